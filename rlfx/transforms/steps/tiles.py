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

from rlfx.transforms.steps.moved import can_move, moved
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
        self._taken: dict[int, Any] = {}

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

    def cuts(self, start: int, size: int) -> bool:
        """Whether rows have to be moved to have this range."""
        return False

    def element(self, i: int) -> jax.Array:
        """One row, ``[block]``."""
        if i not in self._taken:
            self._taken[i] = self.taken(i)
        return self._taken[i]

    def taken(self, i: int) -> jax.Array:
        """The row, taken for the first time."""
        start, size = next((s, n) for s, n in self.parts() if s <= i < s + n)
        x = self.rows(start, size)
        here = _at(x) == i - start
        word = x.astype(jnp.int32) if x.dtype == bool else x
        taken = jnp.where(here, word, jnp.zeros_like(word)).sum(0, dtype=word.dtype)
        return taken != 0 if x.dtype == bool else taken

    def uncut(self, parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """These ranges; those of all tiles, if rows have to be moved for one of them."""
        return chunks(0, self.size) if any(self.cuts(*part) for part in parts) else parts

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


def row(scalar: Any) -> jax.Array:
    """A scalar, ``[block]`` or ``[]`` where all environments share it, as one row."""
    x = jnp.asarray(scalar)
    return x[None, :] if x.ndim else x[None, None]


class Held(Tile):
    """What is in registers already, in parts."""

    def __init__(self, arrays: Sequence[jax.Array], shape: Sequence[int], eqn: Any = None):
        super().__init__(shape, eqn)
        self._known.update(zip(chunks(0, self.size), arrays, strict=True))

    def made(self, start: int, size: int) -> jax.Array:
        return joined([(self, start, size)], size, self.eqn)

    def cuts(self, start: int, size: int) -> bool:
        return (start, size) not in self._known


class Mapped(Tile):
    """An operation row by row. Operands are tiles, or scalars ``[block]`` that all rows share."""

    def __init__(self, fn: Callable, operands: Sequence[Any], shape: Sequence[int], eqn: Any):
        super().__init__(shape, eqn)
        self.fn, self.operands = fn, operands

    def made(self, start: int, size: int) -> jax.Array:
        found = [x.rows(start, size) if isinstance(x, Tile) else row(x) for x in self.operands]
        shape = (padded(size), max(x.shape[1] for x in found))
        return self.fn(*[jnp.broadcast_to(x, shape) for x in found])

    def parts(self) -> list[tuple[int, int]]:
        """Those of its operands, put together."""
        ends = {s for x in self.operands if isinstance(x, Tile) for s, _ in x.parts()} | {self.size}
        ordered = sorted(ends | {0})
        return self.uncut([(a, b - a) for a, b in zip(ordered, ordered[1:], strict=False)])

    def cuts(self, start: int, size: int) -> bool:
        return any(x.cuts(start, size) for x in self.operands if isinstance(x, Tile))


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
        here = [row(x) for x in self.scalars[start : start + size]]
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
        pieces = self.within(start, size)
        if len(pieces) == 1:
            (tile, first, length) = pieces[0]
            return tile.rows(first, length)
        return joined(pieces, size, self.eqn)

    def within(self, start: int, size: int) -> list[tuple[Tile, int, int]]:
        """Of which pieces these rows are."""
        found = []
        for (tile, first, length), at in zip(self.pieces, self.starts, strict=False):
            low, high = max(start, at), min(start + size, at + length)
            if low < high:
                found.append((tile, first + low - at, high - low))
        return found

    def cuts(self, start: int, size: int) -> bool:
        pieces = self.within(start, size)
        return len(pieces) > 1 or pieces[0][0].cuts(*pieces[0][1:])

    def parts(self) -> list[tuple[int, int]]:
        """Of each piece those that lie in it."""
        found = []
        for (tile, first, length), at in zip(self.pieces, self.starts, strict=False):
            inside = [(max(s, first), min(s + n, first + length)) for s, n in tile.parts()]
            found += [(a - first + at, b - a) for a, b in inside if a < b]
        return self.uncut(found)

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


def joined(pieces: Sequence[tuple[Tile, int, int]], size: int, eqn: Any) -> jax.Array:
    """Ranges of tiles, one after another, as one array: scalars are put into it, other rows moved to where they belong."""
    starts = np.cumsum([0, *(n for *_, n in pieces)]).tolist()
    few: list[tuple[int, Any]] = []
    arrays: dict[int, tuple[jax.Array, list]] = {}
    for (tile, first, n), at in zip(pieces, starts, strict=False):
        scalars = scalars_of(tile, first, n) or ([tile.element(first + i) for i in range(n)] if n <= APART else None)
        if scalars is not None:
            few += enumerate(scalars, at)
            continue
        for s, m in tile.parts():
            low, high = max(s, first), min(s + m, first + n)
            if low < high:
                x = tile.rows(s, m)
                arrays.setdefault(id(x), (x, []))[1].append((low - first + at, high - first + at, first - at - s))
    operands = list(arrays.values())
    width = max([x.shape[1] for x, _ in operands] + [row(x).shape[1] for _, x in few])
    if operands and (width == 1 or not all(can_move(x.dtype) for x, _ in operands)):
        if size > FEW:
            raise unsupported(eqn, f"puts {size} numbers together as one operand, which a kernel can't", JOIN)
        few, operands = list(enumerate(t.element(f + i) for t, f, n in pieces for i in range(n))), []
    rows = (padded(size), width)
    wide = [(jnp.broadcast_to(x, (x.shape[0], width)), ranges) for x, ranges in operands]
    start = moved(wide, rows[0]) if wide else jnp.broadcast_to(row(few[0][1]), rows)
    at = jax.lax.broadcasted_iota(jnp.int32, rows, 0)
    return functools.reduce(lambda tile, e: jnp.where(at == e[0], jnp.broadcast_to(row(e[1]), rows), tile), few, start)


#: So many rows, at most, are taken out of a tile one by one rather than moved by a product.
APART = 2

JOIN = "Multiply the parts with their own weights, and add: x @ w[:n] + y @ w[n:]."


def scalars_of(tile: Tile, start: int, size: int) -> list | None:
    """A range as scalars, if that is what it is made of."""
    if isinstance(tile, Stacked):
        return list(tile.scalars[start : start + size])
    return tile.scalars(start, size) if isinstance(tile, View) else None
