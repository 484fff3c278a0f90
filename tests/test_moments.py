"""Running moments in the language: against NumPy over all values, the reference, and what evaluation uses of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import ProgramError

T, B = 6, 4
XS = np.random.default_rng(0).normal(3.0, 2.0, (T, B, 2)).astype(np.float32)


def counted(xs, carry, t):
    x, moments = rlfx.normalize(rlfx.inputs(xs)[t], carry)
    return moments, (x, moments)


def start():
    return rlfx.Shared(rlfx.Moments.of(jnp.zeros(2)))


def test_moments_are_those_of_all_values_so_far():
    moments, (x, each) = rlfx.unroll(counted, length=T, batch=B)(XS, start())
    for t in range(T):
        seen = np.float64(XS[: t + 1].reshape(-1, 2))
        np.testing.assert_allclose(each.mean[t], np.broadcast_to(seen.mean(0), (B, 2)), rtol=1e-5)
        np.testing.assert_allclose(each.variance[t], np.broadcast_to(seen.var(0), (B, 2)), rtol=1e-5)
        np.testing.assert_allclose(x[t], (XS[t] - seen.mean(0)) / seen.std(0), rtol=1e-4, atol=1e-5)
    assert moments.value.count == T * B
    whole = rlfx.Moments.of(jnp.zeros(2)).after(T * B, XS.mean((0, 1)), XS.var((0, 1)))
    np.testing.assert_allclose(moments.value.variance, whole.variance, rtol=1e-5)


def test_the_reference_and_a_mesh_agree():
    def loss(xs, carry, t):
        x, moments = rlfx.normalize(rlfx.inputs(xs)[t], carry)
        value = rlfx.series(x.sum(), start=0.5)
        return value[t - 1] * value[t], moments

    expected = rlfx.reference(loss, length=T, batch=B)(XS, start())
    for mesh in (None, jax.make_mesh((2,), ("b",))):
        got = rlfx.compile(loss, length=T, batch=B, mesh=mesh)(XS, start())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), got, expected)


def test_only_timesteps_before_an_environments_end_count():
    def until(_, carry, t):
        n, moments = carry
        _, moments = rlfx.normalize(n, moments)
        return n + 1.0, moments

    def f(params, carry, t):
        return until(params, carry, t), None

    first = jnp.array([0.0, 2.0])  # the second ends after the values 2, 3; the first after 0, 1, 2, 3
    program = rlfx.unroll(f, length=8, batch=2, until=lambda carry: carry[0] >= 4.0)
    (_, moments), *_ = program(None, (first, rlfx.Shared(rlfx.Moments.of(0.0))))
    seen = np.array([0.0, 1.0, 2.0, 3.0, 2.0, 3.0])
    assert moments.value.count == seen.size
    np.testing.assert_allclose([moments.value.mean, moments.value.variance], [seen.mean(), seen.var()], rtol=1e-5)


def test_evaluation_counts_nothing_and_takes_batches():
    moments = rlfx.Moments.of({"a": jnp.zeros(2), "n": jnp.int32(0)})
    moments = moments.after(10, {"a": jnp.ones(2), "n": 2.0}, {"a": jnp.full(2, 4.0), "n": 1.0})
    value = {"a": jnp.array([[3.0, 1.0], [1.0, 101.0]]), "n": jnp.array([3, 1])}
    np.testing.assert_allclose(moments(value)["a"], [[1.0, 0.0], [0.0, 10.0]], atol=1e-6)
    np.testing.assert_allclose(moments(value)["n"], [1.0, -1.0], atol=1e-6)
    np.testing.assert_allclose(moments.scale(value)["a"], [[1.5, 0.5], [0.5, 50.5]], rtol=1e-6)


def test_moments_are_constants_for_gradients():
    def f(params, carry, t):
        x, moments = rlfx.normalize(params * t.astype(jnp.float32), carry)
        return x * moments.mean, moments

    gradient = jax.grad(lambda p: rlfx.compile(f, length=3)(p, rlfx.Shared(rlfx.Moments.of(0.0)))[0])(2.0)

    def moments_of(params, carry, t):
        _, moments = rlfx.normalize(params * t.astype(jnp.float32), carry)
        return moments, moments

    _, moments = rlfx.unroll(moments_of, length=3)(2.0, rlfx.Shared(rlfx.Moments.of(0.0)))
    means, deviations = moments.mean, jnp.sqrt(moments.variance + 1e-8)
    np.testing.assert_allclose(gradient, np.mean(np.arange(3.0) / deviations * means), rtol=1e-4)


def test_a_long_run_keeps_its_moments():
    """Beyond the integers of float32 the count stands still; the moments do not drift."""
    moments = rlfx.Moments(jnp.float32(2.0**24), jnp.float32(3.0), jnp.float32(4.0))
    after = jax.lax.fori_loop(0, 1000, lambda _, m: m.after(1, jnp.float32(3.0), jnp.float32(4.0)), moments)
    assert (after.count, after.mean, after.variance) == (2.0**24, 3.0, 4.0)


@pytest.mark.parametrize(
    ("value", "moments", "text"),
    [
        (lambda: jnp.ones(3), rlfx.Moments.of(jnp.ones(2)), r"the value is f32\[3\], the moments are of f32\[2\]"),
        (lambda: jnp.ones((1, 2)), rlfx.Moments.of(jnp.ones(2)), r"the value is f32\[1, 2\]"),
        (lambda: jnp.bool_(True), rlfx.Moments.of(jnp.bool_(True)), r"the value is bool\[\]"),
        (lambda: (1.0, 2.0), rlfx.Moments.of(0.0), r"the value is PyTreeDef\(\(\*, \*\)\), the moments are of"),
        (lambda: 1.0, (0.0, 1.0), r"takes rlfx.Moments, got tuple"),
    ],
)
def test_what_does_not_fit_is_refused(value, moments, text):
    with pytest.raises(ProgramError, match=text):
        rlfx.unroll(lambda _, c, t: rlfx.normalize(value(), c)[::-1], length=2)(None, rlfx.Shared(moments))
