"""Pairs of linear functions, each the transpose of the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

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
