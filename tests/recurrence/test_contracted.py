"""Sums of products of what is spread as products of matrices: the same values and gradients, and no array of all pairs."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.rewrite.contracted import with_contractions
from tests.recurrence import of_points

CPU = rlfx.target("cpu")
ALWAYS, NEVER = (dataclasses.replace(CPU, rewrites=dataclasses.replace(CPU.rewrites, contracted=n)) for n in (1, 0))
T, B, N, M, D = 6, 3, 6, 7, 8
K = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "a": jax.random.normal(K[0], (4, N, D)),
    "b": jax.random.normal(K[1], (4, M, D)),
    "x": jax.random.normal(K[2], (T, B, 4)),
}
CARRY = jnp.linspace(0.5, 1.5, B)


def codes(p, x, scale):
    return jnp.tanh(jnp.tensordot(x, p["a"], 1)), jnp.tanh(jnp.tensordot(x, p["b"], 1) * scale)


def of_pairs(p, x, scale):
    a, b = codes(p, x, scale)
    return jnp.sin((a[:, None] * b[None]).sum(-1)).sum()


def columns_first(p, x, scale):
    """The second code's axis comes first, and the one that is added up is in the middle."""
    a, b = codes(p, x, scale)
    return (jnp.exp((a.T[None] * b[:, :, None]).sum(1)) * jnp.arange(M, dtype=jnp.float32)[:, None]).sum()


def of_heads(p, x, scale):
    """Both factors have an axis that stays."""
    a, b = (v.reshape(-1, 2, D // 2) for v in codes(p, x, scale))
    return jnp.cos((a[:, None] * b[None]).mean(-1)).sum()


def over_two_axes(p, x, scale):
    a, b = (v.reshape(-1, 2, D // 2) for v in codes(p, x, scale))
    return jnp.cos((b[:, None] * a[None]).sum((2, 3)) ** 2).sum()


def of_what_is_fixed(p, x, scale):
    """One factor is the same everywhere, and has an axis of one number."""
    a, _ = codes(p, x, scale)
    grid = jnp.linspace(0.0, 1.0, M * D).reshape(M, 1, D)
    return jnp.sin((a[None] * grid).sum(-1)).sum()


SUMS = [of_pairs, columns_first, of_heads, over_two_axes, of_what_is_fixed]


def together(codes):
    """Of all environments' codes, with a gradient inside."""
    likeness = lambda a: jnp.sin((a[:, None] * codes[None]).sum(-1)).sum()  # noqa: E731
    return jnp.cos(jax.grad(likeness)(codes)).sum() + jax.jit(likeness)(codes)


def gradient(sums, target, wrt=(0, 1), **how):
    return of_points.gradient(sums, target, CARRY, T, wrt, **how)


@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize(("plan", "wrt"), [(None, (0, 1)), (rlfx.Plan(), (0, 1)), (rlfx.Plan("blocks", 2), (0,))])
def test_values_and_gradients_are_those_of_sums(sums, plan, wrt):
    of_points.close(gradient(sums, ALWAYS, wrt, plan=plan)(PARAMS, CARRY), of_points.by_hand(sums, CARRY, T, wrt)(PARAMS, CARRY))


def has_all_pairs(fn, *args):
    """Whether anything has a number for every pair and every number of a code, at all points."""
    shapes = re.findall(r"tensor<([0-9x]+)xf32>", fn.lower(*args).as_text())
    return any(math.prod(map(int, shape.split("x"))) >= T * B * N * M * D for shape in shapes)


@pytest.mark.parametrize("sums", SUMS)
def test_no_array_of_pairs_is_left(sums):
    assert not has_all_pairs(gradient(sums, ALWAYS, plan=rlfx.Plan()), PARAMS, CARRY)
    assert has_all_pairs(gradient(sums, NEVER, plan=rlfx.Plan()), PARAMS, CARRY)


def test_bodies_of_shared_functions():
    def loss(p, scale, t):
        code = jnp.tanh(rlfx.inputs(p["x"])[t] @ p["a"][:, 0])
        return rlfx.shared(together, code) * scale, 0.9 * scale

    batch = 4
    p, carry = PARAMS | {"x": jax.random.normal(K[3], (T, batch, 4))}, jnp.linspace(0.5, 1.5, batch)

    def expected(p, scale):
        of = [together(jnp.tanh(p["x"][t] @ p["a"][:, 0])) * 0.9**t * scale.mean() for t in range(T)]
        return sum(of) / T

    def compiled(target):
        fn = rlfx.compile(loss, length=T, batch=batch, target=target)
        return jax.jit(jax.value_and_grad(lambda p, c: fn(p, c)[0], argnums=(0, 1)))

    of_points.close(compiled(ALWAYS)(p, carry), jax.value_and_grad(expected, argnums=(0, 1))(p, carry))
    products = [compiled(target).lower(p, carry).as_text().count("stablehlo.dot_general") for target in (ALWAYS, NEVER)]
    assert products[0] > products[1]


def kept(loss, fewest=1):
    traced = rlfx.trace(loss, PARAMS, jnp.float32(1.0), length=T)
    return with_contractions(traced, fewest) is traced


def test_twice_is_once():
    traced = rlfx.trace(lambda p, s, t: (of_pairs(p, p["x"][0, 0], s), s), PARAMS, jnp.float32(1.0), length=T)
    once = with_contractions(traced, 1)
    assert once is not traced
    assert with_contractions(once, 1) is once


def test_few_products_stay_and_short_axes_do():
    loss = lambda p, s, t: (of_pairs(p, p["x"][0, 0], s), s)  # noqa: E731
    assert not kept(loss, N * M * D)
    assert kept(loss, N * M * D + 1)
    assert kept(lambda p, s, t: ((p["a"][0][:, None] * p["b"][0, :3][None] * s).sum(-1).mean(), s))
    assert kept(lambda p, s, t: (jnp.sin((s * p["a"][0, :, None, :3] * p["b"][0, None, :, :3]).sum(-1)).sum(), s))


def test_products_that_something_else_reads_stay():
    def loss(p, s, t):
        product = (s * p["a"][0])[:, None] * p["b"][0][None]
        return jnp.sin(product.sum(-1)).sum() + product[1, 2, 3], s

    assert kept(loss)


def test_other_sums_stay():
    a, b = (lambda p: p["a"][0][:, None]), (lambda p: p["b"][0][None])
    assert kept(lambda p, s, t: ((s * a(p) * b(p)).sum(0).mean(), s))  # over an axis that one factor is spread over
    assert kept(lambda p, s, t: (jnp.sin((s * p["a"][0] * p["a"][1]).sum(-1)).sum(), s))  # of what is as large
    assert kept(lambda p, s, t: (jnp.sin((s + a(p) + b(p)).sum(-1)).sum(), s))


def test_half_precision_stays():
    def loss(p, s, t):
        a, b = (p[name][0].astype(jnp.bfloat16) for name in "ab")
        return (a[:, None] * b[None]).sum(-1).astype(jnp.float32).sum() * s, s

    assert kept(loss)


def test_the_cpu_has_a_bound_and_accelerators_do_not():
    assert CPU.rewrites.contracted == 512
    assert not rlfx.target("h200").rewrites.contracted


def test_a_body_that_tells_what_it_sees():
    """An equation without outputs, beside such a sum."""
    seen = []

    def told(codes):
        jax.debug.callback(lambda x: seen.append(float(x)), codes.sum())
        with jax.named_scope("likeness"):
            return jnp.sin((codes[:, None] * codes[None]).sum(-1)).sum()

    def loss(p, scale, t):
        return rlfx.shared(told, rlfx.inputs(p["x"])[t]) * scale, 0.9 * scale

    p, carry = {"x": jax.random.normal(K[3], (T, 4, 4))}, jnp.ones(4)
    fn = rlfx.compile(loss, length=T, batch=4, target=ALWAYS)
    found = jax.jit(lambda p: fn(p, carry)[0])(p)
    jax.effects_barrier()
    of = [jnp.sin(p["x"][t] @ p["x"][t].T).sum() * 0.9**t for t in range(T)]
    np.testing.assert_allclose(found, sum(of) / T, rtol=2e-5)
    np.testing.assert_allclose(sorted(seen), sorted(p["x"].sum((1, 2))), rtol=2e-5)


def test_sums_of_weights_by_what_each_point_has_are_products_of_rows():
    """A layer, and likenesses to prototypes, as sums of elements: spread over points, and over no axis of their own."""
    p = {"w": jax.random.normal(K[0], (24, 8)), "to": jax.random.normal(K[1], (32, 24)), "x": jax.random.normal(K[2], (T, B, 8))}

    def sums(p, x, scale):
        h = jnp.tanh((p["w"] * (x * scale)).sum(-1))
        return jnp.sin((h[None] * p["to"]).sum(1)).sum()

    with jax.numpy_rank_promotion("allow"):
        of_points.close(of_points.gradient(sums, ALWAYS, CARRY, T)(p, CARRY), of_points.by_hand(sums, CARRY, T, (0, 1))(p, CARRY))
        program = of_points.traced(sums, p, CARRY, T)
    found = with_contractions(program, 1)
    assert with_contractions(found, 1) is found
    products = [e for e in found.equations if e.op is J.primitive("dot_general")]
    assert [e.outputs[0].shape for e in products] == [(24,), (32,)]
    assert all(found.dims_of(e.inputs[0]) and not found.dims_of(e.inputs[1]) for e in products)
    few = with_contractions(program, 24 * 8 + 1)
    assert [e.outputs[0].shape for e in few.equations if e.op is J.primitive("dot_general")] == [(32,)]


def slopes(p, x, scale):
    """Of each example those of a small network, in all its weights."""
    likeness = lambda w, a: jnp.sin(jnp.tanh(a @ w) @ jnp.ones(M))  # noqa: E731
    a, b = codes(p, x, scale)
    return jax.vmap(jax.grad(likeness), (None, 0))(b.T, a)


def squared_slopes(p, x, scale):
    """As a diagonal of a Fisher information weighs them: three operands, one of them divides."""
    return jnp.sqrt((slopes(p, x, scale) ** 2 / (1.0 + codes(p, x, scale)[1].T ** 2)[None]).sum((1, 2))).sum()


def norms_of_slopes(p, x, scale):
    """By two operands, none of which has all axes that are added up."""
    return jnp.sqrt((slopes(p, x, scale) ** 2).sum((1, 2)) + 0.1).sum()


def beside_axes_of_one_number(p, x, scale):
    """One of them stays, one is added up."""
    a, b = codes(p, x, scale)
    return jnp.sin(((a[:, None, None, :, None] * b[None, :, None, :, None]) ** 2).sum((1, 3, 4))).sum()


def along_an_axis_that_none_has(p, x, scale):
    """What is spread along it all alike is added up as often."""
    a, b = (jnp.broadcast_to(v[0], (5, D)) for v in codes(p, x, scale))
    spread = jnp.broadcast_to(a[:, :, None], (5, D, D)) * jnp.broadcast_to(b[0], (5, D, D))
    return jnp.sin((spread**2).sum((0, 2))).sum()


def cubes(p, x, scale):
    a, b = codes(p, x, scale)
    pairs = a[:, None] * b[None]
    return jnp.sin((a[:, None] * b[None] / (2.0 + jnp.cos(b))[None]).sum(-1) ** 3).sum() + jnp.sin((pairs**3).sum((0, 2))).sum()


POWERS = [squared_slopes, norms_of_slopes, cubes]
AXES = [beside_axes_of_one_number, along_an_axis_that_none_has]


@pytest.mark.parametrize("sums", [*POWERS, *AXES])
@pytest.mark.parametrize(("plan", "wrt"), [(None, (0, 1)), (rlfx.Plan("blocks", 2), (0,))])
def test_sums_of_powers_are_products_of_powers(sums, plan, wrt):
    expected = of_points.by_hand(sums, CARRY, T, wrt)(PARAMS, CARRY)
    of_points.close(gradient(sums, ALWAYS, wrt, plan=plan)(PARAMS, CARRY), expected)


@pytest.mark.parametrize("sums", POWERS)
def test_no_slope_of_an_example_is_made_where_powers_are_added_up(sums):
    program = of_points.traced(sums, PARAMS, CARRY, T)
    found = with_contractions(program, 1)
    assert with_contractions(found, 1) is found
    largest = lambda program: max(math.prod(v.shape) for e in program.equations for v in e.outputs if program.dims_of(v))  # noqa: E731
    assert largest(found) < largest(program)


def test_slopes_that_something_else_reads_are_made():
    """Nothing is saved then."""

    def sums(p, x, scale):
        made = slopes(p, x, scale)
        return jnp.cos(made).sum() + (made**2).sum()

    program = of_points.traced(sums, PARAMS, CARRY, T)
    assert with_contractions(program, 1) is program
