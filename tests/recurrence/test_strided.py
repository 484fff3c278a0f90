"""``rlfx.every`` where all timesteps run at once: fn is computed at its own timesteps alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from tests.sampling import met

W = jnp.linspace(0.1, 0.8, 8)


def f(w, c, t):
    x = jnp.sin(w + t.astype(jnp.float32))
    return jnp.sum(rlfx.every(3, lambda: jnp.tanh(x @ jnp.ones((8, 8))), otherwise=x)), c


@pytest.mark.parametrize("t0", [0, 1, 5])
def test_its_timesteps_are_those_of_absolute_time(t0):
    def by_hand(w):
        rows = [jnp.sin(w + float(t0 + t)) for t in range(7)]
        taken = [jnp.tanh(x @ jnp.ones((8, 8))) if (t0 + t) % 3 == 0 else x for t, x in enumerate(rows)]
        return sum(jnp.sum(x) for x in taken) / 7

    program = rlfx.compile(f, length=7)
    assert "of 3 timesteps one computes what is needed where t % 3 == 0" in str(program.physical(W, None))
    got = jax.value_and_grad(lambda w: program(w, None, t0=t0)[0])(W)
    want = jax.value_and_grad(by_hand)(W)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def of_many(w, c, t):
    """Of environments that move apart: what is taken at every third timestep is read by the gradient."""
    state, left = c
    x = jnp.sin(w + state)
    y = rlfx.every(3, lambda: jnp.tanh(x @ jnp.ones((8, 8))), otherwise=x)
    gain = jax.lax.stop_gradient(rlfx.series(y.sum())[t : t + 2].sum())
    return gain * jnp.sum(y), (0.5 * state + 0.1 * t.astype(jnp.float32), left - 1)


LENGTH, BATCH = 7, 3
PLANS = [None, rlfx.Plan("blocks", block=2), rlfx.Plan("blocks", block=3, environments=1), rlfx.Plan("stream", block=2)]


@pytest.mark.parametrize(("plan", "stops", "t0"), met(PLANS, [(7, 4, 1), None], [5, 0]))
def test_under_every_plan_and_where_environments_end(plan, stops, t0):
    ends = stops or (LENGTH,) * BATCH
    until = None if stops is None else lambda c: c[1] <= 0
    starts = jnp.array([0.1, 0.4, 0.7])

    def by_hand(w):
        total = 0.0
        for b, stop in enumerate(ends):
            ys, state = [], starts[b]
            for t in range(stop):
                x = jnp.sin(w + state)
                ys.append(jnp.tanh(x @ jnp.ones((8, 8))) if (t0 + t) % 3 == 0 else x)
                state = 0.5 * state + 0.1 * (t0 + t)
            sums = [jax.lax.stop_gradient(y.sum()) for y in ys]
            total += sum(sum(sums[t : t + 2]) * jnp.sum(y) for t, y in enumerate(ys))
        return total / sum(ends)

    program = rlfx.compile(of_many, length=LENGTH, batch=BATCH, until=until, plan=plan)
    carry = starts, jnp.array(ends, jnp.int32)
    got = jax.jit(jax.value_and_grad(lambda w: program(w, carry, t0=t0)[0]))(W)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, jax.value_and_grad(by_hand)(W)
    )


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_split_over_a_mesh():
    mesh = jax.make_mesh((2,), ("b",), devices=jax.devices()[:2])
    carry = jnp.linspace(0.1, 0.7, 4), jnp.full(4, LENGTH, jnp.int32)
    one, two = (rlfx.compile(of_many, length=LENGTH, batch=4, mesh=m) for m in (None, mesh))
    found = [jax.jit(jax.value_and_grad(lambda w, f=f: f(w, carry, t0=2)[0]))(W) for f in (one, two)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *found)
