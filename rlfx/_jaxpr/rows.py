"""Functions of the rows of an array, which have no derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive

from rlfx._jaxpr.rules import computed_by, define_batching, define_jvp, zero_tangent_like


def of_rows(name: str, fn: Callable[..., Any]) -> Primitive:
    """A primitive of arrays ``[..., n]``: ``fn(x, **params)`` takes each row by itself, and what it gives has no derivative."""
    primitive = computed_by(name, fn)

    def over_more_rows(args: Any, dims: Any, **params: Any) -> tuple:
        return primitive.bind(jnp.moveaxis(args[0], dims[0], 0), **params), 0

    define_batching(primitive, over_more_rows)

    def moved(primals: tuple, _tangents: tuple, **params: Any) -> tuple:
        found = primitive.bind(*primals, **params)
        return found, zero_tangent_like(found)

    define_jvp(primitive, moved)
    return primitive
