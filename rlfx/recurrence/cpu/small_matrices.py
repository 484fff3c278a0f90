"""Products of many small matrices, one for each row of a batch, as XLA:CPU computes them fast.

XLA:CPU calls a product for each pair of matrices: 0.1 to 0.4 us, most of it for beginning. Here they are sums of outer products
of columns and rows, each for all pairs at once: 0.1 (6 x 6) to 0.9 (16 x 16) of the time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from rlfx import _jaxpr as J

#: Pairs at least; rows and columns of each, at most.
_PAIRS, _MOST = 16, 16
DOT = J.primitives.dot_general_p


def is_of_small_matrices(eqn: Any) -> bool:
    """Whether an equation is such a product: of floating-point numbers, with at least two rows, and two columns."""
    if eqn.primitive is not DOT:
        return False
    (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
    left, right = (v.aval for v in eqn.invars)
    out = eqn.outvars[0].aval
    if any(map(J.is_symbolic, (*left.shape, *right.shape))) or not left.dtype == right.dtype == out.dtype:
        return False
    exact = jnp.issubdtype(out.dtype, jnp.floating) and out.dtype.itemsize >= 4
    pairs, inner = (math.prod(left.shape[axis] for axis in axes) for axes in (batched, contracted))
    rows, columns = (x.size // max(pairs * inner, 1) for x in (left, right))
    return exact and J.platform() == "cpu" and pairs >= _PAIRS and all(2 <= n <= _MOST for n in (rows, inner, columns))


def of_small_matrices(eqn: Any, operands: Sequence[Any]) -> list | None:
    """That product; None if it is no such one.

    Example:
      >>> import jax
      >>> x = jnp.arange(64.0).reshape(16, 2, 2)
      >>> (eqn,) = jax.make_jaxpr(jnp.matmul)(x, x).eqns
      >>> of_small_matrices(eqn, [x, x])[0][0].tolist()
      [[2.0, 3.0], [6.0, 11.0]]
    """
    if not is_of_small_matrices(eqn):
        return None
    (contracted, others), (batched, beside) = eqn.params["dimension_numbers"]
    left, right = operands
    rows = [axis for axis in range(left.ndim) if axis not in (*contracted, *batched)]
    columns = [axis for axis in range(right.ndim) if axis not in (*others, *beside)]
    pairs, inner = (tuple(left.shape[axis] for axis in axes) for axes in (batched, contracted))
    left = jnp.transpose(left, (*batched, *rows, *contracted)).reshape(*pairs, -1, math.prod(inner))
    right = jnp.transpose(right, (*beside, *others, *columns)).reshape(*pairs, math.prod(inner), -1)
    return [_product(left, right).reshape(eqn.outvars[0].aval.shape)]


@J.computed_once  # else what makes the matrices is computed for each row and column, and the product for each of its uses
def _product(left: Any, right: Any) -> Any:
    """``left[..., rows, n] right[..., n, columns]``."""
    shape, pairs = (*left.shape[:-1], right.shape[-1]), tuple(range(left.ndim - 2))

    def spread(x: Any, k: int, over: int, along: int) -> Any:
        return lax.broadcast_in_dim(lax.index_in_dim(x, k, over, keepdims=False), shape, (*pairs, along))

    def outer(k: int) -> Any:
        return lax.mul(spread(left, k, left.ndim - 1, len(pairs)), spread(right, k, left.ndim - 2, len(pairs) + 1))

    return functools.reduce(lax.add, map(outer, range(left.shape[-1])))
