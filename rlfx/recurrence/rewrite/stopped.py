"""An extreme whose derivative is stopped is taken of what is stopped already: nobody traces a derivative that is thrown away.

``jax.nn.softmax`` and ``log_softmax`` subtract the maximum, and stop its derivative. jax takes it first, under every axis that
``jax.vmap`` adds, and XLA removes it.
"""

from __future__ import annotations

from dataclasses import replace

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.build import Builder
from rlfx.recurrence.ir.program import Atom, Program, Var, with_equations

_EXTREMES = frozenset(map(J.primitive, ("reduce_max", "reduce_min")))
_STOP = J.primitive("stop_gradient")


def with_stops(program: Program) -> Program:
    """``stop(max(x))`` as ``stop(max(stop(x)))``; without any it is ``program``. Meaning-preserving; idempotent."""
    moving, definition = _moving(program), program.definitions()
    stopped = lambda v: v in definition and definition[v].op is _STOP  # noqa: E731
    found = {
        e
        for e in program.equations
        if e.op in _EXTREMES
        and e.outputs[0] not in moving
        and isinstance(e.inputs[0], Var)
        and not stopped(e.inputs[0])
        and not e.is_ragged
    }
    if not found:
        return program
    build = Builder(program)
    for e in program.equations:
        if e in found:
            e = replace(e, inputs=(build.name(e.inputs[0], e, _STOP),))
        build.equations.append(e)
    return with_equations(program, tuple(build.equations))


def _moving(program: Program) -> set[Atom | None]:
    """The values through which a derivative may flow."""
    moving: set[Atom | None] = {*program.returned, *(e.source for e in program.reads())}  # these are defined later, perhaps
    for e in reversed(program.equations):
        flows = e.is_read or e.has_effects or any(v in moving and J.is_inexact(v) for v in e.outputs)
        if flows and e.op is not _STOP:
            moving.update(e.inputs)
    return moving
