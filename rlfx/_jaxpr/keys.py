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


#: Generators of which ``jax.vmap`` makes other numbers: what one key gives depends on the others that are drawn from with it.
_TOGETHER = ("rbg", "unsafe_rbg")


def drawn_together(dtype: Any) -> str | None:
    """The generator of keys of this dtype, where its numbers depend on what is drawn together; None of any other."""
    name = dtype._impl.name if jnp.issubdtype(dtype, jax.dtypes.prng_key) else None
    return name if name in _TOGETHER else None


def draws_together(equation: Any) -> str | None:
    """The generator of an operation, where its numbers depend on what is drawn together; None of any other operation."""
    op, inputs = equation.primitive.name, [v.aval for v in equation.invars]
    if op == "rng_bit_generator":
        return "jax.lax.rng_bit_generator"
    if op not in ("random_bits", "random_gamma", "random_split", "random_fold_in"):
        return None
    name = drawn_together(inputs[0].dtype)
    return None if name == "rbg" and op in ("random_split", "random_fold_in") else name  # which are threefry's
