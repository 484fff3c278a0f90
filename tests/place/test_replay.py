"""The sum tree and the replay ring, against numpy and flashbax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlfx.errors import ProgramError
from rlfx.place import replay as rp

set_priorities = jax.jit(rp.set_priorities)
find = jax.jit(rp.find)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), fanout=st.sampled_from([2, 16]))
def test_tree_equals_an_array_of_leaves(seed, fanout):
    rng = np.random.default_rng(seed)
    tree, leaves = rp.make_tree(40, fanout), np.zeros(40, np.float32)
    for _ in range(4):
        indices = rng.integers(0, 40, 8).astype(np.int32)
        values = np.where(rng.random(8) < 0.3, 0.0, rng.random(8)).astype(np.float32)
        tree = set_priorities(tree, indices, values)
        for i, p in zip(indices, values, strict=True):
            leaves[i] = p
    np.testing.assert_array_equal(tree.levels[-1][:40], leaves)
    for upper, lower in zip(tree.levels[:-1], tree.levels[1:], strict=True):
        np.testing.assert_allclose(upper, np.asarray(lower).reshape(-1, fanout).sum(axis=1), rtol=1e-6)
    if leaves.sum() > 0:
        targets = (rng.random(8) * leaves.sum() * 0.999).astype(np.float32)
        got = np.asarray(find(tree, targets))
        assert np.all(leaves[got] > 0)
        high = np.cumsum(leaves)[got]
        assert np.all(high >= targets - 1e-5)
        assert np.all(high - leaves[got] <= targets + 1e-5)


def test_sampling_follows_priorities_and_never_draws_zero():
    leaves = jnp.array([0.0, 1.0, 0.0, 3.0, 6.0, 0.0])
    tree = rp.set_priorities(rp.make_tree(6, 4), jnp.arange(6), leaves)
    indices, probability = rp.sample_indices(tree, jax.random.key(0), 10_000)
    share = np.bincount(np.asarray(indices), minlength=6) / 10_000
    np.testing.assert_allclose(share, np.asarray(leaves) / 10, atol=0.01)
    np.testing.assert_allclose(probability, leaves[indices] / 10, rtol=1e-6)


def test_a_target_at_the_very_end_finds_a_positive_leaf():
    tree = rp.set_priorities(rp.make_tree(64, 4), jnp.arange(3), jnp.array([0.1, 0.2, 0.3]))
    beyond = jnp.nextafter(tree.total, jnp.float32(10))
    assert rp.find(tree, jnp.stack([beyond, tree.total])).tolist() == [2, 2]


def test_bad_priorities_count_as_zero():
    tree = rp.set_priorities(rp.make_tree(4), jnp.arange(3), jnp.array([jnp.nan, -1.0, 2.0]))
    assert tree.levels[-1][:3].tolist() == [0.0, 0.0, 2.0]


def test_infinite_priorities_stay_finite_and_are_drawn():
    tree = set_priorities(rp.make_tree(5, 2), jnp.array([1, 3, 4]), jnp.array([1.0, jnp.inf, 3e38]))
    assert all(np.isfinite(level).all() for level in tree.levels)
    indices, probability = rp.sample_indices(tree, jax.random.key(0), 64)
    assert set(indices.tolist()) == {3, 4}
    np.testing.assert_allclose(probability, 0.5)


def test_the_last_of_many_equal_indices_counts():
    rng = np.random.default_rng(0)
    indices, values = rng.integers(0, 50, 3000).astype(np.int32), rng.random(3000).astype(np.float32)
    expected = np.zeros(64, np.float32)
    for i, p in zip(indices, values, strict=True):
        expected[i] = p
    tree = set_priorities(rp.make_tree(64, 4), indices, values)
    np.testing.assert_array_equal(tree.levels[-1], expected)
    assert tree.total == pytest.approx(expected.sum(), rel=1e-6)


def test_sums_do_not_drift():
    tree = rp.make_tree(256)
    keys = jax.random.split(jax.random.key(0), 200)

    def step(tree, key):
        a, b = jax.random.split(key)
        big = jax.random.uniform(b, (32,)) * 1e6
        return set_priorities(tree, jax.random.randint(a, (32,), 0, 256), big), None

    tree, _ = jax.lax.scan(step, tree, keys)
    tree = set_priorities(tree, jnp.arange(256), jnp.full((256,), 1e-3))
    np.testing.assert_allclose(tree.total, 0.256, rtol=1e-5)


def test_ring_overwrites_the_oldest_and_new_ones_get_the_largest_priority():
    replay = rp.make_replay(4, {"x": jnp.float32(0)})
    replay = rp.insert(replay, {"x": jnp.arange(3.0)})
    replay = rp.update_priorities(replay, jnp.array([0]), jnp.array([16.0]), alpha=0.5)
    replay = rp.insert(replay, {"x": jnp.array([3.0, 4.0])})
    assert replay.data["x"].tolist() == [4.0, 1.0, 2.0, 3.0]
    assert replay.tree.levels[-1][:4].tolist() == [4.0, 1.0, 1.0, 4.0]
    assert (int(replay.size), int(replay.position)) == (4, 1)
    uniform = rp.sample_uniform(replay, jax.random.key(0), 200)
    assert set(uniform.data["x"].tolist()) == {1.0, 2.0, 3.0, 4.0}
    np.testing.assert_allclose(uniform.probability, 0.25)


def test_importance_weights():
    weights = rp.importance_weights(jnp.array([0.5, 0.25, 0.25]), jnp.int32(4), 1.0)
    np.testing.assert_allclose(weights, [0.5, 1.0, 1.0])


def test_collisions():
    replay = rp.insert(rp.make_replay(8, jnp.float32(0)), jnp.arange(6.0))
    assert bool(rp.collision_free(replay, 2, jnp.array([0, 5])))
    assert not bool(rp.collision_free(replay, 3, jnp.array([0, 5])))


def test_refusals():
    with pytest.raises(ProgramError, match=r"A sum tree needs capacity >= 1 and fanout >= 2, got 0 and 16"):
        rp.make_tree(0)
    with pytest.raises(ProgramError, match=r"9 transitions do not fit into a replay of 8"):
        rp.insert(rp.make_replay(8, jnp.float32(0)), jnp.zeros(9))


def test_distribution_equals_flashbax():
    sum_tree = pytest.importorskip("flashbax.buffers.sum_tree")
    priorities = jnp.asarray(np.random.default_rng(0).random(64), jnp.float32)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        theirs = sum_tree.set_batch_bincount(sum_tree.init(64), jnp.arange(64), priorities)
    ours = rp.set_priorities(rp.make_tree(64), jnp.arange(64), priorities)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        their_leaves = sum_tree.get(theirs, jnp.arange(64))
    np.testing.assert_allclose(ours.levels[-1][:64], their_leaves, rtol=1e-6)
    targets = jnp.linspace(0.01, 0.99, 200) * ours.total
    expected = np.searchsorted(np.cumsum(np.asarray(priorities, np.float64)), np.asarray(targets, np.float64), "right")
    assert np.mean(np.asarray(rp.find(ours, targets)) == expected) > 0.99
