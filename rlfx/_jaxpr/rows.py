"""Functions of the rows of an array, which have no derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core, dispatch
from jax.extend.core import Primitive
from jax.interpreters import mlir

from rlfx._jaxpr.rules import define_batching, define_jvp, new_primitive, zero_tangent_like


def of_rows(name: str, fn: Callable[[Any], Any]) -> Primitive:
    """A primitive of arrays ``[..., n]``: ``fn``, which takes each row by itself, and gives what does not move with it."""

    def typed(x: Any) -> Any:
        found = jax.eval_shape(fn, jax.ShapeDtypeStruct(x.shape, x.dtype))
        return core.ShapedArray(found.shape, found.dtype)

    primitive = new_primitive(name, typed)
    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))
    mlir.register_lowering(primitive, mlir.lower_fun(fn, multiple_results=False))
    define_batching(primitive, lambda args, dims: (primitive.bind(jnp.moveaxis(args[0], dims[0], 0)), 0))

    def moved(primals: tuple, _tangents: tuple) -> tuple:
        found = primitive.bind(*primals)
        return found, zero_tangent_like(found)

    define_jvp(primitive, moved)
    return primitive
