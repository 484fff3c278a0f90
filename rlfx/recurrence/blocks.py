"""Blocks of timesteps for a learner without recurrences: gradients accumulate, activations of one block exist at a time.

TimeRL section 5.3 (incrementalization) trades speed for memory; on a CPU blocks that fit the cache are faster, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.recurrence.cost import bytes_of, points
from rlfx.recurrence.learner import Learner, is_float
from rlfx.recurrence.program import Program
from rlfx.recurrence.schedule import Parallel

#: Bytes of activations in one block, by platform: about what the caches hold. None: as large as possible.
CACHE_BYTES = {"cpu": 16 << 20}


def can_block(learner: Learner) -> bool:
    """Whether each timestep of the learner's region is computed from stored values of that timestep alone."""
    program = learner.program
    loss_only = learner.targets == (program.loss,)
    stages = learner.region.stages
    return loss_only and all(isinstance(s, Parallel) and all(e.is_simultaneous for e in s.equations) for s in stages)


def choose_block(learner: Learner, batch: int, platform: str) -> int:
    """The number of timesteps in a block: the divisor of T whose activations come closest to the cache.

    A directive of the program (``incrementalize(program, over="t", block_size=n)``) comes first.
    """
    program = learner.program
    asked = program.directives.get("block_size", {}).get("t")
    if asked is not None:
        return asked
    length, room = program.domain.length, CACHE_BYTES.get(platform)
    if room is None:
        return length
    per_step = activation_bytes(learner, batch)
    fitting = max(1, int(room // max(per_step, 1)))
    if fitting >= length:
        return length
    divisors = [d for d in range(1, length + 1) if length % d == 0]
    best = max(d for d in divisors if d <= fitting)
    # A poor divisor (T prime) costs more in loop overhead than one ragged block does.
    return best if 2 * best >= fitting else fitting


def activation_bytes(learner: Learner, batch: int) -> int:
    """Bytes of all values that one timestep of the region computes."""
    program, domain = learner.program, learner.program.domain
    equations = [e for s in learner.region.stages for e in s.equations]  # type: ignore[union-attr]
    per_point = sum(
        bytes_of(v, domain) * (batch if "b" in program.dims_of(v) else 1)
        for e in equations
        for v in e.outputs
        if is_float(v) and "t" in program.dims_of(v)
    )
    return per_point


def accumulate(
    block_gradient: Callable[[Any, Sequence[Any]], Any], times: Any, stacked: Sequence[Any], block: int, zero: Any
) -> Any:
    """``sum over blocks of block_gradient(times of the block, stacked values of the block)``.

    Args:
      times: int32 [T].
      stacked: values with leading axis [T].
      block: timesteps in a block; the last one may be shorter.
      zero: what to add to.
    """
    length = times.shape[0]
    whole = length // block

    def cut(x: Any) -> Any:
        return x[: whole * block].reshape((whole, block) + x.shape[1:])

    def add(total, inputs):
        step_times, *values = inputs
        return jax.tree.map(jnp.add, total, block_gradient(step_times, values)), None

    total, _ = jax.lax.scan(add, zero, (cut(times), *map(cut, stacked)))
    if whole * block < length:
        rest = [x[whole * block :] for x in (times, *stacked)]
        total, _ = add(total, rest)
    return total


def count_points(program: Program, lengths: Any, batch: int) -> Any:
    """How many points the domain has."""
    if lengths is None:
        return np.float32(points(frozenset("t"), program.domain) * batch)
    return jnp.sum(lengths).astype(jnp.float32)
