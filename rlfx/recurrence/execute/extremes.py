"""The largest and the smallest element, with a derivative that holds however XLA computes the elements.

jax finds the elements that attain an extreme by comparing each of them to it. XLA may compute an element twice, once for the
reduction and once for the comparison, and round differently (a product and a sum in one instruction, or in two): then none is
equal, and the derivative is 0 / 0. Here the place of one of them comes out of a reduction of its own, and is always among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlfx import _jaxpr as J


def largest_or_smallest(
    op: str, x: Any, axes: tuple[int, ...], complete: Callable = lambda op, x: x, reduced: Callable | None = None
) -> Any:
    """The maximum or minimum over some axes: elements that tie share its derivative evenly, as in jax.

    Args:
      op: "max" or "min".
      x: an array.
      axes: those that are reduced.
      complete: ``(op, x) -> x``, a reduction over devices.
      reduced: another way to compute the value on one device.

    Example:
      >>> jax.grad(lambda x: largest_or_smallest("max", x, (0,)))(jnp.array([1.0, 3.0, 3.0])).tolist()
      [0.0, 0.5, 0.5]
    """

    @jax.custom_jvp
    def extreme(x: Any) -> Any:
        return complete(op, reduced(x) if reduced else getattr(jnp, op)(x, axis=axes))

    @extreme.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple:
        (x,), (dx,) = primals, tangents
        found = extreme(x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return found, J.zero_tangent_like(found)
        # (Operators of jax.numpy would be traced as calls, several times as long.)
        own, first = _first(op, lax.stop_gradient(x), axes)
        everywhere = functools.partial(lax.broadcast_in_dim, shape=x.shape, broadcast_dimensions=range(x.ndim))
        here = lax.bitwise_and(first, everywhere(lax.eq(own, complete(op, own))))
        equal = lax.eq(x, everywhere(lax.expand_dims(found, axes)))
        chosen = lax.convert_element_type(lax.bitwise_or(equal, here), x.dtype)
        count = complete("sum", jnp.sum(chosen, axis=axes))
        return found, lax.div(complete("sum", jnp.sum(lax.mul(chosen, dx), axis=axes)), count)

    return extreme(x) if axes else x  # what no environment has of its own is the same on all devices


def _first(op: str, x: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """``(the extreme, where it is first attained)``, of one reduction; the reduced axes stay, of length 1 in the extreme."""
    place = jnp.zeros((), jnp.int32)
    for a in axes:
        place = place * x.shape[a] + lax.broadcasted_iota(jnp.int32, x.shape, a)
    lowest, before = (-jnp.inf, lax.gt) if op == "max" else (jnp.inf, lax.lt)

    def better(left: tuple, right: tuple) -> tuple:
        (a, i), (b, j) = left, right
        ties = lax.bitwise_and(lax.eq(a, b), lax.lt(i, j))
        stays = lax.bitwise_or(lax.bitwise_or(before(a, b), lax.ne(a, a)), ties)
        return lax.select(stays, a, b), lax.select(stays, i, j)

    start = (jnp.asarray(lowest, x.dtype), jnp.asarray(jnp.iinfo(jnp.int32).max, jnp.int32))
    own, at = lax.reduce((x, place), start, better, axes)
    at = lax.broadcast_in_dim(lax.expand_dims(at, axes), x.shape, range(x.ndim))
    return lax.expand_dims(own, axes), lax.eq(place, at)
