"""Sums, products and extremes so far, as XLA:CPU computes them fast: of pairs, of pairs of pairs, and so on.

jax has windows for them, of which XLA:CPU takes blocks of sixteen numbers, each number with all before it in its block, one by
one: 2 to 8 ns a number, and 260 ns of ``cumlogsumexp``. By pairs (``jax.lax.associative_scan``) many rows are taken at once: 0.5
to 2 ns, and 5 to 25. That is how jax differentiates all but sums, so that derivatives are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from rlfx import _jaxpr as J
from rlfx._axes import CUMULATIVE
from rlfx.recurrence.cpu.soft import log_add_exp


def _log_add_exp(x: Any, y: Any) -> Any:
    return jnp.logaddexp(x, y) if jnp.issubdtype(x.dtype, jnp.complexfloating) else log_add_exp(x, y)


_SUM = J.primitive("cumsum")
#: What two become, by primitive.
SO_FAR: dict[Any, Callable] = {
    **{op: monoid.combine for op, monoid in CUMULATIVE.items()},
    J.primitive("cumlogsumexp"): _log_add_exp,
}
#: Numbers of which sums are made by pairs: the derivative of longer ones, sums backwards, is faster by jax's windows.
_MOST_OF_SUM = 128


def is_by_pairs(op: Any, params: Mapping, x: Any) -> bool:
    """Whether what is so far of an array, which may be its type alone, is computed by pairs."""
    count = x.shape[params["axis"]]
    return not J.is_symbolic(count) and J.platform() == "cpu" and (op is not _SUM or count <= _MOST_OF_SUM)


def so_far(op: Any, params: Mapping, x: Any) -> Any:
    """As the primitive gives it.

    Example:
      >>> so_far(J.primitive("cumsum"), {"axis": 0, "reverse": True}, jnp.arange(4.0)).tolist()
      [6.0, 6.0, 5.0, 3.0]
    """
    return lax.associative_scan(SO_FAR[op], x, reverse=params["reverse"], axis=params["axis"])
