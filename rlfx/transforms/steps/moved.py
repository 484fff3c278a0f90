"""Rows of tiles, moved: a kernel can neither cut what is in its registers nor join it, but it can multiply.

A move is a product with a matrix of zeros and ones. It is exact: numbers go through it as whole numbers of 11 bits, which TF32
has, and of each row of the result one term is not zero. So a NaN or an infinity stays where it is, and its bits stay.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

#: Bits of a whole number that a product in TF32 keeps.
BITS = 11

#: One row of the result after another, ``first`` to ``last - 1``, is row ``i + shift`` of an operand.
Range = tuple[int, int, int]


def can_move(dtype: np.dtype) -> bool:
    """Whether numbers of a type can be moved: those of at most 32 bits."""
    return np.dtype(dtype).itemsize <= 4


def moved(operands: Sequence[tuple[jax.Array, Sequence[Range]]], rows: int) -> jax.Array:
    """Rows of several operands, ``[_, block]`` of one type, as one tile ``[rows, block]``. Rows that none gives are zero.

    Example:
      >>> x = jnp.arange(16.0)[:, None] * jnp.ones((1, 16))
      >>> moved([(x, [(0, 1, 15), (1, 16, -1)])], 16)[:4, 0].tolist()
      [15.0, 0.0, 1.0, 2.0]
    """
    matrices = [_matrix(ranges, rows, x.shape[0]) for x, ranges in operands]
    words = [_words(x) for x, _ in operands]
    sums = []
    for column in zip(*words, strict=True):
        terms = [_times(m, word) for m, word in zip(matrices, column, strict=True)]
        sums.append(functools.reduce(jax.lax.add, terms).astype(jnp.int32))
    return _joined(sums, operands[0][0].dtype)


def _matrix(ranges: Sequence[Range], rows: int, columns: int) -> jax.Array:
    to, of = (jax.lax.broadcasted_iota(jnp.int32, (rows, columns), axis) for axis in (0, 1))
    inside = [(to >= first) & (to < last) & (of == to + np.int32(shift)) for first, last, shift in ranges]
    return functools.reduce(jax.lax.bitwise_or, inside).astype(jnp.float32)


def _times(matrix: jax.Array, x: jax.Array) -> jax.Array:
    exact_enough = (jax.lax.Precision.DEFAULT,) * 2  # whatever jax's default is
    return jax.lax.dot_general(matrix, x, (((1,), (0,)), ((), ())), exact_enough, jnp.float32)


def _words(x: jax.Array) -> list[jax.Array]:
    """The bits of numbers, 11 at a time, as float32."""
    if x.dtype == bool:
        return [x.astype(jnp.float32)]
    bits = jax.lax.bitcast_convert_type(_of_32_bits(x), jnp.uint32)
    mask = np.uint32((1 << BITS) - 1)
    parts = [(bits >> np.uint32(at)) & mask for at in range(0, 32, BITS)]
    return [part.astype(jnp.int32).astype(jnp.float32) for part in parts]


def _joined(words: Sequence[jax.Array], dtype: np.dtype) -> jax.Array:
    """The inverse of :func:`_words`."""
    if np.dtype(dtype).kind == "b":
        return words[0] != 0
    parts = [word.astype(jnp.uint32) << np.uint32(BITS * i) for i, word in enumerate(words)]
    bits = functools.reduce(jax.lax.bitwise_or, parts)
    wide = jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32
    return jax.lax.bitcast_convert_type(bits, wide).astype(dtype)


def _of_32_bits(x: jax.Array) -> jax.Array:
    if x.dtype.itemsize == 4:
        return x
    return x.astype(jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.int32)
