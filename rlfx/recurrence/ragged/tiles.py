"""A ragged axis in pieces: products take them one by one, and what is large is never put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlfx import _jaxpr as J
from rlfx.recurrence.program import Equation
from rlfx.recurrence.ragged.part import Part, Point


@dataclass(frozen=True, eq=False)
class Tiles:
    """The pieces of an array along one axis of a point's shape."""

    pieces: tuple
    axis: int

    @property
    def joined(self) -> Any:
        """The array."""
        return jnp.concatenate(self.pieces, axis=self.axis)


jax.tree_util.register_dataclass(Tiles, data_fields=["pieces"], meta_fields=["axis"])


def joined(data: Any) -> Any:
    """An array that may be in pieces, in one."""
    return data.joined if isinstance(data, Tiles) else data


def tilewise(rule: Callable) -> Callable:
    """The rule of an operation on positions one by one, piece by piece."""

    def apply(point: Point, equation: Equation, *parts: Part) -> list[Part]:
        tiled = [p for p in parts if isinstance(p.data, Tiles)]
        if not tiled:
            return rule(point, equation, *parts)
        if len(parts) != 1:
            return rule(point, equation, *(replace(p, data=joined(p.data)) for p in parts))
        (part,) = parts
        by_piece = [rule(point, equation, replace(part, data=piece)) for piece in part.data.pieces]
        return [_in_tiles(outs) for outs in zip(*by_piece, strict=True)]

    return apply


def _in_tiles(pieces: Sequence[Part]) -> Part:
    (axis,) = pieces[0].ragged
    return Part(Tiles(tuple(p.data for p in pieces), axis), pieces[0].starts, pieces[0].clean)


def tiled_product(dot: Callable) -> Callable:
    """The rule of ``dot_general`` where an operand is in pieces: one product a piece, put together or added up."""

    def apply(point: Point, equation: Equation, lhs: Part, rhs: Part) -> list[Part]:
        sides = [lhs, rhs]
        if isinstance(lhs.data, Tiles) == isinstance(rhs.data, Tiles):
            return dot(point, equation, *(replace(p, data=joined(p.data)) for p in sides))
        which = 0 if isinstance(lhs.data, Tiles) else 1
        tiled, other = sides[which], sides[1 - which]
        contracted, batched = equation.params["dimension_numbers"]
        axis = tiled.data.axis
        if axis in batched[which] or tiled.ragged != (axis,):
            sides[which] = replace(tiled, data=tiled.data.joined)
            return dot(point, equation, *sides)
        if axis not in contracted[which]:
            return [_put_together(dot, point, equation, sides, which)]
        along = contracted[1 - which][contracted[which].index(axis)]
        width = sum(p.shape[axis] for p in tiled.data.pieces)
        other = point.aligned(other, along, tiled.starts[axis], width)
        only = tuple(s if i == along else None for i, s in enumerate(other.starts))
        data = point.masked(Part(other.data, only), equation.inputs[1 - which].shape, 0)
        starts = [tiled.starts, other.starts]
        return [_added_up(equation, tiled.data, data, which, along, starts)]

    return apply


def _put_together(dot: Callable, point: Point, equation: Equation, sides: list[Part], which: int) -> Part:
    tiled = sides[which]
    outs = []
    for piece in tiled.data.pieces:
        sides[which] = replace(tiled, data=piece)
        outs += dot(point, equation, *sides)
    axis = _free_axes(equation).index((which, tiled.data.axis))
    return Part(jnp.concatenate([o.data for o in outs], axis=axis), outs[0].starts, outs[0].clean)


def _added_up(equation: Equation, tiled: Tiles, other: Any, which: int, along: int, starts: list) -> Part:
    total, first = None, 0
    for piece in tiled.pieces:
        size = piece.shape[tiled.axis]
        cut = lax.slice_in_dim(other, first, first + size, axis=along)
        (out,) = J.bind(equation.op, dict(equation.params), *((piece, cut) if which == 0 else (cut, piece)))
        total, first = out if total is None else total + out, first + size
    left_and_right = starts if which == 0 else starts[::-1]
    return Part(total, tuple(left_and_right[side][axis] for side, axis in _free_axes(equation)), True)


def _free_axes(equation: Equation) -> list[tuple[int, int]]:
    """For each axis of a product, the operand and the axis of it that it comes from."""
    (lc, rc), (lb, rb) = equation.params["dimension_numbers"]
    left = [(0, a) for a in range(len(equation.inputs[0].shape)) if a not in (*lc, *lb)]
    right = [(1, a) for a in range(len(equation.inputs[1].shape)) if a not in (*rc, *rb)]
    return [*((0, a) for a in lb), *left, *right]
