"""Loops that end when nobody goes on: values and derivatives of every order, mapped or not, against a loop that is counted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlfx.recurrence.execute.ending import while_somebody
from tests.sampling import met

LENGTH = 7


def step(w, state, x):
    """Has a branch, a rule of its own for the derivative, and no finite derivative at a state below zero."""
    (count, a), (x,) = state, x
    grown = jax.lax.cond(a > 1.0, lambda a: jnp.sin(w * a), lambda a: w * jnp.sqrt(a + 1.0), a)
    return (count + 1, a + 0.2 * jax.nn.softplus(grown) + 0.02 * x), [grown * a]


def goes_on(limit):
    return lambda state: state[1] < limit


def ending(w, a, limit):
    xs = np.arange(LENGTH, dtype=np.float32)
    (count, a), ys = while_somebody(functools.partial(step, w), (jnp.int32(0), a), [xs], lambda s: goes_on(limit)(s))
    return count, a, jnp.stack([y.sum() for y in ys]).sum()


def counted(w, a, limit):
    """The same iterations one by one, on values: the first that begins too large is the last, and stands for those left out."""
    state, outs = (jnp.int32(0), a), []
    for i in range(LENGTH):
        last = not bool(goes_on(limit)(jax.lax.stop_gradient(state)))
        state, (y,) = step(w, state, [jnp.float32(i)])
        outs.append(y)
        if last:
            break
    outs += [outs[-1]] * (LENGTH - len(outs))
    return *state, jnp.stack(outs).sum()


def numbers(f):
    """Of a and the sum of the outputs, one number."""
    return lambda w, a, limit: (lambda count, a, total: a + 0.1 * total)(*f(w, a, limit))


def derivatives(f):
    first = jax.grad(f)
    second = jax.grad(lambda *args: jnp.sin(first(*args)))
    return f, first, second, jax.grad(second)


@pytest.mark.parametrize(("limit", "order"), [*met([0.1, 1.3, 9.0], range(3)), (2.0, 3)])
def test_derivatives_are_those_of_the_iterations(limit, order):
    args = jnp.float32(0.7), jnp.float32(0.3), jnp.float32(limit)
    found = jax.jit(derivatives(numbers(ending))[order])(*args)
    np.testing.assert_allclose(found, derivatives(numbers(counted))[order](*args), rtol=1e-4)


@pytest.mark.parametrize("order", range(3))
def test_mapped_over_loops_that_end_apart(order):
    """Each has what it has alone, though all run until the last one ends."""
    f = derivatives(numbers(ending))[order]
    a, limits = jnp.array([0.3, 0.5, 0.1], jnp.float32), jnp.array([0.2, 2.0, 9.0], jnp.float32)
    mapped = jax.jit(jax.vmap(f, (None, 0, 0)))(jnp.float32(0.7), a, limits)
    alone = [f(jnp.float32(0.7), x, limit) for x, limit in zip(a, limits, strict=True)]
    np.testing.assert_allclose(mapped, jnp.stack(alone), rtol=1e-4, atol=1e-5)


def test_a_derivative_of_what_is_mapped():
    f = jax.vmap(numbers(ending), (None, 0, 0))
    a, limits = jnp.array([0.3, 0.5, 0.1], jnp.float32), jnp.array([0.2, 2.0, 9.0], jnp.float32)
    found = jax.grad(lambda w: f(w, a, limits).sum())(jnp.float32(0.7))
    want = sum(
        jax.grad(numbers(counted))(jnp.float32(0.7), x, float(limit)) for x, limit in zip(a, limits, strict=True)
    )
    np.testing.assert_allclose(found, want, rtol=1e-4)


def test_what_comes_after_the_end_has_no_part():
    """The iteration after the last has an infinite derivative; nobody sees it."""

    def rooted(state, x):
        return (state[0] - 1.0,), [jnp.sqrt(state[0])]

    def total(a):
        _, (ys,) = while_somebody(rooted, (a,), [np.zeros(5, np.float32)], lambda s: s[0] > 1.0)
        return ys[:2].sum()

    np.testing.assert_allclose(jax.grad(total)(jnp.float32(2.0)), 0.5 / np.sqrt(2.0) + 0.5, rtol=1e-6)
