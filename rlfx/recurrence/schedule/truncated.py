"""Where the gradient through a loop ends at timesteps that are known: ``where(t % 32 == 0, stop_gradient(state), state)``.

What lies between two such timesteps is a window. No derivative leaves it for the one before, so once the states are known all
windows can be differentiated side by side, as rows (``gradient/own.py``). Truncated backpropagation through time, short-horizon
actor-critics and analytical policy gradients are written so. What comes before the last of them is a burn-in, as of stored
sequences: ``where(t == 40, stop_gradient(state), state)``. Where the loss counts nothing of it, its way back is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.active import STOPS, is_float
from rlfx.recurrence.analysis.timed import Timed
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var
from rlfx.recurrence.schedule.schedule import REGISTER, Loop

_SELECT = J.primitive("select_n")
#: Ways, at most, in which the conditions on t of an iteration come out together: each is followed through it.
_MOST_WAYS = 16

Found = TypeVar("Found")


class Ending(NamedTuple):
    """The series that an iteration reads without a derivative, and those that it carries on without one."""

    read: frozenset[Var]
    carried: frozenset[Var]


@dataclass(frozen=True)
class InWindows:
    """No derivative goes back further than to the beginning of a window. Prints as text.

    Attributes:
      timesteps: of each, a divisor of T.
    """

    timesteps: int

    def __str__(self) -> str:
        return f"no derivative leaves windows of {self.timesteps} timesteps: they are differentiated side by side"


@dataclass(frozen=True)
class BurnIn:
    """No derivative goes back further than to the end of a burn-in. Prints as text.

    Attributes:
      timesteps: of it, none of which is in the loss.
    """

    timesteps: int

    def __str__(self) -> str:
        return f"no derivative goes back beyond t = {self.timesteps}: the loss counts nothing before"


Truncated = InWindows | BurnIn


def truncated(program: Program, loop: Loop, active: AbstractSet[Equation], counted: int = 0) -> Truncated | None:
    """Where no derivative leaves a timestep of a loop for the one before; None: no such windows, and no burn-in.

    Args:
      active: the equations that a derivative goes through.
      counted: the first timestep that is in the loss. A burn-in of half of all timesteps and more comes before windows.

    It is of a program that begins at ``t0 = 0``, which only a call knows.
    """
    length, ends = program.domain.length, _ends(program, loop, active)
    if not any(ends):
        return None
    burn_in = max((t for t in range(min(counted + 1, length)) if ends[t]), default=0)
    windows = (w for w in range(1, length) if length % w == 0 and all(ends[w::w]))
    if 2 * burn_in < length and (window := next(windows, None)) is not None:
        return InWindows(window)
    return BurnIn(burn_in) if burn_in else None


def _ends(program: Program, loop: Loop, active: AbstractSet[Equation]) -> list[bool]:
    """At which timesteps no derivative leaves for the one before, if ``t0`` is 0; empty: nothing is known."""
    series = {e.source for e in loop.reads if is_float(e.source)}
    at_t = by_conditions(program, loop, _endings(program, loop, active), active)
    return [t > 0 and series <= at_t[t].read | at_t[t - 1].carried for t in range(len(at_t))]


def by_conditions(
    program: Program, loop: Loop, of: Callable[[Mapping[Equation, int]], Found], among: Container[Equation]
) -> list[Found]:
    """What is found of every iteration by which case it takes where a condition is on t alone, if ``t0`` is 0.

    Args:
      among: the equations whose conditions count.

    Returns:
      One at each timestep; none if nothing is known, or the loop reads other iterations than the one before.
    """
    length, registers = program.domain.length, {e.source for e in loop.reads}
    if loop.direction != "forward" or program.domain.until or any(loop.depth[v] != REGISTER for v in registers):
        return []
    timed = Timed(program)
    selects = (e for e in loop.body if e.op is _SELECT and e in among)
    known = {e: x for e in selects if (x := timed.of(e.inputs[0])) is not None}
    if not known:
        return []
    ways, at = np.unique([np.broadcast_to(x, length) for x in known.values()], axis=1, return_inverse=True)
    if ways.shape[1] > _MOST_WAYS:
        return []
    found = [of(dict(zip(known, way.tolist(), strict=True))) for way in ways.T]
    return [found[way] for way in at.reshape(-1)]


def _endings(program: Program, loop: Loop, active: AbstractSet[Equation]) -> Callable[[Mapping[Equation, int]], Ending]:
    """Of an iteration, by which case it takes where a condition is on t alone."""
    body, definition = frozenset(loop.body), program.definitions()
    own = {v for e in loop.body if e not in loop.reads for v in e.outputs}
    read_outside = {v for e in active if e not in body for v in e.inputs if isinstance(v, Var)}
    put_out = {*loop.depth, *program.returned, *(v for v in loop.stacked if v in read_outside)}
    passing = [e for e in loop.body if e not in loop.reads and e in active and e.op not in STOPS]

    def varies(v: Atom) -> bool:
        """Whether it has a derivative, of what the iteration is given."""
        if not isinstance(v, Var) or not is_float(v) or v in own:
            return False
        made_by = definition.get(v)
        return made_by is None or (made_by in active and made_by.op not in STOPS)

    given = {v for e in loop.body for v in (*e.inputs, *e.outputs) if varies(v)}
    reads: dict[Var, set[Var]] = {}
    for e in loop.reads:
        reads.setdefault(e.source, set()).update(v for v in e.outputs if is_float(v))

    def reached(begin: AbstractSet[Var], chosen: Mapping[Equation, int]) -> set[Var]:
        found = set(begin)
        for e in passing:
            passed = [e.inputs[1 + int(chosen[e])]] if e in chosen else e.inputs
            if not found.isdisjoint(v for v in passed if isinstance(v, Var)):
                found.update(v for v in e.outputs if is_float(v))
        return found

    def ending(chosen: Mapping[Equation, int]) -> Ending:
        anything = reached(given, chosen)
        return Ending(
            frozenset(v for v, begin in reads.items() if reached(begin, chosen).isdisjoint(put_out)),
            frozenset(v for v in reads if v not in anything),
        )

    return ending
