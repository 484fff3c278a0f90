"""Equations of one point, under one map over all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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

    mapped = map_over(point, dims, [env[u].dims for u in inputs])
    rules = _rules(equations, plan)
    mapped = rewritten(mapped, rules) if rules else mapped
    for v, data in zip(outputs, mapped(*(env[u].data for u in inputs)), strict=True):
        env[v] = Value(data, dims)


def _rules(equations: Sequence[Equation], plan: ExecutablePlan) -> Mapping[Any, Callable]:
    """Those for what has no derivative: a learner's come after its derivatives have been taken."""

    def may_pay(e: Equation) -> bool:
        dims_of = plan.graph.program.dims_of
        return e.op in SMALL and all(isinstance(v, Var) and dims_of(v) for v in e.inputs)

    pays = plan.target.rewrites.contractions and not plan.differentiated
    return SMALL if pays and any(map(may_pay, equations)) else {}
