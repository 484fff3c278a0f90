"""Slices of slices: parts of a ragged axis, and ragged axes put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from rlfx import _jaxpr as J
from rlfx.recurrence.execute.ragged.part import (
    ANYWHERE,
    Here,
    Part,
    align_all,
    align_contracted,
    replaced,
    unsupported,
)
from rlfx.recurrence.ir.program import Equation


def _dynamic_slice(point: Here, equation: Equation, operand: Part, *indices: Part) -> list[Part]:
    sizes, shape = equation.params["slice_sizes"], equation.inputs[0].shape
    for axis, (size, index) in enumerate(zip(sizes, indices, strict=True)):
        if str(size) != str(shape[axis]):  # else all of it
            operand = _cut(point, operand, axis, shape[axis], index.data, size)
    return [operand]


def _cut(point: Here, operand: Part, axis: int, length: Any, index: Any, size: Any) -> Part:
    """``size`` positions of an axis of this length, from a traced one on, within its bounds."""
    data, start = operand.data, operand.starts[axis]
    if start is None and not J.is_symbolic(size):
        return replace(operand, data=lax.dynamic_slice_in_dim(data, index, size, axis))
    within = jnp.clip(jnp.asarray(index, jnp.int32), 0, jnp.maximum(point.value(length) - point.value(size), 0))
    first = within if start is None or start == ANYWHERE else within + point.value(start)
    if not J.is_symbolic(size):
        starts = replaced(operand.starts, axis, None)
        return Part(lax.dynamic_slice_in_dim(data, first, size, axis), starts, operand.clean)
    position = jnp.clip(first + lax.iota(jnp.int32, point.width(size)), 0, data.shape[axis] - 1)
    return Part(jnp.take(data, position, axis=axis, mode="clip"), replaced(operand.starts, axis, 0), False)


def _static_slice(point: Here, equation: Equation, operand: Part) -> list[Part]:
    params = equation.params
    data, starts = operand.data, list(operand.starts)
    strides = params["strides"] or (1,) * data.ndim
    for axis, (lo, hi, step) in enumerate(zip(params["start_indices"], params["limit_indices"], strides, strict=True)):
        if starts[axis] is None:
            data = lax.slice_in_dim(data, lo, hi, step, axis)
        elif step != 1:
            raise unsupported(equation, "A slice with a step, of a slice whose length depends on t")
        elif J.is_symbolic(hi - lo):
            starts[axis] = starts[axis] if starts[axis] == ANYWHERE else starts[axis] + lo
        else:
            first = 0 if starts[axis] == ANYWHERE else point.value(starts[axis])
            data, starts[axis] = lax.dynamic_slice_in_dim(data, first + point.value(lo), hi - lo, axis), None
    return [Part(data, tuple(starts), operand.clean)]


def _gather(point: Here, equation: Equation, operand: Part, indices: Part) -> list[Part]:
    params, shape = equation.params, equation.inputs[0].shape
    numbers, sizes = params["dimension_numbers"], list(params["slice_sizes"])
    for axis, along in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        if operand.starts[axis] is not None or indices.starts[along] is not None:
            operand, indices = align_contracted(point, operand, axis, indices, along)
    index, starts = indices.data, list(operand.starts)
    batch_shape = equation.inputs[1].shape[:-1]
    for axis in operand.ragged:
        if axis in numbers.operand_batching_dims:
            continue
        size = sizes[axis]
        column = numbers.start_index_map.index(axis) if axis in numbers.start_index_map else None
        first = 0 if starts[axis] == ANYWHERE else starts[axis]
        if column is None:
            sizes[axis] = operand.data.shape[axis]
        elif J.is_symbolic(size):
            offset = _static_offset(equation, column)
            if batch_shape:
                raise unsupported(equation, "Several slices of a slice whose length depends on t")
            if offset is None:
                operand = _cut(point, operand, axis, shape[axis], index[column], size)
                starts[axis] = 0
            else:
                starts[axis] = first + offset
            sizes[axis] = operand.data.shape[axis]
            index = index.at[..., column].set(0)
        else:
            within = jnp.clip(index[..., column].astype(jnp.int32), 0, jnp.maximum(point.value(shape[axis]) - size, 0))
            index = index.at[..., column].set(within.astype(index.dtype) + jnp.asarray(point.value(first), index.dtype))
    bound = {k: v for k, v in params.items() if k != "rlfx_static_indices"} | {"slice_sizes": tuple(map(int, sizes))}
    (out,) = J.bind(equation.op, bound, operand.data, index)
    kept = [
        i for i in range(operand.data.ndim) if i not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    by_offset = dict(zip(numbers.offset_dims, kept, strict=True))
    batch = iter(indices.starts[:-1])
    out_starts = tuple(
        (starts[by_offset[i]] if J.is_symbolic(equation.outputs[0].shape[i]) else None)
        if i in by_offset
        else next(batch)
        for i in range(out.ndim)
    )
    return [Part(out, out_starts, operand.clean and indices.clean)]


def _static_offset(equation: Equation, column: int) -> int | None:
    """The position of a slice of a slice, where it is a constant of the program."""
    index = equation.params.get("rlfx_static_indices")
    return None if index is None else int(np.asarray(index).reshape(-1)[column])


def _concatenate(point: Here, equation: Equation, *parts: Part) -> list[Part]:
    axis, total = equation.params["dimension"], equation.outputs[0].shape
    fixed = [replace(p, starts=replaced(p.starts, axis, None)) for p in parts]
    along, starts = align_all(point, fixed, len(total))  # the other axes
    if all(p.starts[axis] is None for p in parts):
        (out,) = J.bind(equation.op, dict(equation.params), *(p.data for p in along))
        return [Part(out, starts, all(p.clean for p in along))]
    # Where a part begins may depend on t, even if how long all of them are does not.
    width, offset, data = point.width(total[axis]), 0, None
    position = lax.iota(jnp.int32, width)
    for part, have, var in zip(along, parts, equation.inputs, strict=True):
        if part.data.shape[axis] == 0:
            continue
        start = have.starts[axis]
        first = 0 if start is None or start == ANYWHERE else point.value(start)
        source = jnp.clip(position - offset + first, 0, part.data.shape[axis] - 1)
        taken = jnp.take(part.data, source, axis=axis, mode="clip")
        here = (position >= offset).reshape((1,) * axis + (width,) + (1,) * (taken.ndim - axis - 1))
        data = taken if data is None else jnp.where(here, taken, data)
        offset = offset + point.value(var.shape[axis])
    return [Part(data, replaced(starts, axis, 0 if J.is_symbolic(total[axis]) else None), False)]


def _pad(point: Here, equation: Equation, operand: Part, fill: Part) -> list[Part]:
    config, shape, out_shape = equation.params["padding_config"], equation.inputs[0].shape, equation.outputs[0].shape
    data, starts = operand.data, list(operand.starts)
    moving = [
        starts[i] is not None or any(map(J.is_symbolic, (lo, hi, out_shape[i]))) for i, (lo, hi, _) in enumerate(config)
    ]
    if any(interior for (*_, interior), moves in zip(config, moving, strict=True) if moves):
        raise unsupported(equation, "Padding inside a slice whose length depends on t")
    data = point.masked(Part(data, tuple(0 if s == ANYWHERE else s for s in starts)), shape, fill.data)
    data = lax.pad(data, fill.data, [(0, 0, 0) if moves else c for c, moves in zip(config, moving, strict=True)])
    for axis, (lo, _, _) in enumerate(config):
        if not moving[axis]:
            continue
        width = point.width(out_shape[axis])
        first = 0 if starts[axis] in (None, ANYWHERE) else point.value(starts[axis])
        position = lax.iota(jnp.int32, width) - point.value(lo)
        inside = (position >= 0) & (position < point.value(shape[axis]))
        taken = jnp.take(data, jnp.clip(position + first, 0, data.shape[axis] - 1), axis=axis, mode="clip")
        inside = inside.reshape((1,) * axis + (width,) + (1,) * (taken.ndim - axis - 1))
        data, starts[axis] = jnp.where(inside, taken, fill.data), 0 if J.is_symbolic(out_shape[axis]) else None
    return [Part(data, tuple(starts), False)]


RULES: dict[Any, Callable[..., list[Part]]] = {
    J.primitive("dynamic_slice"): _dynamic_slice,
    J.primitive("slice"): _static_slice,
    J.primitive("gather"): _gather,
    J.primitive("concatenate"): _concatenate,
    J.primitive("pad"): _pad,
}
