"""Operations on whole numbers where XLA defines a result and a processor none: LLVM, below Pallas' GPU backends, calls it poison.

What is computed from poison may be anything, and its compiler removes it. jax itself shifts by 32: its threefry takes the high
word of a number of 32 bits so, at every ``fold_in``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J


def _shift(name: str, beyond: Callable[[Any], Any]) -> Callable:
    """A shift by any number; ``beyond(x)`` is what is left of x if no bit of it stays."""
    op = J.primitive(name)

    def shift(x: Any, n: Any, **params: Any) -> Any:
        width = 8 * x.dtype.itemsize
        if isinstance(n, np.generic):
            return J.bind(op, params, x, n)[0] if 0 <= int(n) < width else beyond(x)
        stays = (n >= np.zeros((), n.dtype)) & (n < np.asarray(width, n.dtype))
        (shifted,) = J.bind(op, params, x, jnp.where(stays, n, jnp.zeros_like(n)))
        return jnp.where(stays, shifted, beyond(x))

    return shift


def _last(x: Any) -> Any:
    """The highest bit, everywhere."""
    return J.bind(J.primitive("shift_right_arithmetic"), {}, x, np.asarray(8 * x.dtype.itemsize - 1, x.dtype)[()])[0]


def _division(name: str, by_zero: Callable[[Any], Any]) -> Callable:
    """A division by any number; the least number by -1 is itself, and leaves nothing."""
    op = J.primitive(name)

    def divided(x: Any, y: Any, **params: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.integer) or (isinstance(y, np.generic) and y not in (0, -1)):
            return J.bind(op, params, x, y)[0]
        y = jnp.broadcast_to(jnp.asarray(y, x.dtype), x.shape)
        zero, one = y == jnp.zeros_like(y), jnp.ones_like(y)
        if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
            whole = jnp.where(zero, one, y)
        else:
            least = (x == jnp.full_like(x, jnp.iinfo(x.dtype).min)) & (y == jnp.full_like(y, -1))
            whole = jnp.where(zero | least, one, y)
        return jnp.where(zero, by_zero(x), J.bind(op, params, x, whole)[0])

    return divided


def _ones(x: Any) -> Any:
    return jnp.full_like(x, -1 if jnp.issubdtype(x.dtype, jnp.signedinteger) else jnp.iinfo(x.dtype).max)


DEFINED: Mapping[Any, Callable] = {
    J.primitive("shift_left"): _shift("shift_left", jnp.zeros_like),
    J.primitive("shift_right_logical"): _shift("shift_right_logical", jnp.zeros_like),
    J.primitive("shift_right_arithmetic"): _shift("shift_right_arithmetic", _last),
    J.primitive("div"): _division("div", _ones),
    J.primitive("rem"): _division("rem", lambda x: x),
}
"""Primitive → ``fn(x, y)``, defined for all numbers. A ``y`` that is known, a NumPy scalar, costs nothing."""
