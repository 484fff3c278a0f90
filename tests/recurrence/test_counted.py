"""Timesteps that a loss does not count: the same values and gradients, and no work for their blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.gradient.counted import conditions
from rlfx.recurrence.gradient.rule import GradientRule
from rlfx.recurrence.plan.planner import Options

T, B, BURN_IN, N = 9, 2, 5, 3
P, H = jax.random.normal(jax.random.key(0), (4, 4)) / 2, jax.random.normal(jax.random.key(1), (B, 4))
KEY = jax.random.key(2)


def burn_in(p, h, t):
    """A recurrence of which the first states have no gradient."""
    h = jnp.tanh(h @ p + jax.random.normal(t.key, (4,)))
    kept = jnp.where(t == BURN_IN, jax.lax.stop_gradient(h), h)
    return jnp.where(t > BURN_IN, jnp.sum(h**2), 0.0), kept


def flows_through(p, h, t):
    """As burn_in, but the gradient flows through the states that the loss does not count."""
    h = jnp.tanh(h @ p + jax.random.normal(t.key, (4,)))
    return jnp.where(t > BURN_IN, jnp.sum(h**2), 0.0), h


def n_step(p, h, t):
    """The last timesteps have no target."""
    h = jax.lax.stop_gradient(h)
    v = jnp.sum(jnp.tanh(h @ p))
    after = jax.lax.stop_gradient(rlfx.series(v)[t + N])
    return jnp.where(t + N < T, (v - jnp.sin(after)) ** 2, 0.0) / 2, jnp.roll(h, 1) * 0.9


def two_terms(p, h, t):
    """Each with a condition of its own, under another one that depends on the environment."""
    h = jax.lax.stop_gradient(h)
    y = jnp.sum(jnp.tanh(h @ p))
    first, last = jnp.where(t < 2, y, 0.0), jnp.where(t >= T - 2, 0.0, 3.0)
    inner = jnp.where(h[0] > 0, jnp.where(t < 4, y**2, 0.0), 0.0)
    return first + 2.0 * inner - jnp.where(t > 6, 0.0, last * y), jnp.roll(h, 1) * 0.9


def gradient(make, f, t0=0, **options):
    fn = make(f, length=T, batch=B, **options)
    run = jax.value_and_grad(lambda p, h: fn(p, h, KEY, t0=t0), (0, 1), has_aux=True)
    return (jax.jit(run) if make is rlfx.compile else run)(P, H)


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.parametrize("f", [burn_in, flows_through, n_step, two_terms])
def test_skipped_blocks_change_nothing(f):
    expected = gradient(rlfx.reference, f)
    for plan in (rlfx.Plan("blocks", 2), rlfx.Plan("blocks", 5)):
        close(gradient(rlfx.compile, f, plan=plan), expected)
    later = 7  # the condition is on absolute time
    close(gradient(rlfx.compile, f, t0=later, plan=rlfx.Plan("blocks", 3)), gradient(rlfx.reference, f, t0=later))


def test_blocks_that_do_not_count_are_not_computed():
    """Their values are infinite, and only a block that is computed could tell."""

    def f(p, h, t):
        h = jax.lax.stop_gradient(h)
        y = jnp.sum(jnp.sqrt(h @ p - jnp.where(t < 4, jnp.inf, 0.0)))  # NaN, and so is its derivative
        return jnp.where(t < 4, 0.0, y), h

    h = jnp.ones((B, 4))
    begins = jnp.int32(0)  # which is traced: what counts is not known then
    for plan, t0, finite in ((rlfx.Plan("blocks", 4), begins, True), (rlfx.Plan(), begins, False), (rlfx.Plan(), 0, True)):
        fn = rlfx.compile(f, length=T, batch=B, plan=plan)
        found = jax.jit(jax.grad(lambda p, fn=fn, t0=t0: fn(p, h, KEY, t0=t0)[0]))(jnp.ones((4, 4)))
        assert np.isfinite(found).all() == finite


def known(f):
    program = rlfx.trace(f, P, H, length=T, batch=B)
    rule = GradientRule(program, Options(), rlfx.target("cpu"))
    found = conditions(rule.learner(frozenset(program.params)))
    return sorted((program.definitions()[v].op.name, which) for v, which in found)


def test_conditions_on_time_alone_are_found():
    assert known(burn_in) == known(flows_through) == [("gt", True)]
    assert known(n_step) == [("lt", True)]
    assert known(two_terms) == [("gt", False), ("lt", True), ("lt", True)]


@pytest.mark.parametrize(
    "loss",
    [
        lambda t, h, y: jnp.where(h[0] > 0, y, 0.0),
        lambda t, h, y: jnp.where(t > 3, y, 1.0),
        lambda t, h, y: jnp.where(t > 3, y, 0.0) + y,
        lambda t, h, y: jnp.where(t > 3, y, 0.0) / h[0],
        lambda t, h, y: jnp.where(t > 3, y, 0.0) * h[0],
        lambda t, h, y: jnp.exp(jnp.where(t > 3, y, 0.0)),
    ],
)
def test_what_may_be_other_than_zero_is_counted(loss):
    assert known(lambda p, h, t: (loss(t, h, jnp.sum(h @ p)), h)) == []
