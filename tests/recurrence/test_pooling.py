"""Maxima over windows, axis after axis, and their derivative: as jax's, ties included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rlfx
from rlfx.recurrence.cpu.pooling import Windows, maxima, windows_of

SHAPES = {
    "3x3, stride 2": ((2, 9, 8, 3), (1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
    "2x2": ((2, 8, 8, 3), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "2x2, some left over": ((2, 7, 9, 2), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "3x3, every place": ((1, 6, 5, 2), (1, 3, 3, 1), (1, 1, 1, 1), "SAME"),
    "channels first": ((2, 3, 7, 7), (1, 1, 3, 3), (1, 1, 2, 2), "SAME"),
    "farther than wide": ((1, 11, 10, 2), (1, 2, 2, 1), (1, 3, 4, 1), "VALID"),
    "one axis": ((12, 4), (5, 1), (2, 1), "SAME"),
    "all axes": ((5, 4, 6), (2, 3, 2), (2, 1, 3), "SAME"),
    "strides alone": ((6, 7), (1, 1), (2, 3), "VALID"),
}


def of_jax(x, shape, strides, padding):
    return lax.reduce_window(x, -jnp.inf, lax.max, shape, strides, padding)


def both(name, ties=False, dtype=jnp.float32):
    size, shape, strides, padding = SHAPES[name]
    x = jax.random.normal(jax.random.key(0), size)
    x = (jnp.round(x) if ties else x).astype(dtype)
    windows = Windows(shape, strides, tuple(lax.padtype_to_pads(size, shape, strides, padding)), size)
    return x, lambda x: maxima(windows, x), lambda x: of_jax(x, shape, strides, padding)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_values_and_derivatives_both_ways(name, ties):
    x, ours, theirs = both(name, ties)
    np.testing.assert_array_equal(ours(x), theirs(x))
    weights = jax.random.normal(jax.random.key(1), theirs(x).shape)
    gradient = lambda f: jax.jit(jax.grad(lambda x: (f(x) ** 2 * weights).sum()))(x)  # noqa: E731
    np.testing.assert_allclose(gradient(ours), gradient(theirs), rtol=1e-5, atol=1e-6)
    if ties:  # forwards, jax takes another one of those that tie
        return
    dx = jax.random.normal(jax.random.key(2), x.shape)
    np.testing.assert_allclose(jax.jvp(ours, (x,), (dx,))[1], jax.jvp(theirs, (x,), (dx,))[1], rtol=1e-6)


@pytest.mark.parametrize("name", SHAPES)
def test_against_plain_loops(name):
    size, shape, strides, padding = SHAPES[name]
    x, ours, _ = both(name, ties=True)
    pads = lax.padtype_to_pads(size, shape, strides, padding)
    padded = np.pad(np.asarray(x), pads, constant_values=-np.inf)
    found, slope = ours(x), np.zeros_like(padded)
    for window in np.ndindex(*found.shape):
        corner = [w * s for w, s in zip(window, strides, strict=True)]
        part = padded[tuple(slice(c, c + n) for c, n in zip(corner, shape, strict=True))]
        assert found[window] == part.max()
        at = np.unravel_index(part.argmax(), part.shape)
        slope[tuple(c + i for c, i in zip(corner, at, strict=True))] += 1.0
    inner = tuple(slice(lo, lo + n) for (lo, _), n in zip(pads, size, strict=True))
    np.testing.assert_array_equal(jax.grad(lambda x: ours(x).sum())(x), slope[inner])


def test_second_derivatives():
    x, ours, theirs = both("3x3, stride 2")
    product = lambda f: jax.jvp(jax.grad(lambda x: jnp.sum(jnp.sin(f(x)))), (x,), (x,))[1]  # noqa: E731
    np.testing.assert_allclose(product(ours), product(theirs), rtol=1e-5, atol=1e-6)


def test_under_vmap():
    x, ours, theirs = both("3x3, stride 2")
    several = jnp.stack([x, -x, x**2], 2)
    for axis in (2,):
        gradient = lambda f: jax.vmap(jax.grad(lambda x: (f(x) ** 2).sum()), axis)(several)  # noqa: E731
        np.testing.assert_allclose(gradient(ours), gradient(theirs), rtol=1e-5, atol=1e-6)


def test_half_precision():
    x, ours, theirs = both("3x3, stride 2", dtype=jnp.bfloat16)
    assert ours(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(ours(x), theirs(x))


def test_where_all_elements_are_infinite():
    """As in jax, the first is the maximum, be it padding."""
    x, ours, theirs = both("3x3, stride 2")
    lowest = jnp.full_like(x, -jnp.inf)
    weights = jax.random.normal(jax.random.key(6), theirs(x).shape)
    slopes = jax.vjp(ours, lowest)[1](weights)[0]
    np.testing.assert_allclose(slopes, jax.vjp(theirs, lowest)[1](weights)[0], rtol=1e-6)


def test_not_a_number_is_the_maximum():
    x, ours, theirs = both("2x2")
    x = x.at[0, 0, 0, 0].set(jnp.nan)
    np.testing.assert_array_equal(ours(x), theirs(x))


def equation(fn, x):
    return next(e for e in jax.make_jaxpr(fn)(x).eqns if e.primitive.name == "reduce_window_max")


def test_what_stays_jaxs():
    x = jnp.ones((2, 40, 40, 3))
    dilated = lambda x: lax.reduce_window(  # noqa: E731
        x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID", window_dilation=(1, 2, 2, 1)
    )
    large = lambda x: of_jax(x, (1, 9, 9, 1), (1, 9, 9, 1), "VALID")  # noqa: E731
    small = lambda x: of_jax(x, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")  # noqa: E731
    cropped = lambda x: of_jax(x, (1, 2, 2, 1), (1, 2, 2, 1), ((0, 0), (-2, 0), (0, 0), (0, 0)))  # noqa: E731
    found = [windows_of(equation(f, x).params, x) for f in (dilated, large, cropped, small)]
    assert found[:3] == [None] * 3
    assert found[3] is not None
    whole = jnp.ones((4, 4), jnp.int32)
    smallest = np.iinfo(np.int32).min
    of_integers = lambda x: lax.reduce_window(x, smallest, lax.max, (2, 2), (2, 2), "VALID")  # noqa: E731
    assert windows_of(equation(of_integers, whole).params, whole) is None


def program(p, x, t):
    features = of_jax(jnp.tanh(p * x), (3, 3, 1), (2, 2, 1), "SAME")
    return jnp.sum(features**2), 0.9 * jnp.roll(x, 1, axis=0)


def test_programs():
    length, batch = 3, 2
    start = jax.random.normal(jax.random.key(5), (batch, 7, 6, 2))

    def by_hand(p):
        x, total = start, 0.0
        for _ in range(length):
            total += (of_jax(jnp.tanh(p * x), (1, 3, 3, 1), (1, 2, 2, 1), "SAME") ** 2).sum()
            x = 0.9 * jnp.roll(x, 1, axis=1)
        return total / (length * batch)

    expected = jax.value_and_grad(by_hand)(1.5)
    for make in (rlfx.compile, rlfx.reference):
        fn = make(program, length=length, batch=batch)
        found = jax.value_and_grad(lambda p, fn=fn: fn(p, start)[0])(1.5)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    step = jax.jit(jax.grad(lambda p: rlfx.compile(program, length=length, batch=batch)(p, start)[0]))
    assert "select_and_scatter" not in step.lower(1.5).as_text()
