"""A state that every timestep leaves as it is is what it began with: no loop carries it.

``return loss, carry`` is how a program says that it has no state of its own, or keeps what it was given: data, a target network,
the value that follows the last timestep. Before and after, with c the argument:

    x = y[t - 1] (start=c); y = series x   ->   y = series c

What follows from it follows from nothing that moves, and is computed at all timesteps at once.
"""

from __future__ import annotations

from dataclasses import replace

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.build import substituted
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var, with_equations
from rlfx.recurrence.language.index import TIME, Point
from rlfx.recurrence.language.primitives import series_p

_CHOICE = J.primitive("select_n")
#: What gives a value on, and its first operand that is one: an environment that has ended chooses between a state and itself.
_COPIES = {series_p: 0, J.primitive("name"): 0, _CHOICE: 1}


def unchanged(program: Program) -> Program:
    """Replace states that are never changed by what they begin with. Meaning-preserving; idempotent.

    What is returned stays a value of its own: beside what it began with, it has an axis t.
    """
    definition = program.definitions()
    instead = {v: given for e in program.reads() for v, given in _kept(e, program, definition).items()}
    returned = {v: instead.pop(v) for v in program.aux if v in instead}
    named = [
        replace(e, op=series_p, params={}, inputs=(returned[e.outputs[0]],)) if set(e.outputs) & returned.keys() else e
        for e in program.equations
    ]
    return substituted(with_equations(program, named) if returned else program, instead)


def _kept(read: Equation, program: Program, definition: dict[Var, Equation]) -> dict[Var, Atom]:
    """A read of an earlier (later) timestep whose series is the read itself, and choices between it and itself: what they are."""
    given = {Point(TIME - 1): read.start, Point(TIME + 1): read.end}.get(read.access)
    if given is None or "t" in program.dims_of(given):
        return {}
    (state,), v, found = read.outputs, read.source, {}
    while v is not state:
        e = definition.get(v) if isinstance(v, Var) else None
        if e is None or e.op not in _COPIES:
            return {}
        first, *others = e.inputs[_COPIES[e.op] :]
        if any(x is not first for x in others):
            return {}
        if e.op is _CHOICE:  # names stay, for whoever asks for them
            found[v] = given
        v = first
    return found | {state: given}
