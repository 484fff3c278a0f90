"""Functions of numbers many at once, in the bodies that programs call, too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.cpu.elementwise import AT_ONCE, with_fast_elements

LENGTH, BATCH, N = 4, 3, 70
PARAMS = jax.random.normal(jax.random.key(0), (N, N)) / 8
CARRY = jax.random.normal(jax.random.key(1), (BATCH, N))


def turned(w, x):
    angle = jnp.arctan2(w @ x, x + 2.0)
    return jnp.cos(angle) + 0.1 * jax.nn.softplus(angle) + jax.lax.erf_inv(0.5 * jnp.sin(angle))


def in_a_scan(w, x, t):
    y = jax.lax.scan(lambda x, _: (turned(w, x), None), x, None, length=3)[0]
    return jnp.sum(y**2), 0.9 * x + 0.1 * jax.lax.stop_gradient(y)


def in_a_branch(w, x, t):
    y = jax.lax.cond(x[0] > 0, lambda x: turned(w, x), lambda x: x, x)
    return jnp.sum(y**2), 0.9 * x + 0.1 * jax.lax.stop_gradient(y)


def in_a_loop(w, x, t):
    w, y = jax.lax.stop_gradient(w), jax.lax.stop_gradient(x)
    y = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, turned(w, c[1])), (0, y))[1]
    return jnp.sum(y * x), 0.9 * x + 0.1 * y


def plainly(w, x, t):
    y = turned(w, x)
    return jnp.sum(y**2), 0.9 * x + 0.1 * y


FUNCTIONS = {"plainly": plainly, "scan": in_a_scan, "branch": in_a_branch, "loop": in_a_loop}


def names_of_jax(program):
    """jax's own of those that there are better ones for, in bodies."""
    return [q.primitive.name for e in program.equations for q in J.equations_in(dict(e.params)) if q.primitive in AT_ONCE]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_in_every_body(name):
    program = rlfx.trace(FUNCTIONS[name], PARAMS, CARRY, length=LENGTH, batch=BATCH)
    after = with_fast_elements(program)
    assert bool(names_of_jax(program)) == (name != "plainly")
    assert names_of_jax(after) == []
    assert with_fast_elements(after) is after
    assert (after is program) == (name == "plainly")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name):
    make = {"length": LENGTH, "batch": BATCH}

    def run(compiled):
        return jax.value_and_grad(lambda w: compiled(FUNCTIONS[name], **make)(w, CARRY)[0])(PARAMS)

    (value, gradient), (expected, slope) = run(rlfx.compile), run(rlfx.reference)
    np.testing.assert_allclose(value, expected, rtol=2e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=2e-6)


def test_a_scan_against_plain_loops():
    def by_hand(w):
        x, total = CARRY, 0.0
        for _ in range(LENGTH):
            y = x
            for _ in range(3):
                angle = jnp.arctan2(y @ w.T, y + 2.0)
                y = jnp.cos(angle) + 0.1 * jnp.log(1 + jnp.exp(angle)) + jax.lax.erf_inv(0.5 * jnp.sin(angle))
            total, x = total + (y**2).sum(), 0.9 * x + 0.1 * jax.lax.stop_gradient(y)
        return total / (LENGTH * BATCH)

    fn = rlfx.compile(in_a_scan, length=LENGTH, batch=BATCH)
    found, expected = jax.value_and_grad(lambda w: fn(w, CARRY)[0])(PARAMS), jax.value_and_grad(by_hand)(PARAMS)
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=2e-6)


def test_of_what_is_shared():
    def program(w, x, t):
        y = rlfx.series(jnp.tanh(w @ x))
        return rlfx.shared(lambda y: jnp.sum(jnp.cos(3.0 * y)), y[:]) + jnp.sum(y[t]), 0.5 * x

    before = rlfx.trace(program, PARAMS, CARRY, length=LENGTH, batch=BATCH)
    assert names_of_jax(before) == ["cos"]
    assert names_of_jax(with_fast_elements(before)) == []


def test_in_updates_of_minibatches():
    data = jax.random.normal(jax.random.key(2), (4, 64, 5))

    def update(total, x):
        return total + jnp.sum(jnp.cos(x)), jnp.sum(jnp.sin(x))

    how = {"epochs": 2, "minibatches": 2, "key": jax.random.key(3)}
    total, seen = jax.jit(lambda data: rlfx.minibatch_epochs(update, 0.0, data, **how))(data)
    np.testing.assert_allclose(total, 2 * np.cos(np.asarray(data, np.float64)).sum(), rtol=1e-5)
    np.testing.assert_allclose(seen.sum(1), 2 * [np.sin(np.asarray(data, np.float64)).sum()], rtol=1e-4)
