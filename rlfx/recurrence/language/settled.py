"""Of which type a series is that is defined by itself: that of its boundary value, or the wider one of its value."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.errors import ProgramError, located

#: What Python numbers as boundaries may stand for, beside jax's default, by kind. An integer may stand for a float.
_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
_OTHERS = [{"f": x, "i": jnp.int32, "c": jnp.complex64} for x in _FLOATS]
_OTHERS += [{"f": x, "i": x} for x in (*_FLOATS, jnp.float64)]
_ROUNDS = 4


def settled(value_of: Callable[[Any], Any], boundary: Any) -> Any:
    """The type of the value, shapes and dtypes, given that of the boundary.

    A Python number as a boundary leaves the dtype to the value, as Python numbers do. But jax's sums, and functions with a
    derivative of their own, make an array of jax's default dtype of it, which then meets the program's own numbers: where
    that is the only mixture of dtypes, the boundary is of the program's.

    Args:
      value_of: the type of the value, given that of the series.
      boundary: types; those of Python numbers are weak.

    Raises:
      ProgramError: if it does not settle.
    """
    leaves, treedef = jax.tree.flatten(boundary)
    if any(leaf.weak_type for leaf in leaves):
        others = dict.fromkeys(tuple(_as(leaf, kinds) for leaf in leaves) for kinds in _OTHERS)
        for like in (boundary, *map(treedef.unflatten, others)):
            with jax.numpy_dtype_promotion("strict"), contextlib.suppress(TypeError, jax.dtypes.TypePromotionError):
                return _risen(value_of, like)
    return _risen(value_of, boundary)


def _as(leaf: Any, kinds: dict) -> Any:
    dtype = kinds.get(leaf.dtype.kind, leaf.dtype) if leaf.weak_type else leaf.dtype
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(dtype))


def _risen(value_of: Callable[[Any], Any], like: Any) -> Any:
    """The value may be wider than the boundary: (shape, dtype) rise to a fixed point."""
    for _ in range(_ROUNDS):
        value_like = _strong(value_of(like))
        if value_like == _strong(like):
            return value_like
        like = value_like
    raise ProgramError(
        located(
            f"The value that rlfx.solve defines does not settle: its type is now {value_like}, and it was {like} "
            "in the round before.",
            where=J.here(),
            fix="Give start= or end= of the value's own shape and dtype.",
        )
    )


def _strong(like: Any) -> Any:
    """The types without their weakness."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), like)
