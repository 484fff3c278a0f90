"""What a pass over the domain gives: the loss, the last carry, aux, lengths; and which cotangents belong to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx.recurrence.analysis.cost import points
from rlfx.recurrence.execute.collectives import reduce_value
from rlfx.recurrence.execute.executor import Execution
from rlfx.recurrence.execute.extent import Extent
from rlfx.recurrence.execute.values import Value, expand, mask_like, of_atom
from rlfx.recurrence.ir.program import NO_DIMS, Program, Var
from rlfx.recurrence.language.precision import narrowed, wide, widened


def target_of(run: Execution, var: Var) -> Any:
    """A differentiated output. The loss is this device's share of it: their sum is the loss."""
    program = run.program
    if var is program.loss:
        return narrowed(loss_sum(run) * share_of_mean(run), var.dtype)
    if var in set(program.next_carry):
        return expand(run.final(var), carry_dims(program, var), run.sizes).data
    return _padded(run, expand(run.env[var], aux_dims(program, var), run.sizes)).data


def loss_of(run: Execution) -> Any:
    """The loss of all points, on every device; None if the program has none."""
    if run.program.loss is None:
        return None
    total = run.extent.over_devices("sum", loss_sum(run) * share_of_mean(run))
    return narrowed(total, run.program.loss.dtype)


def loss_sum(run: Execution) -> Any:
    """The sum of the losses of this device's points, in at least float32."""
    value = of_atom(run.program.loss, run.env)  # type: ignore[arg-type]
    value = replace(value, data=widened(value.data))
    over = ("t", "b") if run.program.domain.batch is not None else ("t",)
    alone = Extent(run.extent.times, run.extent.batch)
    valid = run.valid(run.env) if run.program.domain.until else None
    return reduce_value("sum", expand(value, frozenset(over), run.sizes), over, run.sizes, valid, alone).data


def share_of_mean(run: Execution) -> Any:
    """What one point weighs in the loss, in at least float32."""
    dtype = wide(run.program.loss.dtype)  # type: ignore[union-attr]
    if run.program.reduce == "sum":
        return jnp.ones((), dtype)
    batch = NO_DIMS if run.program.domain.batch is None else frozenset("b")
    lengths = expand(run.length, batch, run.sizes).data if run.program.domain.until else None
    count = points(frozenset("t"), run.program.domain) * run.extent.batch if lengths is None else jnp.sum(lengths)
    return 1 / run.extent.over_devices("sum", jnp.asarray(count, dtype))


def carry_dims(program: Program, var: Var) -> frozenset:
    """The axes of a returned carry."""
    shared = program.shared[program.next_carry.index(var)]
    return NO_DIMS if shared or program.domain.batch is None else frozenset("b")


def aux_dims(program: Program, var: Any) -> frozenset:
    """An unrolled program's outputs have every axis, as those of ``lax.scan``; aux has the axes of its domain."""
    batch = set() if program.domain.batch is None else {"b"}
    dims = frozenset({"t", *batch}) if program.loss is None else program.dims_of(var)
    return dims | batch if program.domain.until and "t" in dims else dims


def _padded(run: Execution, value: Value) -> Value:
    """Under ``until=``, zeros after each environment's end."""
    if not run.program.domain.until or "t" not in value.dims:
        return value
    alive = run.valid(run.env)
    mask = mask_like(expand(alive, value.dims, run.sizes).data, value.data)
    return Value(jnp.where(mask, value.data, jnp.zeros_like(value.data)), value.dims)


def returned(run: Execution) -> tuple:
    """``(carry leaves, aux leaves, lengths or None)``."""
    program = run.program
    carry = [expand(run.final(v), carry_dims(program, v), run.sizes).data for v in program.next_carry]
    aux = [_padded(run, expand(of_atom(v, run.env), aux_dims(program, v), run.sizes)).data for v in program.aux]
    if not program.domain.until:
        return carry, aux, None
    batch = NO_DIMS if program.domain.batch is None else frozenset("b")
    return carry, aux, expand(run.length, batch, run.sizes).data


# -- cotangents --------------------------------------------------------------------------------------------------------


def is_zero(cotangent: Any) -> bool:
    """Whether a cotangent is zero without being an array of zeros."""
    return (
        isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
        or cotangent is None
        or getattr(cotangent, "dtype", None) == jax.dtypes.float0
    )


def sum_by_var(program: Program, loss: Any, carry: list, aux: list) -> Callable[[Var], Any]:
    """The cotangent of each target; one value may be returned in several places."""
    pairs = [(program.loss, loss), *zip(program.next_carry, carry, strict=True), *zip(program.aux, aux, strict=True)]

    def of(var: Var) -> Any:
        mine = [c for v, c in pairs if v is var]
        given = [c for c in mine if not is_zero(c)]
        if not given:
            return jnp.zeros(mine[0].shape, mine[0].dtype)
        return sum(given[1:], start=given[0])

    return of
