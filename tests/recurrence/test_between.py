"""Squared distances between all pairs of two sets: values and derivatives of plain loops, with products in the way back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import stop_gradient

import rlfx
from rlfx.recurrence.rewrite.between import squared_distances, with_distances_between
from tests.recurrence import of_points

CPU = rlfx.target("cpu")
ALWAYS, NEVER = (dataclasses.replace(CPU, rewrites=dataclasses.replace(CPU.rewrites, pairs=n)) for n in (1, 0))
T, B, N, M, D = 4, 2, 9, 7, 12
K = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "keys": jax.random.normal(K[0], (M, D)), "spread": jax.random.normal(K[1], (3, D)),
    "w": jax.random.normal(K[2], (3, D)), "x": jax.random.normal(K[3], (T, B, 3)),
}  # fmt: skip
CARRY = jnp.linspace(0.5, 1.5, B)
MADE = ("sub", "integer_pow", "square", "mul")


@pytest.fixture(autouse=True)
def lenient():
    """As users write distances."""
    with jax.numpy_rank_promotion("allow"):
        yield


def codes(p, x, scale):
    """``[N, D]``, of one point."""
    return jnp.tanh(x @ p["w"]) + jnp.sin(jnp.arange(1.0, N + 1, dtype=x.dtype))[:, None] * scale


def contrasted(p, x, scale):
    """Codes of two networks."""
    a, b = codes(p, x, scale), jnp.cos(x @ p["spread"]) * p["keys"]
    logits = -jnp.sqrt(((a[:, None] - b[None]) ** 2).sum(-1) + 1e-3)
    return jax.nn.logsumexp(logits, 1).sum()


def to_each_other(p, x, scale):
    """One set's to itself, as a product of differences, times what is none of it."""
    a = codes(p, x, scale)
    d = a[:, None] - a[None]
    return jnp.exp(-0.1 * (d * d).sum(-1)).sum() * scale


def in_groups(p, x, scale):
    """Three sets at once, and one of the two is shared by all points."""
    a = jnp.stack([codes(p, x, scale * k) for k in (1.0, 2.0, 3.0)])
    far = jnp.linalg.norm(a[:, :, None] - p["keys"][None, None], axis=-1)
    return jnp.log1p(far).sum()


def mapped(p, x, scale):
    """Under ``jax.vmap``, the second set first; of which the first has no derivative."""
    a, b = stop_gradient(codes(p, x, scale)), jnp.stack([p["keys"], jnp.sin(p["keys"] * scale)])
    far = jax.vmap(lambda b: jnp.square(b[None] - a[:, None]).sum(-1))(b)
    return jnp.exp(-0.1 * far).sum()


SUMS = [contrasted, to_each_other, in_groups, mapped]


@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize("plan", [None, rlfx.Plan("blocks", 2)])
def test_values_and_gradients_are_those_of_loops(sums, plan):
    wrt = (0,) if plan else (0, 1)
    found = of_points.gradient(sums, ALWAYS, CARRY, T, wrt, plan=plan)(PARAMS, CARRY)
    of_points.close(found, of_points.by_hand(sums, CARRY, T, wrt)(PARAMS, CARRY))


@pytest.mark.parametrize("sums", SUMS)
def test_no_difference_is_left(sums):
    program = of_points.traced(sums, PARAMS, CARRY, T)
    found = with_distances_between(program, 1)
    made = lambda p: [e for e in p.equations if e.op.name in MADE and len(e.outputs[0].shape) > 2]  # noqa: E731
    assert made(program)
    assert not [e for e in made(found) if e.outputs[0].shape[-1] == D]
    assert with_distances_between(found, 1) is found
    assert with_distances_between(program, 10_000) is program


def test_nothing_of_all_pairs_and_dimensions_is_kept():
    texts = [of_points.gradient(contrasted, at, CARRY, T).lower(PARAMS, CARRY).as_text() for at in (ALWAYS, NEVER)]
    assert [f"{N}x{M}x{D}x" in text for text in texts] == [False, True]
    assert not rlfx.target("h200").rewrites.pairs


@pytest.mark.parametrize("dims", [3, 12, 40])
def test_derivatives_of_any_order(dims):
    """As of differences: forwards, backwards, and of the gradient."""
    x, y = jax.random.normal(K[0], (2, 5, 1, dims)), jax.random.normal(K[1], (2, 1, 4, dims))
    loss = lambda far: lambda x, y: jnp.log1p(far(x, y)).sum()  # noqa: E731
    mine, plain = loss(squared_distances), loss(lambda x, y: jnp.square(x - y).sum(-1))
    along = (jnp.cos(x), jnp.sin(y))
    both = lambda f: (f(x, y), jax.jvp(f, (x, y), along), jax.grad(f, (0, 1))(x, y))  # noqa: E731
    of_points.close(both(mine), both(plain))
    twice = lambda f: jax.jvp(jax.grad(f, (0, 1)), (x, y), along)[1]  # noqa: E731
    back = lambda f: jax.grad(lambda x: jnp.square(jax.grad(f)(x, y)).sum())(x)  # noqa: E731
    of_points.close((twice(mine), back(mine)), (twice(plain), back(plain)))


def test_it_does_not_matter_where_sets_are():
    """A thousand from zero, gradients are as those of differences in double precision."""

    def program(p, s, t):
        x = rlfx.inputs(p["x"])[t]
        return jnp.exp(-0.5 * ((x[:, None] - p["y"][None]) ** 2).sum(-1)).sum(), s

    x, y = 0.4 * jax.random.normal(K[0], (T, B, N, D)) + 1000.0, 0.4 * jax.random.normal(K[1], (M, D)) + 1000.0
    fn = rlfx.compile(program, length=T, batch=B, target=ALWAYS)
    found = jax.jit(jax.grad(lambda x: fn({"x": x, "y": y}, CARRY)[0]))(x)
    d = np.asarray(x, np.float64)[:, :, :, None] - np.asarray(y, np.float64)
    expected = -(np.exp(-0.5 * (d**2).sum(-1))[..., None] * d).sum(3) / (T * B)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-7)


def test_what_is_no_such_distance_stays():
    for sums in (
        lambda p, x, s: jnp.square(codes(p, x, s) - jnp.sin(codes(p, x, s))).sum(-1).max(),  # of one with one
        lambda p, x, s: (jnp.abs(codes(p, x, s)[:, None] - p["keys"]) ** 3).sum(),
        lambda p, x, s: jnp.square(codes(p, x, s)[:, None] - p["keys"]).sum(0).max(),  # not over dimensions
        lambda p, x, s: jnp.square(codes(p, x, s)[:, None, :8] - p["keys"][:, :8]).sum(-1).max(),  # few
        lambda p, x, s: stop_gradient(jnp.square(codes(p, x, s)[:, None] - p["keys"]).sum(-1)).max() * s,
    ):
        program = of_points.traced(sums, PARAMS, CARRY, T)
        assert with_distances_between(program, 1) is program


def test_differences_that_something_else_reads_stay():
    def sums(p, x, s):
        d = codes(p, x, s)[:, None] - p["keys"]
        return jnp.square(d).sum(-1).max() + d[0, 1, 2]

    program = of_points.traced(sums, PARAMS, CARRY, T)
    assert with_distances_between(program, 1) is program


def test_bodies_of_shared_functions():
    """Of a batch's codes, as by hand."""
    batch = 8
    p, carry = PARAMS | {"x": jax.random.normal(K[3], (T, batch, 3))}, jnp.linspace(0.5, 1.5, batch)

    def infonce(a, b):
        logits = -jnp.sqrt(((a[:, None] - b[None]) ** 2).sum(-1) + 1e-3)
        return (jax.nn.logsumexp(logits, 1) - jnp.diagonal(logits)).mean()

    def loss(p, scale, t):
        x = rlfx.inputs(p["x"])[t]
        return rlfx.shared(infonce, jnp.tanh(x @ p["w"]), jnp.sin(x @ p["spread"])) * scale, 0.9 * scale

    def expected(p, scale):
        of = lambda x: infonce(jnp.tanh(x @ p["w"]), jnp.sin(x @ p["spread"]))  # noqa: E731
        return sum(of(p["x"][t]) * (0.9**t * scale).mean() for t in range(T)) / T

    def compiled(target):
        fn = rlfx.compile(loss, length=T, batch=batch, target=target)
        return jax.jit(jax.value_and_grad(lambda p, c: fn(p, c)[0], argnums=(0, 1)))

    of_points.close(compiled(ALWAYS)(p, carry), jax.value_and_grad(expected, argnums=(0, 1))(p, carry))
    texts = [compiled(target).lower(p, carry).as_text() for target in (ALWAYS, NEVER)]
    assert [f"8x8x{D}x" in text for text in texts] == [False, True]
