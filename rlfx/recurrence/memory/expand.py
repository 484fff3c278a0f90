"""The operations XLA makes of one equation: copies into other layouts and buffers, gathers with checks of their bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.memory.constants import within
from rlfx.recurrence.memory.simplify import is_scaling
from rlfx.recurrence.memory.sizes import (
    BROADCAST,
    COPY,
    FOR_LOOP,
    LOOPS,
    MUL,
    RELAYOUT,
    RESHAPED,
    SCATTERS,
    Node,
    Value,
    is_constant,
    made,
    names,
    number,
)  # fmt: skip

_TRANSPOSE, _GATHER, _SELECT = J.primitive("transpose"), J.primitive("gather"), J.primitive("select_n")
_SLICE, _DYNAMIC_SLICE = J.primitive("slice"), J.primitive("dynamic_slice")
_ARGUMENTS = names("argmax", "argmin")
#: As text: numbers are told apart by how they are written.
_ZERO = {False: "0.0", True: "False"}
#: What XLA makes of a function: others of the argument, each computed of the one before; the last one reads all of them.
_COMPOSED = {
    J.primitive("erf_inv"): (J.primitive("log1p"), J.primitive("sqrt")),
    J.primitive("logistic"): (J.primitive("exp"), J.primitive("div")),
}


def expand(equation: Any, ins: list[Value | None], outs: list[Value], repeated: Callable) -> list[Node]:
    """The operations XLA makes of one equation: itself, after copies into the layout or the buffer that it needs.

    Args:
      repeated: makes an array of a number; loops write their results over zeros.
    """
    op, before = equation.primitive, []

    def copied(op: Any, value: Value | None, like: Value) -> Value:
        twin = Value(like.bytes, like.shape, like.dtype, host=like.host)
        before.append(made(op, [value], [twin], equation))
        return twin

    pairs: list[tuple[Value, Value]] = []
    if is_scaling(equation) and (number(equation.invars[1], ins[1]) or (ins[1] is not None and _is_number(ins[1]))):
        return [made(MUL, ins, outs, equation)]
    if op in _COMPOSED:
        like = [Value(outs[0].bytes, outs[0].shape, outs[0].dtype) for _ in _COMPOSED[op]]
        for part, out in zip(_COMPOSED[op], like, strict=True):
            before.append(made(part, ins[-1:], [out], equation))
            ins = [*ins, out]
        return [*before, made(_SELECT, ins, outs, equation)]
    if op in SCATTERS:
        target, *others = ins
        ins = [copied(COPY, target, outs[0]), *(v and copied(RESHAPED, v, v) for v in others)]
    if op is J.SPLIT:
        return [made(_SLICE, ins, [out], equation) for out in outs]
    if op is _GATHER:
        return _gathered(equation, ins, outs)
    if op in _ARGUMENTS and ins[0] is not None:  # XLA computes the extremum, too
        return [made(op, ins, [*outs, Value(outs[0].bytes, outs[0].shape, ins[0].dtype)], equation)]
    if op in LOOPS:
        start, carry = _carries(equation)
        for i, out in enumerate(outs):
            if i < carry and ins[start + i] is None:
                continue
            init = copied(COPY, ins[start + i] if i < carry else repeated(_ZERO[out.dtype == bool], out, equation), out)
            if i < carry:
                ins[start + i] = init
            else:
                ins.append(init)
            pairs.append((init, out))
        # Constants that are repeated are made inside of the loop.
        carried = range(start, start + carry)
        ins = [None if i not in carried and _is_repeated_constant(v) else v for i, v in enumerate(ins)]
        # What is transposed gets another layout, and is copied into the one that a loop reads.
        ins = [copied(FOR_LOOP, v, v) if v is not None and v.node and v.node.op is _TRANSPOSE else v for v in ins]
    elif op in _LAYOUTS:
        ins = [
            copied(RELAYOUT, v, v) if v is not None and bad else v
            for v, bad in zip(ins, _LAYOUTS[op](equation), strict=True)
        ]
    return [*before, made(op, ins, outs, equation, pairs)]


def _is_number(value: Value) -> bool:
    """Whether a value repeats a number that XLA knows."""
    return value.node is not None and value.node.op is BROADCAST and not value.node.ins


def _in_bounds(equation: Any, ins: Sequence[Value | None]) -> bool:
    """Whether XLA need not check the indices of a gather, or knows that they are in bounds."""
    if equation.params["mode"] is not jax.lax.GatherScatterMode.FILL_OR_DROP:
        return True
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape = equation.invars[0].aval.shape
    limits = [shape[d] - sizes[d] for d in numbers.start_index_map]
    return ins[1] is not None and ins[1].known is not None and within(ins[1].known, limits)


def _gathered(equation: Any, ins: list[Value | None], outs: list[Value]) -> list[Node]:
    """A gather, and a selection between what it found and the number for indices out of bounds.

    With one index it is a slice.
    """
    indices = equation.invars[1].aval.shape
    one = math.prod(indices[:-1]) == 1
    op = _GATHER if not one else _SLICE if ins[1] is not None and ins[1].known is not None else _DYNAMIC_SLICE
    (out,), offsets = outs, equation.params["dimension_numbers"].offset_dims
    rows = Value(out.bytes, out.shape, out.dtype)
    if _in_bounds(equation, ins):
        return [made(op, ins, [rows], equation), made(RESHAPED, [rows], outs, equation)]
    found = Value(out.bytes, out.shape, out.dtype)
    valid = Value(math.prod(out.shape), out.shape, np.dtype(bool))
    valid.varying = frozenset(d for d, size in enumerate(out.shape) if d not in offsets and size != 1)
    return [
        made(op, ins, [rows], equation),
        made(RESHAPED, [rows], [found], equation),
        made(BROADCAST, ins[1:], [valid], equation),
        made(_SELECT, [valid, found], outs, equation),
    ]


def _is_repeated_constant(value: Value | None) -> bool:
    return value is not None and value.node is not None and value.node.op is BROADCAST and is_constant(value)


def _carries(equation: Any) -> tuple[int, int]:
    """``(first carry among the inputs, number of carries)``."""
    params = equation.params
    if equation.primitive is J.SCAN:
        return J.scan_counts(params)
    consts = params["cond_nconsts"] + params["body_nconsts"]
    return consts, len(equation.outvars)


def _dot_layout(equation: Any) -> tuple[bool, bool]:
    """Which operands of a contraction XLA transposes into a matrix first."""
    (contract, batch) = equation.params["dimension_numbers"]
    shapes = [v.aval.shape for v in equation.invars]
    real = [[d for d in dims if shape[d] != 1] for dims, shape in zip(contract, shapes, strict=True)]
    if any(batch):
        return tuple(_scattered(shape, b, c) for shape, b, c in zip(shapes, batch, contract, strict=True))  # type: ignore
    return len(real[0]) > 1 and len(shapes[0]) > len(contract[0]), False


def _scattered(shape: tuple, batch: Sequence[int], contract: Sequence[int]) -> bool:
    free = [d for d in range(len(shape)) if d not in batch and d not in contract]
    orders = [[*batch, *free, *contract], [*batch, *contract, *free]]
    return not any((o := [d for d in order if shape[d] != 1]) == sorted(o) for order in orders)


def _conv_layout(equation: Any) -> tuple[bool, bool]:
    numbers = equation.params["dimension_numbers"]
    n = len(numbers.lhs_spec)
    inner = tuple(range(1, n - 1))
    return numbers.lhs_spec != (0, n - 1, *inner), numbers.rhs_spec != (n - 1, n - 2, *range(n - 2))


_LAYOUTS = {J.primitive("dot_general"): _dot_layout, J.primitive("conv_general_dilated"): _conv_layout}
