"""``x[t]`` is ``x``: a read of a series at its own timestep is no read, and hides from the schedule that nothing moves."""

from __future__ import annotations

import dataclasses

from rlfx.recurrence.ir.program import Atom, Program, Var, infer_dims
from rlfx.recurrence.language.index import TIME, Point

_NOW = Point(TIME)


def present(program: Program) -> Program:
    """Replace reads ``x[t]`` of what is defined before them by ``x``. Meaning-preserving; idempotent."""
    known: set[Var] = set()
    instead: dict[Atom, Atom] = {}
    equations = []
    for e in program.equations:
        if e.is_read and e.access == _NOW and e.source in known:
            instead[e.outputs[0]] = instead.get(e.source, e.source)
            continue
        known.update(e.outputs)
        equations.append(e)
    if not instead:
        return program
    of = lambda atoms: tuple(instead.get(a, a) if isinstance(a, Var) else a for a in atoms)  # noqa: E731
    kept = tuple(dataclasses.replace(e, inputs=of(e.inputs)) for e in equations)
    given = {v: program.dims_of(v) for v in program.inputs}
    (loss,) = of((program.loss,))
    return dataclasses.replace(
        program,
        equations=kept,
        loss=loss,
        next_carry=of(program.next_carry),
        aux=of(program.aux),
        dims=infer_dims(kept, given, program.alive),
    )
