"""What a kernel's derivative turns is computed before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.cpu.convolution import CONVOLUTION, of_derivative
from rlfx.recurrence.ir.interpret import rewritten

LAST = ("NHWC", "HWIO", "NHWC")


def loss(w, x, numbers=LAST, strides=(2, 2)):
    made = jax.lax.conv_general_dilated(jnp.tanh(x), w, strides, "SAME", dimension_numbers=numbers)
    return jnp.sum(jnp.sin(made))


def given(size=16):
    k = jax.random.split(jax.random.key(0))
    return 0.2 * jax.random.normal(k[0], (3, 3, 3, 5)), jax.random.normal(k[1], (24, size, size, 3))


def calls(fn, *args):
    """What goes into calls that stay."""
    return [e.invars[0].aval.shape for e in jax.make_jaxpr(fn)(*args).eqns if J.stays_a_call(e)]


@pytest.mark.parametrize("how", [{}, {"strides": (1, 1)}])
def test_values_are_those_of_jax(how):
    w, x = given()
    gradient = jax.grad(lambda w, x: loss(w, x, **how), (0, 1))
    found, wanted = jax.jit(rewritten(gradient, {CONVOLUTION: of_derivative}))(w, x), gradient(w, x)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    twice = jax.grad(lambda w, x: jnp.sum(gradient(w, x)[0] ** 2))
    np.testing.assert_allclose(rewritten(twice, {CONVOLUTION: of_derivative})(w, x), twice(w, x), rtol=1e-3, atol=1e-2)


def test_large_images_are_computed_before_and_small_ones_are_not():
    w, x = given()
    learn = rewritten(jax.grad(loss), {CONVOLUTION: of_derivative})
    assert calls(learn, w, x) == [x.shape]  # cotangents are [24, 8, 8, 5]
    assert calls(learn, w, x[:, :8, :8]) == []
    assert calls(rewritten(loss, {CONVOLUTION: of_derivative}), w, x) == []


def test_in_a_learner():
    def program(p, h, t):
        x = rlfx.inputs(p["images"])[t]
        made = jax.lax.conv_general_dilated(x[None], p["w"], (2, 2), "SAME")[0]
        return jnp.sum(jnp.sin(made)) + h, 0.5 * h

    k = jax.random.split(jax.random.key(1))
    p = {"w": 0.2 * jax.random.normal(k[0], (12, 3, 3, 3)), "images": jax.random.normal(k[1], (6, 8, 3, 32, 32))}
    both = []
    for make in (rlfx.compile, rlfx.reference):
        f = make(program, length=6, batch=8)
        both.append(jax.jit(jax.grad(lambda w, f=f: f(p | {"w": w}, jnp.ones(8))[0]))(p["w"]))
    np.testing.assert_allclose(*both, rtol=1e-4, atol=1e-4 * float(jnp.abs(both[1]).max()))
