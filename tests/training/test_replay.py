"""Reading a history at random, against NumPy loops: n-step transitions, whole sequences, priorities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import TrainingError
from rlfx.training import Priorities, draw_times, n_step

KEY = jax.random.key(5)


def test_n_steps_of_integers_are_those_of_floats():
    """Clipped rewards may be kept as int8: the discount is no integer."""
    ends = jnp.zeros(3, bool)
    for dtype in (jnp.int8, jnp.int32, jnp.uint8):
        got = n_step(jnp.array([1, 2, 4], dtype), ends, ends, gamma=0.5)
        assert (float(got.reward), float(got.discount), int(got.last)) == (3.0, 0.125, 2)
        assert got.reward.dtype == got.discount.dtype == jnp.float32


@pytest.mark.parametrize("n", [1, 2, 5])
def test_n_steps_by_a_loop(n):
    """Terminations, truncations, and both at once, at every place."""
    rng = np.random.default_rng(n)
    reward = rng.normal(size=(n, 200)).astype(np.float32)
    terminated, truncated = rng.random((2, n, 200)) < 0.25
    got = jax.jit(lambda *x: n_step(*x, gamma=0.9))(reward, terminated, truncated)
    for j in range(200):
        total, discount = 0.0, 1.0
        for k in range(n):
            total, discount, last = total + discount * reward[k, j], 0.9 * discount, k
            if terminated[k, j] or truncated[k, j]:
                discount *= not terminated[k, j]
                break
        np.testing.assert_allclose([got.reward[j], got.discount[j]], [total, discount], rtol=1e-5, atol=1e-6)
        assert got.last[j] == last


def test_sequences_that_are_drawn_are_whole():
    """At every time, before and after the ring is full: what is read is what was written at these times, none of it NaN."""
    capacity, length, B = 5, 3, 2

    def f(_, carry, t):
        memory = rlfx.series(100.0 * t.now.astype(jnp.float32) + carry[1], history=carry[0])
        i = draw_times(t.key_for("i"), (40,), t.now, capacity, length=length)
        return (memory.history, carry[1]), (i, memory[i[:, None] + jnp.arange(length)[None]])

    history = rlfx.History(capacity, jnp.float32(0), batch=B)
    _, (i, read) = jax.jit(rlfx.unroll(f, length=12, batch=B))(None, (history, jnp.arange(2.0)), KEY)
    for now in range(length - 1, 12):
        assert set(np.unique(i[now])) == set(range(max(now - capacity + 1, 0), now - length + 2))
        expected = 100.0 * (np.asarray(i)[now][..., None] + np.arange(length)) + np.arange(2.0)[:, None, None]
        np.testing.assert_array_equal(read[now], expected)


def test_priorities_of_a_history_by_a_loop():
    """What can be drawn, and how often, is what a dictionary of priorities says; so are the weights."""
    capacity, B, length, count, beta = 5, 2, 2, 6, 0.5

    def errors(i, b):
        return jnp.sin(3.0 * i.astype(jnp.float32) + b.astype(jnp.float32)) + 0.1

    def f(_, carry, t):
        memory = rlfx.series(t.now.astype(jnp.float32), history=carry[0])
        priorities = carry[1].written(t.now)
        drawn = priorities.draw(t.shared_key, count, t.now, beta=beta)
        read = memory[drawn.i, drawn.b]
        after = priorities.update(drawn, errors(drawn.i, drawn.b), alpha=0.7)
        return (memory.history, after), (drawn, read, priorities.tree.levels[-1][: capacity * B])

    carry = (
        rlfx.History(capacity, jnp.float32(0), batch=B),
        rlfx.Shared(Priorities.of(capacity, batch=B, length=length)),
    )
    _, (drawn, read, leaves) = jax.jit(rlfx.unroll(f, length=14, batch=B))(None, carry, KEY)
    drawn, read, leaves = jax.tree.map(lambda x: np.asarray(x)[:, 0], (drawn, read, leaves))  # the same for all
    known, largest = {}, 1.0
    for now in range(14):
        begin = now - length + 1
        known = {(i, b): p for (i, b), p in known.items() if i > now - capacity}
        if begin >= 0:
            known |= {(begin, b): largest for b in range(B)}
        expected = np.zeros(capacity * B)
        for (i, b), p in known.items():
            expected[i % capacity * B + b] = p
        np.testing.assert_allclose(leaves[now], expected, rtol=1e-5, err_msg=f"at {now}")
        i, b, weight = (x[now] for x in drawn)
        if not known:
            assert not weight.any()
            continue
        assert all(pair in known for pair in zip(i, b, strict=True))
        np.testing.assert_array_equal(read[now], i)
        total = sum(known.values())
        wanted = np.array([(len(known) * known[pair] / total) ** -beta for pair in zip(i, b, strict=True)])
        np.testing.assert_allclose(weight, wanted / wanted.max(), rtol=1e-4)
        for j in range(count):
            raised = (abs(np.sin(3.0 * i[j] + b[j]) + 0.1) + 1e-3) ** 0.7
            known[i[j], b[j]], largest = raised, max(largest, raised)


def test_draws_are_in_proportion_and_an_overflow_is_no_flood():
    priorities = Priorities.of(4, batch=1)
    for now in range(4):
        priorities = priorities.written(now)
    every = priorities.draw(KEY, 4, 3)._replace(i=jnp.arange(4), b=jnp.zeros(4, jnp.int32))
    priorities = priorities.update(every, jnp.array([3.0, 1.0, 0.0, jnp.inf]), alpha=1.0, least=0.0)
    drawn = priorities.draw(KEY, 7000, 3).i
    np.testing.assert_allclose(np.bincount(drawn, minlength=4), [3000, 1000, 0, 3000], atol=2)


def test_what_no_history_holds_is_refused():
    with pytest.raises(TrainingError, match="draw_times: a history of 4 timesteps holds no sequence of 5") as error:
        draw_times(KEY, (3,), 9, 4, length=5)
    assert "larger capacity" in str(error.value)
    with pytest.raises(TrainingError, match="Priorities: batch must be a positive integer"):
        Priorities.of(4, batch=0)
    with pytest.raises(TrainingError, match="key must be"):
        draw_times(0, (3,), 9, 4)


@pytest.mark.parametrize("length", [1, 2])
def test_the_time_of_priorities_may_be_a_number(length):
    of_numbers = of_arrays = Priorities.of(4, batch=2, length=length)
    for now in range(6):
        of_numbers, of_arrays = of_numbers.written(now), of_arrays.written(jnp.int32(now))
    jax.tree.map(np.testing.assert_array_equal, of_numbers, of_arrays)
