"""What is computed twice is computed once: equations of the same operation on the same values are one.

XLA does so, too, but after derivatives have been taken, which go back through each of the two, and not what a loop and what comes
after it have in common. Of two convolutions of one board, as products, the patches are the same. A series of a series is that
series: what a recurrence makes of its next value, and the policy that follows from it, make the same of it.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from rlfx.recurrence.ir.build import substituted
from rlfx.recurrence.ir.program import Atom, Equation, Lit, Program, Var
from rlfx.recurrence.language.primitives import series_p

#: Constants of at most so many numbers are compared.
_SMALL = 64


def merged(program: Program) -> Program:
    """The program without equations whose values another one gives already; without any it is ``program``.

    Meaning-preserving; idempotent. Names of scopes stay: equations of different scopes are two, and so are those with effects.
    What the program returns stays by itself: the last of a carry is not what is returned of every timestep.
    """
    return substituted(program, given_before(program))


def given_before(program: Program) -> dict[Var, Atom]:
    """Which value is the same, of those that another equation gives already."""
    first: dict[Hashable, Equation] = {}
    instead: dict[Var, Atom] = {}
    returned, series = set(program.returned), {v for e in program.equations if e.op is series_p for v in e.outputs}
    for e in program.equations:
        if returned.intersection(e.outputs):
            continue
        if e.op is series_p and isinstance(v := e.inputs[0], Var) and (named := instead.get(v, v)) in series:
            instead[e.outputs[0]] = named
            continue
        key = _key(e, instead)
        if key is None:
            continue
        same = first.setdefault(key, e)
        if same is not e:
            instead.update(zip(e.outputs, same.outputs, strict=True))
    return instead


def _key(e: Equation, instead: dict[Var, Atom]) -> Hashable | None:
    """What is the same of equations that are one; None: it stays by itself."""
    if e.has_effects:
        return None
    inputs = tuple(_literal(v) if isinstance(v, Lit) else instead.get(v, v) for v in e.inputs)
    types = tuple((v.shape, v.dtype) for v in e.outputs)
    key = e.op, tuple(sorted(e.params.items(), key=lambda item: item[0])), inputs, types, e.scope
    try:
        hash(key)
    except TypeError:  # a parameter is an array, say
        return None
    return key


def _literal(v: Lit) -> Hashable:
    """A small number by its bits, anything else by which object it is."""
    if isinstance(v.value, (int, float, bool, complex, np.generic, np.ndarray)) and np.size(v.value) <= _SMALL:
        x = np.asarray(v.value)
        return type(v.value) if x.ndim == 0 else None, x.dtype, x.shape, x.tobytes()
    return id(v.value)
