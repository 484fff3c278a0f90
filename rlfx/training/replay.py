"""Reading a `History` at random: times whose sequences are whole, n-step transitions, and priorities over it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlfx._checks import KEY, POSITIVE, expect
from rlfx._sum_tree import SumTree, importance_weights, make_tree, sample_indices, set_priorities
from rlfx.errors import TrainingError, located


def draw_times(key: jax.Array, shape: tuple[int, ...], now: Any, capacity: int, *, length: int = 1) -> jax.Array:
    """Times at which sequences begin that a `History` holds whole, uniform: int32 of ``shape``.

    Args:
      key: a typed key.
      shape: how many.
      now: the absolute time of what was written last, ``t.now``.
      capacity: the history's.
      length: timesteps of a sequence: ``memory[i + jnp.arange(length)[:, None]]`` reads them, time first.

    Returns:
      Each from ``max(now - capacity + 1, 0)`` to ``now - length + 1``; before there is a whole sequence, the oldest. What such
      a sequence lacks reads as NaN: learn from ``now >= length`` on.

    Example:
      >>> draw_times(jax.random.key(0), (5,), 11, 4, length=3).tolist()
      [9, 8, 8, 9, 9]
    """
    key = expect("key", key, KEY, TrainingError, of="draw_times")
    oldest = jnp.maximum(now - _whole("draw_times", capacity, length) + 1, 0)
    return jax.random.randint(key, shape, oldest, jnp.maximum(now - length + 2, oldest + 1), jnp.int32)


def _whole(name: str, capacity: int, length: int) -> int:
    capacity = expect("capacity", capacity, POSITIVE, TrainingError, of=name)
    length = expect("length", length, POSITIVE, TrainingError, of=name)
    if length > capacity:
        fact = f"{name}: a history of {capacity} timesteps holds no sequence of {length}."
        raise TrainingError(located(fact, fix="Give a larger capacity, or a smaller length."))
    return capacity


class NStep(NamedTuple):
    """What followed the first of n transitions.

    Attributes:
      reward: the discounted sum up to the end of the episode, or of all n, ``float[...]``.
      discount: what the value of the observation after the last of them counts: 0 after a termination, ``float[...]``.
      last: which of them that is, ``int32[...]``: ``x.final_obs[last]``.
    """

    reward: jax.Array
    discount: jax.Array
    last: jax.Array


def n_step(reward: jax.Array, terminated: jax.Array, truncated: jax.Array, *, gamma: float) -> NStep:
    """The n-step return of n consecutive transitions, without its value.

    ``target = r.reward + r.discount * value(final_obs[r.last])``. A termination has no future; a truncation ends the sum
    too, and has a value.

    Args:
      reward: ``float[n, ...]``, from the first transition on: time first, as ``memory[i + jnp.arange(n)[:, None], b]`` is.
        Integers count as floats.
      terminated: ``bool[n, ...]``.
      truncated: ``bool[n, ...]``.
      gamma: the discount of a step.

    Sutton and Barto 2018, eq. 7.1.

    Example:
      >>> ends = jnp.array([False, True, False])
      >>> n_step(jnp.array([1.0, 2.0, 4.0]), ends, ~ends & False, gamma=0.5)
      NStep(reward=Array(2., dtype=float32), discount=Array(0., dtype=float32), last=Array(1, dtype=int32))
    """
    if not jnp.issubdtype(reward.dtype, jnp.floating):  # clipped ones may be kept as int8
        reward = reward.astype(jnp.float32)
    done = terminated | truncated
    n = done.shape[0]
    steps = jnp.arange(n).reshape(-1, *(1,) * (done.ndim - 1))
    last = jnp.where(done.any(0), jnp.argmax(done, axis=0), n - 1).astype(jnp.int32)
    counted = steps <= last[None]
    weight = jnp.asarray(gamma, reward.dtype) ** steps.astype(reward.dtype)
    ended = jnp.take_along_axis(terminated, last[None], axis=0)[0]
    discount = jnp.where(ended, 0, jnp.asarray(gamma, reward.dtype) ** (last + 1).astype(reward.dtype))
    return NStep(jnp.sum(jnp.where(counted, weight * reward, 0), axis=0), discount, last)


class Drawn(NamedTuple):
    """Transitions drawn by priority: ``memory[i, b]``.

    Attributes:
      i: absolute times, ``int32[count]``.
      b: environments, ``int32[count]``.
      weight: importance weights, at most 1, ``float32[count]``.
    """

    i: jax.Array
    b: jax.Array
    weight: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Priorities:
    """Priorities of what a `History` of a batch of environments holds: a sum tree, beside it in a `Shared` carry.

    Each timestep: ``priorities = carry.priorities.written(t.now)``, ``drawn = priorities.draw(t.shared_key, count, t.now)``,
    ``memory[drawn.i, drawn.b]``, and ``priorities.update(drawn, errors)``. None of it varies with the environment, so it is
    computed once for all of them.

    Attributes:
      tree: priorities raised to ``alpha``; the leaf of time i of environment b is ``(i % capacity) * batch + b``.
      largest: the largest so far, after ``alpha``, float32: what a new transition gets.
      capacity: timesteps, the history's.
      batch: environments.
      length: timesteps of a sequence that is read from the time that is drawn: only whole ones are. Before there is one, what
        is drawn is not whole, and what it lacks reads as NaN: learn from ``now >= length`` on.

    Schaul et al. 2016, section 3.3, proportional; stratified draws.

    Example:
      >>> p = Priorities.of(4, batch=2)
      >>> for now in range(6):
      ...     p = p.written(now)
      >>> drawn = p.draw(jax.random.key(0), 8, 5)
      >>> sorted(set(drawn.i.tolist())), drawn.weight.tolist()[:2]
      ([2, 3, 4, 5], [1.0, 1.0])
    """

    tree: SumTree
    largest: jax.Array
    capacity: int = dataclasses.field(metadata={"static": True})
    batch: int = dataclasses.field(metadata={"static": True})
    length: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, capacity: int, *, batch: int, length: int = 1) -> Priorities:
        """Nothing written yet.

        Raises:
          TrainingError: a number is not a positive integer, or the history holds no sequence of that length.
        """
        capacity = _whole("Priorities", capacity, length)
        batch = expect("batch", batch, POSITIVE, TrainingError, of="Priorities")
        return cls(make_tree(capacity * batch), jnp.ones((), jnp.float32), capacity, batch, int(length))

    def written(self, now: Any) -> Priorities:
        """After time ``now`` was written over the oldest: the sequence that it completes can be drawn, the oldest can not."""
        begin = now - self.length + 1
        whole = jnp.where(begin >= 0, self.largest, 0.0)
        both = [(now, jnp.zeros((), jnp.float32)), (jnp.maximum(begin, 0), whole)][-self._slots :]
        leaves = jnp.concatenate([self._leaf(i, jnp.arange(self.batch)) for i, _ in both])
        values = jnp.concatenate([jnp.broadcast_to(value, (self.batch,)) for _, value in both])
        return dataclasses.replace(self, tree=set_priorities(self.tree, leaves, values))

    @property
    def _slots(self) -> int:
        return 1 if self.length == 1 else 2

    def _leaf(self, i: Any, b: Any) -> jax.Array:
        return jnp.asarray(i % self.capacity, jnp.int32) * self.batch + b.astype(jnp.int32)

    def draw(self, key: jax.Array, count: int, now: Any, *, beta: Any = 1.0) -> Drawn:
        """``count`` times and environments in proportion to their priorities, and weights ``(size p)^-beta / max``."""
        leaf, probability = sample_indices(self.tree, key, count)
        slot, b = leaf // self.batch, leaf % self.batch
        size = jnp.clip(now - self.length + 2, 1, self.capacity - self.length + 1) * self.batch
        return Drawn(now - (now - slot) % self.capacity, b, importance_weights(probability, size, beta))

    def update(self, drawn: Drawn, errors: jax.Array, *, alpha: float = 0.6, least: float = 1e-3) -> Priorities:
        """Those of what was drawn become ``(|error| + least)^alpha``; ``errors`` are ``float[count]``."""
        raised = (jnp.abs(errors) + least) ** alpha
        finite = jnp.isfinite(raised)
        largest = jnp.maximum(self.largest, jnp.max(jnp.where(finite, raised, 0.0)))
        tree = set_priorities(self.tree, self._leaf(drawn.i, drawn.b), jnp.where(finite, raised, largest))
        return dataclasses.replace(self, tree=tree, largest=largest)
