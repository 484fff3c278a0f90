"""Prioritised replay: a K-ary sum tree as pure functions (PEARL section 4.1), and a ring of transitions over it.

Updating a leaf recomputes each ancestor from its K children: there is nothing to lock, equal writes meet in equal sums,
and rounding errors do not accumulate as they do when differences are added up the tree.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rlfx._checks import ARRAYS, INT32, KEY, POSITIVE, Kind, expect, instance, integer, integers, reals, scalar
from rlfx.errors import ProgramError, located

_TINY = float(jnp.finfo(jnp.float32).tiny)  # anything smaller may be flushed to zero


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SumTree:
    """Sums of non-negative priorities.

    Attributes:
      levels: float32 ``[1]``, ``[K]``, ... ``[K^depth]``; the last holds the leaves, padded with zeros.
      capacity: how many leaves there are, the padding not counted.
    """

    levels: tuple[Array, ...]
    capacity: int = dataclasses.field(metadata={"static": True})

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
    capacity = expect("capacity", capacity, POSITIVE, ProgramError, of="replay")
    fanout = expect("fanout", fanout, integer(2, INT32), ProgramError, of="replay")
    depth = 1
    while fanout**depth < capacity:
        depth += 1
    return SumTree(tuple(jnp.zeros(fanout**i, jnp.float32) for i in range(depth + 1)), capacity)


_INTEGERS, _REALS = integers(1, "[B]"), reals(1, "[B]")


def _vector(label: str, values: Any, kind: Kind, dtype: Any) -> Array:
    """``values``, which are of a kind, as a vector of ``dtype``."""
    return jnp.asarray(expect(label, values, kind, ProgramError, of="replay")).astype(dtype)


def _pairs(indices: Any, priorities: Any) -> tuple[Array, Array]:
    """Indices and their priorities, of one length."""
    indices = _vector("indices", indices, _INTEGERS, jnp.int32)
    priorities = _vector("priorities", priorities, _REALS, jnp.float32)
    if indices.shape != priorities.shape:
        fact = f"replay: {priorities.shape[0]} priorities for {indices.shape[0]} indices."
        raise ProgramError(located(fact, fix="Give one priority for each index."))
    return indices, priorities


def _inside(indices: Array, size: Any) -> Array:
    """Which indices hold something, bool ``[B]``; those that are known now and do not are an error."""
    inside = (indices >= 0) & (indices < size)
    if not isinstance(inside, jax.core.Tracer) and not bool(inside.all()):
        wrong = int(indices[int(jnp.argmin(inside))])
        fact = f"replay: the index {wrong} is not one of the {int(size)} transitions, 0, ..., {int(size) - 1}."
        raise ProgramError(located(fact, fix="Give the indices that `sample` returned."))
    return inside


def set_priorities(tree: SumTree, indices: Array, priorities: Array) -> SumTree:
    """Set the priorities of some leaves.

    Args:
      tree: the tree.
      indices: int32 ``[B]``; if an index occurs more than once, its last priority counts. Where the values are known
        only at run time, those outside of the capacity are dropped.
      priorities: float32 ``[B]``, not negative (negative and not-a-number become zero; none counts as more than the
        largest float over the number of leaves).

    Returns:
      A tree whose every node is the sum of its children.

    Raises:
      ProgramError: other shapes or kinds of numbers, or an index, known now, outside of the capacity.

    Example:
      >>> tree = set_priorities(make_tree(4, fanout=2), jnp.array([1, 1, 3]), jnp.array([5.0, 2.0, 1.0]))
      >>> tree.levels[-1].tolist(), float(tree.total)
      ([0.0, 2.0, 0.0, 1.0], 3.0)
    """
    expect("tree", tree, _TREE, ProgramError, of="replay")
    indices, priorities = _pairs(indices, priorities)
    return _set(tree, indices, priorities, _inside(indices, tree.capacity))


def _set(tree: SumTree, indices: Array, priorities: Array, keep: Array) -> SumTree:
    K, leaves = tree.fanout, tree.levels[-1]
    indices = jnp.where(keep, indices, leaves.shape[0])  # the others fall off the end, at every level
    most = jnp.finfo(jnp.float32).max / leaves.shape[0]  # sums stay finite
    values = jnp.where(priorities > 0.0, jnp.minimum(priorities, most), 0.0)
    # The last of equal indices: all leave their number at the leaf, and the largest stays. No sort, which is slow on CPUs.
    number = jnp.arange(indices.shape[0], dtype=leaves.dtype)
    numbered = leaves.at[indices].set(-1.0).at[indices].max(number)
    last = jnp.where(numbered[indices] == number, indices, leaves.shape[0])
    levels = [numbered.at[last].set(values, mode="drop")]
    nodes = indices
    for level in reversed(tree.levels[:-1]):
        nodes = nodes // K
        children = levels[-1].reshape(-1, K)[nodes]
        levels.append(level.at[nodes].set(jnp.sum(children, axis=1), mode="drop"))
    return SumTree(tuple(reversed(levels)), tree.capacity)


_TREE = instance(SumTree, "a SumTree", "make_tree(capacity)")


def _drawing(key: Any, batch: Any) -> tuple[Array, int]:
    """The key and the number of what is drawn."""
    key = expect("key", key, KEY, ProgramError, of="replay")
    return key, expect("batch", batch, POSITIVE, ProgramError, of="replay")


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

    Raises:
      ProgramError: the batch is not a positive integer, or the key is none.
    """
    expect("tree", tree, _TREE, ProgramError, of="replay")
    key, batch = _drawing(key, batch)
    strata = (jnp.arange(batch, dtype=jnp.float32) + jax.random.uniform(key, (batch,), jnp.float32)) / batch
    indices = find(tree, strata * tree.total)
    return indices, tree.levels[-1][indices] / jnp.maximum(tree.total, _TINY)


def importance_weights(probability: Array, size: Array | int, beta: Array | float) -> Array:
    """``(size * probability)^-beta``, divided by the batch's largest, float32 ``[B]`` (Schaul et al., 2016).

    What is drawn with probability zero, from a tree without priorities, weighs nothing.

    Raises:
      ProgramError: the probabilities are no vector of real numbers, or size and beta are none.

    Example:
      >>> importance_weights(jnp.array([0.5, 0.25, 0.0]), 4, 1.0).tolist()
      [0.5, 1.0, 0.0]
    """
    probability = _vector("probability", probability, _REALS, jnp.float32)
    size = expect("size", size, scalar(whole=True), ProgramError, of="replay")
    beta = expect("beta", beta, scalar(), ProgramError, of="replay")
    drawn = probability >= _TINY
    expected = jnp.maximum(jnp.asarray(size, jnp.float32), 1.0) * jnp.where(drawn, probability, 1.0)
    weights = jnp.where(drawn, expected ** -jnp.asarray(beta, jnp.float32), 0.0)
    return weights / jnp.maximum(jnp.max(weights, initial=0.0), _TINY)


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
    """A batch: pytree of ``[B, ...]``, its indices ``[B]`` and probabilities ``[B]``."""

    data: Any
    indices: Array
    probability: Array


_REPLAY = instance(Replay, "a Replay", "make_replay(capacity, example)")


def make_replay(capacity: int, example: Any, fanout: int = 16) -> Replay:
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
        _set(replay.tree, slots, jnp.broadcast_to(replay.largest, (count,)), jnp.ones(count, bool)),
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
    """
    expect("replay", replay, _REPLAY, ProgramError)
    indices, probability = sample_indices(replay.tree, key, batch)
    return Sample(jax.tree.map(lambda ring: ring[indices], replay.data), indices, probability)


def sample_uniform(replay: Replay, key: Array, batch: int) -> Sample:
    """Draw transitions uniformly; priorities are not read. Probabilities are zero while the ring is empty.

    Raises:
      ProgramError: the batch is not a positive integer, or the key is none.
    """
    expect("replay", replay, _REPLAY, ProgramError)
    key, batch = _drawing(key, batch)
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
      >>> replay.tree.levels[-1][:3].tolist(), float(replay.largest)
      ([2.0, 2.0, 0.0], 2.0)
    """
    expect("replay", replay, _REPLAY, ProgramError)
    indices, priorities = _pairs(indices, priorities)
    alpha = expect("alpha", alpha, scalar(), ProgramError, of="replay")
    held = _inside(indices, replay.size)
    raised = jnp.where(priorities > 0.0, priorities, 0.0) ** alpha
    finite = jnp.isfinite(raised)
    largest = jnp.max(jnp.where(held & finite, raised, 0.0), initial=replay.largest)
    tree = _set(replay.tree, indices, jnp.where(finite, raised, largest), held)
    return replay._replace(tree=tree, largest=largest)


def collision_free(replay: Replay, count: int, sampled: Array) -> Array:
    """Whether the next ``count`` insertions miss every sampled index, bool scalar (PEARL section 3.2).

    A learner that still holds ``sampled`` may run while the insertion proceeds only if so.
    """
    expect("replay", replay, _REPLAY, ProgramError)
    count = expect("count", count, integer(0, INT32), ProgramError, of="replay")
    capacity, sampled = _capacity(replay), _vector("sampled", sampled, _INTEGERS, jnp.int32)
    return ~jnp.any((sampled - replay.position) % capacity < count)
