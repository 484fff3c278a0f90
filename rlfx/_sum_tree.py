"""A K-ary sum tree as pure functions (PEARL section 4.1): priorities that are set, added up, and drawn in proportion to.

Updating a leaf recomputes each ancestor from its K children: there is nothing to lock, equal writes meet in equal sums,
and rounding errors do not accumulate as they do when differences are added up the tree.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from rlfx._checks import INT32, KEY, POSITIVE, Kind, expect, instance, integer, integers, reals, scalar
from rlfx.errors import ProgramError, located

TINY = float(jnp.finfo(jnp.float32).tiny)  # anything smaller may be flushed to zero


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SumTree:
    """Sums of non-negative priorities.

    Attributes:
      levels: float32, from the nodes below the root, ``TOP`` at most, to the leaves. Each is padded with zeros to a multiple
        of K. Arrays of their own: XLA copies what is read and written at once, and in one array the sums of a level would be.
      capacity: how many leaves there are, the padding not counted.
      fanout: K.
    """

    levels: tuple[Array, ...]
    capacity: int = dataclasses.field(metadata={"static": True})
    fanout: int = dataclasses.field(metadata={"static": True})

    @property
    def total(self) -> Array:
        """Sum of all priorities, float32 scalar."""
        return _row_sums(self.levels[0][None])[0]

    @property
    def leaves(self) -> Array:
        """The priorities, float32 ``[capacity]``."""
        return self.levels[-1][: self.capacity]


#: What is fastest on a core of a CPU, of 4, 8, 16 and 32, from 2^14 to 2^20 leaves: ``benchmarks/replay_peer.py``.
FANOUT = 8

#: Children that the root may have. A call takes a microsecond for each array of a tree, and as much for its kernels in each
#: of three functions; comparing a target with more children takes less.
TOP = 64


def make_tree(capacity: int, fanout: int = FANOUT) -> SumTree:
    """A tree of ``capacity`` zero leaves.

    Raises:
      ProgramError: a capacity below one or a fan-out below two.

    Example:
      >>> [level.shape[0] for level in make_tree(100, fanout=8).levels]
      [16, 104]
    """
    capacity = expect("capacity", capacity, POSITIVE, ProgramError, of="replay")
    fanout = expect("fanout", fanout, integer(2, INT32), ProgramError, of="replay")
    sizes = [-(-capacity // fanout) * fanout]
    while sizes[-1] > max(fanout, TOP):
        sizes.append(-(-sizes[-1] // fanout**2) * fanout)
    return SumTree(tuple(jnp.zeros(n, jnp.float32) for n in reversed(sizes)), capacity, fanout)


INTEGERS, REALS = integers(1, "[B]"), reals(1, "[B]")


def vector(label: str, values: Any, kind: Kind, dtype: Any) -> Array:
    """``values``, which are of a kind, as a vector of ``dtype``."""
    return jnp.asarray(expect(label, values, kind, ProgramError, of="replay")).astype(dtype)


def pairs(indices: Any, priorities: Any) -> tuple[Array, Array]:
    """Indices and their priorities, of one length."""
    indices = vector("indices", indices, INTEGERS, jnp.int32)
    priorities = vector("priorities", priorities, REALS, jnp.float32)
    if indices.shape != priorities.shape:
        fact = f"replay: {priorities.shape[0]} priorities for {indices.shape[0]} indices."
        raise ProgramError(located(fact, fix="Give one priority for each index."))
    return indices, priorities


def inside(indices: Array, size: Any) -> Array:
    """Which indices hold something, bool ``[B]``; those that are known now and do not are an error."""
    found = (indices >= 0) & (indices < size)
    if not isinstance(found, jax.core.Tracer) and not bool(found.all()):
        wrong = int(indices[int(jnp.argmin(found))])
        fact = f"replay: the index {wrong} is not one of the {int(size)} transitions, 0, ..., {int(size) - 1}."
        raise ProgramError(located(fact, fix="Give the indices that `sample` returned."))
    return found


def set_priorities(tree: SumTree, indices: Array, priorities: Array) -> SumTree:
    """Set the priorities of some leaves.

    Args:
      tree: the tree.
      indices: int32 ``[B]``; if an index occurs more than once, its last priority counts. Where the values are known
        only at run time, those outside of the capacity are dropped.
      priorities: float32 ``[B]``, not negative (negative and not-a-number become zero; none counts as more than the
        largest float over four times the number of leaves).

    Returns:
      A tree whose every node is the sum of its children.

    Raises:
      ProgramError: other shapes or kinds of numbers, or an index, known now, outside of the capacity.

    Example:
      >>> tree = set_priorities(make_tree(4, fanout=2), jnp.array([1, 1, 3]), jnp.array([5.0, 2.0, 1.0]))
      >>> tree.leaves.tolist(), float(tree.total)
      ([0.0, 2.0, 0.0, 1.0], 3.0)
    """
    expect("tree", tree, TREE, ProgramError, of="replay")
    indices, priorities = pairs(indices, priorities)
    return set_some(tree, indices, priorities, inside(indices, tree.capacity))


def set_some(tree: SumTree, indices: Array, priorities: Array, keep: Array) -> SumTree:
    """:func:`set_priorities` of those indices that are to be kept."""
    leaves = tree.levels[-1]
    indices = jnp.where(keep, indices, leaves.shape[0])  # the others fall off the end
    # The last of equal indices: all leave a negative number at the leaf, and the least stays. No sort, which is slow on CPUs.
    number = -1.0 - jnp.arange(indices.shape[0], dtype=leaves.dtype)
    numbered = leaves.at[indices].min(number, mode="drop")
    last = jnp.where(numbered[indices] == number, indices, leaves.shape[0])
    leaves = numbered.at[last].set(bounded(priorities, leaves.shape[0]), mode="drop")
    return added_up(tree, leaves, jnp.where(keep, indices, 0))


def bounded(priorities: Array, count: int) -> Array:
    """Priorities of which that many have a finite sum, and the sum an inverse; negative and not a number count as zero."""
    most = jnp.finfo(jnp.float32).max / 4 / count
    return jnp.where(priorities > 0.0, jnp.minimum(priorities, most), 0.0)


def set_run(tree: SumTree, run: Array, priority: Array) -> SumTree:
    """Set leaves to one priority that follow each other in the ring of all: no two of them are equal."""
    if run.shape[0] == 0:
        return tree
    leaves = tree.levels[-1]
    leaves = leaves.at[run].set(bounded(priority, leaves.shape[0]), unique_indices=True)
    # Of every parent one child, at least: each K-th, and where the run and the ring end.
    return added_up(tree, leaves, jnp.append(run[:: tree.fanout], jnp.stack([run[-1], jnp.int32(tree.capacity - 1)])))


def added_up(tree: SumTree, leaves: Array, changed: Array) -> SumTree:
    """The tree of these leaves, of which some have changed: a level that is smaller than they are many is made anew."""
    K, levels, nodes = tree.fanout, [leaves], changed
    for level in reversed(tree.levels[:-1]):
        children, nodes = levels[-1].reshape(-1, K), nodes // K
        if level.shape[0] <= nodes.shape[0]:
            sums = _row_sums(children)
            levels.append(jnp.pad(sums, (0, level.shape[0] - sums.shape[0])))
        else:
            levels.append(level.at[nodes].set(_row_sums(children[nodes])))
    return dataclasses.replace(tree, levels=tuple(reversed(levels)))


def _row_sums(x: Array) -> Array:
    """Sums along rows, halves at a time: additions in one order, so that a node is the same bits whoever computes it."""
    while x.shape[1] > 1:
        half = -(-x.shape[1] // 2)
        x = x[:, :half] + jnp.pad(x[:, half:], ((0, 0), (0, 2 * half - x.shape[1])))
    return x[:, 0]


TREE = instance(SumTree, "a SumTree", "make_tree(capacity)")


def drawing(key: Any, batch: Any) -> tuple[Array, int]:
    """The key and the number of what is drawn."""
    key = expect("key", key, KEY, ProgramError, of="replay")
    return key, expect("batch", batch, POSITIVE, ProgramError, of="replay")


def find(tree: SumTree, targets: Array) -> Array:
    """The leaves at which prefix sums pass the targets, int32 ``[B]``, for targets ``[B]`` in ``[0, total)``.

    A leaf of priority zero is never returned while any leaf is positive: at each level it is the last positive child with
    no more than the target before it, and before the first positive one there is exactly zero.

    Example:
      >>> tree = set_priorities(make_tree(3), jnp.array([0, 2]), jnp.array([1.0, 2.0]))
      >>> find(tree, jnp.array([0.5, 1.0, 2.9])).tolist()
      [0, 2, 2]
    """
    K = tree.fanout
    node, rest = _descended(tree.levels[0][None], targets)  # the root is that of all
    for level in tree.levels[1:]:
        child, rest = _descended(level.reshape(-1, K)[node], rest)
        node = node * K + child
    return node


def _descended(children: Array, targets: Array) -> tuple[Array, Array]:
    """Of each row of children the one in which its target is, and what of the target is left there."""
    n = children.shape[1]
    slots = jnp.arange(n, dtype=jnp.int32)[None, :]
    earlier = jnp.triu(jnp.ones((n, n), jnp.float32), 1)
    before = jnp.matmul(children, earlier, precision="highest")  # a cumulative sum is slower, everywhere
    fits = (children > 0.0) & (before <= targets[:, None])
    child = jnp.max(jnp.where(fits, slots, 0), axis=1)
    rest = targets - jnp.sum(jnp.where(slots == child[:, None], before, 0.0), axis=1)
    return child, jnp.maximum(rest, 0.0)


def sample_indices(tree: SumTree, key: Array, batch: int) -> tuple[Array, Array]:
    """Draw leaves in proportion to their priorities, stratified.

    Returns:
      Indices, int32 ``[B]``, and their probabilities, float32 ``[B]``. All are zero if every priority is.

    Raises:
      ProgramError: the batch is not a positive integer, or the key is none.

    Example:
      >>> tree = set_priorities(make_tree(3), jnp.array([0, 2]), jnp.array([1.0, 3.0]))
      >>> indices, probability = sample_indices(tree, jax.random.key(0), 4)
      >>> indices.tolist(), probability.tolist()
      ([0, 2, 2, 2], [0.25, 0.75, 0.75, 0.75])
    """
    expect("tree", tree, TREE, ProgramError, of="replay")
    key, batch = drawing(key, batch)
    strata = (jnp.arange(batch, dtype=jnp.float32) + jax.random.uniform(key, (batch,), jnp.float32)) / batch
    indices = find(tree, strata * tree.total)
    probability = tree.levels[-1][indices] / jnp.maximum(tree.total, TINY)
    # Always so: whoever uses the indices comes after this read, and may write the leaves in place (XLA copies them else).
    return jnp.where(probability >= 0.0, indices, 0), probability


def importance_weights(probability: Array, size: Array | int, beta: Array | float) -> Array:
    """``(size * probability)^-beta``, divided by the batch's largest, float32 ``[B]`` (Schaul et al., 2016).

    What is drawn with probability zero, from a tree without priorities, weighs nothing.

    Raises:
      ProgramError: the probabilities are no vector of real numbers, or size and beta are none.

    Example:
      >>> importance_weights(jnp.array([0.5, 0.25, 0.0]), 4, 1.0).tolist()
      [0.5, 1.0, 0.0]
    """
    probability = vector("probability", probability, REALS, jnp.float32)
    size = expect("size", size, scalar(whole=True), ProgramError, of="replay")
    beta = expect("beta", beta, scalar(), ProgramError, of="replay")
    drawn = probability >= TINY
    expected = jnp.maximum(jnp.asarray(size, jnp.float32), 1.0) * jnp.where(drawn, probability, 1.0)
    weights = jnp.where(drawn, expected ** -jnp.asarray(beta, jnp.float32), 0.0)
    return weights / jnp.maximum(jnp.max(weights, initial=0.0), TINY)
