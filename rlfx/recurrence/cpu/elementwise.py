"""What XLA:CPU computes many numbers at once, in place of jax's own: in programs, and in the bodies that they call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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


class _AtOnce(NamedTuple):
    """What a primitive gives, computed many numbers at once (None: as jax does), and of which operands, or their types."""

    fits: Callable[[Any, Mapping, Sequence], bool]
    value: Callable[[Any, Mapping, Sequence], list | None]


def _maxima(op: Any, params: Mapping, operands: Sequence) -> list | None:
    windows = windows_of(params, operands[0])
    return None if windows is None else [maxima(windows, operands[0])]


#: What is bound in the place of jax's primitives.
AT_ONCE: dict[Any, Any] = ANGLES | NORMAL
_BOUND = _AtOnce(lambda op, params, x: True, lambda op, params, x: [AT_ONCE[op].bind(*x, **params)])
_PLACE = _AtOnce(lambda op, params, x: is_of_many(params, x[0]), lambda op, params, x: [place_of(op, params, x[0])])
_SO_FAR = _AtOnce(lambda op, params, x: is_by_pairs(op, params, x[0]), lambda op, params, x: [so_far(op, params, x[0])])

_RULES: dict[Any, _AtOnce] = {
    **dict.fromkeys(AT_ONCE, _BOUND),
    **dict.fromkeys(PLACES, _PLACE),
    **dict.fromkeys(SO_FAR, _SO_FAR),
    J.CUSTOM_JVP: _AtOnce(lambda op, params, x: is_log_add_exp(params), lambda op, params, x: [log_add_exp(*x)]),
    SORT: _AtOnce(lambda op, params, x: is_short(params, x), lambda op, params, x: in_order(params, x)),
    TOP_K: _AtOnce(lambda op, params, x: is_few_of_many(params, x[0]), lambda op, params, x: largest(params, x[0])),
    MAXIMA: _AtOnce(lambda op, params, x: J.platform() == "cpu", _maxima),
}


def at_once(op: Any, params: Mapping, operands: Sequence) -> list | None:
    """What a primitive gives, computed many numbers at once; None: as jax does."""
    rule = _RULES.get(op)
    return None if rule is None or not rule.fits(op, params, operands) else rule.value(op, params, operands)


def with_fast_elements(program: Program) -> Program:
    """The program with such functions in the bodies of its equations; without any it is ``program``. Meaning-preserving."""
    return with_bodies(program, _changes, ELEMENTS)


def _changes(eqn: Any) -> bool:
    rule = _RULES.get(eqn.primitive)
    return rule is not None and rule.fits(eqn.primitive, eqn.params, [v.aval for v in eqn.invars])


def _of(eqn: Any, operands: list) -> list | None:
    return at_once(eqn.primitive, eqn.params, operands)


#: The rules for :func:`rlfx.recurrence.ir.interpret.rewritten`.
ELEMENTS = with_rules_in_bodies(dict.fromkeys(_RULES, _of), _changes)
