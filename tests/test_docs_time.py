"""What the page on the language says of absolute time holds in a call from any t0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx

T = 9
REWARD = np.random.default_rng(0).uniform(size=T).astype(np.float32)
DONE = np.arange(T) % 4 == 2  # the last episode goes on


@pytest.mark.parametrize("t0", [0, 100])
def test_a_slice_to_the_end_of_an_episode(t0):
    def f(_, carry, t):
        done = rlfx.inputs(jnp.asarray(DONE))[t]
        end = rlfx.solve(lambda e: jnp.where(done, t.now + 1, e[t + 1]), end=t.now + 1)
        return carry, (rlfx.inputs(jnp.asarray(REWARD))[t:end].sum(), end)

    sums, ends = rlfx.unroll(f, length=T)(None, None, t0=t0)[1]
    expected = [next((u + 1 for u in range(t, T) if DONE[u]), T) for t in range(T)]
    np.testing.assert_array_equal(ends, t0 + np.array(expected))
    np.testing.assert_allclose(sums, [REWARD[t:end].sum() for t, end in enumerate(expected)], rtol=1e-6)


@pytest.mark.parametrize("t0", [0, 100])
def test_the_first_and_the_last_timestep_of_a_call(t0):
    def f(_, carry, t):
        now = rlfx.series(t.now)
        return carry, (t.now == now[0], t.now == now[t.length - 1], rlfx.inputs(jnp.asarray(REWARD))[t.length - 1])

    first, last, reward = rlfx.unroll(f, length=T)(None, None, t0=t0)[1]
    np.testing.assert_array_equal(first, np.arange(T) == 0)
    np.testing.assert_array_equal(last, np.arange(T) == T - 1)
    np.testing.assert_array_equal(reward, np.full(T, REWARD[-1]))


@pytest.mark.parametrize("t0", [0, 100])
def test_elements_of_a_slice_count_from_the_first_timestep(t0):
    def f(_, carry, t):
        now = rlfx.series(t.now)
        i = jnp.minimum(t.now + jax.random.randint(t.key, (), 0, 4), now[t.length - 1])  # an absolute time to come
        return carry, (rlfx.inputs(jnp.asarray(REWARD))[:][i - now[0]], i)

    found, i = rlfx.unroll(f, length=T)(None, None, jax.random.key(0), t0=t0)[1]
    assert len({*(np.asarray(i) - t0 - np.arange(T)).tolist()}) > 1
    np.testing.assert_array_equal(found, REWARD[np.asarray(i) - t0])
