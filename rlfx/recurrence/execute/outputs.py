"""What a pass over the domain gives: the loss, the last carry, aux, lengths; and which cotangents belong to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.recurrence.analysis.cost import points
from rlfx.recurrence.execute.collectives import reduce_value
from rlfx.recurrence.execute.executor import Execution
from rlfx.recurrence.execute.extent import Extent
from rlfx.recurrence.execute.values import Value, cut_environments, cut_times, expand, of_atom
from rlfx.recurrence.ir.program import NO_DIMS, Program, Var
from rlfx.recurrence.language.operands import mask_like
from rlfx.recurrence.language.precision import narrowed, wide, widened


def target_of(run: Execution, var: Var) -> Any:
    """A differentiated output that is not the loss, with all its axes."""
    program, dims = run.program, output_dims(run.program, var)
    if var in set(program.next_carry):
        return expand(run.final(var), dims, run.sizes).data
    return _padded(run, expand(run.env[var], dims, run.sizes)).data


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


def aux_dims(program: Program) -> tuple[frozenset, ...]:
    """An unrolled program's outputs have every axis, as those of ``lax.scan``; aux has the axes of its domain."""
    batch = NO_DIMS if program.domain.batch is None else frozenset("b")
    every = batch | {"t"}
    if program.loss is None:
        return (every,) * len(program.aux)
    return tuple(every if program.domain.until and "t" in dims else dims for dims in program.aux_dims)


def output_dims(program: Program, var: Var) -> frozenset:
    """The axes of a returned value."""
    if var is program.loss:
        return NO_DIMS
    if var in set(program.next_carry):
        return carry_dims(program, var)
    return next(dims for v, dims in zip(program.aux, aux_dims(program), strict=True) if v is var)


def _padded(run: Execution, value: Value) -> Value:
    """Under ``until=``, zeros after each environment's end."""
    if not run.program.domain.until or "t" not in value.dims:
        return value
    alive = run.valid(run.env)
    mask = mask_like(expand(alive, value.dims, run.sizes).data, value.data)
    return Value(jnp.where(mask, value.data, jnp.zeros_like(value.data)), value.dims)


def returned(run: Execution, known: Mapping[Var, Any] = MappingProxyType({})) -> tuple:
    """``(carry leaves, aux leaves, lengths or None)``; ``known``: :func:`target_of` some of them, of another pass."""
    program, last = run.program, set(run.program.next_carry)

    def output(v: Any, dims: frozenset) -> Any:
        if isinstance(v, Var) and v in known and v not in last:
            return known[v]
        return _padded(run, expand(of_atom(v, run.env), dims, run.sizes)).data

    carry = [
        known[v] if v in known else expand(run.final(v), carry_dims(program, v), run.sizes).data
        for v in program.next_carry
    ]
    aux = list(map(output, program.aux, aux_dims(program)))
    if not program.domain.until:
        return carry, aux, None
    batch = NO_DIMS if program.domain.batch is None else frozenset("b")
    return carry, aux, expand(run.length, batch, run.sizes).data


# -- cotangents --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Objective:
    """What a learner differentiates: the loss, or outputs times their cotangents; a sum over the parts of the domain.

    Attributes:
      program: the one that has these outputs.
      extent: all that this device computes.
      cotangents: of each target; None: of the loss, 1.
    """

    program: Program
    extent: Extent
    cotangents: Mapping[Var, Any] | None = None

    @property
    def dtype(self) -> Any:
        """At least float32."""
        if self.cotangents is None:
            return wide(self.program.loss.dtype)  # type: ignore[union-attr]
        return jnp.finfo(jnp.result_type(*(wide(v.dtype) for v in self.cotangents))).dtype  # the real part's

    def share(self, acted: Execution) -> Any:
        """What one point weighs in the loss, of an acting pass."""
        return jnp.ones((), jnp.float32) if self.program.loss is None else share_of_mean(acted)

    def __call__(self, run: Execution, share: Any) -> Any:
        """Of an execution of the learner's region on a part of the domain."""
        if self.cotangents is None:
            return loss_sum(run) * share
        terms = [
            loss_sum(run) * share * widened(c) if v is self.program.loss else self._paired(run, v, c)
            for v, c in self.cotangents.items()
        ]
        return sum(jnp.real(x).astype(self.dtype) for x in terms)

    def _paired(self, run: Execution, var: Var, cotangent: Any) -> Any:
        """An output times its cotangent; without an axis t it belongs to the last timesteps, without b to the first tile."""
        value = target_of(run, var)
        mine = Value(cotangent, output_dims(self.program, var))
        counted = []
        if run.sizes["t"] != self.extent.times.shape[0]:
            mine = cut_times(mine, run.extent.times[0], run.sizes["t"])
            counted += [] if "t" in mine.dims else [run.extent.times[-1] == self.extent.times[-1]]
        if run.extent.batch != self.extent.batch:
            first = run.extent.first - self.extent.first
            mine = cut_environments(mine, first, run.extent.batch)
            counted += [] if "b" in mine.dims else [first == 0]
        product = jnp.sum(widened(value) * widened(mine.data))
        for here in counted:
            product = jnp.where(here, product, jnp.zeros_like(product))
        return product


def outputs_of(program: Program) -> tuple:
    """What a program returns, as atoms: the loss if it has one, the carry, aux."""
    return (*(() if program.loss is None else (program.loss,)), *program.next_carry, *program.aux)


def is_zero(cotangent: Any) -> bool:
    """Whether a cotangent is zero without being an array of zeros."""
    return (
        isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
        or cotangent is None
        or getattr(cotangent, "dtype", None) == jax.dtypes.float0
    )


def sum_by_var(program: Program, cotangents: Sequence) -> dict[Var, Any]:
    """The cotangents that are not zero, of what :func:`outputs_of` gives; one value may be returned in several places."""
    found: dict[Var, Any] = {}
    for var, cotangent in zip(outputs_of(program), cotangents, strict=True):
        if not is_zero(cotangent) and isinstance(var, Var):
            found[var] = found[var] + cotangent if var in found else cotangent
    return found


def as_cotangent(given: Any) -> Any:
    """A cotangent as it is, or of a number of Python's an array."""
    return jnp.asarray(given) if isinstance(given, (float, complex)) else given


def scaled(gradient: Any, loss: Any) -> Any:
    """A gradient times the loss' cotangent, in the gradient's own dtype."""
    over = np.promote_types(np.promote_types(np.float32, gradient.dtype), loss.dtype)
    factors = (jax.lax.convert_element_type(x, over) for x in (gradient, loss))
    return jax.lax.convert_element_type(jax.lax.mul(*factors), gradient.dtype)
