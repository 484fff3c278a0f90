"""Equations of one point, under one map over all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlfx.recurrence.cpu.contractions import SMALL
from rlfx.recurrence.execute.features import run_features_first
from rlfx.recurrence.execute.values import Value, evaluate_or_draw, map_over, read_by, scope_of
from rlfx.recurrence.ir.interpret import rewritten
from rlfx.recurrence.ir.program import NO_DIMS, Equation, Lit, Var
from rlfx.recurrence.schedule.physical import ExecutablePlan


def run_pointwise(equations: Sequence[Equation], env: dict[Var, Value], plan: ExecutablePlan) -> None:
    """Evaluate consecutive equations that vary with the same dims under one map, and add what they give to ``env``."""
    if plan.features_first:
        run_features_first(equations, env)
        return
    inputs, outputs = read_by(equations), [v for e in equations for v in e.outputs]
    dims = frozenset().union(*(env[u].dims for u in inputs)) if inputs else NO_DIMS

    def point(*args):
        local: dict[Var, Any] = dict(zip(inputs, args, strict=True))
        for e in equations:
            operands = [u.value if isinstance(u, Lit) else local[u] for u in e.inputs]
            with scope_of(e):
                local.update(zip(e.outputs, evaluate_or_draw(e, operands), strict=True))
        return [local[v] for v in outputs]

    values = [env[u] for u in inputs]
    mapped = map_over(point, dims, [x.dims for x in values])
    if plan.target.rewrites.rows and _are_rows(values):
        mapped = _by_rows(point, [bool(x.dims) for x in values])
    rules = _rules(equations, plan)
    mapped = rewritten(mapped, rules) if rules else mapped
    for v, data in zip(outputs, mapped(*(x.data for x in values)), strict=True):
        env[v] = Value(data, dims)


def _are_rows(values: Sequence[Value]) -> bool:
    """Whether several timesteps of several environments are all that values vary with."""
    varying = [x for x in values if x.dims]
    if not varying or any(len(x.dims) < 2 for x in varying):
        return False
    sizes = {x.data.shape[:2] for x in varying}
    return len(sizes) == 1 and 1 not in sizes.pop()


def _by_rows(point: Callable, varies: Sequence[bool]) -> Callable:
    """``point`` at all points, one after another along one axis.

    XLA:CPU takes the axes of a gather, a scatter or a product apart, one by one: a distribution that is projected by scatters
    takes 0.85 of the time so. On accelerators they are along axes of their own, over which the devices of a mesh may be.
    """

    def run(*data: Any) -> list:
        rows = next(x.shape[:2] for x, own in zip(data, varies, strict=True) if own)
        flat = (jnp.reshape(x, (math.prod(rows), *x.shape[2:])) if own else x for x, own in zip(data, varies, strict=True))
        outs = jax.vmap(point, tuple(0 if own else None for own in varies))(*flat)
        return [jnp.reshape(x, (*rows, *x.shape[1:])) for x in outs]

    return run


def _rules(equations: Sequence[Equation], plan: ExecutablePlan) -> Mapping[Any, Callable]:
    """Those for what has no derivative: a learner's come after its derivatives have been taken."""

    def may_pay(e: Equation) -> bool:
        dims_of = plan.graph.program.dims_of
        return e.op in SMALL and all(isinstance(v, Var) and dims_of(v) for v in e.inputs)

    pays = plan.target.rewrites.contractions and not plan.differentiated
    return SMALL if pays and any(map(may_pay, equations)) else {}
