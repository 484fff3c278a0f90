"""One element of a short axis as a masked sum: ``log_probs[action]``, ``q[action]``.

Mapped over timesteps and environments, such a read is a gather, and its derivative a scatter: on a TPU a loop with an iteration
for every point, on a GPU atomic additions. A comparison, a choice and a sum are fused with what is around them, and so is their
derivative.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program

DYNAMIC_SLICE, GATHER, SCATTER_ADD = map(J.primitive, ("dynamic_slice", "gather", "scatter_add"))


def with_picks(program: Program, most: int) -> Program:
    """The program with masked sums for reads of one element along an axis of values with at most ``most`` elements.

    Meaning-preserving: of what is not read nothing counts, infinities neither (but -0.0 is 0.0).
    """

    def instead(equation: Equation) -> tuple[Callable, Sequence[Atom]] | None:
        axes = axes_of_one(equation)
        if not axes:
            return None
        x = equation.inputs[0]
        if not jnp.issubdtype(x.dtype, jnp.number) or math.prod(x.shape) > most:
            return None
        return functools.partial(_pick, axes=axes), equation.inputs

    return exchanged(program, instead)


def axes_of_one(e: Equation) -> list[int]:
    """The axes along which an equation reads one element, where it reads all of the others; none of any other equation."""
    if e.op is not DYNAMIC_SLICE or e.is_ragged:
        return []
    sizes, shape = e.params["slice_sizes"], e.inputs[0].shape
    short = [axis for axis, n in enumerate(shape) if sizes[axis] != n]
    return short if all(sizes[axis] == 1 for axis in short) else []


def _pick(x: Any, *starts: Any, axes: Sequence[int]) -> Any:
    """Where a slice would begin beyond an axis, its last element."""
    for axis in axes:
        n = x.shape[axis]
        index = jnp.clip(starts[axis], 0, n - 1)
        mine = jax.lax.broadcasted_iota(index.dtype, x.shape, axis) == index
        x = jnp.sum(jnp.where(mine, x, jnp.zeros_like(x)), axis, dtype=x.dtype, keepdims=True)
    return x


# -- the same in a function of whole batches, such as the update of a minibatch: gathers, and scatters of their derivatives


def picking(most: int) -> Mapping[Any, Callable[[Any, list], Any]]:
    """Rules for :func:`rlfx.recurrence.ir.interpret.rewritten`: of every row one element, along an axis of at most ``most``.

    ``jnp.take_along_axis(q, action[:, None], axis=1)`` and ``jax.vmap(lambda q, a: q[a])`` are such gathers, and what jax
    makes of their derivatives such scatters. Others stay.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from rlfx.recurrence.ir.interpret import rewritten
      >>> pick = rewritten(lambda q, a: jnp.take_along_axis(q, a[:, None], axis=1), picking(16))
      >>> "gather" in str(jax.make_jaxpr(pick)(jnp.ones((8, 3)), jnp.zeros(8, jnp.int32)))
      False
    """
    return {GATHER: functools.partial(_gathered, most=most), SCATTER_ADD: functools.partial(_scattered, most=most)}


def _gathered(eqn: Any, operands: list, most: int) -> list | None:
    n, (x, indices) = eqn.params["dimension_numbers"], operands
    rows = n.operand_batching_dims, n.start_indices_batching_dims
    picked = _picked(n.collapsed_slice_dims, n.start_index_map, rows, n.offset_dims, x, indices, most)
    if picked is None or set(eqn.params["slice_sizes"]) != {1}:
        return None
    axis, indices = picked
    mine, inside = _mine(indices, x.shape[axis], eqn.params["mode"])
    lines = jnp.moveaxis(x, axis, -1)[..., None, :]
    found = jnp.sum(jnp.where(mine, lines, jnp.zeros_like(lines)), -1, dtype=x.dtype)
    if inside is None:
        return [found]
    fill = eqn.params["fill_value"]
    other = _outside(x.dtype) if fill is None else fill
    return [jnp.where(inside, found, jnp.asarray(other, x.dtype))]


def _outside(dtype: Any) -> Any:
    """What jax reads outside of an array, if nothing else is said."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.nan
    info = jnp.iinfo(dtype)
    return info.min if jnp.issubdtype(dtype, jnp.signedinteger) else info.max


def _scattered(eqn: Any, operands: list, most: int) -> list | None:
    n, (x, indices, updates) = eqn.params["dimension_numbers"], operands
    rows = n.operand_batching_dims, n.scatter_indices_batching_dims
    picked = _picked(
        n.inserted_window_dims, n.scatter_dims_to_operand_dims, rows, n.update_window_dims, x, indices, most
    )
    if picked is None:
        return None
    axis, indices = picked
    mine, _ = _mine(indices, x.shape[axis], eqn.params["mode"])
    lines = updates[..., None]
    added = jnp.sum(jnp.where(mine, lines, jnp.zeros_like(lines)), -2, dtype=x.dtype)
    return [x + jnp.moveaxis(added, -1, axis)]


def _picked(
    left_out: Sequence[int], mapped: Sequence[int], rows: tuple, window: Sequence[int], x: Any, indices: Any, most: int
) -> tuple[int, Any] | None:
    """The axis along which one element of every row is read or written, and the indices as ``[*rows, k, 1]``.

    All other axes are rows, those of the indices too. Of ``jax.vmap(lambda q, a: q[a])`` the axis stays, with one element.
    """
    axis, others = axis_of_rows(mapped, rows, x.ndim), x.ndim - 1
    if axis is None or not jnp.issubdtype(x.dtype, jnp.number):
        return None
    if not left_out and tuple(window) == (others,) and indices.ndim == x.ndim:
        indices = indices[..., None, :]
    elif tuple(left_out) != (axis,) or window or indices.ndim != x.ndim + 1:
        return None
    return (axis, indices) if x.shape[axis] * indices.shape[-2] <= most else None


def axis_of_rows(mapped: Sequence[int], rows: tuple, ndim: int) -> int | None:
    """The axis along which elements of every row are read or written; None if another axis is no row, of the indices too.

    Args:
      mapped: the axes that the indices are of.
      rows: those that are alike in the array, and in the indices.
      ndim: how many the array has.
    """
    if len(mapped) != 1:
        return None
    axis = int(mapped[0])
    alike = tuple(rows[0]) == tuple(a for a in range(ndim) if a != axis) and tuple(rows[1]) == tuple(range(ndim - 1))
    return axis if alike else None


def _mine(indices: Any, n: int, mode: Any) -> tuple[Any, Any]:
    """Which elements the indices ``[*rows, k, 1]`` are, bool ``[*rows, k, n]``; and whether they are any, None if all are."""
    drops = mode == jax.lax.GatherScatterMode.FILL_OR_DROP
    at = indices if drops else jnp.clip(indices, 0, n - 1)
    mine = jax.lax.broadcasted_iota(at.dtype, (*at.shape[:-1], n), at.ndim - 1) == at
    return mine, ((indices >= 0) & (indices < n))[..., 0] if drops else None
