"""The sum tree and the replay ring, against numpy and flashbax."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlfx.errors import ProgramError
from rlfx.place import replay as rp
from tests.sampling import met

set_priorities = jax.jit(rp.set_priorities)
find = jax.jit(rp.find)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), fanout=st.sampled_from([2, 16]))
def test_tree_equals_an_array_of_leaves(seed, fanout):
    rng = np.random.default_rng(seed)
    capacity = int(rng.choice([40, 64, 65, 700]))  # a root alone, and levels under it
    tree, leaves = rp.make_tree(capacity, fanout), np.zeros(capacity, np.float32)
    assert len(tree.levels) == (1 if capacity <= 64 else {2: 1 + int(np.ceil(np.log2(capacity / 64))), 16: 2}[fanout])
    for _ in range(4):
        indices = (rng.integers(0, 20, 8) * (capacity // 20)).astype(np.int32)  # some of them twice
        values = np.where(rng.random(8) < 0.3, 0.0, rng.random(8)).astype(np.float32)
        tree = set_priorities(tree, indices, values)
        for i, p in zip(indices, values, strict=True):
            leaves[i] = p
    np.testing.assert_array_equal(tree.leaves, leaves)
    for upper, lower in zip(tree.levels[:-1], tree.levels[1:], strict=True):
        sums = np.asarray(lower).reshape(-1, fanout).sum(axis=1)
        np.testing.assert_allclose(upper[: len(sums)], sums, rtol=1e-6)
        assert not upper[len(sums) :].any()
    np.testing.assert_allclose(tree.total, leaves.sum(), rtol=1e-6)
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
    for count in (5, 500):  # without and with levels under the root
        every = set_priorities(rp.make_tree(count, 2), jnp.arange(count), jnp.full(count, jnp.inf))
        np.testing.assert_allclose(rp.sample_indices(every, jax.random.key(0), 64)[1], 1 / count, rtol=1e-6)


@pytest.mark.parametrize(("capacity", "fanout"), met([1, 5, 30, 300], [2, 3, 8]))
def test_what_is_inserted_is_added_up_everywhere(capacity, fanout):
    """Runs of every length from every place of the ring, round its end; some of them hold no transition."""
    insert = jax.jit(rp.insert)
    replay, rng = rp.make_replay(capacity, jnp.float32(0), fanout), np.random.default_rng(0)
    replay = rp.update_priorities(rp.insert(replay, jnp.zeros(1)), jnp.array([0]), jnp.array([3.0]))
    leaves = np.zeros(len(replay.tree.levels[-1]), np.float32)
    leaves[0], position = replay.largest, 1 % capacity
    for count in [0, capacity, *rng.integers(0, capacity + 1, 12)]:
        replay = insert(replay, jnp.zeros(int(count)))
        leaves[(position + np.arange(count)) % capacity] = replay.largest
        position = (position + count) % capacity
        np.testing.assert_array_equal(replay.tree.levels[-1], leaves)
        for upper, lower in zip(replay.tree.levels[:-1], replay.tree.levels[1:], strict=True):
            sums = np.asarray(lower).reshape(-1, fanout).sum(axis=1)
            np.testing.assert_allclose(upper, np.pad(sums, (0, len(upper) - len(sums))), rtol=1e-6)


def test_the_last_of_many_equal_indices_counts():
    rng = np.random.default_rng(0)
    indices, values = rng.integers(0, 150, 3000).astype(np.int32), rng.random(3000).astype(np.float32)
    expected = np.zeros(200, np.float32)
    for i, p in zip(indices, values, strict=True):
        expected[i] = p
    tree = set_priorities(rp.make_tree(200, 4), indices, values)
    np.testing.assert_array_equal(tree.levels[-1], expected)
    assert tree.total == pytest.approx(expected.sum(), rel=1e-6)


@pytest.mark.optimised
def test_a_loop_writes_the_leaves_in_place():
    """No copy of all leaves in a loop that inserts, draws and sets priorities."""
    capacity, like = 4096, {"obs": jnp.zeros(3)}

    def step(replay, key):
        replay = rp.insert(replay, {"obs": jnp.ones((4, 3))})
        drawn = rp.sample(replay, key, 8)
        return rp.update_priorities(replay, drawn.indices, drawn.data["obs"].sum(1)), drawn.probability

    many = jax.jit(lambda replay, keys: jax.lax.scan(step, replay, keys), donate_argnums=0)
    text = many.lower(rp.make_replay(capacity, like), jax.random.split(jax.random.key(0), 5)).compile().as_text()
    assert f"f32[{capacity}]{{0}}" in text
    assert not re.findall(rf"f32\[{capacity}(?:,3)?\]\S* copy\(", text)


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
    with pytest.raises(ProgramError, match=r"replay: capacity must be a positive integer, got 0"):
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


# -- nothing poisons a replay ----------------------------------------------------------------------------------------

ODD = [0.0, -1.0, np.nan, np.inf, -np.inf, 1e-40, 3e38, 2.0, 0.5]


def by_loop(replay, indices, errors, alpha):
    """Priorities and the largest of them, as the documentation says, one at a time."""
    leaves, largest = np.array(replay.tree.levels[-1], np.float64)[: replay.tree.capacity], float(replay.largest)
    raised = [(float(np.float32(e)) if e > np.finfo(np.float32).tiny else 0.0) ** alpha for e in errors]
    held = [(0 <= i < int(replay.size)) for i in indices]
    largest = max([largest, *(r for r, h in zip(raised, held, strict=True) if h and np.isfinite(r))])
    for i, r, h in zip(indices, raised, held, strict=True):
        if h:
            leaves[i] = min(r if np.isfinite(r) else largest, np.finfo(np.float32).max / 4 / len(replay.tree.levels[-1]))
    return leaves, largest


def test_odd_errors_and_indices_equal_a_loop():
    """60 updates with zeros, infinities, not-a-numbers and indices that hold nothing; every draw stays finite."""
    update = jax.jit(rp.update_priorities, static_argnames="alpha")
    draw = jax.jit(rp.sample, static_argnames="batch")
    rng = np.random.default_rng(0)
    for member in range(60):
        if member % 20 == 0:  # empty, partly full, full
            replay = rp.make_replay(10, {"x": jnp.float32(0)}, fanout=4)
            replay = rp.insert(replay, {"x": 1.0 + jnp.arange([0, 6, 10][member // 20], dtype=jnp.float32)})
        indices = rng.integers(-3, 20, 7).astype(np.int32)
        errors = np.where(rng.random(7) < 0.5, rng.choice(ODD, 7), rng.random(7)).astype(np.float32)
        leaves, largest = by_loop(replay, indices, errors, 0.5)
        replay = update(replay, indices, errors, alpha=0.5)
        np.testing.assert_allclose(replay.tree.levels[-1][:10], leaves, rtol=1e-6)
        assert np.all(np.asarray(replay.tree.levels[-1][10:]) == 0)
        assert float(replay.largest) == pytest.approx(largest, rel=1e-6)
        drawn = draw(replay, jax.random.key(member), batch=16)
        assert np.isfinite(drawn.probability).all()
        total = leaves.sum()
        if total > 0:
            assert np.all(leaves[drawn.indices] > 0)
            assert np.all(np.asarray(drawn.data["x"]) > 0)  # a transition that was inserted
            np.testing.assert_allclose(drawn.probability, leaves[drawn.indices] / total, rtol=1e-4)
        else:
            assert not np.asarray(drawn.probability).any()
        assert np.isfinite(rp.importance_weights(drawn.probability, replay.size, 0.4)).all()


def test_one_infinite_error_does_not_outweigh_the_ring():
    replay = rp.insert(rp.make_replay(8, jnp.float32(0)), jnp.arange(4, dtype=jnp.float32))
    replay = rp.update_priorities(replay, jnp.array([0, 1]), jnp.array([9.0, jnp.inf], jnp.float32), alpha=0.5)
    replay = rp.insert(replay, jnp.full(2, 7, jnp.float32))
    assert replay.tree.levels[-1][:6].tolist() == [3, 3, 1, 1, 3, 3]
    assert float(replay.largest) == 3


@pytest.mark.parametrize("probability", [[0.0, 0.5], [0.0, 0.0], [1e-40, 0.5], [1e-30, 1.0], [1.0]])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("size", [0, 8, 2**20])
def test_importance_weights_are_finite(probability, beta, size):
    weights = np.asarray(rp.importance_weights(jnp.array(probability, jnp.float32), size, beta))
    drawn = np.array(probability) >= np.finfo(np.float32).tiny
    assert np.all(weights[~drawn] == 0)
    expected = (max(size, 1) * np.array(probability)[drawn]) ** -beta
    np.testing.assert_allclose(weights[drawn], expected / expected.max(initial=1e-300), rtol=1e-5)


def test_an_empty_replay_draws_nothing():
    replay = rp.make_replay(5, jnp.float32(0))
    for drawn in (rp.sample(replay, jax.random.key(0), 3), rp.sample_uniform(replay, jax.random.key(0), 3)):
        assert drawn.indices.tolist() == [0, 0, 0]
        assert drawn.probability.tolist() == [0, 0, 0]


FULL = rp.insert(rp.make_replay(5, {"x": jnp.float32(0)}), {"x": jnp.zeros(3, jnp.float32)})
F32 = jnp.zeros(2, jnp.float32)
BAD = {
    "capacity": (lambda: rp.make_tree(2.5), "capacity must be a positive integer, got 2.5"),
    "boolean": (lambda: rp.make_tree(True), "capacity must be a positive integer, got True"),
    "fanout": (lambda: rp.make_replay(4, F32, fanout=1), "fanout must be an integer >= 2, got 1"),
    "example": (lambda: rp.make_replay(4, {}), "example must be a pytree of arrays of numbers, got {}"),
    "beyond the padding": (lambda: rp.set_priorities(rp.make_tree(5), jnp.array([99]), F32[:1]), "index 99 is not one"),
    "beyond the capacity": (lambda: rp.set_priorities(rp.make_tree(5), jnp.array([5]), F32[:1]), "5 transitions, 0, ..., 4"),
    "before the first": (lambda: rp.set_priorities(rp.make_tree(5), jnp.array([-1]), F32[:1]), "index -1"),
    "not yet inserted": (lambda: rp.update_priorities(FULL, jnp.array([3]), F32[:1]), "index 3 is not one of the 3"),
    "fractions": (lambda: rp.update_priorities(FULL, F32, F32), r"indices must be an array \[B\] of integers"),
    "one index": (lambda: rp.update_priorities(FULL, jnp.int32(1), F32), r"indices must be an array \[B\] of integers"),
    "text": (lambda: rp.update_priorities(FULL, "0", F32), r"indices must be an array \[B\] of integers, got '0'"),
    "counts": (lambda: rp.update_priorities(FULL, jnp.arange(2), F32[:1]), "1 priorities for 2 indices"),
    "complex": (lambda: rp.update_priorities(FULL, jnp.arange(2), F32.astype(jnp.complex64)), "priorities must be an array"),
    "structure": (lambda: rp.insert(FULL, F32), "transitions have structure"),
    "shape": (lambda: rp.insert(FULL, {"x": jnp.zeros((2, 3), jnp.float32)}), r"float32\[2, 3\], a transition's is float32\[\]"),
    "no batch axis": (lambda: rp.insert(FULL, {"x": jnp.float32(0)}), r"float32\[\], a transition's"),
    "dtype": (lambda: rp.insert(FULL, {"x": jnp.zeros(2, jnp.int32)}), r"int32\[2\], a transition's is float32"),
    "batch": (lambda: rp.sample(FULL, jax.random.key(0), 0), "batch must be a positive integer, got 0"),
    "half a batch": (lambda: rp.sample_uniform(FULL, jax.random.key(0), 2.5), "batch must be a positive integer, got 2.5"),
    "probability": (lambda: rp.importance_weights(0.5, 4, 0.4), "probability must be an array"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    call, message = BAD[case]
    with pytest.raises(ProgramError, match=rf"(?s){message}.*Fix: "):
        call()
