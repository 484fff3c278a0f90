"""Prioritised replay: a K-ary sum tree as pure functions (PEARL section 4.1), and a ring of transitions over it.

Updating a leaf recomputes each ancestor from its K children: there is nothing to lock, equal writes meet in equal sums,
and rounding errors do not accumulate as they do when differences are added up the tree.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rlfx.errors import ProgramError, located


class SumTree(NamedTuple):
    """Sums of non-negative priorities.

    Attributes:
      levels: float32 ``[1]``, ``[K]``, ... ``[K^depth]``; the last holds the leaves, padded with zeros.
    """

    levels: tuple[Array, ...]

    @property
    def total(self) -> Array:
        """Sum of all priorities, float32 scalar."""
        return self.levels[0][0]

    @property
    def fanout(self) -> int:
        """K."""
        return self.levels[1].shape[0]


def make_tree(capacity: int, fanout: int = 16) -> SumTree:
    """A tree of ``capacity`` zero leaves.

    Raises:
      ProgramError: a capacity below one or a fan-out below two.

    Example:
      >>> [level.shape[0] for level in make_tree(100, fanout=8).levels]
      [1, 8, 64, 512]
    """
    if capacity < 1 or fanout < 2:
        raise ProgramError(
            located(f"A sum tree needs capacity >= 1 and fanout >= 2, got {capacity} and {fanout}.",
                    fix="Give the number of transitions to hold, and a fan-out such as 16.")
        )  # fmt: skip
    depth = max(1, math.ceil(round(math.log(capacity, fanout), 9)))
    return SumTree(tuple(jnp.zeros(fanout**i, jnp.float32) for i in range(depth + 1)))


def set_priorities(tree: SumTree, indices: Array, priorities: Array) -> SumTree:
    """Set the priorities of some leaves.

    Args:
      tree: the tree.
      indices: int32 ``[B]``; if an index occurs more than once, its last priority counts.
      priorities: float32 ``[B]``, not negative (negative and not-a-number become zero; none counts as more than the
        largest float over the number of leaves).

    Returns:
      A tree whose every node is the sum of its children.

    Example:
      >>> tree = set_priorities(make_tree(4, fanout=2), jnp.array([1, 1, 3]), jnp.array([5.0, 2.0, 1.0]))
      >>> tree.levels[-1].tolist(), float(tree.total)
      ([0.0, 2.0, 0.0, 1.0], 3.0)
    """
    K, leaves = tree.fanout, tree.levels[-1]
    most = jnp.finfo(jnp.float32).max / leaves.shape[0]  # sums stay finite
    values = jnp.where(priorities > 0.0, jnp.minimum(priorities, most), 0.0)
    # The last of equal indices: all leave their number at the leaf, and the largest stays. No sort, which is slow on CPUs.
    number = jnp.arange(indices.shape[0], dtype=leaves.dtype)
    numbered = leaves.at[indices].set(-1.0).at[indices].max(number)
    last = jnp.where(numbered[indices] == number, indices, leaves.shape[0])  # the others fall off the end
    levels = [numbered.at[last].set(values, mode="drop")]
    nodes = indices
    for level in reversed(tree.levels[:-1]):
        nodes = nodes // K
        children = levels[-1].reshape(-1, K)[nodes]
        levels.append(level.at[nodes].set(jnp.sum(children, axis=1), mode="drop"))
    return SumTree(tuple(reversed(levels)))


def find(tree: SumTree, targets: Array) -> Array:
    """The leaves at which prefix sums pass the targets, int32 ``[B]``, for targets ``[B]`` in ``[0, total)``.

    A leaf of priority zero is never returned while any leaf is positive: at each level it is the last positive child with
    no more than the target before it, and before the first positive one there is exactly zero.
    """
    K = tree.fanout
    node, rest = jnp.zeros(targets.shape, jnp.int32), targets
    slots = jnp.arange(K, dtype=jnp.int32)[None, :]
    earlier = jnp.triu(jnp.ones((K, K), jnp.float32), 1)
    for level in tree.levels[1:]:
        children = level.reshape(-1, K)[node]
        before = jnp.matmul(children, earlier, precision="highest")  # a cumulative sum is slower, everywhere
        fits = (children > 0.0) & (before <= rest[:, None])
        child = jnp.max(jnp.where(fits, slots, 0), axis=1)
        rest = jnp.maximum(rest - jnp.sum(jnp.where(slots == child[:, None], before, 0.0), axis=1), 0.0)
        node = node * K + child
    return node


def sample_indices(tree: SumTree, key: Array, batch: int) -> tuple[Array, Array]:
    """Draw leaves in proportion to their priorities, stratified.

    Returns:
      Indices, int32 ``[B]``, and their probabilities, float32 ``[B]``. All are zero if every priority is.
    """
    strata = (jnp.arange(batch, dtype=jnp.float32) + jax.random.uniform(key, (batch,))) / batch
    indices = find(tree, strata * tree.total)
    return indices, tree.levels[-1][indices] / jnp.maximum(tree.total, 1e-38)


def importance_weights(probability: Array, size: Array, beta: float) -> Array:
    """``(size * probability)^-beta``, divided by the batch's largest, float32 ``[B]`` (Schaul et al., 2016)."""
    weights = (jnp.maximum(size, 1).astype(jnp.float32) * jnp.maximum(probability, 1e-38)) ** -beta
    return weights / jnp.max(weights)


class Replay(NamedTuple):
    """A ring of transitions with priorities.

    Attributes:
      data: pytree, leaves ``[capacity, ...]``.
      tree: priorities raised to ``alpha``; new transitions get the largest so far.
      position: int32, where the next transition goes.
      size: int32, how many there are.
      largest: float32, largest priority so far, after ``alpha``.
    """

    data: Any
    tree: SumTree
    position: Array
    size: Array
    largest: Array


class Sample(NamedTuple):
    """A batch: pytree of ``[B, ...]``, its indices ``[B]`` and probabilities ``[B]``."""

    data: Any
    indices: Array
    probability: Array


def make_replay(capacity: int, example: Any, fanout: int = 16) -> Replay:
    """An empty ring for transitions like ``example`` (a pytree without a batch axis).

    Example:
      >>> replay = make_replay(8, {"reward": jnp.float32(0)})
      >>> replay = insert(replay, {"reward": jnp.arange(3.0)})
      >>> sorted(set(sample(replay, jax.random.key(0), 16).data["reward"].tolist()))
      [0.0, 1.0, 2.0]
    """
    data = jax.tree.map(lambda x: jnp.zeros((capacity, *jnp.shape(x)), jnp.result_type(x)), example)
    zero = jnp.zeros((), jnp.int32)
    return Replay(data, make_tree(capacity, fanout), zero, zero, jnp.ones((), jnp.float32))


def _capacity(replay: Replay) -> int:
    return jax.tree.leaves(replay.data)[0].shape[0]


def insert(replay: Replay, batch: Any) -> Replay:
    """Append transitions (leaves ``[B, ...]``), overwriting the oldest; they get the largest priority so far.

    Raises:
      ProgramError: more transitions than the ring holds.
    """
    capacity, count = _capacity(replay), jax.tree.leaves(batch)[0].shape[0]
    if count > capacity:
        raise ProgramError(
            located(f"{count} transitions do not fit into a replay of {capacity}.", fix="Insert smaller batches.")
        )
    slots = (replay.position + jnp.arange(count, dtype=jnp.int32)) % capacity
    return Replay(
        jax.tree.map(lambda ring, new: ring.at[slots].set(new), replay.data, batch),
        set_priorities(replay.tree, slots, jnp.broadcast_to(replay.largest, (count,))),
        (replay.position + count) % capacity,
        jnp.minimum(replay.size + count, capacity),
        replay.largest,
    )


def sample(replay: Replay, key: Array, batch: int) -> Sample:
    """Draw transitions in proportion to their priorities."""
    indices, probability = sample_indices(replay.tree, key, batch)
    return Sample(jax.tree.map(lambda ring: ring[indices], replay.data), indices, probability)


def sample_uniform(replay: Replay, key: Array, batch: int) -> Sample:
    """Draw transitions uniformly; priorities are not read."""
    indices = jax.random.randint(key, (batch,), 0, jnp.maximum(replay.size, 1))
    probability = jnp.broadcast_to(1.0 / jnp.maximum(replay.size, 1).astype(jnp.float32), (batch,))
    return Sample(jax.tree.map(lambda ring: ring[indices], replay.data), indices, probability)


def update_priorities(replay: Replay, indices: Array, priorities: Array, alpha: float = 0.6) -> Replay:
    """Set priorities (absolute errors) of transitions, raised to ``alpha``; the last of equal indices counts."""
    raised = jnp.where(priorities > 0.0, priorities, 0.0) ** alpha
    tree = set_priorities(replay.tree, indices, raised)
    return replay._replace(tree=tree, largest=jnp.maximum(replay.largest, jnp.max(raised)))


def collision_free(replay: Replay, count: int, sampled: Array) -> Array:
    """Whether the next ``count`` insertions miss every sampled index, bool scalar (PEARL section 3.2).

    A learner that still holds ``sampled`` may run while the insertion proceeds only if so.
    """
    capacity = _capacity(replay)
    return ~jnp.any((sampled - replay.position) % capacity < count)
