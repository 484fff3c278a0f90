"""Where the gradient through a loop ends at timesteps that are known: ``where(t % 32 == 0, stop_gradient(state), state)``.

What lies between two such timesteps is a window. No derivative leaves it for the one before, so once the states are known all
windows can be differentiated side by side, as rows (``gradient/own.py``). Truncated backpropagation through time, short-horizon
actor-critics and analytical policy gradients are written so.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.active import STOPS, is_float
from rlfx.recurrence.analysis.timed import Timed
from rlfx.recurrence.ir.program import Equation, Program, Var
from rlfx.recurrence.schedule.schedule import REGISTER, Loop

_SELECT = J.primitive("select_n")
#: Ways, at most, in which the conditions on t of an iteration come out together: each is followed through it.
_MOST_WAYS = 16


def window_of(program: Program, loop: Loop, active: AbstractSet[Equation]) -> int | None:
    """Timesteps of a window: a divisor of T, at whose multiples no derivative leaves for the timestep before; None: no such.

    Args:
      active: the equations that a derivative goes through.

    It is of a program that begins at ``t0 = 0``, which only a call knows.
    """
    length, registers = program.domain.length, {e.source for e in loop.reads}
    if loop.direction != "forward" or program.domain.until or any(loop.depth[v] != REGISTER for v in registers):
        return None
    selects = [e for e in loop.body if e.op is _SELECT and e in active]
    timed = Timed(program)
    known = {e: x for e in selects if (x := timed.of(e.inputs[0])) is not None}
    if not known:
        return None
    ways, at = np.unique([np.broadcast_to(x, length) for x in known.values()], axis=1, return_inverse=True)
    if ways.shape[1] > _MOST_WAYS:
        return None
    found = [_ending(program, loop, active, dict(zip(known, way.tolist(), strict=True))) for way in ways.T]
    read, carried = zip(*(found[way] for way in at.reshape(-1)), strict=True)  # of each timestep
    series = {v for v in registers if is_float(v)}
    ends = [t > 0 and series <= read[t] | carried[t - 1] for t in range(length)]
    return next((w for w in range(1, length) if length % w == 0 and all(ends[w::w])), None)


def _ending(
    program: Program, loop: Loop, active: AbstractSet[Equation], chosen: Mapping[Equation, int]
) -> tuple[frozenset[Var], frozenset[Var]]:
    """The series that an iteration reads without a derivative, and those that it carries on without one.

    Args:
      chosen: which case it takes, where a condition is on t alone.
    """
    body = frozenset(loop.body)
    read_outside = {v for e in active if e not in body for v in e.inputs if isinstance(v, Var)}
    put_out = {*loop.depth, *program.returned, *(v for v in loop.stacked if v in read_outside)}

    def reached(begin: set[Var]) -> set[Var]:
        for e in loop.body:
            if e in loop.reads or e not in active or e.op in STOPS:
                continue
            passed = [e.inputs[1 + int(chosen[e])]] if e in chosen else e.inputs
            if not begin.isdisjoint(v for v in passed if isinstance(v, Var)):
                begin.update(v for v in e.outputs if is_float(v))
        return begin

    definition = program.definitions()
    own = {v for e in loop.body if e not in loop.reads for v in e.outputs}

    def varies(v: Any) -> bool:
        """Whether it has a derivative, of what the iteration is given."""
        made_by = definition.get(v) if isinstance(v, Var) else None
        known = isinstance(v, Var) and is_float(v) and v not in own
        return known and (made_by is None or (made_by in active and made_by.op not in STOPS))

    reads: dict[Var, set[Var]] = {}
    for e in loop.reads:
        reads.setdefault(e.source, set()).update(v for v in e.outputs if is_float(v))
    anything = reached({v for e in loop.body for v in (*e.inputs, *e.outputs) if varies(v)})
    return (
        frozenset(v for v, begin in reads.items() if reached(begin).isdisjoint(put_out)),
        frozenset(v for v in reads if v not in anything),
    )
