"""Weight gradients of an ensemble's members, each over all of a GPU.

The gradient of ``x @ w`` with respect to ``w`` is a contraction over the many rows of ``x``. Of one product a library cuts the
rows in parts, which all multiprocessors add up. Of a batch of products (critics under ``vmap``, ``[members, rows, n]``) it does
not: two critics of 64 units keep two of 132 multiprocessors busy, and CQL's step takes five times as long (docs/gpu.md).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J

DOT = J.primitives.dot_general_p
#: Of fewer rows for each member there is little to cut; so many blocks of a result, of as many rows and columns, keep a GPU busy.
_ROWS, _BLOCKS, _BLOCK = 512, 64, 64


def by_members(eqn: Any, operands: list) -> list | None:
    """A contraction over rows for each of a few members as one for each; None if it is no such contraction.

    Example:
      >>> gradient = jax.grad(lambda w, x: jax.vmap(jnp.dot, (None, 0))(x, w).sum())
      >>> from rlfx.recurrence.ir.interpret import rewritten
      >>> rewritten(gradient, RULES)(jnp.ones((2, 3, 4)), jnp.ones((4096, 3))).shape
      (2, 3, 4)
    """
    if not _is_narrow(eqn):
        return None
    contracted, batched = eqn.params["dimension_numbers"]
    (left,), (right,) = batched
    without = lambda axes, member: tuple(a - (a > member) for a in axes)  # noqa: E731
    numbers = (without(contracted[0], left), without(contracted[1], right)), ((), ())
    params = eqn.params | {"dimension_numbers": numbers}

    def of(member: int) -> Any:
        one, other = (jax.lax.index_in_dim(x, member, a, keepdims=False) for x, a in zip(operands, (left, right), strict=True))
        return J.bind(DOT, params, one, other)[0]

    return [jnp.stack([of(i) for i in range(operands[0].shape[left])])]


def _is_narrow(eqn: Any) -> bool:
    """Whether a batch of products has many rows, and so few and small results that they leave a GPU idle."""
    contracted, batched = eqn.params["dimension_numbers"]
    left, right = (v.aval.shape for v in eqn.invars)
    if len(batched[0]) != 1:
        return False
    members = left[batched[0][0]]
    free = [
        math.prod(n for a, n in enumerate(shape) if a not in (*c, *b))
        for shape, c, b in ((left, contracted[0], batched[0]), (right, contracted[1], batched[1]))
    ]
    return members > 1 and members * math.prod(-(-n // _BLOCK) for n in free) < _BLOCKS


#: The rules for :func:`rlfx.recurrence.ir.interpret.rewritten`.
RULES = {DOT: by_members}
