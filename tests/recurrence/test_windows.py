"""Windows of what has no derivative: the learner runs in blocks, and every plan gives what the reference says."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import ScheduleError
from tests.sampling import met

T, BATCH = 11, 2
PLANS = [
    rlfx.Plan(), rlfx.Plan("blocks", 1), rlfx.Plan("blocks", 3), rlfx.Plan("blocks", T, 1), rlfx.Plan("blocks", 4, 1),
]  # fmt: skip
DATA = jnp.sin(jnp.arange(T * BATCH * 3.0)).reshape(T, BATCH, 3)
W = jax.random.normal(jax.random.key(0), (4, 3)) / 2.0
X0 = jnp.linspace(-1.0, 1.0, BATCH * 3).reshape(BATCH, 3)


def of_inputs(w, x, t):
    """A convolution over time of data: filled before the beginning and behind the end."""
    seen = rlfx.inputs(DATA)[t]
    near = rlfx.series(seen).window(-2, 2, fill=0.5)
    return jnp.tanh((near * w).sum(0)).sum(), jnp.cos(x)


def of_stopped(w, x, t):
    """Targets of later values that are stopped, and of values from before."""
    value = jnp.tanh(x @ w[0])
    ahead = rlfx.series(jax.lax.stop_gradient(value)).window(1, 5, fill=0.2)
    behind = rlfx.series(jax.lax.stop_gradient(jnp.sin(x))).window(-3, 1)
    return (value - ahead.mean()) ** 2 + (behind * w).sum() * value, jax.lax.stop_gradient(jnp.cos(x + 0.3 * value))


def of_acting(w, x, t):
    """The policy's window over the states that it has seen: acting keeps a ring, the learner what it gave."""
    near = rlfx.series(x).window(-3, 1, fill=1.0)
    logits = jnp.tanh(near * w).sum(0)
    action = jax.random.categorical(t.key_for("action"), logits)
    moved = jax.lax.stop_gradient(jnp.cos(x + action.astype(jnp.float32)))
    return -jax.nn.log_softmax(logits)[action] * jax.lax.stop_gradient(x.sum()), moved


def of_integers(w, x, t):
    """Integers never have a derivative."""
    kind = rlfx.series((x[0] > 0).astype(jnp.int32)).window(-1, 2, fill=2)
    return (w[kind] * x[None]).sum() ** 2, jnp.cos(2.0 * x)


def twice(w, x, t):
    """A window of a window, both of data."""
    near = rlfx.series(rlfx.inputs(DATA)[t]).window(0, 3).max(0)
    far = rlfx.series(near).window(-4, 0)
    return jnp.tanh((far * w).sum(0)).mean(), jnp.cos(x)


PROGRAMS = {f.__name__: f for f in (of_inputs, of_stopped, of_acting, of_integers, twice)}


@functools.cache
def reference(name):
    fn = rlfx.reference(PROGRAMS[name], length=T, batch=BATCH)
    value, aux = fn(W, X0, jax.random.key(3))
    grads = jax.grad(lambda w: fn(w, X0, jax.random.key(3))[0])(W)
    return value, aux, grads


@pytest.mark.parametrize(("name", "plan"), met(PROGRAMS, PLANS))
def test_values_and_gradients_under_every_plan(name, plan):
    fn = rlfx.compile(PROGRAMS[name], length=T, batch=BATCH, plan=plan)
    (value, aux), grads = jax.jit(jax.value_and_grad(fn, has_aux=True))(W, X0, jax.random.key(3))
    for got, want in zip(jax.tree.leaves((value, aux, grads)), jax.tree.leaves(reference(name)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_windows_of_data_against_loops():
    """NumPy, without the compiler's or the reference's idea of a window."""
    data, w = np.asarray(DATA, np.float64), np.asarray(W, np.float64)
    total, slope = 0.0, np.zeros_like(w)
    for t in range(T):
        for b in range(BATCH):
            near = np.stack([data[u, b] if 0 <= u < T else np.full(3, 0.5) for u in range(t - 2, t + 2)])
            y = np.tanh((near * w).sum(0))
            total += y.sum() / (T * BATCH)
            slope += near * (1 - y**2) / (T * BATCH)
    fn = rlfx.compile(of_inputs, length=T, batch=BATCH, plan=rlfx.Plan("blocks", 4))
    (loss, _), grads = jax.jit(jax.value_and_grad(fn, has_aux=True))(W, X0)
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    np.testing.assert_allclose(grads, slope, rtol=1e-5, atol=1e-6)


def test_windows_with_a_derivative_are_still_refused():
    def program(w, x, t):
        near = rlfx.series(jnp.tanh(x * w[0])).window(-2, 1)
        return near.sum(), jnp.cos(x)

    fn = rlfx.compile(program, length=T, batch=BATCH, plan=rlfx.Plan("blocks", 3))
    with pytest.raises(
        ScheduleError, match=r"the gradient flows through reads of other timesteps \(.*test_windows.py:"
    ):
        jax.grad(lambda w: fn(w, X0)[0])(W)


def test_the_learner_may_follow_behind_the_actor():
    """A window ahead of what is stopped delays the learner."""

    def program(w, x, t):
        value = jnp.tanh(x @ w[0])
        ahead = rlfx.series(jax.lax.stop_gradient(value)).window(1, 5, fill=0.2)
        return (value - ahead.mean()) ** 2, jax.lax.stop_gradient(jnp.cos(x + 0.3 * value))

    loss = rlfx.reference(program, length=T, batch=BATCH)
    fn = rlfx.compile(program, length=T, batch=BATCH, plan=rlfx.Plan("stream", 3))
    got, want = (jax.value_and_grad(lambda w, f=f: f(w, X0)[0])(W) for f in (fn, loss))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)
