"""Convolutions of few features as ``cpu/narrow.py`` has them, in programs and in the bodies that they call.

In programs that iterate them: elsewhere what follows, a layer of all features, has them last, and turning them costs what is
gained. What is put together of features that several convolutions with one kernel have in common, a reward beside a value that
is iterated, is convolved once. So that this is seen, short loops with such convolutions are written out.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from rlfx.recurrence.cpu.bodies import with_bodies, with_rules_in_bodies
from rlfx.recurrence.cpu.convolution import CONVOLUTION
from rlfx.recurrence.cpu.narrow import is_narrow, narrowly
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program
from rlfx.recurrence.rewrite.patches import depends, is_acted
from rlfx.recurrence.rewrite.put_together import PutTogether, parts_of
from rlfx.recurrence.rewrite.unrolled import with_iterations


def with_narrow(program: Program, unrolled: int) -> Program:
    """The program with such convolutions in place of its own, but of what acts, and of what recurs at every timestep.

    Meaning-preserving up to reassociation; without such convolutions it is ``program``.

    Args:
      unrolled: so many equations is a loop at most that is written out; 0: none.
    """
    given, program = program, with_bodies(with_iterations(program, unrolled, _is_narrow), _is_narrow, _IN_BODIES)
    if program is given:
        return program
    definition = program.definitions()
    chosen = {e: parts_of(e, definition) for e in program.equations if _is_chosen(e, program, definition)}
    times = collections.Counter(
        (e.inputs[1], *place) for e, parts in chosen.items() for place in dict.fromkeys(parts.places)
    )

    def instead(e: Equation) -> tuple[Callable, Sequence[Atom]] | None:
        if e not in chosen:
            return None
        parts = chosen[e]
        common = tuple(times[(e.inputs[1], *place)] > 1 for place in parts.places)
        if len(set(common)) == 1:
            return functools.partial(narrowly, e.params), e.inputs
        return functools.partial(_sum, e.params, parts, common), [e.inputs[1], *parts.values]

    return exchanged(program, instead)


def _is_chosen(e: Equation, program: Program, definition: Mapping) -> bool:
    found = e.op is CONVOLUTION and not e.is_ragged and is_narrow(e.params, *e.inputs)
    return found and not is_acted(e, program, definition) and not depends(e, e, definition)


def _is_narrow(eqn: Any) -> bool:
    return eqn.primitive is CONVOLUTION and is_narrow(eqn.params, *(v.aval for v in eqn.invars))


def _narrow(eqn: Any, operands: list) -> list | None:
    return [narrowly(eqn.params, *operands)] if _is_narrow(eqn) else None


_IN_BODIES = with_rules_in_bodies({CONVOLUTION: _narrow}, _is_narrow)


def _sum(params: Mapping, parts: PutTogether, common: Sequence[bool], kernel: Any, *values: Any) -> Any:
    """The convolution at one point: of what is common, and of the rest."""
    return jnp.add(*(narrowly(params, x, w) for x, w in parts.by_kind(common, params, kernel, values)))
