"""What is put together along features of images is put together once, in a call of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.cpu.joined import put_together

LENGTH, BATCH, SIDE, UNITS = 5, 4, 6, 16


def equation(*shapes, axis):
    parts = [jnp.ones(s) for s in shapes]
    (eqn,) = jax.make_jaxpr(lambda *parts: lax.concatenate(parts, axis))(*parts).eqns
    return eqn, parts


@pytest.mark.parametrize(
    ("shapes", "axis", "pays"),
    [
        ([(4, 16, 64)] * 2, 2, True),
        ([(4, 16, 60), (4, 16, 4)], 2, True),
        ([(4, 16, 16)] * 2, 2, False),  # few elements
        ([(64, 64)] * 2, 1, False),  # a matrix
        ([(4, 16, 64)] * 2, 1, False),  # not along features
    ],
)
def test_where_it_pays(shapes, axis, pays):
    eqn, parts = equation(*shapes, axis=axis)
    found = put_together(eqn, parts)
    assert (found is not None) == pays
    if pays:
        np.testing.assert_array_equal(found[0], jnp.concatenate(parts, axis))
        calls = jax.make_jaxpr(lambda *parts: put_together(eqn, list(parts)))(*parts).eqns
        assert any(map(J.stays_a_call, calls))


def convolution(x, w):
    return lax.conv_general_dilated(x[None], w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))[0]


def learner(p, state, t):
    """A convolutional LSTM."""
    (h, c), x = state, rlfx.inputs(p["x"])[t]
    gates = convolution(jnp.concatenate([x, h], -1), p["w"]) + p["b"]
    i, f, g, o = jnp.split(gates, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return jnp.sum(h**2), (h, c)


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    w = 0.1 * jax.random.normal(keys[0], (3, 3, 2 + UNITS, 4 * UNITS))
    p = {"w": w, "b": jnp.zeros((1, 1, 4 * UNITS)), "x": jax.random.normal(keys[1], (LENGTH, BATCH, SIDE, SIDE, 2))}
    zero = jnp.zeros((BATCH, SIDE, SIDE, UNITS))
    return p, (zero, zero)


def test_a_convolutional_lstm_against_plain_loops():
    p, start = arguments()

    def by_hand(w):
        (h, c), total = start, 0.0
        for x in p["x"]:
            gates = jax.vmap(convolution, (0, None))(jnp.concatenate([x, h], -1), w) + p["b"][None]
            i, f, g, o = jnp.split(gates, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            total += (h**2).sum()
        return total / (LENGTH * BATCH)

    fn = rlfx.compile(learner, length=LENGTH, batch=BATCH)
    step = jax.jit(jax.value_and_grad(lambda w: fn({**p, "w": w}, start)[0]))
    (value, gradient), expected = step(p["w"]), jax.value_and_grad(by_hand)(p["w"])
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-4, atol=1e-6)
    calls = [line for line in step.lower(p["w"]).as_text().splitlines() if "call" in line and 'inlineable = "false"' in line]
    assert any(f"x{4 * UNITS}xf32" in line for line in calls)
