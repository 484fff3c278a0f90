"""The largest and the smallest element, with a derivative that holds however XLA computes the elements.

jax finds the elements that attain an extreme by comparing each of them to it. XLA may compute an element twice, once for the
reduction and once for the comparison, and round differently (a product and a sum in one instruction, or in two): then none is
equal, and the derivative is 0 / 0. Here the place of one of them comes out of a reduction of its own, and is always among them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

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
        own, first = _first(op, jax.lax.stop_gradient(x), axes)
        chosen = (x == jnp.expand_dims(found, axes)) | (first & (own == complete(op, own)))
        chosen = chosen.astype(x.dtype)
        count = complete("sum", jnp.sum(chosen, axis=axes))
        return found, complete("sum", jnp.sum(chosen * dx, axis=axes)) / count

    return extreme(x) if axes else x  # what no environment has of its own is the same on all devices


def _first(op: str, x: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """``(the extreme, where it is first attained)``, of one reduction; the reduced axes stay, of length 1 in the extreme."""
    place = jnp.zeros((), jnp.int32)
    for a in axes:
        place = place * x.shape[a] + jax.lax.broadcasted_iota(jnp.int32, x.shape, a)
    lowest, before = (-jnp.inf, jax.lax.gt) if op == "max" else (jnp.inf, jax.lax.lt)

    def better(left: tuple, right: tuple) -> tuple:
        (a, i), (b, j) = left, right
        stays = before(a, b) | (a != a) | ((a == b) & (i < j))
        return jax.lax.select(stays, a, b), jax.lax.select(stays, i, j)

    start = (jnp.asarray(lowest, x.dtype), jnp.asarray(jnp.iinfo(jnp.int32).max, jnp.int32))
    own, at = jax.lax.reduce((x, place), start, better, axes)
    return jnp.expand_dims(own, axes), place == jnp.expand_dims(at, axes)
