"""Fused steps through XLA: a scan over a structure of arrays, for all environments or tile by tile."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from rlfx.transforms._fuse_program import StepProgram
from rlfx.transforms._fuse_share import share
from rlfx.transforms._scalarize import Target

Flat = Sequence[jax.Array]


def scan(program: StepProgram, length: int, shared: Flat, t: jax.Array, b: jax.Array, carry: Flat, xs: Flat):
    """All environments of ``b`` (``int32[N]``) advance together: each scalar of the carry is one ``[N]`` array.

    Returns the carry's scalars ``[N]`` and the outputs' scalars ``[K, N]``.
    """
    step = share(program.scalar_step(Target(block=b.shape, dense_matmul=True)), b.size)
    times = t + jnp.arange(length, dtype=jnp.int32)

    def body(c, x):
        one = jnp.minimum(x[0].astype(jnp.float32) + 1.0, 1.0)
        return step(one, shared, x[0], b, c, x[1])

    return jax.lax.scan(body, list(carry), (times, list(xs)))


def tiles(program: StepProgram, length: int, shared: Flat, t: jax.Array, b: jax.Array, carry: Flat, xs: Flat,
          *, tile: int):
    """Tiles of environments one after the other, each for all K steps, so that the state stays in the nearest cache."""
    count = b.shape[0] // tile
    def folded(x):
        return x.reshape(count, tile)

    per_tile = [x.reshape(length, count, tile).swapaxes(0, 1) for x in xs]
    carry, ys = jax.lax.map(
        lambda args: scan(program, length, shared, t, *args), (folded(b), [folded(x) for x in carry], per_tile)
    )
    return [x.reshape(-1) for x in carry], [y.swapaxes(0, 1).reshape(length, -1) for y in ys]
