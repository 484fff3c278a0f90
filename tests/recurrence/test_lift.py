"""Lifting: running extremes as recurrences, with the values and derivatives of the reductions that they replace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from tests.sampling import met

T, B = 9, 3
REDUCTIONS = {"max": jnp.max, "min": jnp.min}
SLICES = {"future": lambda x, t: x[t:], "past": lambda x, t: x[: t + 1]}


def program(reduction, slice_of, elementwise=lambda y: y):
    def f(w, x, t):
        y = rlfx.series(jnp.round(w * jnp.sin(3.0 * x)) / 2.0 + w * 0.1)  # rounded: many timesteps attain an extreme
        extreme = reduction(elementwise(slice_of(y, t)), axis=0)
        return jnp.sum(jnp.sin(extreme) * (1.0 + x)), x + 0.37

    return f


def value_and_gradient(make, f, w, x):
    fn = make(f, length=T, batch=B)
    fn = jax.jit(fn) if make is rlfx.compile else fn  # the reference runs operation by operation
    return jax.value_and_grad(lambda w, x: fn(w, x)[0], (0, 1))(w, x)


def agree(got, expected):
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-6), got, expected)


@pytest.mark.parametrize(("reduction", "slice_of", "point"), met(REDUCTIONS, SLICES, [(2,), ()]))
def test_ties_share_the_derivative_of_a_running_extreme(reduction, slice_of, point):
    f = program(REDUCTIONS[reduction], SLICES[slice_of], jax.nn.relu)
    x = jnp.linspace(0.0, 2.0, B * max(1, *point, 1), dtype=jnp.float32).reshape(B, *point)
    agree(
        value_and_gradient(rlfx.compile, f, jnp.float32(3.0), x),
        value_and_gradient(rlfx.reference, f, jnp.float32(3.0), x),
    )


@pytest.mark.parametrize("slice_of", SLICES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_running_extremes_are_recurrences(reduction, slice_of):
    f, x = program(REDUCTIONS[reduction], SLICES[slice_of]), jnp.linspace(0.0, 2.0, B, dtype=jnp.float32)
    traced = rlfx.trace(f, jnp.float32(1.0), x, length=T, batch=B)
    assert not any(e.is_ragged for e in traced.equations)
    text = str(jax.make_jaxpr(lambda w: value_and_gradient(rlfx.compile, f, w, x))(jnp.float32(1.0)))
    assert f"{T},{T}" not in text


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_values_that_are_not_finite(reduction, bad):
    def f(w, x, t):
        y = rlfx.series(jnp.where(t == 4, bad, w * x))
        return rlfx.last(REDUCTIONS[reduction](y[t:])) + REDUCTIONS[reduction](y[: t + 1]), x + 1.0

    w, x = jnp.float32(0.5), jnp.arange(3.0, dtype=jnp.float32)
    agree(value_and_gradient(rlfx.compile, f, w, x), value_and_gradient(rlfx.reference, f, w, x))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.bool_])
def test_extremes_of_integers(dtype):
    def f(_, x, t):
        y = rlfx.series((x % 5).astype(dtype))
        return x * 7 % 11, (jnp.max(y[t:]), jnp.min(y[: t + 1]))

    x = jnp.arange(B, dtype=jnp.int32)
    got, expected = (make(f, length=T, batch=B)((), x)[1] for make in (rlfx.unroll, _reference_unroll))
    jax.tree.map(lambda g, e: np.testing.assert_array_equal(np.asarray(g), np.asarray(e), strict=True), got, expected)


def _reference_unroll(f, length, batch):
    return rlfx.reference(f, length=length, batch=batch, loss=False)


def test_reductions_over_other_axes_too_stay_as_they_are():
    """Ties within a timestep and between timesteps would share in two steps what they share in one."""

    def f(w, x, t):
        y = rlfx.series(jnp.round(w * jnp.array([1.0, 1.2], jnp.float32) * x))
        return jnp.max(y[t:]), x + 0.5

    w, x = jnp.float32(1.0), jnp.arange(3.0, dtype=jnp.float32)
    assert any(e.is_ragged for e in rlfx.trace(f, w, x, length=T, batch=B).equations)
    agree(value_and_gradient(rlfx.compile, f, w, x), value_and_gradient(rlfx.reference, f, w, x))
