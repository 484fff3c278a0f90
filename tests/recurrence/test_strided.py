"""``rlfx.every`` where all timesteps run at once: fn is computed at its own timesteps alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx

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
    assert "rlfx.every(3, fn): of 3 timesteps one computes fn" in str(program.physical(W, None))
    got = jax.value_and_grad(lambda w: program(w, None, t0=t0)[0])(W)
    want = jax.value_and_grad(by_hand)(W)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)
