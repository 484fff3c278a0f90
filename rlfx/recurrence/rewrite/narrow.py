"""Convolutions of few features as ``cpu/narrow.py`` has them, in programs and in the bodies that they call.

In programs that iterate them: elsewhere what follows, a layer of all features, has them last, and turning them costs what is
gained. What is put together of features that several convolutions with one kernel have in common, a reward beside a value that
is iterated, is convolved once. So that this is seen, short loops with such convolutions are written out.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.cpu.bodies import with_bodies, with_rules_in_bodies
from rlfx.recurrence.cpu.convolution import CONVOLUTION
from rlfx.recurrence.cpu.narrow import is_narrow, narrowly
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program
from rlfx.recurrence.rewrite.patches import depends, is_acted
from rlfx.recurrence.rewrite.unrolled import with_iterations

_CONCATENATE, _TRANSPOSE = J.primitive("concatenate"), J.primitive("transpose")
_ONE_MORE_AXIS = (J.primitive("broadcast_in_dim"), J.primitive("reshape"))


@dataclass(frozen=True)
class _Parts:
    """What a convolution's input is put together of.

    Attributes:
      values: before they are.
      axis: of features, in the values.
      moves: what was done to what they are put together to, the last first.
    """

    values: tuple[Atom, ...]
    axis: int
    moves: tuple[Equation, ...] = ()

    @property
    def places(self) -> list[tuple[Atom, int, int]]:
        """Each value, where its features are, and how many."""
        counts = [v.shape[self.axis] for v in self.values]
        return list(zip(self.values, itertools.accumulate(counts, initial=0), counts, strict=False))

    def image(self, values: Sequence[Any]) -> Any:
        """Some of them put together, as the input of a convolution."""
        x = jnp.concatenate(values, self.axis) if len(values) > 1 else values[0]
        for e in reversed(self.moves):
            x = jnp.transpose(x, e.params["permutation"]) if e.op is _TRANSPOSE else x[None]
        return x


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
    chosen = {e: _parts(e, definition) for e in program.equations if _is_chosen(e, program, definition)}
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


def _parts(e: Equation, definition: Mapping) -> _Parts:
    value, moves, axis = e.inputs[0], [], e.params["dimension_numbers"].lhs_spec[1]
    while (made := definition.get(value)) is not None:
        if made.op is _CONCATENATE and made.params["dimension"] == axis:
            return _Parts(made.inputs, axis, tuple(moves))
        if made.op is _TRANSPOSE:
            axis = made.params["permutation"][axis]
        elif made.op in _ONE_MORE_AXIS and axis and made.outputs[0].shape == (1, *made.inputs[0].shape):
            axis -= 1
        else:
            break
        moves.append(made)
        value = made.inputs[0]
    return _Parts((e.inputs[0],), e.params["dimension_numbers"].lhs_spec[1])


def _sum(params: Mapping, parts: _Parts, common: Sequence[bool], kernel: Any, *values: Any) -> Any:
    """The convolution at one point: of what is common, and of the rest."""
    axis, found = params["dimension_numbers"].rhs_spec[1], []
    for kind in (True, False):
        group = [(x, first, count) for x, (_, first, count), c in zip(values, parts.places, common, strict=True) if c is kind]
        cuts = [jax.lax.slice_in_dim(kernel, first, first + count, axis=axis) for _, first, count in group]
        found.append(narrowly(params, parts.image([x for x, _, _ in group]), jnp.concatenate(cuts, axis)))
    return jnp.add(*found)
