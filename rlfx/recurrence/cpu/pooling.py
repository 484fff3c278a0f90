"""Maxima over windows of images, and their derivative, as XLA:CPU computes them fast.

XLA:CPU takes a window's elements one by one: axis after axis, there are fewer. For the derivative it looks for the place of each
maximum with a counter for every axis, which takes ten times as long as the maxima; here the place is one number, the first
element of the window that is the maximum, as in jax, and each element of the image adds up what the few windows around it give.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlfx import _jaxpr as J

MAXIMA = J.primitive("reduce_window_max")

#: Elements of a window, at most: there is an operation for each.
_MOST = 25


@dataclass(frozen=True)
class Windows:
    """Windows of an image.

    Attributes:
      shape, strides, padding: of every axis.
      size: of the image.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    size: tuple[int, ...]

    @property
    def count(self) -> tuple[int, ...]:
        """How many there are along every axis."""
        padded = (n + sum(p) for n, p in zip(self.size, self.padding, strict=True))
        return tuple((n - w) // s + 1 for n, w, s in zip(padded, self.shape, self.strides, strict=True))

    @property
    def offsets(self) -> list[tuple[int, ...]]:
        """The elements of a window, in order."""
        return list(itertools.product(*map(range, self.shape)))

    def padded(self, x: jax.Array, value: Any) -> jax.Array:
        return lax.pad(x, lax.full((), value, x.dtype), [(lo, hi, 0) for lo, hi in self.padding])

    def element(self, padded: jax.Array, offset: tuple[int, ...]) -> jax.Array:
        """One element of each window."""
        ends = (o + s * (n - 1) + 1 for o, s, n in zip(offset, self.strides, self.count, strict=True))
        return lax.slice(padded, offset, tuple(ends), self.strides)


def windows_of(params: Mapping, x: Any) -> Windows | None:
    """The windows of an equation; None where they are not of an image, or of too many elements."""
    shape, dilations = params["window_dimensions"], (*params["base_dilation"], *params["window_dilation"])
    padding = tuple(map(tuple, params["padding"]))
    usual = jnp.issubdtype(x.dtype, jnp.floating) and set(dilations) == {1} and min(itertools.chain((0,), *padding)) == 0
    if not usual or not 1 < math.prod(shape) <= _MOST or not x.size:
        return None
    return Windows(tuple(shape), tuple(params["window_strides"]), padding, tuple(x.shape))


def maxima(windows: Windows, x: jax.Array) -> jax.Array:
    """The largest element of each window; the first of those that tie has the derivative.

    Example:
      >>> windows = Windows((3,), (2,), ((1, 1),), (5,))
      >>> x = jnp.array([1.0, 4.0, 4.0, 0.0, 2.0])
      >>> maxima(windows, x).tolist(), jax.grad(lambda x: maxima(windows, x).sum())(x).tolist()
      ([4.0, 4.0, 2.0], [0.0, 2.0, 0.0, 0.0, 1.0])
    """
    return _maxima(windows)(x)


@functools.lru_cache
def _maxima(windows: Windows) -> Any:
    @jax.custom_jvp
    def found(x: jax.Array) -> jax.Array:
        ones = (1,) * x.ndim
        for axis, n in enumerate(windows.shape):
            if n > 1 or windows.strides[axis] > 1 or any(windows.padding[axis]):
                padding = _at(axis, windows.padding[axis], ((0, 0),) * x.ndim)
                shape, strides = _at(axis, n, ones), _at(axis, windows.strides[axis], ones)
                x = lax.reduce_window(x, -jnp.inf, lax.max, shape, strides, padding)
        return x

    @found.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple:
        (x,), (dx,) = primals, tangents
        largest = found(x)
        place = _places(windows, lax.stop_gradient(x), lax.stop_gradient(largest))
        return largest, _picked_p.bind(place, dx, windows=windows)

    return found


def _at(axis: int, value: Any, others: Sequence) -> tuple:
    return (*others[:axis], value, *others[axis + 1 :])


def _places(windows: Windows, x: jax.Array, largest: jax.Array) -> jax.Array:
    """Which element of each window is its first maximum."""
    padded, offsets = windows.padded(x, -jnp.inf), windows.offsets
    place = lax.full_like(largest, len(offsets) - 1, np.int32)
    for i, offset in reversed(list(enumerate(offsets[:-1]))):
        place = lax.select(lax.eq(windows.element(padded, offset), largest), lax.full_like(place, i), place)
    return place


def _picked(place: jax.Array, x: jax.Array, *, windows: Windows) -> jax.Array:
    """Those elements of the windows."""
    padded = windows.padded(x, 0)
    parts = (_only(place, i, windows.element(padded, offset)) for i, offset in enumerate(windows.offsets))
    return functools.reduce(lax.add, parts)


def _only(place: jax.Array, i: int, x: jax.Array) -> jax.Array:
    return lax.select(lax.eq(place, lax.full_like(place, i)), x, lax.full_like(x, 0))


def _spread(place: jax.Array, g: jax.Array, *, windows: Windows) -> jax.Array:
    """What each element of the image gets from the windows of which it is the maximum.

    Elements at the same place between two windows (``steps``) are a sum over as many windows as cover them; those of all places
    are put together along each axis.
    """
    steps = list(itertools.product(*map(range, windows.strides)))
    cells = [-(-(n + sum(p)) // s) for n, p, s in zip(windows.size, windows.padding, windows.strides, strict=True)]
    number = {offset: i for i, offset in enumerate(windows.offsets)}
    before = [(w - 1) // s for w, s in zip(windows.shape, windows.strides, strict=True)]
    widths = [(b, c - n, 0) for b, c, n in zip(before, cells, windows.count, strict=True)]
    place = lax.pad(place, np.int32(-1), widths)
    g = lax.pad(g, lax.full((), 0, g.dtype), widths)

    def at(step: tuple[int, ...]) -> jax.Array:
        total = lax.full(cells, 0, g.dtype)
        for back in itertools.product(*(range(b + 1) for b in before)):
            offset = tuple(a + s * q for a, s, q in zip(step, windows.strides, back, strict=True))
            if offset in number:
                starts = [b - q for b, q in zip(before, back, strict=True)]
                limits = [i + c for i, c in zip(starts, cells, strict=True)]
                near = lambda x, starts=starts, limits=limits: lax.slice(x, starts, limits)  # noqa: E731
                total = lax.add(total, _only(near(place), number[offset], near(g)))
        return total

    whole = jnp.stack(list(map(at, steps))).reshape(*windows.strides, *cells)
    n = len(cells)
    whole = jnp.transpose(whole, [i for axis in range(n) for i in (n + axis, axis)])
    whole = whole.reshape([c * s for c, s in zip(cells, windows.strides, strict=True)])
    lows = [lo for lo, _ in windows.padding]
    return lax.slice(whole, lows, [lo + n for lo, n in zip(lows, windows.size, strict=True)])


def _widened(params: Mapping, size: int) -> dict:
    w = params["windows"]
    return {"windows": Windows((1, *w.shape), (1, *w.strides), ((0, 0), *w.padding), (size, *w.size))}


_picked_p, _spread_p = J.linear_pair(("picked", "spread"), (_picked, _spread), _widened)
