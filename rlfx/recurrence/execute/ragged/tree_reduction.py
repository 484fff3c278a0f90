"""Reductions of a row by halves: in a loop, XLA:CPU takes its elements one by one, and vectors of them several times as fast."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from rlfx import _jaxpr as J

#: What two values become, and many.
EXTREMES = {
    J.primitive("reduce_max"): (lax.max, lax.reduce_max),
    J.primitive("reduce_min"): (lax.min, lax.reduce_min),
}
#: Elements that are taken one by one: as many as fill the registers of a core.
_ROW = 16


def by_halves(op: Any, axes: tuple[int, ...], x: Any) -> bool:
    """Whether halves may be faster: of floating-point numbers that lie side by side."""
    floats = jnp.issubdtype(x.dtype, jnp.floating)
    return op in EXTREMES and axes == (x.ndim - 1,) and x.shape[-1] > _ROW and floats


def extreme(op: Any, x: Any) -> Any:
    """``reduce_max`` or ``reduce_min`` over the last axis.

    Args:
      op: the primitive.
      x: [..., n] floating-point.

    Example:
      >>> extreme(J.primitive("reduce_max"), jnp.arange(40.0)).item()
      39.0
    """
    both, many = EXTREMES[op]
    return _halved(both, lambda tile: many(tile, (tile.ndim - 1,)), [x])


def reduced(both: Callable, many: Callable, tiles: Sequence, axis: int, halves: bool) -> Any:
    """A reduction of all tiles of an array along the axis in which it is cut: ``both`` of two, ``many`` along an axis.

    (Its derivative would be slow.)

    Args:
      halves: whether halves of a row are faster than its elements one by one.

    Example:
      >>> reduced(jnp.add, jnp.sum, [jnp.arange(48.0), jnp.ones(20)], 0, halves=True).item()
      1148.0
    """
    if halves and axis == tiles[0].ndim - 1:
        return _halved(both, lambda tile: many(tile, axis), tiles)
    return functools.reduce(both, [many(tile, axis) for tile in tiles])


def _halved(both: Callable, many: Callable, tiles: Sequence) -> Any:
    """The longest tile and the next one together, or its own halves where that one is shorter, until all are short."""
    rows = sorted(tiles, key=_length, reverse=True)
    while (n := _length(rows[0])) > _ROW:
        first, *others = rows
        half = n // 2
        if others and _length(others[0]) >= half:
            second, *others = others
            rest = _cut(first, _length(second), n)
        else:
            first, second, rest = _cut(first, 0, 2 * half), _cut(first, half, 2 * half), _cut(first, 2 * half, n)
        new = both(_cut(first, 0, _length(second)), second)
        rows = sorted((x for x in (new, rest, *others) if _length(x)), key=_length, reverse=True)
    return functools.reduce(both, map(many, rows))


def _length(x: Any) -> int:
    return x.shape[-1]


def _cut(x: Any, start: int, end: int) -> Any:
    return x if (start, end) == (0, _length(x)) else lax.slice_in_dim(x, start, end, axis=-1)
