"""Convolutions of few features, as XLA:CPU computes them fast: products, with what ``jax.vmap`` adds innermost.

XLA:CPU takes about 30 ns for a place of an image, however few the features are. Here the neighbours of all places are put
together, ``[taps * features, places]``, for one product with the kernel; where there are fewer features after than before, the
products of each place are made first, and those of neighbours are added up. Environments lie beside each other, so that all of
this is many numbers at once. A derivative with respect to the image is a convolution of the other kind, with the kernel turned;
with respect to the kernel it is one product over all places.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from rlfx import _jaxpr as J
from rlfx.recurrence.cpu.convolution import is_plain

Padding = tuple[tuple[int, int], ...]

#: Features before or after, at most; so many times the taps of a kernel; and numbers of neighbours of one image.
_FEATURES, _ROWS, _NUMBERS = 8, 72, 1 << 13


def is_narrow(params: Mapping, x: Any, w: Any) -> bool:
    """Whether a convolution of such operands, which may be their types alone, is faster so: of steps of one, of few features."""
    numbers = params["dimension_numbers"]
    out, features, *taps = (w.shape[axis] for axis in numbers.rhs_spec)
    places = [x.shape[axis] for axis in numbers.lhs_spec[2:]]
    if J.platform() != "cpu" or any(map(J.is_symbolic, (*places, out, features, *taps))):
        return False
    least = min(features, out)
    few = 0 < least <= _FEATURES and least * math.prod(taps) <= _ROWS
    fits = few and 0 < least * math.prod(taps) * math.prod(places) <= _NUMBERS
    return fits and set(params["window_strides"]) <= {1} and is_plain(params, x, w)


def narrowly(params: Mapping, x: Any, w: Any) -> Any:
    """That convolution, in the layout of its parameters."""
    numbers = params["dimension_numbers"]
    batch, features, *places = numbers.lhs_spec
    x = jnp.transpose(x, (features, *places, batch))
    y = narrow_convolution(x, jnp.transpose(w, numbers.rhs_spec), params["padding"], params["precision"])
    back, at, *axes = numbers.out_spec
    return jnp.transpose(y, np.argsort((at, *axes, back)))


def narrow_convolution(x: Any, w: Any, padding: Padding, precision: Any = None) -> Any:
    """``x[features, *places, ...]`` convolved with ``w[out, features, *taps]``: ``[out, *places, ...]``.

    Args:
      padding: how many zeros before and after, for each axis of places; negative: so many places are left out.

    Example:
      >>> import jax
      >>> x, w = jnp.arange(5.0).reshape(1, 5), jnp.ones((1, 1, 3))
      >>> narrow_convolution(x, w, ((1, 1),)).tolist()
      [[1.0, 3.0, 6.0, 9.0, 7.0]]
      >>> jax.grad(lambda x: narrow_convolution(x, w, ((1, 1),))[0, 0])(x).tolist()
      [[1.0, 1.0, 0.0, 0.0, 0.0]]
    """
    return narrow_p.bind(x, w, padding=tuple(map(tuple, padding)), precision=precision)


def _convolved(x: Any, w: Any, *, padding: Padding, precision: Any) -> Any:
    x = _padded(x, padding)
    out, features, taps = w.shape[0], w.shape[1], w.shape[2:]
    sizes = _sizes(x, taps)
    if features <= out or math.prod(taps) == 1:
        kernel = jnp.moveaxis(w, 1, -1).reshape(out, -1)
        return _product(kernel, _neighbours(x, taps, sizes), precision)
    kernel = jnp.moveaxis(w, (0, 1), (-2, -1)).reshape(-1, features)
    parts = _product(kernel, x, precision).reshape(*taps, out, *x.shape[1:])
    return _added(parts, tuple(sizes))


@functools.partial(J.computed_once, static_argnums=(1,))  # else XLA adds the results of many in one function, for far longer
def _added(parts: Any, sizes: tuple[int, ...]) -> Any:
    offsets = itertools.product(*map(range, parts.shape[: len(sizes)]))
    return functools.reduce(lax.add, (_shifted(parts[offset], offset, sizes) for offset in offsets))


@functools.partial(J.computed_once, static_argnums=(1,))  # else what makes x is computed for each tap, number by number
def _padded(x: Any, padding: Padding) -> Any:
    others = [(0, 0, 0)] * (x.ndim - 1 - len(padding))
    return lax.pad(x, lax.full((), 0, x.dtype), [(0, 0, 0), *((lo, hi, 0) for lo, hi in padding), *others])


def _sizes(x: Any, taps: Sequence[int]) -> list[int]:
    """Places after the convolution, of what is padded."""
    return [n - k + 1 for n, k in zip(x.shape[1:], taps, strict=False)]


def _shifted(x: Any, offset: Sequence[int], sizes: Sequence[int]) -> Any:
    """A neighbour of each place."""
    rest = x.shape[1 + len(sizes) :]
    ends = (o + n for o, n in zip(offset, sizes, strict=True))
    return lax.slice(x, (0, *offset, *(0 for _ in rest)), (x.shape[0], *ends, *rest))


def _neighbours(x: Any, taps: Sequence[int], sizes: Sequence[int]) -> Any:
    """``[taps * features, *places, ...]``."""
    return jnp.concatenate([_shifted(x, offset, sizes) for offset in itertools.product(*map(range, taps))])


def _product(kernel: Any, x: Any, precision: Any) -> Any:
    """``kernel[out, n] x[n, ...]``."""
    return jnp.matmul(kernel, x.reshape(x.shape[0], -1), precision=precision).reshape(kernel.shape[0], *x.shape[1:])


def _of_image(g: Any, w: Any, *, padding: Padding, precision: Any) -> Any:
    """The derivative with respect to the image."""
    taps = w.shape[2:]
    turned = jnp.flip(jnp.swapaxes(w, 0, 1), range(2, w.ndim))
    around = tuple((k - 1 - lo, k - 1 - hi) for k, (lo, hi) in zip(taps, padding, strict=True))
    return narrow_convolution(g, turned, around, precision)


def _of_kernel(g: Any, x: Any, w: Any, *, padding: Padding, precision: Any) -> Any:
    """The derivative with respect to the kernel; ``w`` is its type."""
    taps, places = w.shape[2:], len(padding)
    x = _padded(x, padding)
    if w.shape[1] <= w.shape[0]:
        near = _neighbours(x, taps, _sizes(x, taps))
        found = _over_places(g, near, precision).reshape(w.shape[0], *taps, w.shape[1])
        return jnp.moveaxis(found, -1, 1)
    # The gradient of each place, moved to where its neighbour is: x[p] meets g[p - offset].
    ends = [k - 1 for k in taps]
    near = _neighbours(_padded(g, tuple((k, k) for k in ends)), taps, x.shape[1 : 1 + places])
    found = _over_places(near, x, precision).reshape(*taps, *w.shape[:2])
    return jnp.flip(jnp.moveaxis(found, (-2, -1), (0, 1)), range(2, w.ndim))


def _over_places(left: Any, right: Any, precision: Any) -> Any:
    """``left[n, ...] right[m, ...]``, summed over all but the first axes."""
    left, right = (x.reshape(x.shape[0], -1) for x in (left, right))
    return lax.dot_general(left, right, (((1,), (1,)), ((), ())), precision=precision)


narrow_p = J.bilinear("narrow_convolution", _convolved, _of_image, _of_kernel)
