"""Tiles: values of many rows that a kernel keeps whole, ``[rows, environments]``, beside scalars.

A tile is lazy: it is asked for rows, and asks what it is made of. So a part of a product is a product with a part of the
weights, and a product of a concatenation is a sum of products: a kernel can neither cut nor join what is in its registers.
Rows come padded to a power of two; what is in the padding is never used.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.transforms.steps.scalarize import array_of, unsupported

#: Vectors of so many numbers are tiles: the least that a product of a kernel takes.
WIDE = 16

#: Rows of a part of a tile, at most.
CHUNK = 128

#: Of so many rows, at most, every one is taken out as a scalar where there is no other way.
FEW = 64


def padded(rows: int) -> int:
    """How many rows a part of so many has in the kernel."""
    return max(WIDE, 1 << max(rows - 1, 0).bit_length())


def chunks(start: int, size: int) -> list[tuple[int, int]]:
    """A range of rows in parts: ``(start, size)``."""
    return [(at, min(CHUNK, start + size - at)) for at in range(start, start + size, CHUNK)]


class Tile:
    """A value of one environment: an array of ``shape``, its rows in C order.

    Attributes:
      eqn: what it comes from, for what is said if it can't be used as it is asked for.
    """

    def __init__(self, shape: Sequence[int], eqn: Any = None):
        self.shape, self.eqn = tuple(shape), eqn
        self.size = math.prod(self.shape)
        self._known: dict[tuple[int, int], jax.Array] = {}

    def rows(self, start: int, size: int) -> jax.Array:
        """``[padded(size), block]``, or ``[padded(size), 1]`` where all environments share it."""
        if (start, size) not in self._known:
            self._known[start, size] = self.made(start, size)
        return self._known[start, size]

    def made(self, start: int, size: int) -> jax.Array:
        """The rows, made for the first time."""
        raise NotImplementedError

    def parts(self) -> list[tuple[int, int]]:
        """Ranges that are there without cutting."""
        return chunks(0, self.size)

    def element(self, i: int) -> jax.Array:
        """One row, ``[block]``."""
        start, size = next((s, n) for s, n in self.parts() if s <= i < s + n)
        x = self.rows(start, size)
        here = _at(x) == i - start
        word = x.astype(jnp.int32) if x.dtype == bool else x
        taken = jnp.where(here, word, jnp.zeros_like(word)).sum(0, dtype=word.dtype)
        return taken != 0 if x.dtype == bool else taken

    def elements(self) -> np.ndarray:
        """All rows as scalars."""
        if self.size > FEW:
            why = f"is {self.size} numbers wide, and is used one by one; a kernel takes at most {FEW} apart"
            raise unsupported(self.eqn, why)
        return array_of([self.element(i) for i in range(self.size)], self.shape)

    def masked(self, start: int, size: int, fill: Any) -> jax.Array:
        """The rows, with ``fill`` in the padding."""
        x = self.rows(start, size)
        return x if x.shape[0] == size else jnp.where(_at(x) < size, x, jnp.full_like(x, fill))


def _at(x: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)


def _row(scalar: Any) -> jax.Array:
    """A scalar, ``[block]`` or ``[]`` where all environments share it, as one row."""
    x = jnp.asarray(scalar)
    return x[None, :] if x.ndim else x[None, None]


class Held(Tile):
    """What is in registers already, in parts."""

    def __init__(self, arrays: Sequence[jax.Array], shape: Sequence[int], eqn: Any = None):
        super().__init__(shape, eqn)
        self._known.update(zip(chunks(0, self.size), arrays, strict=True))

    def made(self, start: int, size: int) -> jax.Array:
        if size > FEW:
            raise unsupported(self.eqn, f"cuts {size} numbers out of a state of {self.size}, which a kernel can't")
        return Stacked([self.element(i) for i in range(start, start + size)], (size,)).rows(0, size)


class Mapped(Tile):
    """An operation row by row. Operands are tiles, or scalars ``[block]`` that all rows share."""

    def __init__(self, fn: Callable, operands: Sequence[Any], shape: Sequence[int], eqn: Any):
        super().__init__(shape, eqn)
        self.fn, self.operands = fn, operands

    def made(self, start: int, size: int) -> jax.Array:
        found = [x.rows(start, size) if isinstance(x, Tile) else _row(x) for x in self.operands]
        shape = (padded(size), max(x.shape[1] for x in found))
        return self.fn(*[jnp.broadcast_to(x, shape) for x in found])

    def parts(self) -> list[tuple[int, int]]:
        """Those of its operands, put together."""
        cuts = {s for x in self.operands if isinstance(x, Tile) for s, _ in x.parts()} | {self.size}
        ordered = sorted(cuts | {0})
        return [(a, b - a) for a, b in zip(ordered, ordered[1:], strict=False)]


class Counted(Tile):
    """Numbers that are known, ``first + step * i``."""

    def __init__(self, first: Any, step: Any, shape: Sequence[int], dtype: Any):
        super().__init__(shape)
        self.first, self.step, self.dtype = first, step, dtype

    def made(self, start: int, size: int) -> jax.Array:
        at = jax.lax.broadcasted_iota(jnp.int32, (padded(size), 1), 0) + np.int32(start)
        return at.astype(self.dtype) * np.asarray(self.step, self.dtype) + np.asarray(self.first, self.dtype)

    def element(self, i: int) -> Any:
        return np.asarray(self.first + self.step * i, self.dtype)[()]


class Stacked(Tile):
    """Scalars, ``[block]`` each, put together."""

    def __init__(self, scalars: Sequence[jax.Array], shape: Sequence[int], eqn: Any = None):
        super().__init__(shape, eqn)
        self.scalars = scalars

    def made(self, start: int, size: int) -> jax.Array:
        here = [_row(x) for x in self.scalars[start : start + size]]
        rows = (padded(size), max(x.shape[1] for x in here))
        at = jax.lax.broadcasted_iota(jnp.int32, rows, 0)
        full = [jnp.broadcast_to(x, rows) for x in here]
        return functools.reduce(lambda tile, i: jnp.where(at == i, full[i], tile), range(1, size), full[0])

    def element(self, i: int) -> jax.Array:
        return self.scalars[i]


class View(Tile):
    """Ranges of other tiles, one after another: ``(tile, start, size)``."""

    def __init__(self, pieces: Sequence[tuple[Tile, int, int]], shape: Sequence[int], eqn: Any):
        super().__init__(shape, eqn)
        self.pieces = pieces
        self.starts = np.cumsum([0, *(size for *_, size in pieces)]).tolist()

    def made(self, start: int, size: int) -> jax.Array:
        for (tile, first, length), at in zip(self.pieces, self.starts, strict=False):
            if at <= start and start + size <= at + length:
                return tile.rows(first + start - at, size)
        if size > FEW:
            raise unsupported(self.eqn, f"puts {size} numbers together as one operand, which a kernel can't", JOIN)
        return Stacked([self.element(i) for i in range(start, start + size)], (size,)).rows(0, size)

    def parts(self) -> list[tuple[int, int]]:
        """Of each piece those that lie in it."""
        found = []
        for (tile, first, length), at in zip(self.pieces, self.starts, strict=False):
            inside = [(max(s, first), min(s + n, first + length)) for s, n in tile.parts()]
            found += [(a - first + at, b - a) for a, b in inside if a < b]
        return found

    def element(self, i: int) -> jax.Array:
        for (tile, first, length), at in zip(self.pieces, self.starts, strict=False):
            if at <= i < at + length:
                return tile.element(first + i - at)
        raise IndexError(i)

    def scalars(self, start: int, size: int) -> list | None:
        """These rows as scalars, where they are."""
        for (tile, first, length), at in zip(self.pieces, self.starts, strict=False):
            if at <= start and start + size <= at + length:
                return scalars_of(tile, first + start - at, size)
        return None


JOIN = "Multiply the parts with their own weights, and add: x @ w[:n] + y @ w[n:]."


def scalars_of(tile: Tile, start: int, size: int) -> list | None:
    """A range as scalars, if that is what it is made of."""
    if isinstance(tile, Stacked):
        return list(tile.scalars[start : start + size])
    return tile.scalars(start, size) if isinstance(tile, View) else None


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
                terms += [line[:, None] * _row(e) for line, e in zip(lines, few, strict=True)]
                continue
            for ins in [(first, many)] if many <= CHUNK else chunks(first, many):
                w, x = self.weights.matrix(self.contracted, ins, (start, size)), self.x.masked(*ins, 0)
                dims = (((self.contracted,), (0,)), ((), ()))
                terms.append(jax.lax.dot_general(w, x, dims, self.precision, self.dtype))
        return functools.reduce(jnp.add, terms).astype(self.dtype)

    def element(self, i: int) -> jax.Array:
        """By a sum over rows, for outputs too few to be a tile."""
        if self.size >= WIDE:
            return super().element(i)
        terms = []
        for ins in self.x.parts():
            few = scalars_of(self.x, *ins)
            if few is not None:
                terms += [self.weights.line(self.contracted, ins[0] + k, i) * e for k, e in enumerate(few)]
                continue
            line = self.weights.line(self.contracted, ins, i)
            terms.append((line[:, None] * self.x.masked(*ins, 0)).sum(0))
        return functools.reduce(jnp.add, terms).astype(self.dtype)
