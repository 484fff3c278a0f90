"""Extremes whose derivative is stopped are taken of what is stopped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.rewrite.stopped import with_stops

LENGTH, BATCH = 5, 3
CARRY = jax.random.normal(jax.random.key(0), (BATCH, 4))
WEIGHTS = jax.random.normal(jax.random.key(1), (4, 4))


def policy(w, x, t):
    return jax.nn.log_softmax(w @ x)[0] + jax.nn.softmax(x)[1] + jax.nn.logsumexp(w[0] * x), jnp.tanh(w @ x)


def of_maximum(w, x, t):
    y = w @ x
    return jnp.max(y) + jax.lax.stop_gradient(jnp.max(y)), 0.5 * x


def carried(w, x, t):
    return jnp.sum(w @ x), x - jnp.max(x)


def read_later(w, x, t):
    best = rlfx.series(jnp.max(w @ x), end=0.0)
    return best[t + 1] + jax.lax.stop_gradient(best[t]), 0.5 * x


def of_a_condition(w, x, t):
    y = w @ x
    return jnp.where(jnp.min(y) > 0, y, 2.0 * y).sum(), 0.5 * x


FUNCTIONS = {"policy": policy, "of maximum": of_maximum, "carried": carried, "read later": read_later}
FUNCTIONS["condition"] = of_a_condition
#: How many extremes are taken of what is stopped.
STOPPED = {"policy": 3, "of maximum": 1, "carried": 0, "read later": 0, "condition": 1}


def programs(name):
    before = rlfx.trace(FUNCTIONS[name], WEIGHTS, CARRY, length=LENGTH, batch=BATCH)
    return before, with_stops(before)


def extremes_of_stopped(program):
    made_by = {v: e.op for e in program.equations for v in e.outputs}
    stop, ops = J.primitive("stop_gradient"), (J.primitive("reduce_max"), J.primitive("reduce_min"))
    return sum(e.op in ops and made_by.get(e.inputs[0]) is stop for e in program.equations)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_those_whose_derivative_is_stopped(name):
    before, after = programs(name)
    assert extremes_of_stopped(before) == 0
    assert extremes_of_stopped(after) == STOPPED[name]
    assert with_stops(after) is after
    assert (after is before) == (not STOPPED[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_stays(name):
    found = jax.jit(jax.value_and_grad(lambda w: rlfx.compile(FUNCTIONS[name], length=LENGTH, batch=BATCH)(w, CARRY)[0]))
    expected = jax.value_and_grad(lambda w: rlfx.reference(FUNCTIONS[name], length=LENGTH, batch=BATCH)(w, CARRY)[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found(WEIGHTS), expected(WEIGHTS))


def test_a_softmax_against_plain_loops():
    def by_hand(w):
        x, total = CARRY, 0.0
        for _ in range(LENGTH):
            y = x @ w.T
            log_p = y[:, 0] - jnp.log(jnp.exp(y).sum(1))
            total += (log_p + jnp.exp(x[:, 1]) / jnp.exp(x).sum(1) + jnp.log(jnp.exp(w[:1] * x).sum(1))).sum()
            x = jnp.tanh(y)
        return total / (LENGTH * BATCH)

    fn = rlfx.compile(policy, length=LENGTH, batch=BATCH)
    found, expected = jax.grad(lambda w: fn(w, CARRY)[0])(WEIGHTS), jax.grad(by_hand)(WEIGHTS)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)
