"""Products of one-hot vectors with weights are rows of these: ``one_hot(a, n) @ w``  ->  ``w[a]``.

A state of a small world, or what was done last, is often written as a vector of zeros and a one. A product multiplies n numbers
for one that counts, and its derivative adds up as many. Rows are read where they are, and their derivatives are added there. An
index that is none of ``0 <= a < n`` has no one, so its row is zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var

_DOT, _EQ, _CONVERT, _IOTA, _BROADCAST = map(
    J.primitive, ("dot_general", "eq", "convert_element_type", "iota", "broadcast_in_dim")
)


def with_rows_taken(program: Program) -> Program:
    """The program with such rows; without such products it is ``program``. Meaning-preserving, of finite weights; idempotent.

    (Weights that are not finite reach those alone that read them: zero times infinity is not taken.)
    """
    definition = program.definitions()

    def instead(e: Equation) -> tuple[Callable, Sequence[Atom]] | None:
        if e.op is not _DOT or e.is_ragged or e.params["dimension_numbers"][1] != ((), ()):
            return None
        for side, (x, w) in enumerate((e.inputs, e.inputs[::-1])):
            axes, of_w = e.params["dimension_numbers"][0][side], e.params["dimension_numbers"][0][1 - side]
            if len(axes) != 1 or not program.dims_of(x) or program.dims_of(w):
                continue
            found = _index(x, axes[0], definition)
            if found is not None:
                return functools.partial(_rows, axis=found[1], of_w=of_w[0], first=side == 0, out=e.outputs[0]), (found[0], w)
        return None

    return exchanged(program, instead)


def _index(x: Atom, axis: int, definition: Mapping[Var, Equation]) -> tuple[Atom, int | None] | None:
    """Which element of a vector along ``axis`` is one, where others are zero; and its own axis of length one there, if any."""
    e = definition.get(x) if isinstance(x, Var) else None
    while e is not None and e.op is _CONVERT:
        e = definition.get(e.inputs[0])
    if e is None or e.op is not _EQ:
        return None
    for index, places in (e.inputs, e.inputs[::-1]):
        if _counts(places, axis, len(e.outputs[0].shape), definition):
            return _without(index, axis, e.outputs[0].shape, definition)
    return None


def _counts(v: Atom, axis: int, ndim: int, definition: Mapping[Var, Equation]) -> bool:
    """Whether a value is 0, 1, 2, ... along an axis."""
    e = definition.get(v) if isinstance(v, Var) and len(v.shape) == ndim else None
    if e is not None and e.op is _BROADCAST and axis in e.params["broadcast_dimensions"]:
        axis = e.params["broadcast_dimensions"].index(axis)
        e = definition.get(e.inputs[0])
    if e is None or e.op is not _IOTA or e.params["dimension"] != axis:
        return False
    out = e.outputs[0]
    return jnp.issubdtype(out.dtype, jnp.integer) and out.shape[axis] - 1 <= jnp.iinfo(out.dtype).max


def _without(v: Atom, axis: int, shape: tuple, definition: Mapping[Var, Equation]) -> tuple[Atom, int | None] | None:
    """A value that is the same along an axis, and the axis if it still has it; None if it may differ along it, or is repeated."""
    rest = (*shape[:axis], *shape[axis + 1 :])
    if v.shape == (*rest[:axis], 1, *rest[axis:]):
        return v, axis
    e = definition.get(v) if isinstance(v, Var) else None
    if e is not None and e.op is _BROADCAST and v.shape == shape and e.inputs[0].shape == rest:
        kept = tuple(a for a in range(len(shape)) if a != axis)
        return (e.inputs[0], None) if tuple(e.params["broadcast_dimensions"]) == kept else None
    return (v, None) if v.shape == () and len(shape) == 1 else None


def _rows(index: Any, w: Any, *, axis: int | None, of_w: int, first: bool, out: Any) -> Any:
    """Rows of weights; ``first``: the index's axes before those of the weights."""
    index = index if axis is None else jnp.squeeze(index, axis)
    table = jnp.moveaxis(w, of_w, 0).astype(out.dtype)
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=tuple(range(index.ndim, index.ndim + w.ndim - 1)), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    rows = jax.lax.gather(table, index[..., None], numbers, (1, *table.shape[1:]), mode="fill", fill_value=0)
    return rows if first else jnp.moveaxis(rows, range(index.ndim), range(-index.ndim, 0))
