"""Where the axes that ``jax.vmap`` adds lie."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax._src.interpreters.batching import BatchTracer
from jax.extend.core import Primitive
from jax.interpreters import batching

_alike_p = Primitive("alike")
_alike_p.multiple_results = True


def alike(*operands: Any) -> tuple:
    """The operands of an elementwise operation, with the axes that ``jax.vmap`` added at the same places.

    Where they are at others, ``jax.vmap`` turns all operands: a product ``[b, h, t, s]`` with a mask ``[t, h, s]`` is written
    once more as ``[t, b, h, s]``. Here the axis goes to where it is farthest from the front: the others, which are masks and
    what is repeated along s, XLA makes in any order. The values are the same; where nothing is behind another axis these are
    the operands.

    Args:
      operands: of one shape.
    """
    return tuple(_alike_p.bind(*operands)) if any(map(_is_behind, operands)) else operands


def _is_behind(x: Any) -> bool:
    """Whether an axis that was added is not the first one."""
    while isinstance(x, BatchTracer):
        if x.batch_dim:
            return True
        x = x.val
    return False


def _batched(operands: tuple, dims: tuple) -> tuple:
    to = max(d for d in dims if d is not None)
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)

    def placed(x: Any, d: int | None) -> Any:
        if d is None:
            x = jnp.expand_dims(x, to)
            return jnp.broadcast_to(x, (*x.shape[:to], size, *x.shape[to + 1 :]))
        return x if d == to else jnp.moveaxis(x, d, to)

    outs = alike(*(placed(x, d) for x, d in zip(operands, dims, strict=True)))
    return outs, (to,) * len(outs)


batching.primitive_batchers[_alike_p] = _batched
