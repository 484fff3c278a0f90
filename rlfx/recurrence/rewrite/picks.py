"""One element of a short axis as a masked sum: ``log_probs[action]``, ``q[action]``.

Mapped over timesteps and environments, such a read is a gather, and its derivative a scatter: on a TPU a loop with an iteration
for every point, on a GPU atomic additions. A comparison, a choice and a sum are fused with what is around them, and so is their
derivative.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Equation, Program

DYNAMIC_SLICE = J.primitive("dynamic_slice")


def with_picks(program: Program, most: int) -> Program:
    """The program with masked sums for reads of one element along an axis of values with at most ``most`` elements.

    Meaning-preserving: of what is not read nothing counts, infinities neither (but -0.0 is 0.0).
    """

    def instead(equation: Equation) -> Callable | None:
        if equation.op is not DYNAMIC_SLICE or equation.is_ragged:
            return None
        x, sizes = equation.inputs[0], equation.params["slice_sizes"]
        short = [axis for axis, n in enumerate(x.shape) if sizes[axis] != n]
        number = jnp.issubdtype(x.dtype, jnp.number)
        if not short or any(sizes[axis] != 1 for axis in short) or not number or math.prod(x.shape) > most:
            return None
        return functools.partial(_pick, axes=short)

    return exchanged(program, instead)


def _pick(x: Any, *starts: Any, axes: Sequence[int]) -> Any:
    """Where a slice would begin beyond an axis, its last element."""
    for axis in axes:
        n = x.shape[axis]
        index = jnp.clip(starts[axis], 0, n - 1)
        mine = jax.lax.broadcasted_iota(index.dtype, x.shape, axis) == index
        x = jnp.sum(jnp.where(mine, x, jnp.zeros_like(x)), axis, dtype=x.dtype, keepdims=True)
    return x
