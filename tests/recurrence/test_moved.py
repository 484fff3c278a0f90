"""Gradients that are differentiated: products with Hessians are those of the same loss in jnp, of all timesteps at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import Plan
from rlfx.recurrence.gradient.rule import Fixed

T, B, D, H = 12, 4, 3, 5
K = jax.random.split(jax.random.key(0), 5)
X = jax.random.normal(K[0], (T, B, D))
P = {
    "in": jax.random.normal(K[1], (D, H)),
    "h": jax.random.normal(K[2], (H, H)) / 2.0,
    "out": jax.random.normal(K[3], (H, 2)),
}
V = jax.tree.map(lambda w: jnp.cos(3.0 * w), P)


def network(p, x, h, t):
    return jnp.tanh(jnp.tanh(x @ p["in"]) @ p["h"]) @ p["out"], h


def recurrence(p, x, h, t):
    h = jnp.tanh(x @ p["in"] + h @ p["h"])
    return h @ p["out"], h


def of_next(p, x, h, t):
    """Through reads of the next timestep, and a mean."""
    z = jnp.tanh(x @ p["in"])
    after = rlfx.series(z, end=jnp.zeros(H))[t + 1]
    return (z @ p["h"] - after) @ p["out"] * rlfx.mean(z[:2]), h


def compiled(step, **how):
    def f(p, h, t):
        y, h = step(p, rlfx.inputs(X)[t], h, t)
        return (y**2).sum() + jnp.sin(y[0]), h

    fn = rlfx.compile(f, length=T, batch=B, **how)
    return lambda p: fn(p, jnp.zeros((B, H)))[0]


def by_jnp(step):
    def loss(p):
        if step is of_next:
            z = jnp.tanh(X @ p["in"])
            after = jnp.concatenate([z[1:], jnp.zeros((1, B, H))])
            y = (z @ p["h"] - after) @ p["out"] * z[..., :2].mean((0, 1))[None, None]
        elif step is recurrence:
            body = lambda h, x: recurrence(p, x, h, 0)[::-1]  # noqa: E731
            y = jax.lax.scan(body, jnp.zeros((B, H)), X)[1]
        else:
            y = network(p, X, None, 0)[0]
        return ((y**2).sum(-1) + jnp.sin(y[..., 0])).mean()

    return loss


def product(loss, p=P, v=V):
    """Backwards twice."""
    dot = lambda g: sum(map(jnp.vdot, jax.tree.leaves(g), jax.tree.leaves(v)))  # noqa: E731
    return jax.grad(lambda p: dot(jax.grad(loss)(p)))(p)


def close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("step", [network, recurrence, of_next])
def test_products_with_the_hessian(step):
    expected = product(by_jnp(step))
    for how in ({}, {"plan": Plan("blocks", 4)}, {"memory_budget": 1 << 20}):
        close(jax.jit(lambda how=how: product(compiled(step, **how)))(), expected)
    loss = compiled(step)
    close(product(loss), expected)  # without jit
    close(jax.jvp(jax.grad(loss), (P,), (V,))[1], expected)  # forwards over backwards
    some = jax.vmap(lambda v: product(loss, v=v))(jax.tree.map(lambda v: jnp.stack([v, 2.0 * v]), V))
    close(jax.tree.map(lambda w: w[1], some), jax.tree.map(lambda w: 2.0 * w, expected))


def test_the_hessian_and_third_derivatives():
    mine, theirs = compiled(network), by_jnp(network)
    small = lambda loss: lambda x: loss(P | {"out": x})  # noqa: E731
    close(jax.hessian(small(mine))(P["out"]), jax.hessian(small(theirs))(P["out"]))
    third = lambda loss: jax.grad(lambda p: sum((g**2).sum() for g in jax.tree.leaves(product(loss, p))))(P)  # noqa: E731
    close(jax.jit(third, static_argnums=0)(mine), third(theirs))


def test_other_outputs():
    """The pullback of aux is differentiated, too."""

    def f(p, h, t):
        y, h = network(p, rlfx.inputs(X)[t], h, t)
        return (y**2).sum(), h, jnp.sin(y)

    def mine(p):
        loss, (_, aux) = rlfx.compile(f, length=T, batch=B)(p, jnp.zeros((B, H)))
        return loss + (aux**2).sum()

    def theirs(p):
        y, _ = network(p, X, None, 0)
        return (y**2).sum(-1).mean() + (jnp.sin(y) ** 2).sum()

    close(product(mine), product(theirs))


def test_devices_share_the_environments():
    mesh = jax.make_mesh((2,), ("b",), devices=jax.devices()[:2])
    close(jax.jit(lambda: product(compiled(network, mesh=mesh)))(), product(by_jnp(network)))


def wide(length=256, batch=32, width=64):
    data, p = jnp.ones((length, batch, width)), {"in": jnp.ones((width, width)), "out": jnp.ones((width, 2))}

    def f(p, h, t):
        return ((jnp.tanh(rlfx.inputs(data)[t] @ p["in"]) @ p["out"]) ** 2).sum(), h

    return f, p, jnp.zeros(batch), {"length": length, "batch": batch}


def test_blocks_are_left_where_a_gradient_is_differentiated():
    f, p, h, sizes = wide()
    loops = lambda fn: jax.jit(fn).lower(p).as_text().count("stablehlo.while")  # noqa: E731
    loss = lambda p: rlfx.compile(f, **sizes)(p, h)[0]  # noqa: E731
    assert loops(jax.grad(loss)) == 1
    assert loops(lambda p: product(loss, p, p)) == 0
    asked = lambda p: rlfx.compile(f, **sizes, plan=Plan("blocks", 16))(p, h)[0]  # noqa: E731
    assert loops(lambda p: product(asked, p, p)) > 0
    less = lambda p: rlfx.compile(rlfx.incrementalize(f, over="t", block_size=16), **sizes)(p, h)[0]  # noqa: E731
    assert loops(lambda p: product(less, p, p)) > 0


def test_a_fixed_plan_is_kept():
    assert not Fixed(Plan()).is_free(None)
