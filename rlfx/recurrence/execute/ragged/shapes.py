"""Ragged axes through elementwise operations and changes of shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from rlfx import _jaxpr as J
from rlfx._axes import nest_of, resized
from rlfx.recurrence.execute.ragged.part import ANYWHERE, Here, Part, align_all, alike, unsupported
from rlfx.recurrence.ir.program import Equation
from rlfx.recurrence.language.primitives import series_p

#: Operations whose derivative does not depend on data, and that have nothing of several timesteps.
_HARMLESS = frozenset(
    {series_p, *J.STOP_GRADIENT, *(J.primitive(n) for n in ("neg", "copy", "convert_element_type", "not", "name"))}
)
#: Those that may meet any data: they have no derivative, or one that depends on comparisons alone.
_UNHARMED = _HARMLESS | frozenset(
    map(
        J.primitive,
        ("add", "sub", "max", "min", "clamp", "select_n", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor",
         "is_finite", "sign", "floor", "ceil", "round"),
    )
)  # fmt: skip


def _elementwise(point: Here, equation: Equation, *parts: Part) -> list[Part]:
    shape = equation.outputs[0].shape
    aligned, starts = align_all(point, parts, len(shape))
    if point.perturbed and point.t is not None and equation.op not in _UNHARMED:
        aligned = [point.cleaned(p, shape) if p.data.ndim else p for p in aligned]
    clean = all(p.clean for p in aligned)
    if equation.op is series_p:
        return [Part(aligned[0].data, starts, clean)]
    outs = J.bind(equation.op, dict(equation.params), *alike([p.data for p in aligned]))
    return [Part(d, starts, clean) for d in outs]


def _by_axes(point: Here, equation: Equation, *parts: Part) -> list[Part]:
    """What moves elements, repeats them or puts them side by side: axes of the results are those of the operands."""
    ins, outs = ([v.shape for v in side] for side in (equation.inputs, equation.outputs))
    loops = nest_of(equation.op, equation.params, ins, outs)
    assert loops is not None
    if any(axes[i] is None for part, axes in zip(parts, loops.operands, strict=True) for i in part.ragged):
        raise unsupported(equation, f"{equation.op.name} along an axis whose length depends on t")
    aligned, found = align_all(point, parts, len(ins[0]))
    starts = {loop: ANYWHERE for loop, n in enumerate(loops.sizes) if J.is_symbolic(n)}
    sizes = {loop: point.width(loops.sizes[loop]) for loop in starts}
    for loop, start, size in zip(loops.operands[0], found, aligned[0].data.shape, strict=True):
        if loop is not None and start is not None:
            starts[loop], sizes[loop] = start, size
    params = resized(equation.op, equation.params, loops, sizes)
    results = J.bind(equation.op, params, *(p.data for p in aligned))
    clean = all(p.clean for p in aligned)
    return [Part(x, tuple(map(starts.get, of)), clean) for x, of in zip(results, loops.results, strict=True)]


def _reshape(point: Here, equation: Equation, operand: Part, *_: Part) -> list[Part]:
    before, after = equation.inputs[0].shape, equation.outputs[0].shape
    old, new = J.symbolic_axes(before), J.symbolic_axes(after)
    times = 1
    if [str(before[i]) for i in old] != [str(after[i]) for i in new] or _products(before, old) != _products(after, new):
        times = _merged(before, after, old, new)
        if times is None:
            raise unsupported(
                equation, f"A reshape from {before} to {after} merges or splits an axis whose length depends on t"
            )
        operand = point.settled(operand, before)
    sizes, starts = list(after), [None] * len(after)
    for i, j in zip(old, new, strict=True):
        sizes[j] = times * operand.data.shape[i]
        starts[j] = operand.starts[i] if times == 1 else times * operand.starts[i]
    return [Part(operand.data.reshape(sizes), tuple(starts), operand.clean)]


def _merged(before: Sequence, after: Sequence, old: Sequence[int], new: Sequence[int]) -> int | None:
    """How many elements of each timestep of a slice become as many of one longer axis; None if it is no such reshape."""
    if len(old) != 1 or len(new) != 1:
        return None
    (first, rest), (new_first, new_rest) = _products(before, old), _products(after, new)
    if first != new_first or not new_rest or rest % new_rest:
        return None
    times = rest // new_rest
    return times if J.equal_dims(after[new[0]], times * before[old[0]]) else None


def _products(shape: Sequence, symbolic: Sequence[int]) -> list[int]:
    """The products of the static sizes between symbolic axes."""
    out, current = [], 1
    for i, d in enumerate(shape):
        if i in symbolic:
            out.append(current)
            current = 1
        else:
            current *= d
    return [*out, current]


def _reverse(point: Here, equation: Equation, operand: Part) -> list[Part]:
    starts, shape = list(operand.starts), equation.inputs[0].shape
    for axis in equation.params["dimensions"]:
        if starts[axis] is not None and starts[axis] != ANYWHERE:
            starts[axis] = operand.data.shape[axis] - starts[axis] - shape[axis]
    return [Part(lax.rev(operand.data, equation.params["dimensions"]), tuple(starts), operand.clean)]


def _iota(point: Here, equation: Equation, *_: Part) -> list[Part]:
    shape, dimension = equation.params["shape"], equation.params["dimension"]
    sizes = tuple(point.width(d) for d in shape)
    starts = tuple((0 if i == dimension else ANYWHERE) if J.is_symbolic(d) else None for i, d in enumerate(shape))
    return [Part(lax.broadcasted_iota(equation.params["dtype"], sizes, dimension), starts, False)]


def _dim(point: Here, equation: Equation) -> list[Part]:
    return [Part(jnp.asarray(point.value(equation.params["dim"]), equation.outputs[0].dtype), ())]


_MOVING = J.STACKING | {J.SPLIT, J.primitive("transpose"), J.primitive("squeeze")}

RULES: dict[Any, Callable[..., list[Part]]] = {
    **dict.fromkeys((*J.ELEMENTWISE, series_p, J.primitive("name")), _elementwise),
    J.primitive("reshape"): _reshape,
    J.primitive("rev"): _reverse,
    J.primitive("iota"): _iota,
    J.DIM_AS_VALUE: _dim,
    **dict.fromkeys((*_MOVING, J.primitive("broadcast_in_dim")), _by_axes),
}

#: What moves data or changes its type, and nothing else.
MOVES = _HARMLESS | _MOVING | {J.primitive("reshape")}
