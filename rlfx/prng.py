"""A fast counter-based generator as a typed key implementation."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx._jaxpr import computed_once, define_prng_impl, drawn_together

_GOLDEN = np.uint32(0x9E3779B9)
# What each use of a key adds to its second word, so that their streams never meet.
_SEED, _SPLIT, _FOLD, _BITS = (np.uint32(c) for c in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344))


def _mix(x):
    """A bijection of 32-bit words with low bias (Wellons' lowbias32): two multiplications."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _block(k0, k1, counter):
    """A permutation of 64-bit blocks: three Feistel rounds of ``_mix`` on ``(k0 + counter * golden ratio, k1)``."""
    left, right = k0 + counter * _GOLDEN, k1
    right = right ^ _mix(left)
    left = left + _mix(right)
    return left, right ^ _mix(left + np.uint32(0xA5A5A5A5))


@computed_once
def _at(key, counter):
    """The block of a counter that was folded in."""
    return _block(key[0], key[1] ^ _FOLD, counter)


@functools.partial(computed_once, static_argnums=(1, 2))
def _words(key, count, use):
    return _block(key[0], key[1] ^ use, jax.lax.iota(jnp.uint32, count))


def _seed(seed):
    if seed.shape:
        raise TypeError(f"PRNG key seed must be a scalar; got shape {seed.shape}.")
    wide = np.dtype(seed.dtype).itemsize == 8
    low = (seed & seed.dtype.type(0xFFFFFFFF)).astype(jnp.uint32) if wide else seed.astype(jnp.uint32)
    high = (seed >> 32).astype(jnp.uint32) if wide else jnp.zeros((), jnp.uint32)
    return jnp.stack(_block(low, high ^ _SEED, jnp.uint32(1)))


def _split(key, shape):
    words = _words(key, math.prod(shape), _SPLIT)
    return jnp.stack(words, axis=-1).reshape(*shape, 2)


def _fold_in(key, data):
    return jnp.stack(_at(key, data.astype(jnp.uint32)))


def _random_bits(key, bit_width, shape):
    size = math.prod(shape)
    if bit_width == 64:
        left, right = (word.astype(jnp.uint64) for word in _words(key, size, _BITS))
        return ((left << np.uint64(32)) | right).reshape(shape)
    bits = jnp.concatenate(_words(key, (size + 1) // 2, _BITS))[:size].reshape(shape)
    return bits if bit_width == 32 else (bits >> np.uint32(32 - bit_width)).astype(f"uint{bit_width}")


fast_prng = define_prng_impl(
    key_shape=(2,), seed=_seed, split=_split, random_bits=_random_bits, fold_in=_fold_in, name="feistel32", tag="fst"
)
"""``jax.random.key(seed, impl=fast_prng)``: keys whose random numbers cost less than threefry's.

A 64-bit key and a 32-bit counter go through a three-round Feistel network, a permutation, so that the children of a key
are distinct, and so are the children of distinct keys under one ``fold_in``. Not for cryptography. A draw depends on
(key, shape): the first values of a longer draw are not those of a shorter one, as with jax's own generators.
"""


def seeded(key: jax.Array, impl: Any) -> jax.Array:
    """A key of another generator, seeded by the numbers of ``key``; a key of that generator is itself.

    Of jax's ``rbg`` the words of the key are the seed: its numbers depend on the other keys that are drawn from with it.

    Args:
      key: a typed key, ``[]``.
      impl: what ``jax.random.key(seed, impl=impl)`` takes.

    Raises:
      ValueError, TypeError: jax knows no such generator.

    Example:
      >>> key = seeded(jax.random.key(0), fast_prng)
      >>> key.dtype == jax.random.key(0, impl=fast_prng).dtype, bool(seeded(key, fast_prng) == key)
      (True, True)
    """
    other = jax.eval_shape(lambda: jax.random.key(0, impl=impl))
    if key.dtype == other.dtype:
        return key
    if drawn_together(key.dtype):
        first, *words = jnp.split(jax.random.key_data(key), (2, 3))
        key = functools.reduce(jax.random.fold_in, (w[0] for w in words), jax.random.wrap_key_data(first, impl="threefry2x32"))
        if key.dtype == other.dtype:
            return key
    shape = jax.eval_shape(jax.random.key_data, other).shape
    return jax.random.wrap_key_data(jax.random.bits(key, shape, jnp.uint32), impl=impl)
