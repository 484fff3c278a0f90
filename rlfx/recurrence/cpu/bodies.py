"""Equations of the bodies that a program calls, in scans, branches, loops and ``rlfx.shared``, by rules of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.interpret import rewritten_body
from rlfx.recurrence.ir.program import Equation, Program
from rlfx.recurrence.language.primitives import whole_p

#: What has bodies that are changed.
_WITH_BODIES = (J.SCAN, J.COND, J.WHILE, whole_p)

Rules = dict[Any, Callable[[Any, list], Any]]


def with_rules_in_bodies(rules: Rules, changes: Callable[[Any], bool]) -> Rules:
    """Rules for :func:`rlfx.recurrence.ir.interpret.rewritten` that hold in the bodies of equations, too.

    Args:
      changes: whether a rule changes an equation: other bodies stay as they are.
    """

    def inside(eqn: Any, operands: list) -> list | None:
        bodies = _bodies(eqn.primitive, eqn.params, changes, everywhere)
        return J.bind(eqn.primitive, {**eqn.params, **bodies}, *operands) if bodies else None

    everywhere = {**rules, **dict.fromkeys(_WITH_BODIES, inside)}
    return everywhere


def with_bodies(program: Program, changes: Callable[[Any], bool], rules: Rules) -> Program:
    """The program with such rules in the bodies of its equations; where they change nothing it is ``program``."""

    def changed(e: Equation) -> Equation:
        bodies = _bodies(e.op, e.params, changes, rules)
        return replace(e, params={**e.params, **bodies}) if bodies else e

    equations = tuple(map(changed, program.equations))
    return program if equations == program.equations else replace(program, equations=equations)


def _bodies(op: Any, params: Mapping, changes: Callable[[Any], bool], rules: Rules) -> dict[str, Any]:
    """The parameters with a body in which there is something to change."""
    if op not in _WITH_BODIES:
        return {}
    found = {}
    for name, value in params.items():
        several = value if isinstance(value, tuple) else (value,)
        if any(J.closed(body) and any(map(changes, J.equations_in({"jaxpr": body}))) for body in several):
            changed = tuple(rewritten_body(body, rules) for body in several)
            found[name] = changed if isinstance(value, tuple) else changed[0]
    return found
