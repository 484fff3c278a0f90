"""Sorting of short axes, as XLA:CPU computes it fast: the place of each number is counted.

XLA:CPU sorts one row after the other, by comparisons one by one: 35 to 90 ns a number. Here each number of a row is compared with
all others, many at once: how many come before it is its place, and the number of a place is picked by comparing places. Of n
numbers that are 2n operations each, 1 to 20 ns up to n = 256. Long axes stay jax's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from rlfx import _jaxpr as J

SORT = J.primitive("sort")

#: Numbers of a row, at most: of more, comparing each with all takes longer than XLA:CPU does.
_MOST = 256
#: Operations of this many numbers of a row are written out, or in an iteration of a loop over them: longer ones compile slowly.
_WRITTEN_OUT, _IN_A_LOOP = 24, 8


def is_short(params: Mapping, operands: Sequence) -> bool:
    """Whether rows of operands, which may be their types alone, are sorted faster so: by floating-point numbers."""
    count = operands[0].shape[params["dimension"]]
    short = not J.is_symbolic(count) and 2 <= count <= _MOST
    by_one = params["num_keys"] == 1 and jnp.issubdtype(operands[0].dtype, jnp.floating)
    return short and by_one and J.platform() == "cpu" and all(map(_is_moved, operands))


def _is_moved(x: Any) -> bool:
    """Whether its bits may be picked."""
    return any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))


def in_order(params: Mapping, operands: Sequence) -> list:
    """As ``jax.lax.sort``: by the first operand, what is not a number last; those that are equal stay in their order.

    Example:
      >>> x = jnp.asarray([3.0, jnp.nan, 1.0, 3.0])
      >>> found = in_order({"dimension": 0, "num_keys": 1}, [x, jnp.arange(4)])
      >>> [y.tolist() for y in found]
      [[1.0, 3.0, 3.0, nan], [2, 0, 3, 1]]
    """
    axis = params["dimension"]
    rows = [jnp.moveaxis(x, axis, -1) for x in operands]
    place = _places_p.bind(lax.stop_gradient(rows[0]))
    return [jnp.moveaxis(_picked_p.bind(place, x), -1, axis) for x in rows]


def _places(x: Any) -> Any:
    """How many numbers of a row come before each, ``int32[..., n]``."""
    key = _key(x)

    def counted(total: Any, j: Any, number: Any) -> Any:
        equal_ones = lax.convert_element_type(lax.gt(number, lax.full_like(number, j)), key.dtype)
        return lax.add(total, lax.convert_element_type(lax.lt(_at(key, j), lax.add(key, equal_ones)), total.dtype))

    return _over(counted, lax.full_like(x, 0, np.int32))


def _key(x: Any) -> Any:
    """Integers that are ordered as floating-point numbers are: both zeros alike, what is not a number last."""
    x = x if x.dtype.itemsize >= 4 else lax.convert_element_type(x, np.float32)
    whole = np.iinfo(f"int{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(lax.select(lax.eq(x, lax.full_like(x, 0)), lax.full_like(x, 0), x), whole.dtype)
    turned = lax.bitwise_xor(lax.bitwise_not(bits), lax.full_like(bits, whole.min))
    ordered = lax.select(lax.lt(bits, lax.full_like(bits, 0)), turned, bits)
    return lax.select(lax.ne(x, x), lax.full_like(bits, whole.max - 1), ordered)


def _picked(place: Any, x: Any) -> Any:
    """The number of each place."""
    return _gathered(x, lambda j, number: lax.eq(_at(place, j), number))


def _spread(place: Any, x: Any) -> Any:
    """What is at the place of each number."""
    return _gathered(x, lambda j, _: lax.eq(place, lax.full_like(place, j)))


def _gathered(x: Any, chosen: Callable[[Any, Any], Any]) -> Any:
    """Of each row the one number that is ``chosen(j, number)``: by its bits, so that signs of zeros stay."""
    floats = jnp.issubdtype(x.dtype, jnp.floating)
    bits = lax.bitcast_convert_type(x, np.dtype(f"int{8 * x.dtype.itemsize}")) if floats else x
    nothing = lax.full_like(bits, 0)
    add = lambda total, j, number: lax.bitwise_or(total, lax.select(chosen(j, number), _at(bits, j), nothing))  # noqa: E731
    found = _over(add, nothing)
    return lax.bitcast_convert_type(found, x.dtype) if floats else found


def _at(x: Any, j: Any) -> Any:
    """The number of each row at ``j``, at all places of the row."""
    return lax.broadcast_in_dim(lax.dynamic_slice_in_dim(x, j, 1, -1), x.shape, range(x.ndim))


def _over(step: Callable[[Any, Any, Any], Any], start: Any) -> Any:
    """``step(... step(step(start, 0, number), 1, number) ..., n - 1, number)``; ``number``: that of each place of a row."""
    count, number = start.shape[-1], lax.broadcasted_iota(np.int32, start.shape, start.ndim - 1)

    def several(total: Any, first: Any) -> tuple[Any, None]:
        for i in range(_IN_A_LOOP):
            total = step(total, first + i, number)
        return total, None

    in_loops = count // _IN_A_LOOP * _IN_A_LOOP if count > _WRITTEN_OUT else 0
    total = start
    if in_loops:
        total, _ = lax.scan(several, total, np.arange(0, in_loops, _IN_A_LOOP, dtype=np.int32))
    for j in range(in_loops, count):
        total = step(total, j, number)
    return total


_places_p = J.of_rows("places", _places)
_picked_p, _spread_p = J.linear_pair(("picked", "spread"), (_picked, _spread), lambda params, size: {})
