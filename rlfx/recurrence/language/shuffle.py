"""A keyed permutation without a sort: a Feistel network on a rectangle of integers."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx._checks import expect, integer
from rlfx.errors import DomainError, located
from rlfx.recurrence.language.operands import as_array, as_key

_LIMIT = 1 << 30
_COUNT = integer(1, _LIMIT)
# Two odd constants of Mueller's and Wellons' integer hashes; any with well spread bits would do.
_SPREAD, _MIX, _HALF = np.uint32(0x9E3779B1), np.uint32(0x7FEB352D), np.uint32(1 << 31)


def shuffle(key: jax.Array, n: int, positions: Any = None) -> jax.Array:
    """A random permutation of ``0 .. n - 1``, computed position by position.

    Unlike ``jax.random.permutation``, which sorts ``n`` random numbers twice, each element is a function of its position
    and the key: elementwise arithmetic that a compiler vectorises, and any part can be computed without the rest.

    Args:
      key: a typed key.
      n: how many, a positive integer (at most 2**30).
      positions: integers in ``[0, n)`` of any shape; by default all of them, in order.

    Returns:
      int32 [n], or of the shape of ``positions``: element ``i`` of the permutation. It is a bijection for every key.

    Raises:
      DomainError: if ``n`` is not such an integer.

    A position is a point of a rectangle with ``a * b >= n`` points. Each round adds to one coordinate a keyed hash of the
    other, modulo its length (a Feistel network, so a bijection); points that land outside ``[0, n)`` go round again
    (cycle walking: Black and Rogaway, 2002). The round keys come from ``key``. It is made for mixing minibatches, not for
    cryptography, and a key has 64 bits: of the ``n!`` permutations of more than 20 elements most are never drawn.

    Example:
      >>> import jax
      >>> from rlfx.recurrence.language.shuffle import shuffle
      >>> order = shuffle(jax.random.key(0), 10)
      >>> sorted(order.tolist())
      [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
      >>> bool((shuffle(jax.random.key(0), 10, order[:3]) == order[order[:3]]).all())
      True
    """
    n = expect("n", n, _COUNT, of="shuffle", fix=f"n is an integer from 1 to {_LIMIT}.")
    key = as_key(key)
    if key is None:
        raise DomainError(located("shuffle needs a key, got None.", where=J.here(), fix="Give jax.random.key(0)."))
    if positions is not None:
        positions = as_array(positions, "shuffle")
        if not jnp.issubdtype(positions.dtype, jnp.integer):
            fact = f"shuffle: positions must be integers in [0, n), got {J.short_dtype(positions.dtype)}."
            raise DomainError(located(fact, where=J.here(), fix="Give an array of integers."))
    a, b = _rectangle(n)
    keys = jax.random.bits(key, (2 * _rounds(n) + 1,), jnp.uint32)
    start = jax.lax.iota(jnp.uint32, n) if positions is None else positions.astype(jnp.uint32)
    if n > 1:  # Rounds over odd lengths are even permutations: exchanging 0 and 1 by chance gives the odd ones.
        start = start ^ ((start < 2) & (keys[-1] >= _HALF)).astype(jnp.uint32)
    return _order(start, keys, n, a, b)


@functools.partial(J.computed_once, static_argnums=(2, 3, 4))  # and not again inside every gather that uses the order
def _order(start: jax.Array, keys: jax.Array, n: int, a: int, b: int) -> jax.Array:
    """The network; positions that it sends outside go round again."""
    order = _network(start, keys, a, b)
    if a * b > n:
        again = lambda x: jnp.where(x < n, x, _network(x, keys, a, b))  # noqa: E731
        order = jax.lax.while_loop(lambda x: jnp.any(x >= n), again, order)
    return order.astype(jnp.int32)


def _network(x: jax.Array, keys: jax.Array, a: int, b: int) -> jax.Array:
    """A bijection of ``[0, a * b)``."""
    left, right = x // np.uint32(b), x % np.uint32(b)
    for i in range(0, keys.shape[0] - 1, 2):
        left = _add(left, _hash(right, keys[i]), a)
        right = _add(right, _hash(left, keys[i + 1]), b)
    return left * np.uint32(b) + right


def _hash(x: jax.Array, key: jax.Array) -> jax.Array:
    """Sixteen well mixed bits of a coordinate and a round key."""
    x = (x ^ key) * _SPREAD
    return ((x ^ (x >> np.uint32(15))) * _MIX) >> np.uint32(16)


def _add(x: jax.Array, h: jax.Array, length: int) -> jax.Array:
    """``(x + h * length / 2**16) % length`` without a division; ``length`` is at most 2**16."""
    x = x + ((h * np.uint32(length)) >> np.uint32(16))
    return jnp.where(x >= length, x - np.uint32(length), x)


def _rectangle(n: int) -> tuple[int, int]:
    """``(a, b)`` with ``a * b = n`` and not longer than about four times its width, or else the near-square just above."""
    root = math.isqrt(n - 1) + 1
    for b in range(root, max(2, -(-root // 2)) - 1, -1):
        if n % b == 0:
            return n // b, b
    return root, -(-n // root)


def _rounds(n: int) -> int:
    """Pairs of rounds. A small rectangle needs more of them to reach its permutations evenly; there they cost nothing."""
    return 4 if n >= 1024 else 8 if n >= 64 else 16
