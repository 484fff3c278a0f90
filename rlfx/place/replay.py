"""Prioritised replay: a ring of transitions over a sum tree of their priorities (PEARL section 4.1)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rlfx._checks import ARRAYS, INT32, expect, instance, integer, scalar
from rlfx._sum_tree import (
    FANOUT,
    INTEGERS,
    SumTree,
    drawing,
    find,
    importance_weights,
    inside,
    make_tree,
    pairs,
    sample_indices,
    set_priorities,
    set_run,
    set_some,
    vector,
)
from rlfx.errors import ProgramError, located

__all__ = [
    "Replay", "Sample", "SumTree", "collision_free", "find", "importance_weights", "insert", "make_replay", "make_tree",
    "sample", "sample_indices", "sample_uniform", "set_priorities", "update_priorities",
]  # fmt: skip


class Replay(NamedTuple):
    """A ring of transitions with priorities.

    Attributes:
      data: pytree, leaves ``[capacity, ...]``.
      tree: priorities raised to ``alpha``; new transitions get the largest so far.
      position: int32, where the next transition goes.
      size: int32, how many there are.
      largest: float32, largest finite priority so far, after ``alpha``.
    """

    data: Any
    tree: SumTree
    position: Array
    size: Array
    largest: Array


class Sample(NamedTuple):
    """A batch.

    Attributes:
      data: pytree, leaves ``[B, ...]``.
      indices: of its transitions in the ring, int32 ``[B]``.
      probability: with which each was drawn, float32 ``[B]``.
    """

    data: Any
    indices: Array
    probability: Array


_REPLAY = instance(Replay, "a Replay", "make_replay(capacity, example)")


def make_replay(capacity: int, example: Any, fanout: int = FANOUT) -> Replay:
    """An empty ring for transitions like ``example`` (a pytree without a batch axis).

    Raises:
      ProgramError: a capacity below one, a fan-out below two, or an example without arrays.

    Example:
      >>> replay = make_replay(8, {"reward": jnp.float32(0)})
      >>> replay = insert(replay, {"reward": jnp.arange(3.0)})
      >>> sorted(set(sample(replay, jax.random.key(0), 16).data["reward"].tolist()))
      [0.0, 1.0, 2.0]
    """
    tree = make_tree(capacity, fanout)
    capacity, example = tree.capacity, expect("example", example, ARRAYS, ProgramError, of="replay")
    data = jax.tree.map(lambda x: jnp.zeros((capacity, *jnp.shape(x)), jnp.result_type(x)), example)
    zero = jnp.zeros((), jnp.int32)
    return Replay(data, tree, zero, zero, jnp.ones((), jnp.float32))


def _capacity(replay: Replay) -> int:
    return jax.tree.leaves(replay.data)[0].shape[0]


def insert(replay: Replay, batch: Any) -> Replay:
    """Append transitions (leaves ``[B, ...]``), overwriting the oldest; they get the largest priority so far.

    Raises:
      ProgramError: more transitions than the ring holds, or of another structure, shape or dtype.

    Example:
      >>> replay = insert(insert(make_replay(4, jnp.float32(0)), jnp.arange(3.0)), jnp.array([3.0, 4.0]))
      >>> replay.data.tolist(), int(replay.position), int(replay.size)
      ([4.0, 1.0, 2.0, 3.0], 1, 4)
    """
    expect("replay", replay, _REPLAY, ProgramError)
    expect("batch", batch, ARRAYS, ProgramError, of="replay")
    capacity, count = _capacity(replay), _count(replay, batch)
    if count > capacity:
        raise ProgramError(
            located(f"{count} transitions do not fit into a replay of {capacity}.", fix="Insert smaller batches.")
        )
    slots = (replay.position + jnp.arange(count, dtype=jnp.int32)) % capacity
    return Replay(
        jax.tree.map(lambda ring, new: ring.at[slots].set(new), replay.data, batch),
        set_run(replay.tree, slots, replay.largest),
        (replay.position + count) % capacity,
        jnp.minimum(replay.size + count, capacity),
        replay.largest,
    )


def _count(replay: Replay, batch: Any) -> int:
    """How many transitions a batch holds."""
    (known, tree), (given, other) = jax.tree.flatten(replay.data), jax.tree.flatten(batch)
    if tree != other:
        fact = f"replay: transitions have structure {tree}, the batch has {other}."
        raise ProgramError(located(fact, fix="Insert a pytree like the example, leaves [B, ...]."))
    count = jnp.shape(given[0])[0] if jnp.ndim(given[0]) else None
    for ring, new in zip(known, given, strict=True):
        if jnp.shape(new) != (count, *ring.shape[1:]) or jnp.result_type(new) != ring.dtype:
            fact = (
                f"replay: a leaf of the batch is {jnp.result_type(new)}{list(jnp.shape(new))}, "
                f"a transition's is {ring.dtype}{list(ring.shape[1:])}."
            )
            raise ProgramError(located(fact, fix="Insert leaves [B, ...] of the example's shapes and dtypes."))
    return int(count or 0)


def sample(replay: Replay, key: Array, batch: int) -> Sample:
    """Draw transitions in proportion to their priorities; index and probability are zero where every priority is.

    Raises:
      ProgramError: the batch is not a positive integer, or the key is none.

    Example:
      >>> replay = insert(make_replay(4, jnp.float32(0)), jnp.array([5.0, 6.0]))
      >>> replay = update_priorities(replay, jnp.array([0, 1]), jnp.array([0.0, 2.0]))
      >>> drawn = sample(replay, jax.random.key(0), 3)
      >>> drawn.data.tolist(), drawn.indices.tolist(), drawn.probability.tolist()
      ([6.0, 6.0, 6.0], [1, 1, 1], [1.0, 1.0, 1.0])
    """
    expect("replay", replay, _REPLAY, ProgramError)
    indices, probability = sample_indices(replay.tree, key, batch)
    return Sample(jax.tree.map(lambda ring: ring[indices], replay.data), indices, probability)


def sample_uniform(replay: Replay, key: Array, batch: int) -> Sample:
    """Draw transitions uniformly; priorities are not read. Probabilities are zero while the ring is empty.

    Raises:
      ProgramError: the batch is not a positive integer, or the key is none.

    Example:
      >>> replay = insert(make_replay(4, jnp.float32(0)), jnp.array([5.0, 5.0]))
      >>> drawn = sample_uniform(replay, jax.random.key(0), 3)
      >>> drawn.data.tolist(), drawn.probability.tolist()
      ([5.0, 5.0, 5.0], [0.5, 0.5, 0.5])
    """
    expect("replay", replay, _REPLAY, ProgramError)
    key, batch = drawing(key, batch)
    indices = jax.random.randint(key, (batch,), 0, jnp.maximum(replay.size, 1), jnp.int32)
    one = jnp.where(replay.size > 0, 1.0 / jnp.maximum(replay.size, 1).astype(jnp.float32), 0.0)
    probability = jnp.broadcast_to(one, (batch,))
    return Sample(jax.tree.map(lambda ring: ring[indices], replay.data), indices, probability)


def update_priorities(replay: Replay, indices: Array, priorities: Array, alpha: float = 0.6) -> Replay:
    """Set priorities (absolute errors) of transitions, raised to ``alpha``; the last of equal indices counts.

    An infinite one counts as the largest finite priority so far: one error that overflows does not outweigh the ring.
    Indices known only at run time that hold no transition are dropped.

    Raises:
      ProgramError: other shapes or kinds of numbers, or an index, known now, that holds no transition.

    Example:
      >>> replay = insert(make_replay(4, jnp.float32(0)), jnp.arange(2.0))
      >>> replay = update_priorities(replay, jnp.array([0, 1]), jnp.array([4.0, jnp.inf]), alpha=0.5)
      >>> replay.tree.leaves[:3].tolist(), float(replay.largest)
      ([2.0, 2.0, 0.0], 2.0)
    """
    expect("replay", replay, _REPLAY, ProgramError)
    indices, priorities = pairs(indices, priorities)
    alpha = expect("alpha", alpha, scalar(), ProgramError, of="replay")
    held = inside(indices, replay.size)
    raised = jnp.where(priorities > 0.0, priorities, 0.0) ** alpha
    finite = jnp.isfinite(raised)
    largest = jnp.max(jnp.where(held & finite, raised, 0.0), initial=replay.largest)
    tree = set_some(replay.tree, indices, jnp.where(finite, raised, largest), held)
    return replay._replace(tree=tree, largest=largest)


def collision_free(replay: Replay, count: int, sampled: Array) -> Array:
    """Whether the next ``count`` insertions miss every sampled index, bool scalar (PEARL section 3.2).

    A learner that still holds ``sampled`` may run while the insertion proceeds only if so.

    Example:
      >>> replay = insert(make_replay(4, jnp.float32(0)), jnp.arange(3.0))  # the next ones go to 3 and 0
      >>> [bool(collision_free(replay, count, jnp.array([0, 2]))) for count in (1, 2)]
      [True, False]
    """
    expect("replay", replay, _REPLAY, ProgramError)
    count = expect("count", count, integer(0, INT32), ProgramError, of="replay")
    capacity, sampled = _capacity(replay), vector("sampled", sampled, INTEGERS, jnp.int32)
    return ~jnp.any((sampled - replay.position) % capacity < count)
