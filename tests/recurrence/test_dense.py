"""Transposed convolutions without zeros: the same numbers as jax's, values and gradients, and fewer products."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.cpu.dense import dense_convolution, with_dense_convolutions
from tests.recurrence import of_points

CPU = rlfx.target("cpu")
CONVOLUTION = J.primitive("conv_general_dilated")
T, B, FIRST, OUT = 3, 2, 3, 4
LAST, CHANNELS = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")


def convolutions(fn, *args):
    return [e for e in J.equations_in({"jaxpr": jax.make_jaxpr(fn)(*args)}) if e.primitive is CONVOLUTION]


def operands(window, layout, places=(4, 5)):
    k = jax.random.split(jax.random.key(0))
    x, w = (2, *places, FIRST), (*window, FIRST, OUT)
    if layout == CHANNELS:
        x, w = (2, FIRST, *places), (OUT, FIRST, *window)
    return jax.random.normal(k[0], x), jax.random.normal(k[1], w)


STEPS, WINDOWS = [(2, 2), (3, 2), (2, 1), (4, 3)], [(2, 2), (3, 3), (4, 4), (5, 4), (4, 3)]
PADDING = ["SAME", "VALID", ((0, 0), (1, 2)), ((3, 1), (0, 4)), ((-1, 2), (2, -1))]


@pytest.mark.parametrize("layout", [LAST, CHANNELS], ids=lambda x: x[0])
@pytest.mark.parametrize("padding", PADDING, ids=str)
def test_it_is_that_of_jax(padding, layout):
    """All steps and windows: a window that is smaller than a step has outputs of nothing, and stays."""
    compared = 0
    for steps, window in itertools.product(STEPS, WINDOWS):
        if any(n < s for n, s in zip(window, steps, strict=True)):
            continue
        x, w = operands(window, layout)

        def whole(x, w, steps=steps):
            if isinstance(padding, str):
                return lax.conv_transpose(x, w, steps, padding, dimension_numbers=layout)
            return lax.conv_general_dilated(x, w, (1, 1), padding, lhs_dilation=steps, dimension_numbers=layout)

        (eqn,) = convolutions(whole, x, w)
        found = dense_convolution(eqn.params, x, w)
        np.testing.assert_allclose(found, whole(x, w), rtol=1e-5, atol=1e-5)
        assert found.shape == eqn.outvars[0].aval.shape
        compared += 1
    assert compared >= 15


def test_one_dimension_and_three():
    for d in (1, 3):
        x, w = jnp.arange(float(2 * 3**d * 2)).reshape(2, *[3] * d, 2) / 9.0, jnp.ones((*[3] * d, 2, 2)).at[0].set(2.0)
        numbers = ("NWC", "WIO", "NWC") if d == 1 else ("NDHWC", "DHWIO", "NDHWC")
        whole = lambda x, w, d=d, n=numbers: lax.conv_transpose(x, w, (2,) * d, "SAME", dimension_numbers=n)  # noqa: E731
        (eqn,) = convolutions(whole, x, w)
        np.testing.assert_allclose(dense_convolution(eqn.params, x, w), whole(x, w), rtol=1e-5)


def decoder(p, x, scale):
    """A frame out of a vector, by two layers; at one point without an axis of a batch."""
    y = jnp.tanh(x * scale).reshape(1, 2, 2, FIRST)
    y = jnp.tanh(lax.conv_transpose(y, p["a"], (2, 2), "SAME", dimension_numbers=LAST))
    return (lax.conv_transpose(y, p["b"], (2, 2), "VALID", dimension_numbers=LAST) ** 2).mean()


def encoder(p, x, scale):
    """Steps of two: what is learnt of the first layer goes back through a transposed one."""
    y = (x * scale).reshape(1, 4, 3, 1)
    same = {"dimension_numbers": LAST, "padding": "SAME"}
    y = jnp.tanh(lax.conv_general_dilated(y, p["first"], (1, 1), **same))
    return jnp.cos(lax.conv_general_dilated(y, p["a"], (2, 2), **same)).mean()


K = jax.random.split(jax.random.key(3), 4)
PARAMS = {
    "a": jax.random.normal(K[0], (3, 3, FIRST, OUT)), "b": jax.random.normal(K[1], (4, 4, OUT, 1)),
    "first": jax.random.normal(K[2], (2, 2, 1, FIRST)), "x": jax.random.normal(K[3], (T, B, 12)),
}  # fmt: skip
CARRY = jnp.linspace(0.5, 1.5, B)


@pytest.mark.parametrize("f", [decoder, encoder], ids=lambda f: f.__name__)
@pytest.mark.parametrize("wrt", [(0, 1), 0], ids=["with data", "weights"])
def test_values_and_gradients_are_those_of_loops(f, wrt):
    found = of_points.gradient(f, CPU, CARRY, T, wrt)(PARAMS, CARRY)
    of_points.close(found, of_points.by_hand(f, CARRY, T, wrt)(PARAMS, CARRY))


@pytest.mark.parametrize("f", [decoder, encoder], ids=lambda f: f.__name__)
def test_no_zeros_are_multiplied(f):
    """Neither in values, nor in what the gradient makes of steps. (A kernel's own derivative has them in its window.)"""
    found = convolutions(of_points.gradient(f, CPU, CARRY, T), PARAMS, CARRY)
    assert found
    assert all(set(e.params["lhs_dilation"] or ()) <= {1} for e in found)


def test_idempotent_and_what_stays():
    program = of_points.traced(decoder, PARAMS, CARRY, T)
    found = with_dense_convolutions(program)
    assert found is not program
    assert with_dense_convolutions(found) is found

    def small(p, x, scale):
        """One tap for steps of two; and features in groups."""
        y = (x * scale).reshape(1, 2, 2, FIRST)
        one = lax.conv_transpose(y, p["a"][:1, :1], (2, 2), "SAME", dimension_numbers=LAST)
        groups = {"lhs_dilation": (2, 2), "feature_group_count": FIRST, "dimension_numbers": LAST}
        return one.sum() + lax.conv_general_dilated(y, p["a"][:, :, :1, :FIRST], (1, 1), ((1, 1), (1, 1)), **groups).sum()

    program = of_points.traced(small, PARAMS, CARRY, T)
    assert with_dense_convolutions(program) is program
    found = of_points.gradient(small, CPU, CARRY, T)(PARAMS, CARRY)
    of_points.close(found, of_points.by_hand(small, CARRY, T, (0, 1))(PARAMS, CARRY))
