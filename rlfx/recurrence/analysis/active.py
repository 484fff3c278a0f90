"""Which equations a derivative goes through, in a learner."""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.program import Equation, Program, Var
from rlfx.recurrence.language.primitives import aside_p

#: What no derivative goes through.
STOPS = J.STOP_GRADIENT | {aside_p}


def is_float(var: Var) -> bool:
    """Whether a value can carry a derivative."""
    return jnp.issubdtype(var.dtype, jnp.inexact)


def differentiated(equation: Equation) -> list[Var]:
    """The inputs through which an equation may have a derivative."""
    return [] if equation.op in STOPS else [v for v in equation.inputs if isinstance(v, Var) and is_float(v)]


def active_equations(program: Program, perturbed: frozenset[Var], targets: Iterable[Var]) -> frozenset[Equation]:
    """Equations on a differentiable path from the perturbed inputs to the targets, through reads and the carry."""
    users = program.users
    reached = set(perturbed)
    todo = list(perturbed)
    while todo:
        for e in users.get(todo.pop(), ()):
            new = [v for v in e.outputs if e.op not in STOPS and is_float(v) and v not in reached]
            reached.update(new)
            todo += new
    definition = program.definitions()
    leading: set[Equation] = set()
    todo = [v for v in targets if v in reached]
    while todo:
        equation = definition.get(todo.pop())
        if equation is None or equation in leading:
            continue
        leading.add(equation)
        todo += [v for v in equation.inputs if isinstance(v, Var) and v in reached]
    return frozenset(leading)
