"""``logaddexp``, of which softplus is made, with what is chosen chosen before: as exact, and its derivative more so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.cpu.soft import is_log_add_exp, log_add_exp


def softplus(x):
    return log_add_exp(x, jnp.zeros_like(x))


def in_last_places(found, expected):
    return np.abs(np.asarray(found, np.float64) - expected) / np.spacing(expected.astype(np.float32))


def test_values_are_as_exact_as_jaxs():
    x = jnp.linspace(-80.0, 80.0, 400_001)
    exact = np.logaddexp(np.asarray(x, np.float64), 0.0)
    ours, of_jax = (in_last_places(jax.jit(f)(x), exact) for f in (softplus, jax.nn.softplus))
    assert ours.max() <= of_jax.max()
    assert ours.mean() < 1.2 * of_jax.mean()
    assert ours[200_000:].max() < 2


def test_derivatives_are_nearer():
    x = jnp.linspace(-80.0, 80.0, 400_001)
    exact = 1.0 / (1.0 + np.exp(-np.asarray(x, np.float64)))
    ours, of_jax = (jax.jit(jax.grad(lambda x: f(x).sum()))(x) for f in (softplus, jax.nn.softplus))
    assert np.abs(ours - exact).max() < 2e-7
    assert np.abs(ours - exact).max() < np.abs(of_jax - exact).max()
    second = jax.vmap(jax.grad(jax.grad(softplus)))(x)
    np.testing.assert_allclose(second, exact * (1.0 - exact), rtol=1e-5, atol=1e-7)


def test_infinite_and_not_a_number():
    special = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 3.0])
    x, z = (v.ravel() for v in jnp.meshgrid(special, special))
    np.testing.assert_array_equal(log_add_exp(x, z), jnp.logaddexp(x, z))
    x, z = jnp.array([jnp.inf, 3.0, -jnp.inf, 2.0]), jnp.array([3.0, jnp.inf, 0.0, 2.0])
    slopes = jax.vmap(jax.grad(log_add_exp, (0, 1)))(x, z)
    np.testing.assert_array_equal(slopes, ([1.0, 0.0, 0.0, 0.5], [0.0, 1.0, 1.0, 0.5]))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_numbers(dtype):
    x = jnp.linspace(-8.0, 8.0, 1001).astype(dtype)
    found = softplus(x)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, jax.nn.softplus(x))


def test_double_precision():
    with jax.enable_x64(True):
        x = jnp.linspace(-80.0, 80.0, 10_001)
        np.testing.assert_allclose(softplus(x), np.logaddexp(np.asarray(x), 0.0), rtol=1e-14)


CALLS = {
    "logaddexp": (jnp.logaddexp, 2),
    "softplus": (jax.nn.softplus, 1),
    "log_sigmoid": (jax.nn.log_sigmoid, 1),
    "mish": (lambda x: x * jnp.tanh(jax.nn.softplus(x)), 1),
}


def calls(fn, operands):
    closed = jax.make_jaxpr(fn)(*(1.0,) * operands)
    return [e for e in J.equations_in({"jaxpr": closed}) if e.primitive is J.CUSTOM_JVP]


@pytest.mark.parametrize("name", CALLS)
def test_jaxs_is_recognised(name):
    assert [is_log_add_exp(e.params) for e in calls(*CALLS[name])] == [True]


def test_others_are_not():
    @jax.custom_jvp
    def logaddexp(x, z):
        return jnp.maximum(x, z)

    @jax.custom_jvp
    def otherwise(x, z):
        """The same steps, of other values."""
        far = x - z
        choice, total = far != far, x + z
        return jax.lax.select(choice, jnp.maximum(x, z) + jnp.log1p(jnp.exp(-jnp.abs(total))), total)

    for fn in (logaddexp, otherwise):
        fn.defjvp(lambda primals, tangents, fn=fn: (fn(*primals), tangents[0]))
    for fn, operands in ((logaddexp, 2), (otherwise, 2), (jax.nn.relu, 1), (jnp.logaddexp2, 2), (jax.nn.silu, 1)):
        assert not any(is_log_add_exp(e.params) for e in calls(fn, operands))


def test_programs_against_plain_loops():
    length, batch = 5, 8

    def program(p, x, t):
        h = CALLS["mish"][0](p["w"] @ x)
        loss = -jax.nn.log_sigmoid(p["v"] @ h) + jnp.logaddexp(h[0], x[1])
        return loss, 0.5 * x + 0.1 * jax.nn.softplus(h[:3])

    def by_hand(p, x):
        total = 0.0
        for _ in range(length):
            y = x @ p["w"].T
            h = y * jnp.tanh(jnp.log(1.0 + jnp.exp(y)))
            total += (jnp.log(1.0 + jnp.exp(-h @ p["v"])) + jnp.log(jnp.exp(h[:, 0]) + jnp.exp(x[:, 1]))).sum()
            x = 0.5 * x + 0.1 * jnp.log(1.0 + jnp.exp(h[:, :3]))
        return total / (length * batch)

    keys = jax.random.split(jax.random.key(0), 3)
    p = {"w": jax.random.normal(keys[0], (4, 3)), "v": jax.random.normal(keys[1], (4,))}
    start = jax.random.normal(keys[2], (batch, 3))
    expected = jax.value_and_grad(by_hand)(p, start)
    for make in (rlfx.compile, rlfx.reference):
        fn = make(program, length=length, batch=batch)
        value, gradient = jax.value_and_grad(lambda p: fn(p, start)[0])(p)
        np.testing.assert_allclose(value, expected[0], rtol=2e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), gradient, expected[1])
