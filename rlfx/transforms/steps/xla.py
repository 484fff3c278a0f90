"""Fused steps through XLA: a scan over a structure of arrays, for all environments or tile by tile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.transforms.steps.program import StepProgram
from rlfx.transforms.steps.scalarize import Target
from rlfx.transforms.steps.share import one_function, staged

Flat = Sequence[jax.Array]


def scan(program: StepProgram, length: int, shared: Flat, t: jax.Array, b: jax.Array, carry: Flat, xs: Flat):
    """All environments of ``b`` (``int32[N]``) advance together: each scalar of the carry is one ``[N]`` array.

    Returns the carry's scalars ``[N]`` and, for each leaf of the outputs, its scalars ``[K, N]`` or one array
    ``[K, ..., N]``.
    """
    advance, whole = _loop(program, length, shared, b.size)
    return whole(advance)(list(shared), t, b, list(carry), list(xs))


def tiles(
    program: StepProgram, length: int, shared: Flat, t: jax.Array, b: jax.Array, carry: Flat, xs: Flat, *, tile: int
):
    """Tiles of environments one after the other, each for all K steps, so that the state stays in the nearest cache."""
    count = b.shape[0] // tile
    advance, whole = _loop(program, length, shared, tile)

    def folded(x):
        return x.reshape(count, tile)

    per_tile = [x.reshape(length, count, tile).swapaxes(0, 1) for x in xs]
    run = whole(lambda shared, t, *args: jax.lax.map(lambda one: advance(shared, t, *one), args))
    carry, ys = run(list(shared), t, folded(b), [folded(x) for x in carry], per_tile)
    joined = jax.tree.map(lambda y: jnp.moveaxis(y, 0, -2).reshape(*y.shape[1:-1], count * tile), ys)
    return [x.reshape(-1) for x in carry], joined


def _loop(program: StepProgram, length: int, shared: Flat, n: int) -> tuple[Callable, Callable]:
    """``(shared, t, b, carry, xs) -> (carry, ys)`` for n environments, and what is to be put around it."""
    step = program.scalar_step(Target(block=(n,), dense_matmul=True))
    given: Callable[[Any], Callable] = lambda shared: functools.partial(step, shared)  # noqa: E731
    whole: Callable[[Callable], Callable] = lambda fn: fn  # noqa: E731
    if J.platform() == "cpu":
        stages = staged(step, _avals(program, shared, n), n)
        given = lambda shared: functools.partial(stages, stages.weights(shared), shared)  # noqa: E731
        whole = whole if stages.has_products else one_function

    def advance(shared, t, b, carry, xs):
        step, times = given(shared), t + jnp.arange(length, dtype=jnp.int32)
        return jax.lax.scan(lambda c, x: step(x[0], b, c, x[1]), carry, (times, xs))

    return advance, whole


def _avals(program: StepProgram, shared: Flat, n: int) -> list[Any]:
    def blocks(dtypes):
        return [jax.ShapeDtypeStruct((n,), d) for d in dtypes]

    time, index = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((n,), jnp.int32)
    kinds = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shared]
    return [kinds, time, index, blocks(program.carry.dtypes), blocks(program.xs.dtypes)]
