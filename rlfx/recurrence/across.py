"""Equations whose result at one point needs other points: reductions over t and b, calls on the whole batch, data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.extent import Extent
from rlfx.recurrence.primitives import across_p, inputs_p, reduce_p, whole_p
from rlfx.recurrence.program import NO_DIMS, Equation, Var
from rlfx.recurrence.ragged import extreme_of
from rlfx.recurrence.values import Value, axis_of, expand, map_over, mask_like


def reduce_value(
    op: str, value: Value, over: Sequence[str], sizes: Mapping[str, int], valid: Value | None, extent: Extent
) -> Value:
    """Reduce over t and b. ``valid``: which points belong to the domain, where it is ragged."""
    finish = extent.over_devices if "b" in over else lambda op, x: x
    dims = value.dims | (frozenset(over) if op == "sum" or valid is not None else NO_DIMS)
    if valid is not None:
        dims |= valid.dims
    wide = expand(value, dims, sizes)
    axes = tuple(a for a in (axis_of(dims, d) for d in over) if a is not None)
    if op == "last":
        return Value(wide.data[-1], dims - {"t"}) if "t" in dims else wide
    if valid is None:
        data = getattr(jnp, op)(wide.data, axis=axes).astype(wide.data.dtype)
        return Value(finish(op, data), dims - set(over))
    data = wide.data
    mask = mask_like(expand(valid, dims, sizes).data, data)
    if op in ("sum", "mean"):
        total = finish("sum", jnp.sum(jnp.where(mask, data, jnp.zeros_like(data)), axis=axes))
        if op == "mean":
            total = total / finish("sum", jnp.sum(mask, axis=axes).astype(data.dtype))
        return Value(total.astype(data.dtype), dims - set(over))
    fill = jnp.asarray(extreme_of(data.dtype, op == "min"), data.dtype)
    return Value(finish(op, getattr(jnp, op)(jnp.where(mask, data, fill), axis=axes)), dims - set(over))


def _reduce(run: Any, equation: Equation, values: list[Value], env, t: Value) -> list[Value]:
    op, over = equation.params["op"], equation.params["over"]
    valid = run.valid(env) if run.domain.until else None
    if op == "last" and valid is not None:
        return [run.last(equation.inputs[0]) if isinstance(equation.inputs[0], Var) else values[0]]
    return [reduce_value(op, values[0], over, run.sizes, valid, run.extent)]


def _whole(run: Any, equation: Equation, values: list[Value], env, t: Value) -> list[Value]:
    n, jaxpr = equation.params["num_consts"], equation.params["jaxpr"]
    args = [*values[:n], *(run.extent.gathered(expand(v, v.dims | {"b"}, run.sizes)) for v in values[n:])]
    fn = J.jaxpr_as_fun(jaxpr.jaxpr, jaxpr.consts)
    dims = frozenset().union(*(v.dims for v in args)) - {"b"} if args else NO_DIMS
    outs = map_over(fn, dims, [v.dims for v in args])(*(v.data for v in args))
    return [Value(o, dims) for o in outs]


def _across(run: Any, equation: Equation, values: list[Value], env, t: Value) -> list[Value]:
    data, i, b = values
    if "b" not in data.dims:
        data = expand(data, data.dims | {"b"}, run.sizes)
    data = run.extent.gathered(data)
    dims = (data.dims - {"b"}) | i.dims | b.dims
    whole = data.dims - {"b"}
    fn = map_over(lambda x, i, b: x[b, i], dims, [whole, i.dims, b.dims])
    return [Value(fn(data.data, i.data, b.data), dims)]


def _inputs(run: Any, equation: Equation, values: list[Value], env, t: Value) -> list[Value]:
    return [Value(values[0].data, frozenset(equation.params["axes"]))]


#: ``(execution, equation, operands, env, t) -> outputs``.
SPECIAL: dict[Any, Callable] = {reduce_p: _reduce, whole_p: _whole, across_p: _across, inputs_p: _inputs}
