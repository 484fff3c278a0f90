"""A slice whose length depends on t, as an array of fixed length with a mask; how two of them are aligned.

A ragged axis is an axis of fixed length W in which the positions ``start <= p < start + n`` are valid. ``n`` is the
symbolic dimension of the traced program and ``start`` is symbolic too, so that two slices of the same timesteps are
recognised as aligned: ``x[t:]`` stays the shared array ``X`` of all timesteps, with start ``t``, and is never gathered.

Before a nonlinear elementwise operation, positions that are not valid are filled with a copy of valid data: a large
exponent in the padding would have right values and NaN gradients. The fill carries no cotangent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from rlfx import _jaxpr as J
from rlfx.errors import UnsupportedSliceOp, located
from rlfx.recurrence.execute.values import COMPUTED
from rlfx.recurrence.ir.program import Equation
from rlfx.recurrence.language.domain import Domain, widest

#: The start of an axis along which all positions are equal.
ANYWHERE = "anywhere"


@dataclass(frozen=True, eq=False)
class Part:
    """A value of one point, with the starts of its ragged axes.

    Attributes:
      clean: positions that are not valid hold copies of valid data.
      raw: what else they hold: COMPUTED, OTHERS, NOTHING.
    """

    data: Any
    starts: tuple
    clean: bool = True
    raw: int = COMPUTED

    @property
    def ragged(self) -> tuple[int, ...]:
        return tuple(i for i, s in enumerate(self.starts) if s is not None)


@dataclass(frozen=True, eq=False)
class Here:
    """Where the rules evaluate: one point of the domain.

    Attributes:
      t: None for what does not vary with t.
      n: the length.
      perturbed: whether the evaluation may be differentiated.
      halves: whether rows are reduced by halves.
    """

    domain: Domain
    t: Any
    n: Any
    perturbed: bool
    halves: bool

    def value(self, dim: Any) -> Any:
        """A symbolic dimension as an int32."""
        return J.evaluate_dim(dim, self.t + 1, self.n)

    def width(self, dim: Any) -> int:
        """The fixed length that stands for a dimension: its largest value."""
        return widest(self.domain, dim)

    def mask(self, part: Part, shape: Sequence) -> Any:
        """Which positions are valid, broadcastable to ``part.data``; ``shape`` are the symbolic dimensions."""
        mask = None
        for axis in part.ragged:
            if part.starts[axis] == ANYWHERE:
                continue
            size = part.data.shape[axis]
            valid = self.valid(part, axis, shape[axis])
            valid = lax.broadcast_in_dim(valid, (1,) * axis + (size,) + (1,) * (part.data.ndim - axis - 1), (axis,))
            mask = valid if mask is None else mask & valid
        return None if mask is None else jnp.broadcast_to(mask, part.data.shape)

    def valid(self, part: Part, axis: int, dim: Any) -> Any:
        """Which positions along a ragged axis of this symbolic length are valid: bool [W]."""
        position, start = lax.iota(jnp.int32, part.data.shape[axis]), part.starts[axis]
        valid = position < self.value(start) + self.value(dim)
        return valid & (position >= self.value(start)) if J.is_symbolic(start) or start > 0 else valid

    def masked(self, part: Part, shape: Sequence, identity: Any) -> Any:
        """The data with ``identity`` where it is not valid."""
        mask = self.mask(part, shape)
        if mask is None:
            return part.data
        return chosen(mask, part.data, jnp.asarray(identity, part.data.dtype))

    def cleaned(self, part: Part, shape: Sequence) -> Part:
        """The part with copies of valid data at positions that are not valid."""
        if part.clean or not part.ragged:
            return part
        mask = self.mask(part, shape)
        if mask is None:
            return part
        sample = part.data
        for axis in part.ragged:
            if part.starts[axis] != ANYWHERE:
                sample = self._one(sample, part.starts[axis], axis)
        if J.is_inexact(sample):  # an empty slice has no valid data, and infinity times nothing is not a number
            sample = jnp.where(jnp.isfinite(sample), sample, jnp.ones_like(sample))
        return Part(chosen(mask, part.data, lax.stop_gradient(sample)), part.starts, True)

    def _one(self, data: Any, position: Any, axis: int) -> Any:
        """The data at a position along an axis, of length 1."""
        last = data.shape[axis] - 1
        if not J.is_symbolic(position):
            first = min(max(position, 0), last)
            return lax.slice_in_dim(data, first, first + 1, axis=axis)
        return lax.dynamic_slice_in_dim(data, jnp.clip(self.value(position), 0, last), 1, axis)

    def aligned(self, part: Part, axis: int, start: Any, width: int) -> Part:
        """The part moved along ``axis`` so that its valid positions begin at ``start``, in ``width`` positions."""
        have = part.starts[axis]
        if have == ANYWHERE:
            size = part.data.shape[axis]
            if size != width:
                one = lax.slice_in_dim(part.data, 0, 1, axis=axis)
                part = Part(jnp.broadcast_to(one, replaced(part.data.shape, axis, width)), part.starts, part.clean)
            return Part(part.data, replaced(part.starts, axis, start), part.clean)
        if same(have, start) and part.data.shape[axis] == width:
            return part
        # Of the same start (then nothing need be known of t), a tile and a slice may still differ in width.
        if same(have, start) and width < part.data.shape[axis]:
            return replace(part, data=lax.slice_in_dim(part.data, 0, width, axis=axis))
        offset = 0 if same(have, start) else self.value(have) - self.value(start)
        position = lax.iota(jnp.int32, width) + offset
        data = jnp.take(part.data, jnp.clip(position, 0, part.data.shape[axis] - 1), axis=axis, mode="clip")
        return Part(data, replaced(part.starts, axis, start), False, part.raw)

    def settled(self, part: Part, shape: Sequence) -> Part:
        """The part with a start on every ragged axis."""
        for axis in part.ragged:
            if part.starts[axis] == ANYWHERE:
                part = self.aligned(part, axis, 0, self.width(shape[axis]))
        return part


def alike(operands: Sequence) -> Sequence:
    """What an operation on elements takes, of one shape; scalars as they are."""
    shape = np.broadcast_shapes(*(jnp.shape(x) for x in operands))
    whole = iter(J.alike(*(jnp.broadcast_to(x, shape) for x in operands if jnp.ndim(x))))
    return [next(whole) if jnp.ndim(x) else x for x in operands]


def chosen(mask: Any, data: Any, otherwise: Any) -> Any:
    """``jnp.where`` of values with axes in any order."""
    return lax.select_n(*J.alike(*(jnp.broadcast_to(x, data.shape) for x in (mask, otherwise, data))))


def replaced(items: Sequence, index: int, item: Any) -> tuple:
    """The items with another one at ``index``."""
    return (*items[:index], item, *items[index + 1 :])


def without(items: Sequence, index: int) -> tuple:
    """The items but that at ``index``."""
    return (*items[:index], *items[index + 1 :])


def same(a: Any, b: Any) -> bool:
    """Whether two starts are surely equal."""
    if isinstance(a, str) or isinstance(b, str):
        return a is b
    return bool(J.equal_dims(a, b))


def _reference_starts(parts: Sequence[Part], ndim: int) -> tuple[list, list[int]]:
    """For each axis, the start and width to which the parts are aligned."""
    starts: list = [None] * ndim
    widths = [1] * ndim
    for axis in range(ndim):
        own = [p for p in parts if p.data.ndim == ndim and p.starts[axis] is not None]
        fixed = [p for p in own if p.starts[axis] != ANYWHERE]
        chosen = max(fixed or own, key=lambda p: p.data.shape[axis], default=None)
        if chosen is not None:
            starts[axis], widths[axis] = chosen.starts[axis], chosen.data.shape[axis]
    return starts, widths


def align_all(point: Here, parts: Sequence[Part], ndim: int) -> tuple[list[Part], tuple]:
    """The parts with all ragged axes aligned, and the starts that they share; parts of another rank are left alone."""
    starts, widths = _reference_starts(parts, ndim)
    out = []
    for part in parts:
        if part.data.ndim == ndim:
            for axis in part.ragged:
                part = point.aligned(part, axis, starts[axis], widths[axis])
        out.append(part)
    return out, tuple(starts)


def align_contracted(point: Here, left: Part, la: int, right: Part, ra: int) -> tuple[Part, Part]:
    """Two parts with the axes ``la`` and ``ra`` of a product aligned."""
    # Move what varies with t anyway; what is shared by all t stays as it is.
    if left.starts[la] != ANYWHERE and (right.starts[ra] == ANYWHERE or not right.clean or left.clean):
        target, width = left.starts[la], left.data.shape[la]
    else:
        target, width = right.starts[ra], right.data.shape[ra]
    if target == ANYWHERE:
        target = 0
    return point.aligned(left, la, target, width), point.aligned(right, ra, target, width)


def unsupported(equation: Equation, fact: str) -> UnsupportedSliceOp:
    """The refusal of an operation on a ragged axis."""
    return UnsupportedSliceOp(
        located(
            f"{fact}.",
            where=equation.where,
            fix="Read a window of fixed length, x.window(lo, hi, fill=v), or reduce the slice first.",
        )
    )
