"""jax's threefry, bit for bit, unrolled for CPUs."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J


@J.computed_once
def _at(key: jax.Array, counter: jax.Array) -> tuple[Any, Any]:
    """The block of a counter."""
    return J.threefry_block.bind(key[0], key[1], np.uint32(0), counter)


@functools.partial(J.computed_once, static_argnums=(1, 2))
def _counted(key: jax.Array, count: int, bit_width: int) -> tuple[Any, ...]:
    """The words of counters 0, 1, 2, ... (64-bit counters, of which the high word stays zero); one word for up to 32 bits."""
    low = jax.lax.iota(jnp.uint32, count)
    words = J.threefry_block.bind(key[0], key[1], np.uint32(0), low)
    return words if bit_width == 64 else (words[0] ^ words[1],)


def _words(key: jax.Array, shape: tuple[int, ...], bit_width: int) -> tuple[Any, ...]:
    if math.prod(shape) >= 1 << 32:
        raise NotImplementedError(f"A draw of {math.prod(shape)} elements; split the key for more than 2**32.")
    # XLA:CPU takes many numbers at once along the last axis: the words are in one row, in which the call keeps them.
    return tuple(word.reshape(shape) for word in _counted(key, math.prod(shape), bit_width))


def _seed(seed: jax.Array) -> jax.Array:
    return jax.random.key_data(jax.random.key(seed, impl="threefry2x32"))


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.stack(_words(key, shape, 64), axis=-1)


def _fold_in(key: jax.Array, data: jax.Array) -> jax.Array:
    return jnp.stack(_at(key, data.astype(jnp.uint32)))


def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    words = _words(key, shape, bit_width)
    if bit_width == 64:
        return (words[0].astype(jnp.uint64) << np.uint64(32)) | words[1].astype(jnp.uint64)
    return words[0].astype(f"uint{bit_width}")


threefry = J.define_prng_impl(
    key_shape=(2,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="threefry2x32_unrolled",
    tag="fru",
)
"""``jax.random.key(seed, impl=threefry)``: the keys and numbers of ``jax.random.key(seed)``, sooner on a CPU.

On CPUs jax lowers threefry's twenty rounds to a loop, which costs a small program more than the rounds themselves. Here they
are unrolled, and computed once for all that use a draw. Bit-identical to jax's (with ``jax_threefry_partitionable``, its
default).
"""


def unrolled(key: jax.Array) -> jax.Array:
    """``key``, if it is one of jax's threefry keys, as one of the same numbers computed sooner; else ``key``.

    On GPUs jax has a kernel of its own for threefry: there it is ``key``, too.

    Example:
      >>> import jax
      >>> key = jax.random.key(0)
      >>> bool(jax.random.uniform(unrolled(key)) == jax.random.uniform(key))
      True
    """
    typed = J.is_key(key)
    if J.platform() != "cpu" or not typed or str(jax.random.key_impl(key)) != "threefry2x32":
        return key
    if not jax.config.jax_threefry_partitionable:  # other numbers
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=threefry)


def draw(op: Any, params: dict, key: Any, *rest: Any) -> list[jax.Array]:
    """One of jax's random primitives (``J.DRAWS``): its results, computed sooner where the key is one of jax's threefry."""
    outs = J.bind(op, params, unrolled(key), *rest)
    impl = jax.random.key_impl(key)
    return [jax.random.wrap_key_data(jax.random.key_data(out), impl=impl) if J.is_key(out) else out for out in outs]
