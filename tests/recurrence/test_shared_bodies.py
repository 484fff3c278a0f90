"""Bodies of ``rlfx.shared`` with gradients of their own: as a CPU does them best, with the same numbers."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.cpu.shared_bodies import with_fast_bodies

T, B, ROWS, WIDTH, RATE = 6, 4, 5, 12, 0.1
CPU = rlfx.target("cpu")
PLAIN = replace(CPU, rewrites=replace(CPU.rewrites, contractions=False))
DATA = np.random.RandomState(0).randn(T, B, ROWS, WIDTH).astype(np.float32)
START = np.random.RandomState(1).randn(WIDTH, 2).astype(np.float32)


def step(w, x):
    """One step of gradient descent: the mean squares of all environments' rows."""
    return w - RATE * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


def learner(every):
    def learn(data, w, t):
        def update(x):
            stepped = lambda: step(w, x)  # noqa: E731
            return stepped() if every == 1 else rlfx.every(every, stepped, otherwise=w)

        w = rlfx.shared(update, rlfx.inputs(data)[t])
        return rlfx.Shared(w), w

    return learn


def by_hand(every):
    w, seen = START.astype(np.float64), []
    for t in range(T):
        if t % every == 0:
            x = DATA[t].reshape(-1, WIDTH).astype(np.float64)
            w = w - RATE * 2.0 * x.T @ (x @ w) / (len(x) * 2)
        seen.append(w)
    return np.stack(seen)


def barriers(fn, *args):
    """How many products of a call were made contractions over rows."""
    return jax.jit(fn).lower(*args).as_text().count("optimization_barrier")


@pytest.mark.parametrize("every", [1, 2])
def test_an_update_inside_a_loop(every):
    fast, plain = (rlfx.unroll(learner(every), length=T, batch=B, target=target) for target in (CPU, PLAIN))
    arguments = jnp.asarray(DATA), rlfx.Shared(jnp.asarray(START))
    for fn in (fast, plain):
        carry, seen = fn(*arguments)
        expected = np.broadcast_to(by_hand(every)[:, None], (T, B, WIDTH, 2))
        np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(carry.value, by_hand(every)[-1], rtol=1e-5, atol=1e-6)
    assert barriers(fast, *arguments) == 1
    assert barriers(plain, *arguments) == 0


def gradients(w, carry, t):
    """The gradient at every timestep, without a loop, and a derivative through it."""
    x = jnp.sin(carry + jnp.float32(t) + jnp.arange(ROWS * WIDTH, dtype=jnp.float32)).reshape(ROWS, WIDTH)
    stepped = rlfx.shared(lambda x: step(w, x), x)
    return jnp.sum(stepped**2), carry


def test_updates_of_all_timesteps_and_derivatives_through_them():
    starts = jnp.linspace(0.0, 1.0, B, dtype=jnp.float32)

    def value_and_gradient(target):
        fn = rlfx.compile(gradients, length=T, batch=B, target=target)
        return jax.jit(jax.value_and_grad(lambda w: fn(w, starts)[0]))(jnp.asarray(START))

    def expected(w):
        times, grid = np.arange(T, dtype=np.float32), np.arange(ROWS * WIDTH, dtype=np.float32)
        losses = []
        for t in times:
            x = np.sin(np.asarray(starts)[:, None] + t + grid).reshape(-1, WIDTH)
            losses.append(jnp.sum((w - RATE * (x.T @ (x @ w)) * (2.0 / (len(x) * w.shape[1]))) ** 2))
        return jnp.mean(jnp.stack(losses))

    value, gradient = jax.value_and_grad(expected)(jnp.asarray(START))
    for target in (CPU, PLAIN):
        found = value_and_gradient(target)
        np.testing.assert_allclose(found[0], value, rtol=1e-5)
        np.testing.assert_allclose(found[1], gradient, rtol=1e-4, atol=1e-5)


def test_the_rewrite_keeps_the_meaning_and_other_programs():
    program = rlfx.trace(gradients, jnp.asarray(START), jnp.zeros(B, jnp.float32), length=T, batch=B)
    fast = with_fast_bodies(program)
    assert fast is not program
    arguments = jnp.asarray(START), jnp.linspace(0.0, 1.0, B, dtype=jnp.float32)
    reference = rlfx.reference(gradients, length=T, batch=B)(*arguments)[0]
    np.testing.assert_allclose(rlfx.lower(fast)(*arguments)[0], reference, rtol=1e-5)
    none = rlfx.trace(
        lambda w, x, t: (rlfx.shared(jnp.sum, w * x), x), jnp.float32(1.0), jnp.zeros(B, jnp.float32), length=T, batch=B
    )
    assert with_fast_bodies(none) is none
