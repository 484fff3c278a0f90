"""Equations of narrow networks with features first: an array of ``[n, T, B]`` where others have ``[T, B, n]``.

With 16 units and thousands of environments the last axis of ``[B, 16]`` is hardly longer than what a core takes at once:
products have few columns, and sums over features, logarithms of three probabilities, or parts of a state are read across rows.
With rows last all of these run along them. Here each equation is mapped so; what has no rule is mapped by ``jax.vmap``, with the
same axes. Between groups of equations values have rows first: XLA cancels the transpositions. TimeRL leaves layouts to its
backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._axes import ARGUMENTS, CUMULATIVE, REDUCTIONS, TABLE, elementwise
from rlfx.recurrence.execute.values import (
    AXES,
    Value,
    axis_of,
    evaluate_or_draw,
    expand,
    meaning,
    of_atom,
    read_by,
    scope_of,
)
from rlfx.recurrence.ir.program import Equation, Var
from rlfx.recurrence.language.primitives import products_p

DOT = J.primitive("dot_general")


def rows_last(value: Value) -> Value:
    """A value with the axes of its dims behind those of a point."""
    n = len(value.dims)
    return Value(jnp.moveaxis(value.data, range(n), range(-n, 0)), value.dims)


def rows_first(value: Value) -> Value:
    """As :func:`rows_last`, back."""
    n = len(value.dims)
    return Value(jnp.moveaxis(value.data, range(-n, 0), range(n)), value.dims)


def run_features_first(equations: Sequence[Equation], env: dict[Var, Value]) -> None:
    """As ``run_pointwise``."""
    local = {v: rows_last(env[v]) for v in read_by(equations)}
    for e in equations:
        operands = [of_atom(u, local) for u in e.inputs]
        with scope_of(e):
            outs = evaluate_mapped(e.op, e.params, operands, lambda *xs, e=e: evaluate_or_draw(e, xs))
        local.update(zip(e.outputs, outs, strict=True))
    dims = frozenset().union(*(x.dims for x in local.values()))
    sizes = dict(zip((a for a in AXES if a in dims), _sizes([*local.values()], dims), strict=True))
    env |= {v: expand(rows_first(local[v]), dims, sizes) for e in equations for v in e.outputs}


def evaluate_mapped(op: Any, params: Mapping, operands: Sequence[Value], one: Callable) -> list[Value]:
    """An equation at all points of its operands' dims, with rows last.

    Args:
      operands: with rows last.
      one: the equation on operands of one point, for what has no rule.
    """
    dims = frozenset().union(*(x.dims for x in operands))
    rule = _rule_of(op) if dims else None
    outs = None if rule is None else rule(op, params, operands, dims)
    if outs is None:
        outs = _mapped(one, operands, dims)
    return [Value(out, dims) for out in outs]


def _mapped(one: Callable, operands: Sequence[Value], dims: frozenset) -> list:
    for i in reversed(range(len(AXES))):  # b is the inner map
        if AXES[i] in dims:
            inner = [x.dims & frozenset(AXES[i + 1 :]) for x in operands]
            within = -1 - len(dims & frozenset(AXES[i + 1 :]))
            axes = tuple(-1 - len(d) if AXES[i] in x.dims else None for x, d in zip(operands, inner, strict=True))
            one = jax.vmap(one, in_axes=axes, out_axes=within)
    return one(*(x.data for x in operands))


def _point(value: Value) -> tuple:
    """The shape at one point."""
    return value.data.shape[: value.data.ndim - len(value.dims)]


def _sizes(operands: Sequence[Value], dims: frozenset) -> tuple:
    """The sizes of the rows, in order."""
    found = {}
    for x in operands:
        rows = x.data.shape[x.data.ndim - len(x.dims) :]
        found |= {axis: rows[axis_of(x.dims, axis)] for axis in x.dims}  # type: ignore[index]
    return tuple(found[axis] for axis in AXES if axis in dims)


def _spread(value: Value, shape: Sequence[int], dims: frozenset, rows: tuple) -> Any:
    """A value of a point's shape ``()`` or ``shape``, at all rows."""
    at = tuple(range(len(shape)))[len(shape) - len(_point(value)) :]
    own = [len(shape) + i for i, axis in enumerate(a for a in AXES if a in dims) if axis in value.dims]
    if value.data.shape == (*shape, *rows):
        return value.data
    return jax.lax.broadcast_in_dim(jnp.asarray(value.data), (*shape, *rows), (*at, *own))


def _elementwise(op: Any, params: Mapping, operands: Sequence[Value], dims: frozenset) -> list | None:
    shape, rows = max((_point(x) for x in operands), key=len), _sizes(operands, dims)
    if any(_point(x) not in ((), shape) for x in operands) or any(J.is_key(x.data) for x in operands):
        return None
    return meaning(op, params, *(_spread(x, shape, dims, rows) for x in operands))


def _product(op: Any, params: Mapping, operands: Sequence[Value], dims: frozenset) -> list | None:
    """``w.T @ x`` for ``x @ w`` of vectors x, one for all members of an ensemble or of each."""
    joined = op is products_p
    product = params["product"] if joined else params
    (contracted, members), (x, w) = product["dimension_numbers"], operands
    flipped = bool(w.dims)
    if flipped:
        x, w = w, x
    point, mine = _point(x), int(flipped)  # which operand x is
    taken = {*contracted[mine], *members[mine]}
    if w.dims or len(taken) != len(point) or len(contracted[0]) != 1 or (joined and (flipped or members[0])):
        return None
    swapped = dict(product) | {"dimension_numbers": tuple((axes[1 - mine], axes[mine]) for axes in (contracted, members))}
    (out,) = J.bind(DOT, swapped, w.data, x.data.reshape(*point, -1))  # over all rows, derivatives too
    out = out.reshape(*out.shape[:-1], *x.data.shape[len(point) :])
    return list(jax.lax.split(out, params["columns"])) if joined else [out]


def _picked(op: Any, params: Mapping, operands: Sequence[Value], dims: frozenset) -> list | None:
    """One element of a vector as a masked sum; a slice that would begin beyond it is its last element."""
    x, *starts = operands
    if len(_point(x)) != 1 or tuple(params["slice_sizes"]) != (1,) or not jnp.issubdtype(x.data.dtype, jnp.number):
        return None
    rows = _sizes(operands, dims)
    n, at = _point(x)[0], _spread(starts[0], _point(x), dims, rows)
    mine = jax.lax.broadcasted_iota(at.dtype, (n, *rows), 0) == jnp.clip(at, 0, n - 1)
    value = _spread(x, (n,), dims, rows)
    return [jnp.sum(jnp.where(mine, value, jnp.zeros_like(value)), 0, dtype=value.dtype, keepdims=True)]


def _same(op: Any, params: Mapping, operands: Sequence[Value], dims: frozenset) -> list | None:
    """The parameters speak of a point's axes, by number."""
    return meaning(op, params, operands[0].data) if len(operands) == 1 else None


def _joined(op: Any, params: Mapping, operands: Sequence[Value], dims: frozenset) -> list:
    rows = _sizes(operands, dims)
    return J.bind(op, dict(params), *(_spread(x, _point(x), dims, rows) for x in operands))


def _changed(of: Callable[[Mapping, tuple, tuple], Mapping]) -> Callable:
    """Of one operand: ``of(params, its shape at a point, its rows)`` has the parameters that change."""

    def rule(op: Any, params: Mapping, operands: Sequence[Value], dims: frozenset) -> list | None:
        if len(operands) != 1:
            return None
        (x,) = operands
        return J.bind(op, {**params, **of(params, _point(x), _sizes(operands, dims))}, x.data)

    return rule


def _after(shape: Sequence, rows: tuple) -> tuple:
    """The numbers of the rows' axes behind a shape."""
    return tuple(range(len(shape), len(shape) + len(rows)))


_RULES: dict[Any, Callable] = {
    DOT: _product,
    products_p: _product,
    J.primitive("dynamic_slice"): _picked,
    **dict.fromkeys((*REDUCTIONS, *CUMULATIVE, *ARGUMENTS, J.SPLIT), _same),
    **dict.fromkeys(map(J.primitive, ("squeeze", "rev")), _same),
    J.primitive("concatenate"): _joined,
    J.primitive("broadcast_in_dim"): _changed(
        lambda params, point, rows: {
            "shape": (*params["shape"], *rows),
            "broadcast_dimensions": (*params["broadcast_dimensions"], *_after(params["shape"], rows)),
        }
    ),
    J.primitive("reshape"): _changed(lambda params, point, rows: {"new_sizes": (*params["new_sizes"], *rows)}),
    J.primitive("transpose"): _changed(
        lambda params, point, rows: {"permutation": (*params["permutation"], *_after(point, rows))}
    ),
    J.primitive("slice"): _changed(
        lambda params, point, rows: {
            "start_indices": (*params["start_indices"], *(0 for _ in rows)),
            "limit_indices": (*params["limit_indices"], *rows),
            "strides": None if params["strides"] is None else (*params["strides"], *(1 for _ in rows)),
        }
    ),
}


def _rule_of(op: Any) -> Callable | None:
    return _RULES.get(op) or (_elementwise if TABLE.get(op) is elementwise and op not in J.DRAWS else None)
