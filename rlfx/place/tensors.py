"""Sharded values as seen by their readers: blocks, and lazy views of blocks that never become nodes of the graph.

A reader asks for a *region* (a half-open range per axis) and gets an expression over blocks. Broadcasts, reshapes,
transposes, casts, slices and concatenations only move or rename elements, so they are evaluated inside the reader.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Region = tuple[tuple[int, int], ...]
Cuts = tuple[tuple[int, ...], ...]  # per axis: 0 = first boundary < ... < last boundary = size
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Expr:
    """An array computed from blocks: which blocks, and how. ``read`` is the number of bytes of blocks used."""

    blocks: frozenset[int]
    run: Callable[[Mapping[int, jax.Array]], jax.Array]


class Tensor(Protocol):
    """A value that can be read by region."""

    @property
    def shape(self) -> Shape:
        """The array's shape."""
        ...

    @property
    def cuts(self) -> Cuts:
        """The boundaries along which reading is cheapest."""
        ...

    def request(self, region: Region) -> None:
        """Announce a read: an argument is split where its first reader needs it."""
        ...

    def read(self, region: Region) -> Expr:
        """The elements of ``region``."""
        ...


def whole(shape: Shape) -> Region:
    """The region that is the entire array."""
    return tuple((0, n) for n in shape)


def region_shape(region: Region) -> Shape:
    """The shape of a region's elements."""
    return tuple(stop - start for start, stop in region)


def even_cuts(size: int, parts: int) -> tuple[int, ...]:
    """Boundaries of ``parts`` nearly equal ranges of ``size`` elements.

    Example:
      >>> even_cuts(10, 4)
      (0, 3, 6, 8, 10)
    """
    return tuple(int(x) for x in np.cumsum([0, *(len(c) for c in np.array_split(np.arange(size), max(1, parts)))]))


def regions(cuts: Cuts) -> dict[tuple[int, ...], Region]:
    """Every block of a grid, by its index."""
    return {
        index: tuple((c[i], c[i + 1]) for i, c in zip(index, cuts, strict=True))
        for index in itertools.product(*(range(len(c) - 1) for c in cuts))
    }


def _slice(x: jax.Array, region: Region) -> jax.Array:
    """``x[region]``, or ``x`` itself when that is all of it."""
    if region == whole(x.shape):
        return x
    return lax.slice(x, [a for a, _ in region], [b for _, b in region])


@dataclass(frozen=True)
class Blocks:
    """An array stored as a grid of blocks: ``ids[index]`` is the number of the block."""

    shape: Shape
    cuts: Cuts
    ids: Mapping[tuple[int, ...], int]

    def request(self, region: Region) -> None:
        """Blocks are already cut."""

    def read(self, region: Region) -> Expr:
        """Slices of the blocks that meet the region, concatenated."""
        hits = [
            [i for i in range(len(c) - 1) if c[i] < stop and c[i + 1] > start]
            for c, (start, stop) in zip(self.cuts, region, strict=True)
        ]
        parts = {}
        for index in itertools.product(*hits):
            inside = tuple(
                (max(start, c[i]) - c[i], min(stop, c[i + 1]) - c[i])
                for i, c, (start, stop) in zip(index, self.cuts, region, strict=True)
            )
            parts[index] = (self.ids[index], inside)

        def run(env: Mapping[int, jax.Array]) -> jax.Array:
            def assemble(axis: int, prefix: tuple[int, ...]) -> jax.Array:
                if axis == len(hits):
                    block, inside = parts[prefix]
                    return _slice(env[block], inside)
                pieces = [assemble(axis + 1, (*prefix, i)) for i in hits[axis]]
                return pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, axis)

            return assemble(0, ())

        return Expr(frozenset(block for block, _ in parts.values()), run)


@dataclass
class Argument:
    """An argument of the function. It is cut where its first reader asks, once, by :meth:`settle`."""

    shape: Shape
    make: Callable[[Cuts], Blocks]
    asked: set[Region] = field(default_factory=set)
    blocks: Blocks | None = None

    @property
    def cuts(self) -> Cuts:
        """The grid, or one block before the first read."""
        return self.blocks.cuts if self.blocks else tuple((0, n) for n in self.shape)

    def request(self, region: Region) -> None:
        """Remember what the first reader needs."""
        if self.blocks is None:
            self.asked.add(region)

    def settle(self, cuts: Cuts | None = None) -> None:
        """Cut along every requested boundary, or along ``cuts``."""
        if self.blocks is not None or (cuts is None and not self.asked):
            return
        bounds = cuts or tuple(
            tuple(sorted({0, n, *(edge for r in self.asked for edge in r[axis])})) for axis, n in enumerate(self.shape)
        )
        self.blocks = self.make(bounds)

    def read(self, region: Region) -> Expr:
        """A region of the argument's blocks."""
        self.request(region)
        self.settle()
        assert self.blocks is not None
        return self.blocks.read(region)


@dataclass(frozen=True)
class Synthetic:
    """A value computed from no argument (literals, iotas, masks made of them): recomputed by each reader."""

    shape: Shape
    make: Callable[[Region], jax.Array]

    @property
    def cuts(self) -> Cuts:
        """One block."""
        return tuple((0, n) for n in self.shape)

    def request(self, region: Region) -> None:
        """Nothing to cut."""

    def read(self, region: Region) -> Expr:
        """The elements, made on the spot."""
        return Expr(frozenset(), lambda env: self.make(region))


@dataclass(frozen=True)
class View:
    """Another tensor, moved: ``pull`` maps a region to the parent's region, ``push`` computes it from the parent's."""

    parent: Tensor
    shape: Shape
    cuts: Cuts
    pull: Callable[[Region], Region]
    push: Callable[[jax.Array, Region], jax.Array]

    def request(self, region: Region) -> None:
        """Ask the parent."""
        self.parent.request(self.pull(region))

    def read(self, region: Region) -> Expr:
        """Read the parent and move its elements."""
        inner = self.parent.read(self.pull(region))
        return Expr(inner.blocks, lambda env: self.push(inner.run(env), region))


@dataclass(frozen=True)
class Joined:
    """Several tensors side by side along an axis."""

    parents: tuple[Tensor, ...]
    axis: int
    shape: Shape

    @property
    def cuts(self) -> Cuts:
        """The parents' grid, and no cut along the joined axis."""
        cuts = list(self.parents[0].cuts)
        cuts[self.axis] = (0, self.shape[self.axis])
        return tuple(cuts)

    def _pieces(self, region: Region) -> list[tuple[Tensor, Region]]:
        start, stop = region[self.axis]
        offset, pieces = 0, []
        for parent in self.parents:
            low, high = max(start - offset, 0), min(stop - offset, parent.shape[self.axis])
            if low < high:
                pieces.append((parent, (*region[: self.axis], (low, high), *region[self.axis + 1 :])))
            offset += parent.shape[self.axis]
        return pieces

    def request(self, region: Region) -> None:
        """Ask the parents that the region meets."""
        for parent, inner in self._pieces(region):
            parent.request(inner)

    def read(self, region: Region) -> Expr:
        """Concatenate the parents' parts."""
        reads = [parent.read(inner) for parent, inner in self._pieces(region)]

        def run(env: Mapping[int, jax.Array]) -> jax.Array:
            parts = [r.run(env) for r in reads]
            return parts[0] if len(parts) == 1 else lax.concatenate(parts, self.axis)

        return Expr(frozenset().union(*(r.blocks for r in reads)), run)


def synthetic(x: Tensor) -> bool:
    """Whether a tensor needs no blocks at all."""
    if isinstance(x, View):
        return synthetic(x.parent)
    return isinstance(x, Synthetic) or (isinstance(x, Joined) and all(map(synthetic, x.parents)))


def literal(value: Any) -> Synthetic:
    """A constant without blocks."""
    value = np.asarray(value)
    return Synthetic(value.shape, lambda region: jnp.asarray(value[tuple(slice(a, b) for a, b in region)]))


def cast(parent: Tensor, shape: Shape, apply: Callable[[jax.Array], jax.Array]) -> View:
    """An elementwise relabelling of one tensor."""
    return View(parent, shape, parent.cuts, lambda region: region, lambda x, region: apply(x))


def transpose(parent: Tensor, perm: tuple[int, ...]) -> View:
    """Axes in another order."""
    shape = tuple(parent.shape[i] for i in perm)
    inverse = tuple(int(i) for i in np.argsort(perm))
    return View(
        parent,
        shape,
        tuple(parent.cuts[i] for i in perm),
        lambda region: tuple(region[i] for i in inverse),
        lambda x, region: lax.transpose(x, perm),
    )


def broadcast(parent: Tensor, shape: Shape, dims: tuple[int, ...]) -> View:
    """New or stretched axes; ``dims[i]`` is where the parent's axis ``i`` goes."""
    stretched = [parent.shape[i] == 1 and shape[d] != 1 for i, d in enumerate(dims)]
    cuts: list[tuple[int, ...]] = [(0, n) for n in shape]
    for i, d in enumerate(dims):
        if not stretched[i]:
            cuts[d] = parent.cuts[i]
    return View(
        parent,
        shape,
        tuple(cuts),
        lambda region: tuple((0, 1) if stretched[i] else region[d] for i, d in enumerate(dims)),
        lambda x, region: lax.broadcast_in_dim(x, region_shape(region), dims),
    )


def squeeze(parent: Tensor, dims: tuple[int, ...]) -> View:
    """Without some axes of size one."""
    kept = [i for i in range(len(parent.shape)) if i not in dims]
    return View(
        parent,
        tuple(parent.shape[i] for i in kept),
        tuple(parent.cuts[i] for i in kept),
        lambda region: tuple((0, 1) if i in dims else region[kept.index(i)] for i in range(len(parent.shape))),
        lambda x, region: lax.squeeze(x, dims),
    )


def shift(parent: Tensor, starts: Shape, stops: Shape) -> View:
    """A contiguous slice."""
    cuts = tuple(
        tuple(sorted({0, b - a, *(e - a for e in c if a < e < b)}))
        for c, a, b in zip(parent.cuts, starts, stops, strict=True)
    )
    return View(
        parent,
        tuple(b - a for a, b in zip(starts, stops, strict=True)),
        cuts,
        lambda region: tuple((lo + a, hi + a) for (lo, hi), a in zip(region, starts, strict=True)),
        lambda x, region: x,
    )


def _groups(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Pair up the smallest runs of axes with equal products in a reshape."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        left, right = [], []
        while i < len(old) and (not left or math.prod(old[a] for a in left) < math.prod(new[b] for b in right)):
            left.append(i)
            i += 1
            while j < len(new) and math.prod(new[b] for b in right) < math.prod(old[a] for a in left):
                right.append(j)
                j += 1
        while i < len(old) and old[i] == 1 and j == len(new):
            left.append(i)
            i += 1
        while j < len(new) and (new[j] == 1 or not left):
            right.append(j)
            j += 1
        groups.append((left, right))
    return groups


def reshape(parent: Tensor, shape: Shape) -> View:
    """The same elements in row-major order under other axes.

    A region of the result is a region of the parent where only the leading axis of a run of split or merged axes is
    cut, at a multiple of the others; elsewhere the whole run is read and sliced after the reshape.
    """
    groups = _groups(parent.shape, shape)
    scales = []  # per group: how many elements of the run one step of its leading axis covers, old and new
    for old, new in groups:
        lead_old = next((a for a in old if parent.shape[a] != 1), old[0] if old else None)
        lead_new = next((b for b in new if shape[b] != 1), new[0] if new else None)
        total = math.prod(parent.shape[a] for a in old)
        scales.append(
            (
                lead_old,
                lead_new,
                total // parent.shape[lead_old] if lead_old is not None else 1,
                total // shape[lead_new] if lead_new is not None else 1,
            )
        )

    def pull_group(g: int, region: Region) -> tuple[dict[int, tuple[int, int]], bool]:
        (old, new), (lead_old, lead_new, per_old, per_new) = groups[g], scales[g]
        full = {a: (0, parent.shape[a]) for a in old}
        if all(region[b] == (0, shape[b]) for b in new):
            return full, True
        rest_full = all(region[b] == (0, shape[b]) for b in new if b != lead_new)
        start, stop = region[lead_new][0] * per_new, region[lead_new][1] * per_new
        if lead_old is not None and rest_full and start % per_old == 0 and stop % per_old == 0:
            return {**full, lead_old: (start // per_old, stop // per_old)}, True
        return full, False

    def pull(region: Region) -> Region:
        ranges: dict[int, tuple[int, int]] = {}
        for g in range(len(groups)):
            ranges.update(pull_group(g, region)[0])
        return tuple(ranges[a] for a in range(len(parent.shape)))

    def push(x: jax.Array, region: Region) -> jax.Array:
        target, after = [0] * len(shape), list(whole(shape))
        for g, (_, new) in enumerate(groups):
            exact = pull_group(g, region)[1]
            for b in new:
                target[b] = region[b][1] - region[b][0] if exact else shape[b]
                after[b] = (0, target[b]) if exact else region[b]
        return _slice(lax.reshape(x, target), tuple(after))

    cuts: list[tuple[int, ...]] = [(0, n) for n in shape]
    for _, (lead_old, lead_new, per_old, per_new) in zip(groups, scales, strict=True):
        if lead_old is not None and lead_new is not None:
            bounds = [e * per_old for e in parent.cuts[lead_old]]
            if all(e % per_new == 0 for e in bounds):
                cuts[lead_new] = tuple(e // per_new for e in bounds)
    return View(parent, shape, tuple(cuts), pull, push)
