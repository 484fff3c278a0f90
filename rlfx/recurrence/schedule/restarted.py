"""Where the state of a loop begins anew at timesteps that are known: ``where(t % 8 == 0, stored, state)``.

What lies between two such timesteps is a window that needs nothing of the one before, so that all windows run side by side, as
rows: forward, and so backward, too. Stored states of replayed sequences are written so, and predictions of several steps by
learned dynamics. Where the gradient alone ends there, ``truncated.py`` says what is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.program import Equation, Program, Var
from rlfx.recurrence.schedule.schedule import Loop
from rlfx.recurrence.schedule.truncated import by_conditions


@dataclass(frozen=True)
class Restarted:
    """Windows of timesteps that run side by side. Prints as text.

    Attributes:
      timesteps: of each, a divisor of T.
    """

    timesteps: int

    def __str__(self) -> str:
        return f"its state begins anew every {self.timesteps} timesteps: these windows run side by side"


def restarted(program: Program, loop: Loop) -> Restarted | None:
    """The shortest windows whose first timestep reads nothing of the one before; None: there are none.

    It is of a program that begins at ``t0 = 0``.
    """
    if any(e.has_effects or e.is_ragged or _branches(e, program) for e in loop.body):
        return None
    length = program.domain.length
    begins = by_conditions(program, loop, lambda chosen: _begins(program, loop, chosen), frozenset(loop.body))
    window = next((w for w in range(1, length) if length % w == 0 and all(begins[w::w])), None) if begins else None
    return None if window is None else Restarted(window)


def _branches(e: Equation, program: Program) -> bool:
    """Whether an equation computes one of several things, by what is the same for all environments: rows would compute all."""
    return e.op in (J.COND, J.WHILE) and not any("b" in program.dims_of(v) for v in e.inputs[:1] if isinstance(v, Var))


def _begins(program: Program, loop: Loop, chosen: Mapping[Equation, int]) -> bool:
    """Whether nothing that an iteration gives depends on the one before, if it takes these cases."""
    given = {*loop.depth, *loop.stacked, *loop.last, *program.returned}
    found = {v for e in loop.reads for v in e.outputs}
    for e in loop.body:
        if e in loop.reads:
            continue
        passed = [e.inputs[0], e.inputs[1 + int(chosen[e])]] if e in chosen else e.point_inputs
        if not found.isdisjoint(v for v in passed if isinstance(v, Var)):
            found.update(e.outputs)
    return found.isdisjoint(given)
