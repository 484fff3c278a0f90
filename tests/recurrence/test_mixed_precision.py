"""Parameters, losses and lengths of several dtypes in one program, under strict promotion."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from tests.oracle.forms import SLICES

PARAMETERS = [jnp.bfloat16, jnp.float16, jnp.float32, jnp.complex64]
SHAPES = [(), (2,), (2, 3), (0,), (1, 1)]


@pytest.mark.parametrize("loss_dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_gradient_has_the_dtype_of_its_parameter_whatever_the_loss_is(loss_dtype):
    """Sixty members: the loss' cotangent and the gradient that was kept have no common dtype under strict promotion."""
    params = {f"{jnp.dtype(d)}{s}": jnp.full(s, 0.5, d) for d, s in itertools.product(PARAMETERS, SHAPES)}
    weights = {k: 1.0 + i for i, k in enumerate(params)}

    def f(p, carry, t):
        time = t.now.astype(jnp.float32)
        loss = sum(weights[k] * jnp.real(x).astype(jnp.float32).sum() * time for k, x in p.items())
        return (loss / 64).astype(loss_dtype), carry

    loss_fn = rlfx.compile(f, length=4, reduce="sum")
    gradients = jax.jit(jax.grad(lambda p: loss_fn(p, None)[0].astype(jnp.float32) * 3))(params)
    for k, x in params.items():
        assert (gradients[k].dtype, gradients[k].shape) == (x.dtype, x.shape)
        expected = np.full(x.shape, weights[k] * 6 * 3 / 64)
        np.testing.assert_allclose(gradients[k].astype(jnp.complex64), expected, rtol=1e-2)


def test_products_of_slices_trace_with_64_bit_integers():
    """Every slice in a product with itself and with another: the lengths of two axes, as int32, where jax's are int64."""

    def f(p, carry, t):
        total = jnp.zeros(())
        for lo, hi, *_ in SLICES:
            if "np." in lo + hi:
                continue
            x = eval(f"s[{lo}:{hi}]", {"s": rlfx.series(carry), "t": t, "rlfx": rlfx})
            for op in (jnp.tanh, jnp.sin, lambda y: jnp.where(y > 0, y, 1.0)):
                total += jnp.sum(op(x[:, None] - x[None, :]))
        return total, jnp.sin(carry)

    with jax.enable_x64(True):
        assert jax.make_jaxpr(rlfx.compile(f, length=5))(None, jnp.float64(0.3)).out_avals[0].dtype == jnp.float64
