"""Equations that the loss needs of later timesteps alone: computed there, and before without a derivative, or not at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx.recurrence.execute.values import Value, cut_times, zeros
from rlfx.recurrence.ir.program import Var
from rlfx.recurrence.schedule.later import Later


def run_later(run: Any, part: Later) -> None:
    """Evaluate the equations, and add what others read to the values that ``run``, an execution of all timesteps, knows."""
    made = {v for e in part.equations for v in e.outputs}
    used = dict.fromkeys(v for e in part.equations for v in e.inputs if isinstance(v, Var) and v not in made)
    given = {v: run.env[v] for v in used}

    def evaluated(first: int, count: int, env: dict[Var, Value]) -> dict[Var, Value]:
        here = {v: cut_times(x, first, count) for v, x in env.items()}
        run.sequence(part.equations, here, cut_times(run.times, first, count), None)
        return here

    sooner = {v: replace(x, data=jax.lax.stop_gradient(x.data)) for v, x in given.items()} if part.before else None
    before = None if sooner is None else evaluated(0, part.first, sooner)
    after = evaluated(part.first, run.sizes["t"] - part.first, given)

    def whole(v: Var) -> Value:
        value = after[v]
        if "t" not in value.dims:
            return value
        shape = (part.first, *value.data.shape[1:])
        ahead = zeros(shape, value.data.dtype) if before is None else before[v].data
        return replace(value, data=jnp.concatenate([ahead, value.data]))

    run.env.update((v, whole(v)) for v in part.outputs)
