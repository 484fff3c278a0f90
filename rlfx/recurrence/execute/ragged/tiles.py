"""A ragged axis in tiles: products take them one by one, and what is large is never put together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlfx import _jaxpr as J
from rlfx.recurrence.execute.ragged.part import Here, Part, replaced
from rlfx.recurrence.execute.ragged.tree_reduction import EXTREMES
from rlfx.recurrence.ir.program import Equation


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of an array along one axis of a point's shape."""

    tiles: tuple
    axis: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """How long each of them is."""
        return tuple(p.shape[self.axis] for p in self.tiles)


jax.tree_util.register_dataclass(Tiles, data_fields=["tiles"], meta_fields=["axis"])


def joined(data: Any) -> Any:
    """An array that may be in tiles, in one."""
    return jnp.concatenate(data.tiles, axis=data.axis) if isinstance(data, Tiles) else data


def in_one(part: Part) -> Part:
    """The part with its data in one array."""
    return replace(part, data=joined(part.data))


def tilewise(rule: Callable) -> Callable:
    """The rule of an operation on positions one by one, tile by tile."""

    def apply(point: Here, equation: Equation, *parts: Part) -> list[Part]:
        tiles = _alike(point, equation, parts)
        if tiles is None:
            return rule(point, equation, *map(in_one, parts))
        return [_in_tiles(outs) for outs in zip(*(rule(point, equation, *ps) for ps in tiles), strict=True)]

    return apply


def tilewise_unperturbed(rule: Callable) -> Callable:
    """The rule, tile by tile if there is no derivative.

    (A derivative needs copies of valid data where there is none, and of the last tile nothing may be valid.)
    """
    by_piece = tilewise(rule)

    def apply(point: Here, equation: Equation, *parts: Part) -> list[Part]:
        return rule(point, equation, *map(in_one, parts)) if point.perturbed else by_piece(point, equation, *parts)

    return apply


def tiled_reduction(rule: Callable, both: Callable) -> Callable:
    """The rule of a reduction: of each tile, and of what comes of them by ``both`` of two.

    (Those that are equal share the derivative of an extreme evenly, as two by two they would not.)
    """
    along_others = tilewise(rule)

    def apply(point: Here, equation: Equation, operand: Part) -> list[Part]:
        if not isinstance(operand.data, Tiles) or (point.perturbed and equation.op in EXTREMES):
            return rule(point, equation, in_one(operand))
        if operand.data.axis not in equation.params["axes"]:
            return along_others(point, equation, operand)
        return _total([rule(point, equation, tile) for tile in _valid_tiles(operand)], both)

    return apply


def tiled_product(dot: Callable) -> Callable:
    """The rule of ``dot_general`` where an operand is in tiles: one product a tile, side by side or added up."""

    def apply(point: Here, equation: Equation, *sides: Part) -> list[Part]:
        which = next((i for i, p in enumerate(sides) if isinstance(p.data, Tiles)), None)
        if which is None:
            return dot(point, equation, *sides)
        tiled = sides[which]
        contracted, batched = equation.params["dimension_numbers"]
        axis = tiled.data.axis
        if axis in contracted[which]:
            along = contracted[1 - which][contracted[which].index(axis)]
            pairs = pieces_along(point, sides[0], sides[1], (axis, along) if which == 0 else (along, axis))
            if pairs is not None:
                return _total([dot(point, equation, *pair) for pair in pairs], jnp.add)
        elif axis not in batched[which] and _is_one_axis(equation):
            tiles = [replace(tiled, data=tile) for tile in tiled.data.tiles]
            return [_in_tiles([dot(point, equation, *replaced(sides, which, p))[0] for p in tiles])]
        return dot(point, equation, *map(in_one, sides))

    return apply


def _is_one_axis(equation: Equation) -> bool:
    """Whether no output has more than one axis whose length depends on t."""
    return all(len(J.symbolic_axes(v.shape)) == 1 for v in equation.outputs)


def _in_tiles(tiles: Sequence[Part]) -> Part:
    (axis,) = tiles[0].ragged
    return replace(tiles[0], data=Tiles(tuple(p.data for p in tiles), axis))


def _total(tiles: Sequence[list[Part]], both: Callable) -> list[Part]:
    """What the only outputs of all tiles are together."""
    return [replace(tiles[0][0], data=functools.reduce(both, [out.data for (out,) in tiles]))]


def pieces_along(point: Here, left: Part, right: Part, axes: tuple[int, int]) -> list[tuple[Part, Part]] | None:
    """The tiles of two operands along the axes of a contraction; None if neither is in tiles, or both are in others."""
    if isinstance(left.data, Tiles):
        cut = left, _cut_like(point, right, axes[1], left)
    elif isinstance(right.data, Tiles):
        cut = _cut_like(point, left, axes[0], right), right
    else:
        return None
    return list(zip(*map(_valid_tiles, cut), strict=True)) if None not in cut else None


def _valid_tiles(part: Part) -> list[Part]:
    """The tiles, with the starts that are theirs: all but the last one are valid throughout."""
    axis = part.data.axis
    *complete, last = part.data.tiles
    start = part.starts[axis] - sum(p.shape[axis] for p in complete)
    throughout = replaced(part.starts, axis, None)
    return [
        *(replace(part, data=p, starts=throughout) for p in complete),
        replace(part, data=last, starts=replaced(part.starts, axis, start)),
    ]


def _cut_like(point: Here, part: Part, axis: int, like: Part) -> Part | None:
    """The part in tiles along ``axis`` as long as those of another one; None if it is in others."""
    sizes = like.data.sizes
    if isinstance(part.data, Tiles):
        return part if (part.data.axis, part.data.sizes) == (axis, sizes) else None
    part = point.aligned(part, axis, like.starts[like.data.axis], sum(sizes))
    return replace(part, data=Tiles(tuple(lax.split(part.data, sizes, axis)), axis))


def _alike(point: Here, equation: Equation, parts: Sequence[Part]) -> list[list[Part]] | None:
    """All the parts, for each tile; None if none of them is in tiles, or not all can be."""
    like = next((p for p in parts if isinstance(p.data, Tiles)), None)
    if like is None or not _is_one_axis(equation):
        return None
    given = [_cut_like(point, p, like.data.axis, like) if p.ragged else p for p in parts]
    cut = [p for p in given if p is not None]
    if len(cut) < len(given):
        return None
    count = len(like.data.tiles)
    return [[replace(p, data=p.data.tiles[i]) if p.ragged else p for p in cut] for i in range(count)]
