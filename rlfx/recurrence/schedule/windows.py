"""Sums over features of windows, with positions last: distances from what is remembered, scores of it.

``((x.window(-w, 0) - x[t]) ** 2).sum(-1)`` adds up the features of each position. XLA:CPU adds up a last axis number by number.
With ``[features, environments, positions]`` a sum is one of slices, each added to the last along positions, and a timestep's
window is a slice of a series whose last axis is time: nothing is copied or turned. ``execute/positions.py`` runs them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._axes import REDUCTIONS, TABLE, elementwise, nest_of
from rlfx.recurrence.analysis.cost import bytes_in_all
from rlfx.recurrence.ir.program import NO_DIMS, Equation, Program, Var
from rlfx.recurrence.language.index import Window
from rlfx.recurrence.schedule.positions import followed

#: A CPU's vector, of positions; features that are worth it; and so many slices are still compiled soon.
VECTOR, FEWEST, MOST = 16, 4, 64
#: Bytes of a timestep's windows, at least: each timestep is an iteration of a loop.
LEAST = 1 << 15

_SUM, _BROADCAST = J.primitive("reduce_sum"), J.primitive("broadcast_in_dim")


@dataclass(frozen=True, eq=False)
class PositionsLast:
    """Equations of windows that run so.

    Attributes:
      reads: of the windows.
      equations: the others, in order; each computes every position by itself.
      axis: which axis of a value is that of positions, of the values that have one.
      loop: which loop of each equation that is.
      needed: what is needed of them elsewhere.
    """

    reads: tuple[Equation, ...]
    equations: tuple[Equation, ...]
    axis: Mapping[Var, int]
    loop: Mapping[Equation, int]
    needed: tuple[Var, ...]


def positions_last(
    members: Sequence[Equation], outputs: Sequence[Var], program: Program, batch: int
) -> PositionsLast | None:
    """Which of some equations run so; None if nothing is gained by it."""
    reads = tuple(e for e in members if e.is_read)
    if (
        not reads
        or not all(_is_plain(e, program) for e in reads)
        or len({e.access.hi - e.access.lo for e in reads}) > 1
    ):  # type: ignore[union-attr]
        return None
    each = min(bytes_in_all(e.outputs[0], program, batch) for e in reads) / program.domain.length
    if reads[0].outputs[0].shape[0] < VECTOR or each < LEAST:
        return None
    axis = {v: next(iter(axes)) for v, axes in followed(program, reads).items() if len(axes) == 1}
    inside = {v for e in members for v in e.outputs}
    chosen, loop = {v for e in reads for v in e.outputs}, {}
    for e in members:
        own = e.is_read or any(v in inside and v not in chosen for v in e.inputs)
        if not own and (found := _loop(e, axis)) is not None:
            loop[e] = found
            chosen |= set(e.outputs)
    others = [e for e in members if not e.is_read and e not in loop]
    elsewhere = {v for e in others for v in e.inputs} | set(outputs)
    needed = tuple(v for e in members for v in e.outputs if v in chosen and v in elsewhere)
    # Features that are needed elsewhere would be turned back.
    flat = all(v in axis and math.prod(v.shape) == v.shape[axis[v]] for v in needed)
    if not flat or not any(map(_adds_up_features, loop)):
        return None
    return PositionsLast(reads, tuple(e for e in members if e in loop), axis, loop, needed)


def _is_plain(e: Equation, program: Program) -> bool:
    """Whether an equation reads a window that has the same everywhere outside of the domain."""
    (fill,) = e.operands if isinstance(e.access, Window) else (None,)
    return fill is not None and (not isinstance(fill, Var) or program.dims_of(fill) == NO_DIMS)


def _loop(e: Equation, axis: Mapping[Var, int]) -> int | None:
    """Which loop of an equation goes along positions, each of which it computes by itself; None if none does."""
    mapped = TABLE.get(e.op) is elementwise or e.op in REDUCTIONS or e.op is _BROADCAST
    it = nest_of(e.op, e.params, *([v.shape for v in side] for side in (e.inputs, e.outputs))) if mapped else None
    if it is None or not e.is_pointwise or e.is_ragged:
        return None
    sides = [*zip(e.inputs, it.operands, strict=True), *zip(e.outputs, it.results, strict=True)]
    found = {axes[axis[v]] for v, axes in sides if v in axis}
    if len(found) != 1 or None in found or not found <= it.free:
        return None
    (loop,) = found
    known = all(axes.count(loop) == (v in axis) for v, axes in sides if v in axis or v.shape)
    lengths = {v.shape[a] for v, axes in sides for a, i in enumerate(axes) if i == loop}
    return loop if known and len(lengths) == 1 and all(v in axis for v in e.outputs) else None


def _adds_up_features(e: Equation) -> bool:
    if e.op is not _SUM:
        return False
    (x,) = e.inputs
    count = math.prod(x.shape[a] for a in e.params["axes"])
    return FEWEST <= count <= MOST and jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits >= 32
