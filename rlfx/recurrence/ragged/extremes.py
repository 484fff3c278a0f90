"""Maxima, minima and sums by halves: XLA:CPU takes the elements of a row one by one, and vectors of them much faster."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlfx import _jaxpr as J

#: What two values become, and many.
EXTREMES = {
    J.primitive("reduce_max"): (lax.max, lax.reduce_max),
    J.primitive("reduce_min"): (lax.min, lax.reduce_min),
}
#: Elements that are compared one by one: as many as fill the registers of a core.
_ROW = 16


def by_halves(op: Any, axes: tuple[int, ...], x: Any) -> bool:
    """Whether halves are faster: on a CPU, floating-point numbers that lie side by side."""
    floats = jnp.issubdtype(x.dtype, jnp.floating)
    return op in EXTREMES and axes == (x.ndim - 1,) and x.shape[-1] > _ROW and floats and jax.default_backend() == "cpu"


def total(x: Any, axis: int) -> Any:
    """The sum along an axis, by halves where that is faster. (Of a sum by halves XLA would make a slow derivative.)

    Example:
      >>> total(jnp.arange(96.0), 0).item()
      4560.0
    """
    if axis == x.ndim - 1 and jax.default_backend() == "cpu":
        while (n := x.shape[-1]) > _ROW and n % 2 == 0:
            x = lax.slice_in_dim(x, 0, n // 2, axis=-1) + lax.slice_in_dim(x, n // 2, n, axis=-1)
    return jnp.sum(x, axis)


def largest(x: Any, axis: int) -> Any:
    """The maximum along an axis, by halves where that is faster."""
    op = J.primitive("reduce_max")
    return extreme(op, x) if by_halves(op, (axis,), x) else lax.reduce_max(x, (axis,))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def extreme(op: Any, x: Any) -> Any:
    """``reduce_max`` or ``reduce_min`` over the last axis, with its derivative: ties share it evenly.

    Args:
      op: the primitive.
      x: [..., n] floating-point.

    Example:
      >>> extreme(J.primitive("reduce_max"), jnp.arange(40.0)).item()
      39.0
    """
    both, many = EXTREMES[op]
    while (n := x.shape[-1]) > _ROW:
        half = -(-n // 2)  # of an odd number, the one in the middle is in both
        x = both(lax.slice_in_dim(x, 0, half, axis=-1), lax.slice_in_dim(x, n - half, n, axis=-1))
    return many(x, (x.ndim - 1,))


@extreme.defjvp
def _(op: Any, primals: tuple, tangents: tuple) -> tuple:
    (x,) = primals
    _, tangent = jax.jvp(lambda x: EXTREMES[op][1](x, (x.ndim - 1,)), primals, tangents)
    return extreme(op, x), tangent
