"""Pairs of linear functions, each the transpose of the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from rlfx._jaxpr.rules import computed_by, define_batching, define_jvp, is_zero_tangent, zero_tangent_like


def linear_pair(
    names: tuple[str, str], functions: tuple[Callable, Callable], widened: Callable[[Mapping, int], dict]
) -> tuple[Primitive, Primitive]:
    """Two primitives ``(context, x, **params)``, linear in ``x``, each the transpose of the other.

    (``jax.custom_derivatives.linear_call`` has no meaning under ``jax.vmap``.)

    Args:
      functions: what they compute.
      widened: the parameters of what has one more leading axis, of a size, in context and ``x``.
    """
    pair = tuple(map(computed_by, names, functions))
    for one, other in zip(pair, pair[::-1], strict=True):
        define_batching(one, functools.partial(_batched, one, widened))
        define_jvp(one, functools.partial(_moved, one))
        ad.primitive_transposes[one] = functools.partial(_turned, other)
    return pair  # type: ignore[return-value]


def _batched(primitive: Primitive, widened: Callable, args: tuple, dims: tuple, **params: Any) -> tuple:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    whole = lambda x, d: jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)  # noqa: E731
    return primitive.bind(*map(whole, args, dims), **widened(params, size)), 0


def _moved(primitive: Primitive, primals: tuple, tangents: tuple, **params: Any) -> tuple:
    context, x = primals
    out = primitive.bind(context, x, **params)
    if is_zero_tangent(tangents[1]):
        return out, zero_tangent_like(out)
    return out, primitive.bind(context, tangents[1], **params)


def _turned(other: Primitive, cotangent: Any, context: Any, x: Any, **params: Any) -> list:
    if is_zero_tangent(cotangent):
        return [None, ad.Zero(x.aval)]
    return [None, other.bind(context, cotangent, **params)]


def bilinear(name: str, fn: Callable, of_first: Callable, of_second: Callable) -> Primitive:
    """A primitive ``fn(x, w, **params)``, linear in each. Axes that ``jax.vmap`` adds to ``x`` alone are the last.

    Args:
      of_first: the cotangent of ``x``, of that of the result, and ``w``.
      of_second: the cotangent of ``w``, of that of the result, ``x``, and the type of ``w``.
    """
    primitive = computed_by(name, fn)

    def batched(args: tuple, dims: tuple, **params: Any) -> tuple:
        if dims[1] is not None:
            return jax.vmap(functools.partial(fn, **params), dims)(*args), 0
        out = primitive.bind(jnp.moveaxis(args[0], dims[0], -1), args[1], **params)
        return out, out.ndim - 1

    def moved(primals: tuple, tangents: tuple, **params: Any) -> tuple:
        (x, w), (dx, dw) = primals, tangents
        out = primitive.bind(x, w, **params)
        parts = [primitive.bind(*pair, **params) for pair in ((dx, w), (x, dw)) if not any(map(is_zero_tangent, pair))]
        return out, functools.reduce(jnp.add, parts) if parts else zero_tangent_like(out)

    def turned(cotangent: Any, x: Any, w: Any, **params: Any) -> list:
        first = ad.is_undefined_primal(x)
        if is_zero_tangent(cotangent):
            return [ad.Zero(x.aval), None] if first else [None, ad.Zero(w.aval)]
        return [of_first(cotangent, w, **params), None] if first else [None, of_second(cotangent, x, w.aval, **params)]

    define_batching(primitive, batched)
    define_jvp(primitive, moved)
    ad.primitive_transposes[primitive] = turned
    return primitive
