"""Triangular systems of many small matrices, one for each row of a batch, as XLA:CPU solves them fast.

XLA:CPU calls LAPACK for each matrix. Here each unknown follows from those before it, for all systems at once: they are what
``jnp.linalg.solve``, Cholesky factors and their derivatives consist of.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from rlfx import _jaxpr as J

SOLVE = J.primitive("triangular_solve")

#: Systems, at least; unknowns and right-hand sides of each, at most: there is an operation for each pair of unknowns.
_SYSTEMS, _UNKNOWNS, _SIDES = 16, 8, 16


def is_of_small_systems(eqn: Any) -> bool:
    """Whether an equation solves many small ones, of real numbers."""
    if eqn.primitive is not SOLVE:
        return False
    a, b = (v.aval for v in eqn.invars)
    if any(map(J.is_symbolic, (*a.shape, *b.shape))) or not jnp.issubdtype(a.dtype, jnp.floating):
        return False
    sides = b.shape[-1 if eqn.params["left_side"] else -2]
    fits = 1 <= a.shape[-1] <= _UNKNOWNS and 1 <= sides <= _SIDES and math.prod(a.shape[:-2]) >= _SYSTEMS
    return fits and J.platform() == "cpu"


def of_small_systems(eqn: Any, operands: Sequence[Any]) -> list | None:
    """Their solutions; None if an equation is no such one.

    Example:
      >>> import jax
      >>> a, b = jnp.tile(jnp.array([[2.0, 0.0], [1.0, 4.0]]), (16, 1, 1)), jnp.ones((16, 2, 1))
      >>> solve = lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True)
      >>> (eqn,) = jax.make_jaxpr(solve)(a, b).eqns
      >>> of_small_systems(eqn, [a, b])[0][0].tolist()
      [[0.5], [0.125]]
    """
    if not is_of_small_systems(eqn):
        return None
    a, b = operands
    left, lower = eqn.params["left_side"], eqn.params["lower"] != eqn.params["transpose_a"]
    if eqn.params["transpose_a"]:
        a = jnp.swapaxes(a, -1, -2)
    if left:
        return [_solved(a, b, lower, eqn.params["unit_diagonal"])]
    turned = _solved(jnp.swapaxes(a, -1, -2), jnp.swapaxes(b, -1, -2), not lower, eqn.params["unit_diagonal"])
    return [jnp.swapaxes(turned, -1, -2)]


@functools.partial(J.computed_once, static_argnums=(2, 3))
def _solved(a: Any, b: Any, lower: bool, unit: bool) -> Any:
    """``a[..., n, n] x[..., n, m] = b[..., n, m]``."""
    n, last = a.shape[-1], b.ndim - 1
    row = lambda x, i: lax.index_in_dim(x, i, last - 1, keepdims=False)  # noqa: E731

    def factor(i: int, j: int) -> Any:
        number = lax.index_in_dim(row(a, i), j, last - 1, keepdims=True)
        return jnp.broadcast_to(number, (*b.shape[:-2], b.shape[-1]))

    found: dict[int, Any] = {}
    for i in range(n) if lower else reversed(range(n)):
        x = row(b, i)
        for j, known in found.items():
            x = lax.sub(x, lax.mul(factor(i, j), known))
        found[i] = x if unit else lax.div(x, factor(i, i))
    return jnp.stack([found[i] for i in range(n)], -2)
