"""What follows from t alone, by numbers: at which timesteps a condition holds, and whether these are every n-th."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var


def _divided(a: Any, b: Any) -> Any:
    """Rounded towards 0, as XLA does; by 0 it is nothing that a program would ask for."""
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.maximum(np.abs(b), 1))


#: Operations on integers and conditions.
_NUMBERS: Mapping[Any, Callable] = {
    J.primitive(name): fn
    for name, fn in {
        "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": _divided, "neg": np.negative, "abs": np.abs,
        "sign": np.sign, "max": np.maximum, "min": np.minimum, "rem": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)),
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
        "select_n": lambda which, *cases: np.choose(which, cases), "copy": lambda x: x,
    }.items()
}  # fmt: skip
_CONVERTED, _REM, _BROADCAST, _ADD, _SUB = map(J.primitive, ("convert_element_type", "rem", "broadcast_in_dim", "add", "sub"))
_SHIFTS = (_ADD, _SUB)
#: Longer periods are no periods: hardly any program has so many timesteps.
_LONGEST = 1 << 12


class Timed:
    """The numbers of a program's equations at some times, where these follow from t alone.

    Args:
      times: by default all timesteps, of which the first is at 0.
    """

    def __init__(self, program: Program, times: np.ndarray | None = None) -> None:
        self._definition = program.definitions()
        self._known: dict[Var, np.ndarray | None] = {program.now: program.domain.times() if times is None else times}

    def of(self, atom: Atom) -> np.ndarray | None:
        """An integer, or a condition, [T] or a scalar; None of anything else."""
        if not isinstance(atom, Var):
            value = np.asarray(atom.value)
            return value if value.ndim == 0 and value.dtype.kind in "iub" else None
        if atom not in self._known:
            self._known[atom] = None  # a recurrence is none
            e = self._definition.get(atom)
            self._known[atom] = None if e is None else self._evaluated(e)
        return self._known[atom]

    def _evaluated(self, e: Equation) -> np.ndarray | None:
        dtype = np.dtype(e.outputs[0].dtype) if len(e.outputs) == 1 and not e.outputs[0].shape else None
        fn = (lambda x: x) if e.op is _CONVERTED else _NUMBERS.get(e.op)
        if fn is None or dtype is None or dtype.kind not in "iub":
            return None
        operands = [self.of(a) for a in e.inputs]
        return None if any(x is None for x in operands) else np.asarray(fn(*operands)).astype(dtype)


def every_nth(condition: Atom, program: Program) -> dict[bool, tuple[int, int]]:
    """What a condition is where ``(t0 + t) % n == k`` alone, whatever t0 is: ``(n, k)`` by whether it holds there."""
    period = _period(condition, program)
    if period is None:
        return {}
    n, moved = period
    times = np.arange(1 - n - moved, n + moved)  # remainders are negative where times are
    numbers = Timed(program, times).of(condition)
    found: dict[bool, tuple[int, int]] = {}
    for holds in () if numbers is None else (False, True):
        there = (numbers != 0) == holds
        first = int(times[-n:][np.argmax(there[-n:])]) % n
        if np.array_equal(there, (times - first) % n == 0):
            found[holds] = n, first
    return found


def _period(condition: Atom, program: Program) -> tuple[int, int] | None:
    """After how many timesteps a condition is the same again, one of remainders of t alone, and how far these are from t's own;
    None of any other."""
    definition, timed, n, most = program.definitions(), Timed(program), 1, 0
    todo, seen = [condition], set()
    while todo:
        v = todo.pop()
        if not isinstance(v, Var) or v in seen:
            continue
        seen.add(v)
        e = definition.get(v)
        if e is None or v.shape:  # t itself, too
            return None
        moved = _moved(e.inputs[0], program, timed) if e.op is _REM else None
        if moved is None:
            todo += e.inputs
            continue
        divisor = timed.of(e.inputs[1])
        n = 0 if divisor is None or divisor.ndim else math.lcm(n, max(int(divisor), 0))
        most = max(most, abs(moved))
        if not 0 < n <= _LONGEST or most > _LONGEST:
            return None
    return (n, most) if n > 1 else None


def _moved(atom: Atom, program: Program, timed: Timed) -> int | None:
    """k of ``t + k``; None of anything else."""
    if atom is program.now:
        return 0
    e = program.definitions().get(atom) if isinstance(atom, Var) else None
    if e is None or e.op not in _SHIFTS or program.now not in e.inputs:
        return None
    first, second = e.inputs
    if first is not program.now and e.op is not _ADD:
        return None
    by = timed.of(second if first is program.now else first)
    return None if by is None or by.ndim else int(by) if e.op is _ADD else -int(by)


def of_one(value: Atom, program: Program) -> Atom:
    """The one condition, or number, that was spread over all elements of a value; or the value itself."""
    e = program.definitions().get(value) if isinstance(value, Var) else None
    spread = e is not None and e.op is _BROADCAST and not e.inputs[0].shape
    return e.inputs[0] if spread else value  # type: ignore[union-attr]
