"""Axes of length one around products: the same values and gradients as plain loops, none is left, and which stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.rewrite.units import without_unit_axes
from tests.recurrence import of_points

CPU = rlfx.target("cpu")
T, B, D = 4, 3, 4
K = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "w": jax.random.normal(K[0], (D, D)), "u": jax.random.normal(K[1], (D, 3 * D)), "b": jnp.linspace(-1.0, 1.0, D),
    "x": jax.random.normal(K[2], (T, B, 5, D)), "one": jax.random.normal(K[3], (1, D, D)),
}  # fmt: skip
CARRY = jnp.linspace(0.5, 1.5, B)
DOT, CONVOLUTION = J.primitive("dot_general"), J.primitive("conv_general_dilated")


def layers(p, x, scale):
    """As a library's layers are called: with a batch of one."""
    y = jax.nn.relu(x[:1] @ p["w"] + p["b"][None])
    return (jnp.tanh(y @ p["w"] + p["b"][None]) * scale)[0].sum()


def attention(p, x, scale):
    q, k, v = jnp.split(x @ p["u"], 3, -1)
    q, k, v = (z.reshape(5, 2, 2) for z in (q * scale, k, v))
    return jnp.cos(jax.nn.dot_product_attention(q, k, v, is_causal=True)).sum()


def einsums(p, x, scale):
    """Axes of one in the middle; transposed; put together with what has none."""
    y = jnp.einsum("bnd,bde->ben", x[None], p["one"]) * scale
    z = jnp.swapaxes(jax.nn.softmax(y, -1), 0, 2)  # [n, e, b]
    return (jnp.einsum("neb,dne->bd", z, jnp.sin(x)[None].transpose(2, 1, 0) * p["b"][:, None, None]) ** 2).max(0).sum()


def sums_over_it(p, x, scale):
    """Reductions over the axis itself, alone and with others; spread, and squeezed."""
    y = jnp.tanh(x[None, :, None] @ p["w"])  # [1, 5, 1, D]
    return (y.sum(0).squeeze(1) * scale + y.max((0, 2)) + jnp.broadcast_to(y.prod(2), (1, 5, D))[0]).sum()


def normalised(p, x, scale):
    """Axes that are kept beside a sum are as long as others that they meet: they stay; the one of a batch goes."""
    y = x[None] @ p["w"]
    y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + scale)
    return jnp.cos(y @ p["w"]).sum()


PROGRAMS = [layers, attention, einsums, sums_over_it, normalised]


@pytest.mark.parametrize("wrt", [(0, 1), 0], ids=["with data", "weights"])
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_values_and_gradients_are_those_of_loops(f, wrt):
    found = of_points.gradient(f, CPU, CARRY, T, wrt)(PARAMS, CARRY)
    of_points.close(found, of_points.by_hand(f, CARRY, T, wrt)(PARAMS, CARRY))


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_no_product_has_them(f):
    """Idempotent; and the law of every rewrite: the same by the reference."""
    program = of_points.traced(f, PARAMS, CARRY, T)
    found = without_unit_axes(program)
    products = [e for e in found.equations if e.op is DOT]
    assert products
    assert not any(1 in v.shape for e in products for v in (*e.inputs, *e.outputs))
    assert without_unit_axes(found) is found
    one, other = (rlfx.reference(x)(PARAMS, CARRY) for x in (program, found))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, other)


def test_a_state_with_such_an_axis():
    """It is carried with its axis; what a timestep makes of it has none."""

    def act(p, h, t):
        h = jnp.tanh(rlfx.inputs(p["x"])[t][:1] @ p["w"] + h @ p["one"][0])
        return (h**2).sum(), h

    state = jnp.ones((B, 1, D))
    fn, reference = (make(act, length=T, batch=B) for make in (rlfx.compile, rlfx.reference))
    one, other = (jax.value_and_grad(lambda p, h, f=f: f(p, h)[0], (0, 1))(PARAMS, state) for f in (fn, reference))
    of_points.close(one, other)
    program = without_unit_axes(rlfx.trace(act, PARAMS, state, length=T, batch=B))
    assert program.next_carry[0].shape == (1, D)
    assert not any(1 in v.shape for e in program.equations if e.op is DOT for v in e.inputs)


def images(p, x, scale):
    """A convolution keeps its batch, and all that it leads to."""
    y = lax.conv_general_dilated(
        x[None, :, :, None] * scale, p["w"][:2, :2, None, None], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.tanh(y.reshape(1, -1)[:, :D] @ p["w"]).sum()


def of_another_length(p, x, scale):
    """What is one here is five there."""
    return (jnp.tanh(x[:1] @ p["w"]) * x * scale).sum()


def in_a_loop(p, x, scale):
    step = lambda h, y: (jnp.tanh(h @ p["w"] + y[None]), None)  # noqa: E731
    return lax.scan(step, x[:1] @ p["w"], x)[0].sum() * scale


def critic(p, x, scale):
    """Weights with one output."""
    return jnp.tanh(jnp.tanh(x[0] @ p["w"]) @ p["w"][:, :1])[0] * scale


STAY = [(images, 0), (of_another_length, 1), (in_a_loop, 1), (critic, 1)]


@pytest.mark.parametrize(("f", "products"), STAY, ids=["images", "lengths", "loop", "critic"])
def test_what_stays(f, products):
    """Of so many products axes stay."""
    program = of_points.traced(f, PARAMS, CARRY, T)
    found = without_unit_axes(program)
    assert sum(1 in e.outputs[0].shape for e in found.equations if e.op is DOT) == products
    kept = [[v.shape for v in e.inputs] for p in (program, found) for e in p.equations if e.op is CONVOLUTION]
    assert kept[::2] == kept[1::2]
    of_points.close(
        of_points.gradient(f, CPU, CARRY, T)(PARAMS, CARRY), of_points.by_hand(f, CARRY, T, (0, 1))(PARAMS, CARRY)
    )


def test_without_products_nothing_changes():
    alone = lambda p, x, scale: (x[None].sum(0) * scale + jnp.cumsum(x, 0)[:1]).sum()  # noqa: E731
    program = of_points.traced(alone, PARAMS, CARRY, T)
    assert without_unit_axes(program) is program
