"""Products with data of other timesteps: what is infinite there counts no more than anything else there.

One operand is masked: zeros where the slice is not valid. The other one holds data of other timesteps there, shared by all t, of
which a mask would make a copy for every t. Zero times infinity is not a number; where a result is none, it is added up once
more, position by position, of what is valid alone. The loop that does it ends at once where there is nothing to do.
The derivative is that of the product: that of the masked operand is masked, and that of the other is made of zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlfx import _jaxpr as J
from rlfx.recurrence.execute.extremes import valued
from rlfx.recurrence.execute.ragged.part import Here, Part
from rlfx.recurrence.execute.values import OTHERS

_DOT = J.primitive("dot_general")


def of_valid(point: Here, product: Mapping, masked: Any, part: Part, side: int, axis: int, dim: Any) -> Any:
    """``dot_general`` with the parameters ``product`` of a masked array and a part as it is.

    Args:
      masked: the operand ``side``, zero where the part is not valid.
      axis: the part's axis that is contracted, of the symbolic length ``dim``.
    """
    contracted = product["dimension_numbers"][0]
    along = contracted[side][contracted[1 - side].index(axis)]

    out = _times(product, side, masked, part.data)
    if part.raw != OTHERS or part.starts[axis] is None or not J.is_inexact(out):
        return out
    first, second = lax.stop_gradient((masked, part.data))
    static = (*product.items(),), side, axis, along
    return valued(out, _restored(*static, first, second, point.valid(part, axis, dim), lax.stop_gradient(out)))


def _times(product: Mapping, side: int, masked: Any, data: Any) -> Any:
    return J.bind(_DOT, dict(product), *((masked, data) if side == 0 else (data, masked)))[0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))  # traced, and mapped, once for all products of a shape
def _restored(product: tuple, side: int, axis: int, along: int, masked: Any, data: Any, valid: Any, out: Any) -> Any:
    """The product, of what is valid alone where it is not a number."""
    wrong = jnp.isnan(out)
    count = jnp.where(jnp.any(wrong), len(valid), 0)

    def one(state: tuple) -> tuple:
        i, total = state
        pair = lax.dynamic_slice_in_dim(masked, i, 1, along), lax.dynamic_slice_in_dim(data, i, 1, axis)
        term = _times(dict(product), side, *pair)
        return i + 1, total + jnp.where(valid[i], term, 0)

    _, total = lax.while_loop(lambda state: state[0] < count, one, (jnp.int32(0), jnp.zeros_like(out)))
    return jnp.where(wrong, total, out)
