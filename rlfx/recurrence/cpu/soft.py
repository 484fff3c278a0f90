"""``log(exp(x) + exp(z))``, of which softplus and log-sigmoid are made, as XLA:CPU computes it many numbers at once.

jax chooses behind the logarithm what holds where both are infinite, and for the derivative once more; XLA chooses for the
logarithm itself between two formulas. Each choice becomes a branch, and the numbers are taken one by one, in three to four times
as long. Here what is chosen is chosen before. The value is as near to the exact one; the derivative is nearer, and holds where
one of the two is infinite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import lax

from rlfx import _jaxpr as J

#: (atanh(s) - s) / s^3 in powers of s^2: interpolated in Chebyshev's points up to s = 1/3.
_ATANH = (0.33333333660280906, 0.19999853159710557, 0.14296179337160467, 0.1085328216060148, 0.11612194238915821)

#: What ``jax.numpy.logaddexp`` computes of its operands, 0 and 1, step by step from 2.
_STEPS = (
    ("max", 0, 1), ("sub", 0, 1), ("ne", 3, 3), ("add", 0, 1), ("abs", 3), ("neg", 6), ("exp", 7), ("log1p", 8), ("add", 2, 9),
    ("select_n", 4, 10, 5),
)  # fmt: skip


def is_log_add_exp(params: Mapping) -> bool:
    """Whether a call with a derivative of its own (of ``J.CUSTOM_JVP``) is jax's ``logaddexp``.

    Example:
      >>> (call,) = jax.make_jaxpr(jax.numpy.logaddexp)(1.0, 2.0).eqns
      >>> call.primitive is J.CUSTOM_JVP and is_log_add_exp(call.params)
      True
    """
    body, _ = J.call_body(J.CUSTOM_JVP, dict(params))
    if len(body.eqns) != len(_STEPS) or len(body.invars) != 2:
        return False
    outputs = [v for e in body.eqns for v in e.outvars]
    number = {v: i for i, v in enumerate((*body.invars, *outputs))}
    steps = ((e.primitive.name, *(None if J.is_literal(v) else number.get(v) for v in e.invars)) for e in body.eqns)
    return tuple(steps) == _STEPS and body.outvars == outputs[-1:]


@jax.custom_jvp
def log_add_exp(x: Any, z: Any) -> Any:
    """``jax.numpy.logaddexp`` of real numbers; the derivative is the logistic function of their difference.

    Example:
      >>> log_add_exp(jax.numpy.float32(0.0), jax.numpy.float32(0.0)).item() == jax.numpy.log(2.0).item()
      True
    """
    return lax.add(lax.max(x, z), _log1p(lax.exp(lax.neg(lax.abs(_apart(x, z))))))


@log_add_exp.defjvp
def _(primals: tuple, tangents: tuple) -> tuple:
    (dx, dz), far = tangents, _apart(*primals)
    return log_add_exp(*primals), lax.add(lax.mul(dx, lax.logistic(far)), lax.mul(dz, lax.logistic(lax.neg(far))))


def _log1p(e: Any) -> Any:
    """``log(1 + e)`` of what is between 0 and 1, as 2 atanh(e / (2 + e)): XLA's own is one of two formulas, chosen behind."""
    if e.dtype != np.float32:
        return lax.log1p(e)
    s = lax.div(e, lax.add(e, lax.full_like(e, 2)))
    z, more = lax.mul(s, s), lax.full_like(s, _ATANH[-1])
    for c in reversed(_ATANH[:-1]):
        more = lax.add(lax.mul(more, z), lax.full_like(s, c))
    twice = lax.add(s, s)
    return lax.add(twice, lax.mul(twice, lax.mul(z, more)))


def _apart(x: Any, z: Any) -> Any:
    """The difference: of what is infinite and equal, it is 0."""
    far = lax.sub(x, z)
    infinite = lax.bitwise_and(lax.ne(far, far), lax.eq(x, z))
    return lax.select(infinite, lax.full_like(far, 0), far)
