"""Ragged axes that are reduced, accumulated, contracted or sorted: what is not valid becomes the operation's identity."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from rlfx import _jaxpr as J
from rlfx._axes import CUMULATIVE, REDUCTIONS, extreme_of
from rlfx.recurrence.execute.extremes import largest_or_smallest
from rlfx.recurrence.execute.ragged.infinite import of_valid
from rlfx.recurrence.execute.ragged.part import ANYWHERE, Here, Part, align_all, align_contracted, replaced, without
from rlfx.recurrence.execute.ragged.tree_reduction import EXTREMES, by_halves, extreme
from rlfx.recurrence.execute.values import discounted_total, meaning
from rlfx.recurrence.ir.program import Equation
from rlfx.recurrence.language.primitives import discounted_sum_p


def _fixed(start: Any) -> Any:
    """Along an axis on which all positions are equal, the valid ones still have to be counted."""
    return 0 if start == ANYWHERE else start


def _only(part: Part, axes: Any, clean: bool = False) -> Part:
    """The part as if it were ragged along ``axes`` alone."""
    return Part(part.data, tuple(_fixed(s) if i in axes else None for i, s in enumerate(part.starts)), clean)


#: One function each: what is traced of it is known by that.
_HALVED = {op: partial(extreme, op) for op in EXTREMES}


def _reduce(point: Here, equation: Equation, operand: Part, *, identity: Callable[[Any], Any]) -> list[Part]:
    axes = equation.params["axes"]
    data = point.masked(_only(operand, axes), equation.inputs[0].shape, identity(operand.data.dtype))
    if point.halves and by_halves(equation.op, axes, data):
        op = equation.op.name.removeprefix("reduce_")
        out = largest_or_smallest(op, data, axes, reduced=_HALVED[equation.op])
    else:
        (out,) = meaning(equation.op, equation.params, data)
    return [Part(out, tuple(s for i, s in enumerate(operand.starts) if i not in axes), operand.clean)]


def _arg(point: Here, equation: Equation, operand: Part, *, largest: bool) -> list[Part]:
    (axis,) = equation.params["axes"]
    data = operand.data
    if operand.starts[axis] is not None:
        one = _only(operand, (axis,))
        data = point.masked(one, equation.inputs[0].shape, extreme_of(data.dtype, largest))
        # The first valid position wins ties with the padding, as it does in the slice itself.
        data = point.aligned(Part(data, one.starts, False), axis, 0, data.shape[axis]).data
    (out,) = J.bind(equation.op, dict(equation.params), data)
    return [Part(out, without(operand.starts, axis), operand.clean)]


def _cumulative(point: Here, equation: Equation, operand: Part, *, identity: Callable[[Any], Any]) -> list[Part]:
    axis = equation.params["axis"]
    if operand.starts[axis] is None:
        (out,) = meaning(equation.op, equation.params, operand.data)
        return [Part(out, operand.starts, operand.clean)]
    data = point.masked(_only(operand, (axis,)), equation.inputs[0].shape, identity(operand.data.dtype))
    (out,) = meaning(equation.op, equation.params, data)
    moved = Part(out, replaced(operand.starts, axis, _fixed(operand.starts[axis])), False)
    return [point.cleaned(moved, equation.inputs[0].shape)]  # the identity of a maximum is infinite


def _dot(point: Here, equation: Equation, lhs: Part, rhs: Part) -> list[Part]:
    (lc, rc), (lb, rb) = equation.params["dimension_numbers"]
    left_shape, right_shape = equation.inputs[0].shape, equation.inputs[1].shape
    for la, ra in (*zip(lc, rc, strict=True), *zip(lb, rb, strict=True)):
        if lhs.starts[la] is not None:
            lhs, rhs = align_contracted(point, lhs, la, rhs, ra)
    contracted_left = tuple(s if i in lc else None for i, s in enumerate(lhs.starts))
    contracted_right = tuple(s if i in rc else None for i, s in enumerate(rhs.starts))
    # One masked operand is enough where the other holds data of other timesteps: a mask would make a copy of it for every t.
    ragged = [i for i, axis in enumerate(lc) if lhs.starts[axis] is not None]
    side = next((i for i, part in ((1, rhs), (0, lhs)) if part.raw and len(ragged) == 1), None)
    left = lhs.data if side == 0 else point.masked(Part(lhs.data, contracted_left), left_shape, 0)
    right = rhs.data if side == 1 else point.masked(Part(rhs.data, contracted_right), right_shape, 0)
    if side is None:
        (out,) = J.bind(equation.op, dict(equation.params), left, right)
    else:
        axes, part, shape = ((lc, lhs, left_shape), (rc, rhs, right_shape))[side]
        along = axes[ragged[0]]
        out = of_valid(point, equation.params, (left, right)[1 - side], part, 1 - side, along, shape[along])
    batch = [lhs.starts[a] for a in lb]
    free_left = [s for i, s in enumerate(lhs.starts) if i not in (*lc, *lb)]
    free_right = [s for i, s in enumerate(rhs.starts) if i not in (*rc, *rb)]
    return [Part(out, (*batch, *free_left, *free_right), lhs.clean and rhs.clean)]


def _sort(point: Here, equation: Equation, *parts: Part) -> list[Part]:
    axis, shape = equation.params["dimension"], equation.inputs[0].shape
    aligned, starts = align_all(point, parts, len(shape))
    if starts[axis] is None:
        outs = J.bind(equation.op, dict(equation.params), *(p.data for p in aligned))
        return [Part(d, starts, False) for d in outs]
    first = 0 if starts[axis] == ANYWHERE else starts[axis]
    only = Part(aligned[0].data, tuple(first if i == axis else None for i in range(len(shape))), False)
    padding = ~point.mask(only, shape)
    params = {**equation.params, "num_keys": equation.params["num_keys"] + 1}
    outs = J.bind(equation.op, params, padding, *(p.data for p in aligned))[1:]
    return [Part(d, replaced(starts, axis, 0), False) for d in outs]


def _discounted_sum(point: Here, equation: Equation, rewards: Part, discounts: Part) -> list[Part]:
    (rewards, discounts), starts = align_all(point, (rewards, discounts), rewards.data.ndim)
    shape = equation.inputs[0].shape
    valid = Part(rewards.data, starts, False)
    r = point.masked(valid, shape, 0)
    # The last discount of a slice has no part in its sum: it may be infinite.
    d = point.masked(Part(discounts.data, starts, False), (shape[0] - 1, *shape[1:]), 1)
    total = discounted_total(r, d)
    return [Part(total, (None,) * total.ndim)]


RULES: dict[Any, Callable[..., list[Part]]] = {
    **{op: partial(_reduce, identity=monoid.identity) for op, monoid in REDUCTIONS.items()},
    **{op: partial(_cumulative, identity=monoid.identity) for op, monoid in CUMULATIVE.items()},
    J.primitive("argmax"): partial(_arg, largest=False),
    J.primitive("argmin"): partial(_arg, largest=True),
    J.primitive("dot_general"): _dot,
    J.primitive("sort"): _sort,
    discounted_sum_p: _discounted_sum,
}
