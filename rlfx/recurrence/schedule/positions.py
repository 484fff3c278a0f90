"""Which axes of a value stand for other timesteps: those of a slice ``x[:]``, and of what is computed from it axis by axis. So of
a window ``x.window(lo, hi)``.

Where an axis comes from decides, not how long it is: an image 64 pixels wide at T = 64 is no slice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlfx import _jaxpr as J
from rlfx._axes import nest_of
from rlfx.recurrence.ir.program import Equation, Program, Var
from rlfx.recurrence.language.index import Point, Slice

#: Shorter slices are no matter.
LONG = 64
#: ``(operand, its axis, result, its axis, whether that is known)``: the same positions.
Links = Iterator[tuple[int, int, Var, int, bool]]


def positions(program: Program) -> Mapping[Var, frozenset[int]]:
    """The axes that are positions of slices of a fixed length, the same at every timestep, of the values that have any."""
    return followed(program, (e for e in program.equations if _is_long_slice(e, program)))


def followed(program: Program, reads: Iterable[Equation]) -> Mapping[Var, frozenset[int]]:
    """The axes that are positions of what some reads give, of the values that have any."""
    found = {(e.outputs[0], 0) for e in reads}
    if not found:
        return {}
    same: dict[tuple, list[tuple]] = {}
    for e in program.equations:
        for i, a, out, b, known in _read(e) if e.is_read else _computed(e):
            same.setdefault((e.inputs[i], a), []).append((out, b))
            if known:  # a mask of positions has the positions of the scores that it masks
                same.setdefault((out, b), []).append((e.inputs[i], a))
    todo = list(found)
    while todo:
        new = set(same.get(todo.pop(), ())) - found
        found |= new
        todo += new
    axes: dict[Var, set[int]] = {}
    for v, axis in found:
        axes.setdefault(v, set()).add(axis)
    return {v: frozenset(of) for v, of in axes.items()}


def _is_long_slice(e: Equation, program: Program) -> bool:
    is_slice = e.is_read and isinstance(e.access, Slice) and _is_long(e.params["size"])
    return is_slice and "t" not in program.dims_of(e.outputs[0])


def _read(e: Equation) -> Links:
    first, (out,) = 0 if isinstance(e.access, Point) else 1, e.outputs
    if len(out.shape) == len(e.source.shape) + first:
        yield from ((0, a, out, a + first, True) for a in range(len(e.source.shape)))


def _computed(e: Equation) -> Links:
    """Axes that follow one loop. What is read as a whole, or by what is not known, keeps the length of an axis."""
    loops = nest_of(e.op, e.params, *([v.shape for v in side] for side in (e.inputs, e.outputs)))
    if loops is None:
        operands, results = ([(None,) * len(v.shape) for v in side] for side in (e.inputs, e.outputs))
    else:
        operands, results = loops.operands, loops.results
    for (i, axes), (out, of_out) in itertools.product(enumerate(operands), zip(e.outputs, results, strict=True)):
        for (a, loop), (b, other) in itertools.product(enumerate(axes), enumerate(of_out)):
            if loop is not None and loop == other:
                yield i, a, out, b, True
            elif loop is None and e.inputs[i].shape[a] == out.shape[b] and _is_long(out.shape[b]):
                yield i, a, out, b, False


def _is_long(n: Any) -> bool:
    return not J.is_symbolic(n) and n >= LONG
