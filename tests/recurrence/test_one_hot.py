"""Products of one-hot vectors with weights are rows of these: the same values and gradients as plain loops; and what stays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.api.adapted import adapted
from rlfx.recurrence.rewrite.one_hot import with_rows_taken
from tests.recurrence import of_points

CPU = rlfx.target("cpu")
T, B, N, OUT = 5, 3, 7, 4
K = jax.random.split(jax.random.key(0), 3)
PARAMS = {
    "w": jax.random.normal(K[0], (N, OUT)), "left": jax.random.normal(K[1], (OUT, N)),
    "x": jax.random.normal(K[2], (T, B, 3)) * 2.0,
}  # fmt: skip
CARRY = jnp.linspace(0.5, 1.5, B)
DOT = J.primitive("dot_general")


def places(x):
    """Three numbers of 0 <= i < N, some of which are outside."""
    return jnp.round(2.0 + 2.0 * x).astype(jnp.int32)


def one(p, x, scale):
    return (jnp.tanh(jax.nn.one_hot(places(x)[0], N) @ p["w"]) * scale).sum()


def several(p, x, scale):
    return (jnp.sin(jax.nn.one_hot(places(x), N) @ p["w"] * scale) ** 2).sum()


def on_the_right(p, x, scale):
    return (jnp.tanh(p["left"] @ jax.nn.one_hot(places(x)[1], N)) * scale).sum()


def first_axis(p, x, scale):
    """Positions along another axis than the last, weights' axes after and before those of the rows."""
    hot = jax.nn.one_hot(places(x), N, axis=0)
    return (jnp.einsum("nk,no->ko", hot, p["w"]) ** 2).sum() * scale + jnp.cos(jnp.einsum("on,nk->ok", p["left"], hot))[1].sum()


def compared(p, x, scale):
    """As comparisons, on either side."""
    i = places(x)[2]
    return ((jnp.arange(N) == i).astype(jnp.float32) @ p["w"] * scale + (i == jnp.arange(N)).astype(jnp.float32) @ p["w"]).max()


def mapped(p, x, scale):
    """Under ``jax.vmap``, and in a function of its own."""
    layer = jax.jit(lambda i: jnp.tanh(jax.nn.one_hot(i, N) @ p["w"]))
    return jax.vmap(layer)(places(x)).sum() * scale


PROGRAMS = [one, several, on_the_right, first_axis, compared, mapped]


@pytest.mark.parametrize("sums", PROGRAMS)
def test_values_and_gradients_are_those_of_loops(sums):
    found = of_points.gradient(sums, CPU, CARRY, T)(PARAMS, CARRY)
    of_points.close(found, of_points.by_hand(sums, CARRY, T, (0, 1))(PARAMS, CARRY))


def traced(sums):
    return of_points.traced(sums, PARAMS, CARRY, T)


def products(program):
    return sum(e.op is DOT for e in program.equations)


@pytest.mark.parametrize("sums", PROGRAMS)
def test_there_are_no_products(sums):
    program = traced(sums)
    found = with_rows_taken(program)
    assert products(program) > products(found) == 0
    assert with_rows_taken(found) is found
    assert products(adapted(program, CPU)) == 0


def test_what_is_no_one_hot_vector_or_no_weights_stays():
    def of_points_own(p, x, s):
        return jax.nn.one_hot(places(x)[0], 3) @ (x * s)

    def counted(p, x, s):  # two ones, or more
        return (jnp.arange(N) <= places(x)[0]).astype(jnp.float32) @ p["w"][:, 0] * s

    def of_each(p, x, s):  # another number for each place
        return (jnp.arange(N) == jnp.tile(places(x), 3)[:N]).astype(jnp.float32) @ p["w"][:, 0] * s

    def other_axis(p, x, s):
        return (jax.nn.one_hot(places(x), N).T @ p["x"][0, 0]).sum() * s

    def of_floats(p, x, s):
        return (jnp.arange(7.0) == x[0]).astype(jnp.float32) @ p["w"][:, 0] * s

    for sums in (of_points_own, counted, of_each, other_axis, of_floats):
        program = traced(sums)
        assert with_rows_taken(program) is program, sums


def test_weights_that_are_not_finite_reach_those_that_read_them():
    w = PARAMS["w"].at[2].set(jnp.inf)

    def program(p, s, t):
        i = rlfx.inputs(jnp.arange(T), axes="t")[t]
        return jnp.where(i == 2, 0.0, (jax.nn.one_hot(i, N) @ p).sum()), s

    fn = rlfx.compile(program, length=T, batch=B, target=CPU)
    loss, slope = jax.jit(jax.value_and_grad(lambda p: fn(p, CARRY)[0]))(w)
    assert np.isfinite(loss)
    np.testing.assert_allclose(slope[:, 0], [0.2, 0.2, 0.0, 0.2, 0.2, 0.0, 0.0], rtol=1e-6)


def test_types_are_those_of_the_product():
    def program(p, s, t):
        hot = jax.nn.one_hot(places(rlfx.inputs(PARAMS["x"])[t]), N, dtype=jnp.bfloat16)
        y = jax.lax.dot_general(hot, p.astype(jnp.bfloat16), (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        assert y.dtype == jnp.float32
        return y.sum(), s

    given = PARAMS["w"], CARRY
    loss, _ = jax.jit(rlfx.compile(program, length=T, batch=B, target=CPU))(*given)
    np.testing.assert_allclose(loss, rlfx.reference(program, length=T, batch=B)(*given)[0], rtol=1e-5)
