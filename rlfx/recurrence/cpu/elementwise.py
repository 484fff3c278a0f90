"""What XLA:CPU computes many numbers at once, in place of jax's own: in programs, and in the bodies that they call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlfx import _jaxpr as J
from rlfx.recurrence.cpu.angles import ANGLES
from rlfx.recurrence.cpu.arguments import PLACES, is_of_many, place_of
from rlfx.recurrence.cpu.bodies import with_bodies, with_rules_in_bodies
from rlfx.recurrence.cpu.cumulative import SO_FAR, is_by_pairs, so_far
from rlfx.recurrence.cpu.largest import TOP_K, is_few_of_many, largest
from rlfx.recurrence.cpu.normal import NORMAL
from rlfx.recurrence.cpu.pooling import MAXIMA, maxima, windows_of
from rlfx.recurrence.cpu.soft import is_log_add_exp, log_add_exp
from rlfx.recurrence.cpu.sorting import SORT, in_order, is_short
from rlfx.recurrence.ir.program import Program

#: What is bound in the place of jax's primitives.
AT_ONCE: dict[Any, Any] = ANGLES | NORMAL


def at_once(op: Any, params: Mapping, operands: Sequence) -> list | None:
    """What a primitive gives, computed many numbers at once; None: as jax does."""
    if op in AT_ONCE:
        return [AT_ONCE[op].bind(*operands, **params)]
    if op is J.CUSTOM_JVP and is_log_add_exp(params):
        return [log_add_exp(*operands)]
    if op in PLACES and is_of_many(params, operands[0]):
        return [place_of(op, params, operands[0])]
    if op in SO_FAR and is_by_pairs(op, params, operands[0]):
        return [so_far(op, params, operands[0])]
    if op is SORT and is_short(params, operands):
        return in_order(params, operands)
    if op is TOP_K and is_few_of_many(params, operands[0]):
        return largest(params, operands[0])
    if op is MAXIMA and J.platform() == "cpu":
        windows = windows_of(params, operands[0])
        return None if windows is None else [maxima(windows, operands[0])]
    return None


def with_fast_elements(program: Program) -> Program:
    """The program with such functions in the bodies of its equations; without any it is ``program``. Meaning-preserving."""
    return with_bodies(program, _changes, ELEMENTS)


def _changes(eqn: Any) -> bool:
    if eqn.primitive in PLACES:
        return is_of_many(eqn.params, eqn.invars[0].aval)
    if eqn.primitive in SO_FAR:
        return is_by_pairs(eqn.primitive, eqn.params, eqn.invars[0].aval)
    if eqn.primitive is SORT:
        return is_short(eqn.params, [v.aval for v in eqn.invars])
    if eqn.primitive is TOP_K:
        return is_few_of_many(eqn.params, eqn.invars[0].aval)
    return eqn.primitive in (*AT_ONCE, MAXIMA) or (eqn.primitive is J.CUSTOM_JVP and is_log_add_exp(eqn.params))


def _of(eqn: Any, operands: list) -> list | None:
    return at_once(eqn.primitive, eqn.params, operands)


#: The rules for :func:`rlfx.recurrence.ir.interpret.rewritten`.
ELEMENTS = with_rules_in_bodies(dict.fromkeys((*AT_ONCE, J.CUSTOM_JVP, MAXIMA, SORT, TOP_K, *PLACES, *SO_FAR), _of), _changes)
