"""Pairs of linear functions, each the transpose of the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core, dispatch
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def linear_pair(
    names: tuple[str, str], functions: tuple[Callable, Callable], widened: Callable[[Mapping, int], dict]
) -> tuple[Primitive, Primitive]:
    """Two primitives ``(context, x, **params)``, linear in ``x``, each the transpose of the other.

    (``jax.custom_derivatives.linear_call`` has no meaning under ``jax.vmap``.)

    Args:
      functions: what they compute.
      widened: the parameters of what has one more leading axis, of a size, in context and ``x``.
    """
    pair = tuple(Primitive(name) for name in names)
    for one, other, fn in zip(pair, pair[::-1], functions, strict=True):
        one.def_impl(functools.partial(dispatch.apply_primitive, one))
        one.def_abstract_eval(functools.partial(_typed, fn))
        mlir.register_lowering(one, mlir.lower_fun(fn, multiple_results=False))
        batching.primitive_batchers[one] = functools.partial(_batched, one, widened)
        ad.primitive_jvps[one] = functools.partial(_moved, one)
        ad.primitive_transposes[one] = functools.partial(_turned, other)
    return pair  # type: ignore[return-value]


def _typed(fn: Callable, context: Any, x: Any, **params: Any) -> Any:
    given = (jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (context, x))
    found = jax.eval_shape(functools.partial(fn, **params), *given)
    return core.ShapedArray(found.shape, found.dtype)


def _batched(primitive: Primitive, widened: Callable, args: tuple, dims: tuple, **params: Any) -> tuple:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    whole = lambda x, d: jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)  # noqa: E731
    return primitive.bind(*map(whole, args, dims), **widened(params, size)), 0


def _moved(primitive: Primitive, primals: tuple, tangents: tuple, **params: Any) -> tuple:
    context, x = primals
    out = primitive.bind(context, x, **params)
    if isinstance(tangents[1], ad.Zero):
        return out, ad.Zero(core.typeof(out).to_tangent_aval())
    return out, primitive.bind(context, tangents[1], **params)


def _turned(other: Primitive, cotangent: Any, context: Any, x: Any, **params: Any) -> list:
    if isinstance(cotangent, ad.Zero):
        return [None, ad.Zero(x.aval)]
    return [None, other.bind(context, cotangent, **params)]
