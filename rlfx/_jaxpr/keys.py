"""Random keys and their words."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax._src.random import prng

RANDOM_WRAP, RANDOM_UNWRAP = prng.random_wrap_p, prng.random_unwrap_p


def is_key(value: Any) -> bool:
    """Whether an array, or a type of arrays, is of typed keys."""
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def zero_keys(shape: tuple, dtype: Any) -> Any:
    """Typed keys of this dtype, all words zero."""
    impl = dtype._impl
    return prng.random_wrap(jnp.zeros((*shape, *impl.key_shape), jnp.uint32), impl=impl)


def keys_of(words: Any, dtype: Any) -> Any:
    """Typed keys of this dtype from their words."""
    return prng.random_wrap(words, impl=dtype._impl)


def random_by_loop(equation: Any) -> bool:
    """Whether an operation on random keys is jax's own threefry, a loop of its own, and not straight arithmetic."""
    dtypes_of = [v.aval.dtype for v in (*equation.invars, *equation.outvars)]
    impls = [d._impl.name for d in dtypes_of if jnp.issubdtype(d, jax.dtypes.prng_key)]
    return not impls or impls[0] == "threefry2x32"
