"""Operations on whole numbers where XLA defines a result and a processor none: LLVM, below Pallas' GPU backends, calls it poison.

What is computed from poison may be anything, and its compiler removes it. jax itself shifts by 32: its threefry takes the high
word of a number of 32 bits so, at every ``fold_in``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J


@dataclasses.dataclass(frozen=True)
class Defined:
    """An operation with a result for all numbers, as a function of ``x`` and ``y``. A ``y`` that is a NumPy scalar is known.

    Attributes:
      name: of the primitive.
      fine: ``fine(dtype, y)``, whether processors agree with XLA on numbers of this type and this ``y``, None if it is not known.
      total: ``total(op, x, y)``, where they do not.
    """

    name: str
    fine: Callable[[Any, Any], bool]
    total: Callable[[Callable, Any, Any], Any]

    def __call__(self, x: Any, y: Any, **params: Any) -> Any:
        def op(x: Any, y: Any) -> Any:
            return J.bind(J.primitive(self.name), params, x, y)[0]

        return op(x, y) if self.fine(x.dtype, y if isinstance(y, np.generic) else None) else self.total(op, x, y)


def _short(dtype: Any, n: Any) -> bool:
    return n is not None and 0 <= int(n) < 8 * dtype.itemsize


def _shift(name: str, beyond: Callable[[Callable, Any], Any]) -> Defined:
    """``beyond(op, x)`` is what is left of x if no bit of it stays."""

    def total(op: Callable, x: Any, n: Any) -> Any:
        if isinstance(n, np.generic):
            return beyond(op, x)
        stays = (n >= np.zeros((), n.dtype)) & (n < np.asarray(8 * x.dtype.itemsize, n.dtype))
        return jnp.where(stays, op(x, jnp.where(stays, n, jnp.zeros_like(n))), beyond(op, x))

    return Defined(name, _short, total)


def _nothing(op: Callable, x: Any) -> Any:
    return jnp.zeros_like(x)


def _last(shift: Callable, x: Any) -> Any:
    """The highest bit, everywhere."""
    return shift(x, np.asarray(8 * x.dtype.itemsize - 1, x.dtype)[()])


def _divides(dtype: Any, y: Any) -> bool:
    return not jnp.issubdtype(dtype, jnp.integer) or (y is not None and y not in (0, -1))


def _division(name: str, by_zero: Callable[[Any], Any]) -> Defined:
    """The least number by -1 is itself, and leaves nothing."""

    def total(op: Callable, x: Any, y: Any) -> Any:
        y = jnp.broadcast_to(jnp.asarray(y, x.dtype), x.shape)
        zero = y == jnp.zeros_like(y)
        unsafe = zero
        if jnp.issubdtype(x.dtype, jnp.signedinteger):
            unsafe |= (x == jnp.full_like(x, jnp.iinfo(x.dtype).min)) & (y == jnp.full_like(y, -1))
        return jnp.where(zero, by_zero(x), op(x, jnp.where(unsafe, jnp.ones_like(y), y)))

    return Defined(name, _divides, total)


def _ones(x: Any) -> Any:
    return jnp.full_like(x, -1 if jnp.issubdtype(x.dtype, jnp.signedinteger) else jnp.iinfo(x.dtype).max)


DEFINED: Mapping[Any, Defined] = {
    J.primitive(found.name): found
    for found in (
        _shift("shift_left", _nothing),
        _shift("shift_right_logical", _nothing),
        _shift("shift_right_arithmetic", _last),
        _division("div", _ones),
        _division("rem", lambda x: x),
    )
}
