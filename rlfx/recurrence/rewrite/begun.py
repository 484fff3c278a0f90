"""A learner that begins later is one branch, not a branch and a choice: ``where(t >= 99, every(4, learn, otherwise=old), old)``.

Written so, weights and moments of an optimiser are chosen number by number at every timestep, and before the learner begins it
learns in vain. Before and after, where a carry is what is kept:

    new = cond(p, learn, lambda: old); z = select(c, old, new)   ->   z = cond(p and c, learn, lambda: old)

``jnp.where`` of each leaf is one choice; they are all of one condition, which no environment has for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.timed import of_one
from rlfx.recurrence.ir.build import Builder, substituted
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var, with_equations
from rlfx.recurrence.language.index import TIME, Point
from rlfx.recurrence.rewrite.merged import given_before

_SELECT = J.primitive("select_n")
_PREVIOUS = Point(TIME - 1)


class _Begun(NamedTuple):
    """A branch of which all that it gives is chosen by one more condition.

    Attributes:
      condition: a number of one timestep.
      holds: what it is where the branch counts.
      keeping: the branch that gives what is chosen elsewhere.
      chosen: what each choice gives, and the branch's value.
      first: of the choices the first one, where all is known that they read.
    """

    condition: Var
    holds: bool
    keeping: int
    chosen: Mapping[Var, Var]
    first: Equation


def with_begun(program: Program) -> Program:
    """The program with one branch for such choices; without any ``program``. Meaning-preserving; idempotent."""
    branches = [e for e in program.equations if e.op is J.COND]
    same = given_before(program) if branches else {}
    found = {e: begun for e in branches if (begun := _begun(e, program, same)) is not None}
    if not found:
        return program
    build, moved = Builder(program), {begun.first: (e, begun) for e, begun in found.items()}
    for e in program.equations:
        if e in moved:
            branch, begun = moved[e]
            which = build.call(_which(begun), (branch.inputs[0], begun.condition), branch)
            build.equations.append(replace(branch, inputs=(which, *branch.inputs[1:])))
        if e not in found:
            build.equations.append(e)
    chosen = {z: new for _, begun in moved.values() for z, new in begun.chosen.items()}
    return with_begun(substituted(with_equations(program, tuple(build.equations)), chosen))  # there may be a third condition


def _which(begun: _Begun) -> Callable:
    """The branch's index, of the one that it was and the condition."""

    def which(index: Any, condition: Any) -> Any:
        counts = condition if begun.holds else ~condition
        return jnp.where(counts, index, begun.keeping).astype(index.dtype)

    return which


def _begun(e: Equation, program: Program, same: Mapping[Var, Atom]) -> _Begun | None:
    """How one more condition chooses all that a branch gives; None if it does not."""
    dims, users = program.dims_of, program.users
    returned = set(program.returned)
    if e.has_effects or e.is_ragged or not _of_time(e.inputs[0], program):
        return None
    choices, found = {}, set()
    for i, new in enumerate(e.outputs):
        if new in returned:
            return None
        for select in dict.fromkeys(users.get(new, ())):
            case = _choice(select, new, program)
            if case is None:
                return None
            condition, holds, old = case
            keeping = frozenset(k for k, body in enumerate(e.params["branches"]) if _passes(body, i, old, e))
            found.add((same.get(condition, condition), holds, keeping))
            choices[select] = (select.outputs[0], new)
    if len(found) != 1:
        return None
    ((condition, holds, keeping),) = found
    if not keeping or dims(condition) - {"t"}:
        return None
    first = next(s for s in program.equations if s in choices)
    return _Begun(condition, holds, min(keeping), dict(choices.values()), first)


def _of_time(atom: Atom, program: Program) -> bool:
    return isinstance(atom, Var) and not program.dims_of(atom) - {"t"}


def _choice(select: Equation, new: Var, program: Program) -> tuple[Var, bool, Atom] | None:
    """The condition of a choice, what it is where ``new`` is taken, and what is taken elsewhere: a carry."""
    if select.op is not _SELECT or len(select.inputs) != 3 or select.is_ragged:
        return None
    condition, *cases = of_one(select.inputs[0], program), *select.inputs[1:]
    if cases.count(new) != 1 or not isinstance(condition, Var) or condition.shape or condition.dtype != np.bool_:
        return None
    holds = cases[1] is new
    old = cases[not holds]
    return (condition, holds, old) if _is_carried(old, program) else None


def _is_carried(old: Atom, program: Program) -> bool:
    """Whether a value is what the timestep before left: the branch is in a loop then, where no timestep is apart."""
    e = program.definitions().get(old) if isinstance(old, Var) else None
    return e is not None and e.is_read and e.access == _PREVIOUS


def _passes(body: Any, i: int, value: Atom, e: Equation) -> bool:
    """Whether a branch gives one of its operands as it is."""
    jaxpr = body.jaxpr
    out = jaxpr.outvars[i]
    return any(v is out and x is value for v, x in zip(jaxpr.invars, e.inputs[1:], strict=True))
