"""What is computed twice is one equation: the same values and gradients, of fewer equations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.rewrite.merged import merged

T, B, D = 6, 3, 4
K = jax.random.split(jax.random.key(0), 3)
P = {"w": jax.random.normal(K[0], (D, D)), "u": jax.random.normal(K[1], (D, D))}
X = jax.random.normal(K[2], (T, B, D))
CARRY = jnp.linspace(0.5, 1.5, B * D).reshape(B, D)


def traced(f):
    return rlfx.trace(f, P, jnp.ones(D), length=T)


def count(program, name):
    return sum(e.op.name == name for e in program.equations)


def twice(p, h, t):
    """Logits, their softmax, and a read of the timestep before: each of them two times."""
    logits, again = h @ p["w"], h @ p["w"]
    log_p, entropy = jax.nn.log_softmax(logits), -(jax.nn.softmax(again) * jax.nn.log_softmax(again)).sum()
    z = rlfx.series(jnp.tanh(logits), start=jnp.zeros(D))
    return log_p[0] + entropy + (z[t - 1] * z[t - 1]).sum(), 0.9 * h


def test_what_is_the_same_is_one_equation():
    program = traced(twice)
    once = merged(program)
    assert (count(program, "dot_general"), count(once, "dot_general")) == (2, 1)
    assert (count(program, "reduce_max"), count(once, "reduce_max")) == (3, 1)
    assert (count(program, "read"), count(once, "read")) == (3, 2)  # the carry is another one
    assert merged(once) is once


@pytest.mark.parametrize("how", [{}, {"plan": rlfx.Plan()}, {"memory_budget": 1 << 20}])
def test_values_and_gradients_are_those_of_both(how):
    fn = rlfx.compile(twice, length=T, batch=B, **how)
    reference = rlfx.reference(twice, length=T, batch=B)
    gradient = lambda fn: jax.value_and_grad(lambda p, h: fn(p, h)[0], (0, 1))(P, CARRY)  # noqa: E731
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), gradient(fn), gradient(reference))


def soft_values(p, h, t, end=0.0):
    """Values that look one timestep ahead, and a policy that follows from the same values."""
    x = rlfx.series(jnp.sin(h))[t]
    worth = lambda after: jnp.tanh(x[:2] @ p["w"][:2]) + 0.9 * (p["u"] @ after)  # noqa: E731
    value = rlfx.solve(lambda v: 0.5 * jax.nn.softplus(worth(v[t + 1])), end=jnp.zeros(D))
    policy = jax.nn.log_softmax(worth(rlfx.series(value, end=jnp.zeros(D) if end == 0.0 else jnp.full(D, end))[t + 1]))
    return policy[1] * x[0] - value.sum(), 0.9 * h + 0.1


def test_a_series_of_a_series_is_that_series():
    """What a recurrence multiplies is not multiplied once more after it, unless its ends are others."""
    for end, products in ((0.0, 2), (0.5, 3)):
        program = traced(functools.partial(soft_values, end=end))
        once = merged(program)
        assert (count(program, "dot_general"), count(once, "dot_general")) == (4, products)
        assert count(once, "series") < count(program, "series")
        assert merged(once) is once


@pytest.mark.parametrize("how", [{}, {"plan": rlfx.Plan()}, {"plan": rlfx.Plan(environments=1)}])
@pytest.mark.parametrize("end", [0.0, 0.5])
def test_values_and_gradients_of_series_of_series(end, how):
    """By the reference, and by a plain loop."""
    f = functools.partial(soft_values, end=end)
    fn, reference = rlfx.compile(f, length=T, batch=B, **how), rlfx.reference(f, length=T, batch=B)

    def by_loop(p, carry):
        h, xs, total = carry, [], 0.0
        for _ in range(T):
            xs.append(jnp.sin(h))
            h = 0.9 * h + 0.1
        after, behind = jnp.zeros((B, D)), jnp.full((B, D), end)
        for x in xs[::-1]:
            known = jnp.tanh(x[:, :2] @ p["w"][:2])
            value = 0.5 * jax.nn.softplus(known + 0.9 * after @ p["u"].T)
            policy = jax.nn.log_softmax(known + 0.9 * behind @ p["u"].T)
            total += (policy[:, 1] * x[:, 0] - value.sum(1)).sum()
            after = behind = value
        return total / (T * B)

    expected = jax.value_and_grad(by_loop)(P, CARRY)
    for each in (fn, reference):
        found = jax.value_and_grad(lambda p, each=each: each(p, CARRY)[0])(P)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), found, expected)


def test_others_stay_two():
    def scopes(p, h, t):
        with jax.named_scope("first"):
            a = jnp.tanh(h)
        with jax.named_scope("second"):
            b = jnp.tanh(h)
        return (a * b).sum(), h

    def numbers(p, h, t):
        return (h * 2.0 * (h * 3.0)).sum() + (h[:2] * h[1:3]).sum() + (h @ p["w"] * (h @ p["u"])).sum(), h

    def reads(p, h, t):
        z, y = (rlfx.series(h, end=jnp.full(D, end)) for end in (0.0, 1.0))
        return (z[t + 1] * y[t + 1]).sum(), 0.9 * h

    for f in (scopes, numbers):
        program = traced(f)
        assert merged(program) is program, f.__name__
    program = traced(reads)  # two boundary values
    assert count(merged(program), "read") == count(program, "read")


def test_draws_of_one_key_are_one_and_those_of_two_are_two():
    def draws(p, h, t):
        noise = lambda name: jax.random.normal(t.key_for(name), (D,))  # noqa: E731
        return (h * (noise("a") + noise("a") + noise("b"))).sum(), h

    fn, reference = (make(draws, length=T, batch=B) for make in (rlfx.compile, rlfx.reference))
    key = jax.random.key(1)
    np.testing.assert_allclose(fn(P, CARRY, key)[0], reference(P, CARRY, key)[0], rtol=1e-5)


def test_effects_stay_as_many():
    seen = []

    def told(p, h, t):
        for _ in range(2):
            rlfx.effect(lambda x: seen.append(float(x)), h.sum())
        return h.sum(), h

    fn = rlfx.compile(told, length=T)
    jax.block_until_ready(jax.jit(fn)(P, jnp.ones(D)))
    jax.effects_barrier()
    assert len(seen) == 2 * T
