"""What nothing needs but the value behind the last timestep is computed at the last timestep alone.

``rlfx.series(value(obs), end=value(next_obs))`` asks for one value of ``next_obs``, and computes, as written, one at every
timestep: a critic twice, a recurrent cell once more. Before and after:

    y = net(x); z = series[t + 1] else y   ->   y = net(last(x)); z = series[t + 1] else y

Only where no derivative goes through it: a learner's reduction over time would have to be of all of it at once. And only where
something goes backwards through time, so that the learner waits for the end anyway: others may learn while they act.
"""

from __future__ import annotations

import dataclasses

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.active import active_equations, float_inputs
from rlfx.recurrence.analysis.cost import PRODUCTS
from rlfx.recurrence.analysis.graph import Graph
from rlfx.recurrence.ir.build import Builder, live
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var, with_equations
from rlfx.recurrence.language.primitives import reduce_p, series_p
from rlfx.recurrence.rewrite.now_and_then import moves

#: What is worth it: products, and loops.
_WORK = PRODUCTS | {J.SCAN, J.WHILE}


def with_ends_alone(program: Program) -> Program:
    """The program with such values of the last timestep; without any ``program``. Meaning-preserving; idempotent."""
    alone = frozenset() if program.domain.until else _alone(program)
    if not any(e.op in _WORK for e in alone) or not _goes_back(program):
        return program
    build, made = Builder(program), {v for e in alone for v in e.outputs}
    at_last: dict[Var, Var] = {}

    def last(v: Atom, like: Equation) -> Atom:
        if not isinstance(v, Var) or "t" not in program.dims_of(v):
            return v
        if v not in at_last:
            at_last[v], params = build.var(v.shape, v.dtype), {"op": "last", "over": ("t",)}
            build.equations.append(Equation(reduce_p, params, (v,), (at_last[v],), like.where, like.scope))
        return at_last[v]

    for e in program.equations:
        if e in alone:
            inputs = tuple(last(v, e) for v in e.inputs)
            at_last |= {v: build.var(v.shape, v.dtype) for v in e.outputs}
            build.equations.append(dataclasses.replace(e, inputs=inputs, outputs=tuple(at_last[v] for v in e.outputs)))
        elif e.end in made:
            source, *edges = e.inputs
            ends = [at_last[v] if v is e.end else v for v in edges]
            build.equations.append(dataclasses.replace(e, inputs=(source, *ends)))
        else:
            build.equations.append(e)
    return with_equations(program, live(tuple(build.equations), program))


def _alone(program: Program) -> frozenset[Equation]:
    """The equations of which only ends of series need what they give."""
    active = active_equations(program, float_inputs(program), (program.loss, *program.next_carry))
    returned, users, found = set(program.returned), program.users, set()
    for e in reversed(program.equations):
        varies = all("t" in program.dims_of(v) for v in e.outputs) and program.now not in e.inputs
        there = moves(e) or e.op is series_p  # a name that no other timestep reads is none
        if not (varies and there) or e in active or not returned.isdisjoint(e.outputs):
            continue
        if all(u in found or _is_end(v, u) for v in e.outputs for u in users.get(v, ())):
            found.add(e)
    return frozenset(found)


def _goes_back(program: Program) -> bool:
    """Whether a recurrence runs from the end."""
    graph = Graph(program, frozenset(v for v in program.returned if isinstance(v, Var)))
    return any(graph.direction(component) == "backward" for component in graph.components)


def _is_end(v: Var, user: Equation) -> bool:
    """Whether a read needs a value behind the last timestep, and nowhere else."""
    return user.is_read and user.end is v and sum(u is v for u in user.inputs) == 1
