"""Weights in memory, and the products of tiles with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.transforms.steps.scalarize import array_of
from rlfx.transforms.steps.tiles import CHUNK, WIDE, Tile, chunks, padded, row, scalars_of


class Weights(Tile):
    """What all environments share, in memory: parts are loaded as they are asked for.

    Attributes:
      load: ``load(index)`` gives a part: for each axis ``(start, size)`` or a number.
      outer: the array, as a function of the kernel's shared arguments.
    """

    def __init__(self, load: Callable[[tuple], jax.Array], outer: Callable[[Sequence[Any]], Any], aval: Any):
        super().__init__(aval.shape)
        self.load, self.outer, self.dtype = load, outer, aval.dtype

    def made(self, start: int, size: int) -> jax.Array:
        assert len(self.shape) == 1
        return self.load(((start, padded(size)),))[:, None]

    def element(self, i: int) -> jax.Array:
        return self.load(tuple(int(k) for k in np.unravel_index(i, self.shape)))

    def elements(self) -> np.ndarray:
        return array_of([self.element(i) for i in range(self.size)], self.shape)

    def matrix(self, contracted: int, ins: tuple[int, int], outs: tuple[int, int]) -> jax.Array:
        """A part of a matrix, ``[padded, padded]``, its axes in their order in memory."""
        ranges = [(s, padded(n)) for s, n in (ins, outs)]
        return self.load(tuple(ranges if contracted == 0 else ranges[::-1]))

    def line(self, contracted: int, ins: Any, outs: Any) -> jax.Array:
        """A part of one row or column: one of ``ins`` and ``outs`` is a number."""
        index = [x if isinstance(x, int) else (x[0], padded(x[1])) for x in (ins, outs)]
        return self.load(tuple(index if contracted == 0 else index[::-1]))


class Product(Tile):
    """A vector times a matrix that all environments share."""

    def __init__(self, x: Tile, weights: Weights, contracted: int, precision: Any, dtype: Any, eqn: Any):
        super().__init__((weights.shape[1 - contracted],), eqn)
        self.x, self.weights, self.contracted, self.precision, self.dtype = x, weights, contracted, precision, dtype

    def made(self, start: int, size: int) -> jax.Array:
        terms = []
        for first, many in self.x.parts():
            few = scalars_of(self.x, first, many)
            if few is not None and many < WIDE:
                lines = [self.weights.line(self.contracted, first + i, (start, size)) for i in range(many)]
                terms += [line[:, None] * row(e) for line, e in zip(lines, few, strict=True)]
                continue
            for ins in [(first, many)] if many <= CHUNK else chunks(first, many):
                w, x = self.weights.matrix(self.contracted, ins, (start, size)), self.x.masked(*ins, 0)
                dims = (((self.contracted,), (0,)), ((), ()))
                terms.append(jax.lax.dot_general(w, x, dims, self.precision, self.dtype))
        return functools.reduce(jnp.add, terms).astype(self.dtype)

    def taken(self, i: int) -> jax.Array:
        """By a sum over rows, for outputs too few to be a tile."""
        if self.size >= WIDE:
            return super().taken(i)
        terms = []
        for ins in self.x.parts():
            few = scalars_of(self.x, *ins)
            if few is not None:
                terms += [self.weights.line(self.contracted, ins[0] + k, i) * e for k, e in enumerate(few)]
                continue
            line = self.weights.line(self.contracted, ins, i)
            terms.append((line[:, None] * self.x.masked(*ins, 0)).sum(0))
        return functools.reduce(jnp.add, terms).astype(self.dtype)
