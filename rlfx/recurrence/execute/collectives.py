"""Equations whose result at one point needs other points: reductions over t and b, calls on the whole batch, data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._axes import extreme_of
from rlfx.recurrence.execute.extent import Extent, over_devices
from rlfx.recurrence.execute.extremes import largest_or_smallest
from rlfx.recurrence.execute.held import counted
from rlfx.recurrence.execute.outer import reduce_outer
from rlfx.recurrence.execute.values import Value, axis_of, expand, map_over
from rlfx.recurrence.ir.program import NO_DIMS, Equation, Program, Var
from rlfx.recurrence.language.operands import mask_like
from rlfx.recurrence.language.precision import widened
from rlfx.recurrence.language.primitives import across_p, inputs_p, reduce_p, whole_p


def reduce_value(
    op: str, value: Value, over: Sequence[str], sizes: Mapping[str, int], valid: Value | None, extent: Extent
) -> Value:
    """Reduce over t and b. ``valid``: which points belong to the domain, where it is ragged."""
    # Not the method: rules of derivatives keep it, and the extent holds values of this trace.
    finish = partial(over_devices, extent.mesh_axis if "b" in over else None)
    dims = value.dims | (frozenset(over) if op == "sum" or valid is not None else NO_DIMS)
    if valid is not None:
        dims |= valid.dims
    wide = expand(value, dims, sizes)
    axes = tuple(a for a in (axis_of(dims, d) for d in over) if a is not None)
    if op == "last":
        return Value(wide.data[-1], dims - {"t"}) if "t" in dims else wide
    data, counts = wide.data, op in ("sum", "mean")
    mask = None if valid is None else mask_like(expand(valid, dims, sizes).data, data)
    if mask is not None and not counts:
        data = jnp.where(mask, data, jnp.asarray(extreme_of(data.dtype, op == "min"), data.dtype))
    if op in ("max", "min"):
        return Value(largest_or_smallest(op, data, axes, finish), dims - set(over))
    if mask is None or not counts:
        found = finish(op, getattr(jnp, op)(widened(data) if counts else data, axis=axes))
        return Value(found.astype(data.dtype), dims - set(over))
    total = finish("sum", jnp.sum(widened(jnp.where(mask, data, jnp.zeros_like(data))), axis=axes))
    if op == "mean":
        total = total / finish("sum", jnp.sum(mask, axis=axes).astype(total.dtype))
    return Value(total.astype(data.dtype), dims - set(over))


def _reduce(run: Any, equation: Equation, values: list[Value], env, t: Value) -> list[Value]:
    op, over = equation.params["op"], equation.params["over"]
    valid = run.valid(env) if run.domain.until else None
    if op == "last" and valid is not None:
        return [run.last(equation.inputs[0]) if isinstance(equation.inputs[0], Var) else values[0]]
    count = None if valid is None else counted(valid, over, run.extent)
    if equation.params.get("outer") is not None:
        return [reduce_outer(equation.params["outer"], values, op, over, run.sizes, count, run.extent)]
    return [reduce_value(op, values[0], over, run.sizes, count, run.extent)]


def _whole(run: Any, equation: Equation, values: list[Value], env, t: Value) -> list[Value]:
    n, jaxpr = equation.params["num_consts"], equation.params["jaxpr"]
    args = [*values[:n], *(run.extent.gathered(expand(v, v.dims | {"b"}, run.sizes)) for v in values[n:])]
    fn = J.jaxpr_as_fun(jaxpr.jaxpr, jaxpr.consts)
    if equation.has_effects:
        fn = run.extent.on_the_first(fn)
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
    value = run.extent.own(Value(values[0].data, frozenset(equation.params["axes"])))
    return [run.held(value, equation.outputs[0]) if "t" in value.dims else value]


def environment_axes(program: Program) -> dict[Var, int]:
    """Which axis is that of the environments, of the inputs that are data given from outside and nothing else."""
    found: dict[Var, set[int]] = {}
    other = {v for v in (program.loss, *program.aux, *program.next_carry) if isinstance(v, Var)}
    for e in program.equations:
        atoms = {v for v in e.inputs if isinstance(v, Var)}
        if e.op is inputs_p and "b" in e.params["axes"]:
            for v in atoms:
                found.setdefault(v, set()).add(e.params["axes"].index("b"))
        else:
            other |= atoms
    return {v: min(axes) for v, axes in found.items() if len(axes) == 1 and v not in other}


#: ``(execution, equation, operands, env, t) -> outputs``.
SPECIAL: dict[Any, Callable] = {reduce_p: _reduce, whole_p: _whole, across_p: _across, inputs_p: _inputs}
