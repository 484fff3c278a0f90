"""What follows from t alone, by numbers: at which timesteps a condition holds."""

from __future__ import annotations

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
_CONVERTED = J.primitive("convert_element_type")


class Timed:
    """The numbers of a program's equations at all timesteps, where these follow from t alone, which begins at 0."""

    def __init__(self, program: Program) -> None:
        self._definition = program.definitions()
        self._known: dict[Var, np.ndarray | None] = {program.now: program.domain.times()}

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
