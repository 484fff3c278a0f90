"""Which axes of a value stand for other timesteps: those of a slice ``x[:]``, and of what is computed from it axis by axis.

Where an axis comes from decides, not how long it is: an image 64 pixels wide at T = 64 is no slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.program import Equation, Program, Var
from rlfx.recurrence.language.index import Point, Slice

#: Shorter slices are no matter.
LONG = 64
#: ``(operand, its axis, axis of the result)``: the same positions.
Links = Iterator[tuple[int, int, int]]


def positions(program: Program) -> Mapping[Var, frozenset[int]]:
    """The axes that are positions of slices of a fixed length, the same at every timestep, of the values that have any."""
    found = {(e.outputs[0], 0) for e in program.equations if _is_long_slice(e, program)}
    if not found:
        return {}
    same: dict[tuple, list[tuple]] = {}
    for e in program.equations:
        known = _reads(e) if e.is_read else _LINKS.get(e.op, _elementwise if e.op in J.ELEMENTWISE else None)
        for out in e.outputs:
            for i, a, b in _unknown(e, out) if known is None else known(e, out):
                same.setdefault((e.inputs[i], a), []).append((out, b))
                if known is not None:  # a mask of positions has the positions of the scores that it masks
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


def _reads(e: Equation) -> Callable[[Equation, Var], Links]:
    first = 0 if isinstance(e.access, Point) else 1

    def links(e: Equation, out: Var) -> Links:
        if len(out.shape) == len(e.source.shape) + first:
            yield from ((0, a, a + first) for a in range(len(e.source.shape)))

    return links


def _elementwise(e: Equation, out: Var) -> Links:
    for i, v in enumerate(e.inputs):
        yield from ((i, a, a) for a, n in enumerate(v.shape) if n == out.shape[a])


def _broadcast(e: Equation, out: Var) -> Links:
    for a, b in enumerate(e.params["broadcast_dimensions"]):
        if e.inputs[0].shape[a] == out.shape[b]:
            yield 0, a, b


def _transposed(e: Equation, out: Var) -> Links:
    yield from ((0, a, b) for b, a in enumerate(e.params["permutation"]))


def _without(name: str) -> Callable[[Equation, Var], Links]:
    """Of an operation after which the axes of a parameter are gone."""

    def links(e: Equation, out: Var) -> Links:
        left = [a for a in range(len(e.inputs[0].shape)) if a not in e.params[name]]
        yield from ((0, a, b) for b, a in enumerate(left))

    return links


def _product(e: Equation, out: Var) -> Links:
    contracted, batched = e.params["dimension_numbers"]
    for i, axes in enumerate(batched):
        yield from ((i, a, b) for b, a in enumerate(axes))
    at = len(batched[0])
    for i, v in enumerate(e.inputs):
        free = [a for a in range(len(v.shape)) if a not in contracted[i] and a not in batched[i]]
        yield from ((i, a, at + n) for n, a in enumerate(free))
        at += len(free)


def _reshaped(e: Equation, out: Var) -> Links:
    """Axes with the same number of elements before them, and of the same length."""
    before = {(math.prod(out.shape[:b]), n): b for b, n in enumerate(out.shape)}
    for a, n in enumerate(e.inputs[0].shape):
        if (b := before.get((math.prod(e.inputs[0].shape[:a]), n))) is not None:
            yield 0, a, b


def _joined(e: Equation, out: Var) -> Links:
    for i, v in enumerate(e.inputs):
        yield from ((i, a, a) for a in range(len(v.shape)) if a != e.params["dimension"])


def _unknown(e: Equation, out: Var) -> Links:
    """What is not known keeps the length of an axis."""
    for i, v in enumerate(e.inputs):
        yield from ((i, a, b) for a, n in enumerate(v.shape) for b, m in enumerate(out.shape) if n == m and _is_long(n))


def _is_long(n: Any) -> bool:
    return not J.is_symbolic(n) and n >= LONG


_REDUCTIONS = tuple(f"reduce_{n}" for n in ("sum", "max", "min", "prod", "and", "or")) + ("argmax", "argmin")
_LINKS: dict[Any, Callable[[Equation, Var], Links]] = {
    J.primitive("broadcast_in_dim"): _broadcast,
    J.primitive("transpose"): _transposed,
    J.primitive("squeeze"): _without("dimensions"),
    J.primitive("dot_general"): _product,
    J.primitive("reshape"): _reshaped,
    J.primitive("concatenate"): _joined,
    **{J.primitive(n): _without("axes") for n in _REDUCTIONS},
    **{J.primitive(n): _elementwise for n in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")},
}
