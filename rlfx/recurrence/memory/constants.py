"""What XLA computes of constants while it compiles: indices, mostly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J

#: Elements of the largest constant that is looked at.
_AT_MOST = 1 << 16


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.choose(np.asarray(which, np.int64), np.broadcast_arrays(*cases))


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x / y if x.dtype.kind == "f" else np.trunc(x / y)


_OPERATIONS: dict[str, Callable] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "neg": np.negative,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "not": np.invert, "select_n": _select, "abs": np.abs, "sign": np.sign,
    "clamp": lambda low, x, high: np.minimum(np.maximum(low, x), high), "convert_element_type": lambda x: x,
    "broadcast_in_dim": lambda x: x, "rem": np.fmod, "div": _divide, "exp": np.exp,
    "log": np.log, "sqrt": np.sqrt, "tanh": np.tanh, "square": np.square, "sin": np.sin, "cos": np.cos, "pow": np.power,
}  # fmt: skip
_FOLDED = {p: f for name, f in _OPERATIONS.items() if (p := getattr(J.primitives, name + "_p", None)) is not None}
_BROADCAST = J.primitive("broadcast_in_dim")


def numbers_of(aval: Any, constant: Any) -> np.ndarray | None:
    """The numbers of a small constant, where this process has them."""
    if not is_small(aval) or isinstance(constant, jax.core.Tracer):
        return None
    if isinstance(constant, jax.Array) and (constant.is_deleted() or not constant.is_fully_addressable):
        return None
    return np.asarray(constant)


def is_small(aval: Any) -> bool:
    """Whether the numbers of a constant are worth knowing."""
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended) and math.prod(aval.shape) <= _AT_MOST


def folded(equation: Any, ins: Sequence[Any]) -> np.ndarray | None:
    """The result of an operation on constants; None if an operand is no constant."""
    compute = _FOLDED.get(equation.primitive)
    if compute is None:
        return None
    (out,) = equation.outvars
    if not is_small(out.aval) or (equation.primitive is _BROADCAST and math.prod(out.aval.shape) != 1):
        return None
    numbers = [_numbers(value, atom) for value, atom in zip(ins, equation.invars, strict=True)]
    if any(n is None for n in numbers):
        return None
    with np.errstate(all="ignore"):
        return np.broadcast_to(compute(*numbers), out.aval.shape).astype(out.aval.dtype)


def _numbers(value: Any, atom: Any) -> np.ndarray | None:
    if J.is_literal(atom):
        return np.asarray(atom.val)
    return None if value is None or value.known is None else value.known.reshape(atom.aval.shape)


def counts(numbers: np.ndarray) -> bool:
    """Whether a constant is 0, 1, 2, ...: XLA counts when the program runs, and computes with that then."""
    flat = numbers.reshape(-1)
    return flat.size > 1 and flat.dtype.kind in "iu" and bool((flat == np.arange(flat.size)).all())


def within(indices: np.ndarray, limits: Sequence[int]) -> bool:
    """Whether XLA sees that constant indices are in bounds: of 0, 1, 2, ... it knows no more than where they begin."""
    if len(limits) == 1 and counts(indices):
        return False
    per_index = indices.reshape(-1, len(limits))
    return bool((per_index >= 0).all() and (per_index <= np.asarray(limits)).all())
