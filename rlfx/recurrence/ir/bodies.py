"""Bodies of ``rlfx.shared`` as equations, some of which are exchanged for others, as those of the program are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.interpret import evaluate, inlined_body
from rlfx.recurrence.ir.program import Atom, Equation, Lit, Program, Var, users_of
from rlfx.recurrence.language.primitives import whole_p

#: Of an equation, a function that computes its output, and of which values; None: it stays (``build.exchanged``).
Instead = Callable[[Equation], tuple[Callable, Sequence[Atom]] | None]
#: ... of equations that are defined so, and whose values are used there.
InsteadIn = Callable[[Mapping[Var, Equation], Mapping[Var, Sequence[Equation]]], Instead]


def exchanged_in_bodies(
    program: Program, instead_in: InsteadIn, fits: Callable[[Equation], bool] = lambda e: True
) -> Program:
    """The program with other equations for some of those in bodies of ``rlfx.shared``; without any it is ``program``.

    Args:
      fits: whether the body of an equation is looked at.
    """
    bodies = {e: _exchanged(e.params["jaxpr"], instead_in) for e in program.equations if e.op is whole_p and fits(e)}
    if not any(bodies.values()):
        return program
    of = lambda e: replace(e, params={**e.params, "jaxpr": bodies[e]}) if bodies.get(e) else e  # noqa: E731
    return replace(program, equations=tuple(map(of, program.equations)))


def _exchanged(body: Any, instead_in: InsteadIn) -> Any | None:
    """A closed jaxpr with such equations; None if it has none."""
    flat = inlined_body(body)
    equations, names = _equations(flat.jaxpr)
    instead = instead_in({v: e for e in equations.values() for v in e.outputs}, users_of(equations.values()))
    found = {eqn: other for eqn, e in equations.items() if (other := instead(e)) is not None}
    if not found:
        return None
    seen: dict[Var, Any] = {}

    def rule(eqn: Any, operands: list) -> list | None:
        seen.update((names[v], x) for v, x in zip(eqn.invars, operands, strict=True) if not J.is_literal(v))
        if eqn not in found:
            return None
        fn, atoms = found[eqn]
        return [fn(*(a.value if isinstance(a, Lit) else seen[a] for a in atoms))]

    run = lambda *args: evaluate(flat.jaxpr, flat.consts, args, rule)  # noqa: E731
    return J.without_dead_code(jax.make_jaxpr(run)(*body.in_avals))


def _equations(jaxpr: Any) -> tuple[dict[Any, Equation], dict[Any, Var]]:
    """Those of a jaxpr, each as a program's, and its names as values."""
    ids, names = itertools.count(), {}

    def var(v: Any) -> Var:
        if v not in names:
            names[v] = Var(next(ids), tuple(v.aval.shape), v.aval.dtype)
        return names[v]

    of = lambda v: Lit(v.val) if J.is_literal(v) else var(v)  # noqa: E731
    equations = {
        e: Equation(e.primitive, dict(e.params), tuple(map(of, e.invars)), tuple(map(var, e.outvars))) for e in jaxpr.eqns
    }
    return equations, names
