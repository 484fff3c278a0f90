"""Functions of the rows of an array, which have no derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive

from rlfx._jaxpr.rules import computed_by, define_batching, define_jvp, zero_tangent_like


def of_rows(name: str, fn: Callable[[Any], Any]) -> Primitive:
    """A primitive of arrays ``[..., n]``: ``fn``, which takes each row by itself, and gives what does not move with it."""
    primitive = computed_by(name, fn)
    define_batching(primitive, lambda args, dims: (primitive.bind(jnp.moveaxis(args[0], dims[0], 0)), 0))

    def moved(primals: tuple, _tangents: tuple) -> tuple:
        found = primitive.bind(*primals)
        return found, zero_tangent_like(found)

    define_jvp(primitive, moved)
    return primitive
