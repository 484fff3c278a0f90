"""The inverse of the error function in one row on CPUs: the same bits, whatever the shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.cpu.normal import FEWEST, erf_inv

SHAPES = [(64, 6), (32, 3, 24, 5, 2), (16, 16), (4, 9, 7), (FEWEST, 1), (7, 2), (2000,), ()]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bits(shape):
    x = jax.random.uniform(jax.random.key(0), shape, minval=-1.0, maxval=1.0)
    for own in (erf_inv.bind, jax.jit(erf_inv.bind)):
        np.testing.assert_array_equal(own(x), jax.jit(jax.lax.erf_inv)(x))


@pytest.mark.parametrize("shape", [(64, 6), (4, 9, 7)])
def test_in_a_call_of_its_own(shape):
    text = jax.jit(erf_inv.bind).lower(jax.ShapeDtypeStruct(shape, jnp.float32)).as_text()
    assert f"tensor<{np.prod(shape)}xf32>" in text
    assert 'inlineable = "false"' in text


@pytest.mark.parametrize("shape", [(64, 2), (16, 16, 8), (64, 32), (4, 16), (4096,)])
def test_what_is_taken_at_once_as_it_is(shape):
    """No call, and no memory of its own."""
    text = jax.jit(erf_inv.bind).lower(jax.ShapeDtypeStruct(shape, jnp.float32)).as_text()
    assert "inlineable" not in text


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_numbers(dtype):
    x = jnp.linspace(-0.9, 0.9, 600).reshape(100, 6).astype(dtype)
    assert erf_inv.bind(x).dtype == dtype
    np.testing.assert_allclose(*(np.asarray(f(x), np.float32) for f in (erf_inv.bind, jax.lax.erf_inv)), rtol=1e-2)


def test_derivatives():
    x = jnp.linspace(-0.9, 0.9, 600).reshape(100, 6)
    for order in (jax.grad, lambda f: jax.grad(lambda x: jax.grad(f)(x).sum())):
        own, of_jax = (order(lambda x, f=f: f(x).sum())(x) for f in (erf_inv.bind, jax.lax.erf_inv))
        np.testing.assert_allclose(own, of_jax, rtol=1e-5)


def test_under_vmap():
    x = jax.random.uniform(jax.random.key(1), (5, 40, 6), minval=-1.0, maxval=1.0)
    mapped = jax.jit(jax.vmap(jax.vmap(erf_inv.bind, 1, 1)))
    np.testing.assert_array_equal(mapped(x), jax.jit(jax.lax.erf_inv)(x))
    text = mapped.lower(x).as_text()
    assert "tensor<1200xf32>" in text


def test_what_programs_draw_is_what_jax_draws():
    length, batch, actions = 4, 64, 6

    def program(p, x, t):
        action = p @ x + jax.random.normal(t.key_for("action"), (actions,))
        return jnp.sum(action**2), 0.9 * x + 0.1 * action, action

    p, x, key = jnp.eye(actions), jnp.zeros((batch, actions)), jax.random.key(3)
    found = jax.jit(lambda p: rlfx.compile(program, length=length, batch=batch)(p, x, key))(p)
    expected = rlfx.reference(program, length=length, batch=batch)(p, x, key)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6), found, expected)
