"""A state that begins anew is kept as what it would have been otherwise, and whether it begins anew.

Eligibility traces are cut where an episode ends: ``z = decay * z + grad; w = w + step * z; state = where(done, 0, z)``. A loop
that carries ``state`` writes what is as large as all weights twice in an iteration, as steps need ``z`` itself. It carries ``z``
and ``done`` instead, and the next iteration makes the choice where it reads:

    x = state[t - 1]; ... state = where(done, 0, z)   ->   x = where(done[t - 1], 0, z[t - 1])

Compilers fuse that with what is computed of it, element by element. What multiplies matrices would need it written anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.timed import of_one
from rlfx.recurrence.ir.program import Atom, Equation, Lit, Program, Var, users_of
from rlfx.recurrence.language.primitives import series_p
from rlfx.recurrence.schedule.schedule import REGISTER, Loop

_SELECT, _CONVERT = map(J.primitive, ("select_n", "convert_element_type"))


@dataclass(frozen=True)
class Postponed:
    """How a register is kept.

    Attributes:
      value: what it is where it does not begin anew.
      condition: whether it does, a boolean of each environment.
      holds: what the condition is where it does.
      given: the number that it begins with.
    """

    value: Var
    condition: Var
    holds: bool
    given: Any


def postponed(program: Program, loop: Loop, fewest: int) -> dict[Var, Postponed]:
    """The registers of a loop that are better kept so. Under ``until=``, where states are held, there are none.

    Args:
      fewest: numbers of an environment, of a state that is worth it.
    """
    if program.domain.until:
        return {}
    users, definition, stacked = users_of(loop.body), program.definitions(), frozenset(loop.stacked)

    def made_by(v: Var, others: Set[Equation]) -> Equation | None:
        """What computes a register for the next iteration alone."""
        if v in stacked or not set(users.get(v, ())) <= others:
            return None
        e = definition[v]
        if e.op is not series_p:
            return e
        (of,) = e.inputs
        return made_by(of, {e}) if isinstance(of, Var) and of in definition else None

    def kept(v: Var) -> Postponed | None:
        reads = [e for e in loop.reads if e.source is v]
        ring = loop.depth[v] != REGISTER or any(map(J.is_symbolic, v.shape))
        if ring or math.prod(v.shape) < fewest or not all(op in J.ELEMENTWISE for op in _ops(reads, users)):
            return None
        e = made_by(v, set(reads))
        ways = () if e is None else _ways(e, program)
        return next((p for p in ways if p.condition in users and len(users.get(p.value, ())) > 1), None)

    return {v: found for v in loop.depth if (found := kept(v)) is not None}


def _ops(reads: list[Equation], users: dict[Var, list[Equation]]) -> Iterator[Any]:
    """What is computed of what is read."""
    return (u.op for e in reads for v in e.outputs for u in users.get(v, ()))


def _ways(e: Equation, program: Program) -> Iterator[Postponed]:
    """A choice between a value and a number by one condition, as such."""
    if e.op is not _SELECT or len(e.inputs) != 3 or e.is_ragged:
        return
    condition = of_one(e.inputs[0], program)
    if not isinstance(condition, Var) or condition.shape or condition.dtype != np.bool_:
        return
    for holds in (True, False):
        value, given = e.inputs[1 + (not holds)], _number(of_one(e.inputs[1 + holds], program), program)
        if isinstance(value, Var) and given is not None:
            yield Postponed(value, condition, holds, given)


def _number(atom: Atom, program: Program) -> Any:
    """A number that is written down, whatever types it went through; None if it is something else."""
    if isinstance(atom, Lit):
        return None if np.shape(atom.value) else atom.value
    e = program.definitions().get(atom)
    inner = _number(e.inputs[0], program) if e is not None and e.op is _CONVERT else None
    return None if inner is None else np.asarray(inner).astype(atom.dtype)

