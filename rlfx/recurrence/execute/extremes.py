"""The largest and the smallest element, with a derivative that holds however XLA computes the elements.

jax finds the elements that attain an extreme by comparing each of them to it. XLA may compute an element twice, once for the
reduction and once for the comparison, and round differently (a product and a sum in one instruction, or in two): then none is
equal, and the derivative is 0 / 0. On a CPU both are in one function here, that XLA does not inline: the elements are in memory
when it begins. Elsewhere, and where devices share the axis, the place of one of them comes out of a reduction of its own, and is
always among them; XLA:CPU takes that element by element, seven times as long (a gradient of ``max`` over rows of ``[2048, 64]``:
0.73 ms for 0.11).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlfx import _jaxpr as J


def _on_one_device(op: str, x: Any) -> Any:
    return x


def largest_or_smallest(
    op: str, x: Any, axes: tuple[int, ...], complete: Callable = _on_one_device, reduced: Callable | None = None
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
        return complete(op, _value(op, x, axes, reduced))

    @extreme.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple:
        (x,), (dx,) = primals, tangents
        if not jnp.issubdtype(x.dtype, jnp.floating):
            found = extreme(x)
            return found, J.zero_tangent_like(found)
        if complete is _on_one_device and J.platform() == "cpu":
            value, chosen, count = _attained(op, axes, reduced)(lax.stop_gradient(x))
            found, chosen = valued(extreme(x), value), lax.convert_element_type(chosen, x.dtype)
        else:
            found = extreme(x)
            chosen = _shared(op, x, found, axes, complete)
            count = complete("sum", jnp.sum(chosen, axis=axes))
        return found, lax.div(complete("sum", jnp.sum(lax.mul(chosen, dx), axis=axes)), count)

    return extreme(x) if axes else x  # what no environment has of its own is the same on all devices


@jax.custom_jvp
def valued(moving: Any, value: Any) -> Any:
    """The value, with the derivative of what moves."""
    return value


@valued.defjvp
def _(primals: tuple, tangents: tuple) -> tuple:
    return valued(*primals), tangents[0]


def _value(op: str, x: Any, axes: tuple[int, ...], reduced: Callable | None) -> Any:
    return reduced(x) if reduced else getattr(jnp, op)(x, axis=axes)


@functools.lru_cache
def _attained(op: str, axes: tuple[int, ...], reduced: Callable | None) -> Callable:
    """``x -> (the extreme, which elements attain it, how many)``, of elements that are computed once."""

    def of(x: Any) -> tuple[Any, Any, Any]:
        found = _value(op, x, axes, reduced)
        chosen = lax.eq(x, lax.broadcast_in_dim(lax.expand_dims(found, axes), x.shape, range(x.ndim)))
        return found, chosen, jnp.sum(lax.convert_element_type(chosen, x.dtype), axis=axes)

    return J.computed_once(of)


def _shared(op: str, x: Any, found: Any, axes: tuple[int, ...], complete: Callable) -> Any:
    """1 for the elements that attain the extreme, and for one that does in a reduction of its own; else 0."""
    # (Operators of jax.numpy would be traced as calls, several times as long.)
    own, first = _first(op, lax.stop_gradient(x), axes)
    everywhere = functools.partial(lax.broadcast_in_dim, shape=x.shape, broadcast_dimensions=range(x.ndim))
    here = lax.bitwise_and(first, everywhere(lax.eq(own, complete(op, own))))
    equal = lax.eq(x, everywhere(lax.expand_dims(found, axes)))
    return lax.convert_element_type(lax.bitwise_or(equal, here), x.dtype)


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
