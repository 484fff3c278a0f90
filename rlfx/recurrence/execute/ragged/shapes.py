"""Ragged axes through elementwise operations and changes of shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from rlfx import _jaxpr as J
from rlfx.recurrence.execute.ragged.part import ANYWHERE, Here, Part, align_all, unsupported, without
from rlfx.recurrence.ir.program import Equation
from rlfx.recurrence.language.primitives import series_p

#: Operations that may meet any data: their derivative does not depend on it.
_HARMLESS = frozenset(
    {series_p, *J.STOP_GRADIENT, *(J.primitive(n) for n in ("neg", "copy", "convert_element_type", "not", "name"))}
)


def _elementwise(point: Here, equation: Equation, *parts: Part) -> list[Part]:
    shape = equation.outputs[0].shape
    aligned, starts = align_all(point, parts, len(shape))
    if point.perturbed and point.t is not None and equation.op not in _HARMLESS:
        aligned = [point.cleaned(p, shape) if p.data.ndim else p for p in aligned]
    clean = all(p.clean for p in aligned)
    if equation.op is series_p:
        return [Part(aligned[0].data, starts, clean)]
    return [Part(d, starts, clean) for d in J.bind(equation.op, dict(equation.params), *(p.data for p in aligned))]


def _broadcast(point: Here, equation: Equation, *parts: Part) -> list[Part]:
    operand, params = parts[0], equation.params
    shape, where = params["shape"], params["broadcast_dimensions"]
    starts: list = [ANYWHERE if J.is_symbolic(d) else None for d in shape]
    sizes = [point.width(d) for d in shape]
    for axis, target in enumerate(where):
        if operand.starts[axis] is not None:
            starts[target], sizes[target] = operand.starts[axis], operand.data.shape[axis]
    data = lax.broadcast_in_dim(operand.data, sizes, where)
    return [Part(data, tuple(starts), operand.clean)]


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
    """The sizes of the static stretches between symbolic axes."""
    out, current = [], 1
    for i, d in enumerate(shape):
        if i in symbolic:
            out.append(current)
            current = 1
        else:
            current *= d
    return [*out, current]


def _squeeze(point: Here, equation: Equation, operand: Part) -> list[Part]:
    dropped = {d % operand.data.ndim for d in equation.params["dimensions"]}
    starts = tuple(s for i, s in enumerate(operand.starts) if i not in dropped)
    return [Part(lax.squeeze(operand.data, tuple(dropped)), starts, operand.clean)]


def _transpose(point: Here, equation: Equation, operand: Part) -> list[Part]:
    order = equation.params["permutation"]
    return [Part(lax.transpose(operand.data, order), tuple(operand.starts[i] for i in order), operand.clean)]


def _reverse(point: Here, equation: Equation, operand: Part) -> list[Part]:
    starts, shape = list(operand.starts), equation.inputs[0].shape
    for axis in equation.params["dimensions"]:
        if starts[axis] is not None and starts[axis] != ANYWHERE:
            starts[axis] = operand.data.shape[axis] - starts[axis] - shape[axis]
    return [Part(lax.rev(operand.data, equation.params["dimensions"]), tuple(starts), operand.clean)]


def _stack(point: Here, equation: Equation, *parts: Part) -> list[Part]:
    axis, rank = equation.params["axis"], len(equation.inputs[0].shape)
    aligned, starts = align_all(point, parts, rank)
    (out,) = J.bind(equation.op, dict(equation.params), *(p.data for p in aligned))
    return [Part(out, (*starts[:axis], None, *starts[axis:]), all(p.clean for p in aligned))]


def _unstack(point: Here, equation: Equation, operand: Part) -> list[Part]:
    outs = J.bind(equation.op, dict(equation.params), operand.data)
    return [Part(out, without(operand.starts, equation.params["axis"]), operand.clean) for out in outs]


def _split(point: Here, equation: Equation, operand: Part) -> list[Part]:
    if operand.starts[equation.params["axis"]] is not None:
        raise unsupported(equation, "A split of an axis whose length depends on t")
    outs = J.bind(equation.op, dict(equation.params), operand.data)
    return [Part(out, operand.starts, operand.clean) for out in outs]


def _tile(point: Here, equation: Equation, operand: Part) -> list[Part]:
    if any(equation.params["reps"][axis] != 1 for axis in operand.ragged):
        raise unsupported(equation, "A repetition of an axis whose length depends on t")
    (out,) = J.bind(equation.op, dict(equation.params), operand.data)
    return [Part(out, operand.starts, operand.clean)]


def _iota(point: Here, equation: Equation, *_: Part) -> list[Part]:
    shape, dimension = equation.params["shape"], equation.params["dimension"]
    sizes = tuple(point.width(d) for d in shape)
    starts = tuple((0 if i == dimension else ANYWHERE) if J.is_symbolic(d) else None for i, d in enumerate(shape))
    return [Part(lax.broadcasted_iota(equation.params["dtype"], sizes, dimension), starts, False)]


def _dim(point: Here, equation: Equation) -> list[Part]:
    return [Part(jnp.asarray(point.value(equation.params["dim"]), equation.outputs[0].dtype), ())]


_STACKING = {"stack": _stack, "unstack": _unstack, "tile": _tile}

RULES: dict[Any, Callable[..., list[Part]]] = {
    **dict.fromkeys((*J.ELEMENTWISE, series_p, J.primitive("name")), _elementwise),
    J.primitive("broadcast_in_dim"): _broadcast,
    J.primitive("reshape"): _reshape,
    J.primitive("squeeze"): _squeeze,
    J.primitive("transpose"): _transpose,
    J.primitive("rev"): _reverse,
    J.primitive("iota"): _iota,
    J.DIM_AS_VALUE: _dim,
    J.SPLIT: _split,
    **{p: _STACKING[p.name] for p in J.STACKING},
}

#: What moves data or changes its type, and nothing else.
MOVES = _HARMLESS | {J.SPLIT, *J.STACKING, *(J.primitive(n) for n in ("transpose", "squeeze", "reshape"))}
