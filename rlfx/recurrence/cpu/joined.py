"""What is put together along features of images is put together once, and by itself.

XLA:CPU computes what is put together in one function with the parts, element by element, and once more for each shape in which
it is used: the derivative of a convolutional LSTM's gates for its products as a matrix, for its biases as an image. In a call of
its own it is a copy of parts that are computed many numbers at once.
"""

from __future__ import annotations

from typing import Any

from jax import lax

from rlfx import _jaxpr as J

CONCATENATE = J.primitive("concatenate")

#: Axes, and elements, from which it pays.
_AXES, _FEWEST = 3, 4096


def put_together(eqn: Any, operands: list) -> list | None:
    """A concatenation of features in a call of its own; None where it does not pay.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.ones((8, 8, 32))
      >>> (eqn,) = jax.make_jaxpr(lambda x: lax.concatenate([x, x], 2))(x).eqns
      >>> put_together(eqn, [x, x])[0].shape
      (8, 8, 64)
    """
    (out,), axis = eqn.outvars, eqn.params["dimension"]
    if out.aval.ndim < _AXES or axis != out.aval.ndim - 1 or out.aval.size < _FEWEST:
        return None
    return [J.computed_once(lambda *parts: lax.concatenate(parts, axis))(*operands)]
