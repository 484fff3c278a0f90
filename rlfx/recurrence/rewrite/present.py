"""``x[t]`` is ``x``: a read of a series at its own timestep is no read, and hides from the schedule that nothing moves."""

from __future__ import annotations

from rlfx.recurrence.ir.build import substituted
from rlfx.recurrence.ir.program import Atom, Program, Var
from rlfx.recurrence.language.index import TIME, Point

_NOW = Point(TIME)


def present(program: Program) -> Program:
    """Replace reads ``x[t]`` of what is defined before them by ``x``. Meaning-preserving; idempotent."""
    known: set[Var] = set()
    instead: dict[Var, Atom] = {}
    for e in program.equations:
        if e.is_read and e.access == _NOW and e.source in known:
            instead[e.outputs[0]] = e.source
        else:
            known.update(e.outputs)
    return substituted(program, instead)
