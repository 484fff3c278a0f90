"""Distances in a few dimensions, number by number: the same values and gradients; and what stays as it is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import stop_gradient

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.rewrite.distances import with_distances
from tests.recurrence import of_points

CPU = rlfx.target("cpu")
ALWAYS, NEVER = (dataclasses.replace(CPU, rewrites=dataclasses.replace(CPU.rewrites, pairs=n)) for n in (1, 0))
T, B, N, D = 6, 2, 12, 5
K = jax.random.split(jax.random.key(0), 4)
PARAMS = {
    "keys": jax.random.normal(K[0], (2, N, D)),
    "values": jax.random.normal(K[1], (2, N)),
    "w": jax.random.normal(K[2], (3, D)),
    "x": jax.random.normal(K[3], (T, B, 3)),
}
CARRY = jnp.linspace(0.5, 1.5, B)
SUM = J.primitive("reduce_sum")


@pytest.fixture(autouse=True)
def lenient():
    """As users write distances."""
    with jax.numpy_rank_promotion("allow"):
        yield


def squares(keys, h):
    return jnp.square(keys - h).sum(-1)


def nearest(p, x, scale):
    """Values of the nearest of entries, by weights that are differentiated."""
    h = jnp.tanh(x @ p["w"])

    def of(keys, values):
        near = jax.lax.top_k(-stop_gradient(squares(keys, h)), 3)[1]
        weight = 1.0 / (squares(keys[near], h) + 0.1)
        return (weight * values[near]).sum() / weight.sum()

    return jax.vmap(of)(p["keys"], p["values"]).sum() * scale


def novelty(p, x, scale):
    """How far it is from the third of its neighbours, by sums of absolute values; a weight of the loss."""
    h = jnp.tanh(x @ p["w"])
    far = jnp.sort(jnp.abs(0.5 * p["keys"] - h).sum(-1), -1)[:, 2]
    return jnp.sum(h**2) * stop_gradient(jnp.log1p(far).mean()) * scale


def particles(p, x, scale):
    """Distances of all pairs of what is computed at one point."""
    h = jnp.tanh(x @ p["w"]) + jnp.arange(9.0, dtype=x.dtype)[:, None] * scale
    far = jnp.where(jnp.eye(9, dtype=bool), jnp.inf, ((h[:, None] - h[None]) ** 2).sum(-1))
    return jnp.sum(h) * jnp.exp(-stop_gradient(far.min(-1))).sum()


def masked(p, x, scale):
    """Of which some numbers count."""
    h = stop_gradient(jnp.tanh(x @ p["w"]))
    far = jnp.where(p["keys"][0] > h, 2.0 * (p["keys"][0] - h), 0.0).sum(-1)
    return p["values"][0, jnp.argmin(far)] * scale


def repelled(p, x, scale):
    """Through which gradients go: points at one timestep from each other, by absolute values, and from what they share."""
    h = jnp.tanh(x @ p["w"]) + jnp.arange(9.0, dtype=x.dtype)[:, None] * scale
    near = jnp.exp(-0.2 * ((h[:, None] - h[None]) ** 2).sum(-1)).sum()
    return near + jnp.tanh(jnp.abs(2.0 * (h[:, None] - p["keys"][0]) + 0.3).sum(-1)).sum()


SUMS = [nearest, novelty, particles, masked, repelled]


def gradient(sums, target, wrt=(0, 1), **how):
    return of_points.gradient(sums, target, CARRY, T, wrt, **how)


@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize("plan", [None, rlfx.Plan("blocks", 4)])
def test_values_and_gradients_are_those_of_pairs(sums, plan):
    wrt = (0,) if plan else (0, 1)
    of_points.close(gradient(sums, ALWAYS, wrt, plan=plan)(PARAMS, CARRY), of_points.by_hand(sums, CARRY, T, wrt)(PARAMS, CARRY))


def test_what_is_chosen_is_numpy_s():
    """Entries by distances in double precision."""

    def f(p, c, t):
        h = rlfx.inputs(p["x"])[t] @ p["w"]
        return c, jax.lax.top_k(-squares(p["keys"][0], h), 3)[1]

    _, chosen = rlfx.unroll(f, length=T, batch=B, target=ALWAYS)(PARAMS, CARRY)
    keys, w, x = (np.asarray(PARAMS[name], np.float64) for name in ("keys", "w", "x"))
    far = ((keys[0][None, None] - (x @ w)[:, :, None]) ** 2).sum(-1)
    np.testing.assert_array_equal(chosen, np.argsort(far, -1)[..., :3])


def left(loss, fewest=1):
    """Axes of the sums that are left, of more than one axis."""
    traced = rlfx.trace(loss, PARAMS, jnp.ones(()), length=T)
    found = with_distances(traced, fewest)
    assert with_distances(found, fewest) is found
    return [e.inputs[0].shape for e in found.equations if e.op is SUM and len(e.inputs[0].shape) > 1]


def of_stopped(far):
    """A loss that has a derivative, but of what is far."""
    return lambda p, s, t: (p["w"][0, 0] * stop_gradient(jnp.min(far(p, s))), 0.9 * s)


def test_no_sum_of_pairs_is_left():
    assert not left(of_stopped(lambda p, s: squares(p["keys"], s * p["keys"][0, 0])))
    for sums in (particles, repelled):
        texts = [gradient(sums, at).lower(PARAMS, CARRY).as_text() for at in (ALWAYS, NEVER)]
        assert ["9x9x5x" in text for text in texts] == [False, True]
    assert not rlfx.target("h200").rewrites.pairs


def test_what_all_points_share_is_made_once():
    """Entries of length one: they are made of the weights before, not of each point's numbers."""

    def loss(p, s, t):
        keys = p["keys"] / jnp.sqrt(jnp.square(p["keys"]).sum(-1, keepdims=True))
        return p["w"][0, 0] * stop_gradient(squares(keys, s * p["keys"][0, 0]).min()), 0.9 * s

    found = with_distances(rlfx.trace(loss, PARAMS, jnp.ones(()), length=T), 1)
    (made,) = (e for e in found.equations if e.op is J.primitive("div"))
    assert made.outputs[0].shape == (2, N, D)
    assert not found.dims_of(made.outputs[0])
    assert [e.inputs[0].shape for e in found.equations if e.op is SUM and found.dims_of(e.outputs[0])] == []


def test_other_sums_stay():
    pairs = (2, N, D)
    twice = lambda p, s: squares(jnp.tile(p["keys"], 2), jnp.tile(s * p["keys"][0, 0], 2))  # noqa: E731
    assert left(lambda p, s, t: (twice(p, s).min(), s)) == [(2, N, 2 * D)]  # differentiated, in ten dimensions
    assert left(of_stopped(lambda p, s: squares(p["keys"], s * p["keys"][0, 0])), 2 * N * D + 1) == [pairs]  # few
    long = lambda p, s: squares(jnp.tile(p["keys"], 7), jnp.tile(s * p["keys"][0, 0], 7))  # noqa: E731
    assert left(of_stopped(long)) == [(2, N, 7 * D)]
    assert left(of_stopped(lambda p, s: squares(p["keys"][0, :7], s * p["keys"][0, 0]))) == [(7, D)]  # few rows
    middle = lambda p, s: jnp.square(p["keys"] - s * p["keys"][0, 0]).sum(1)  # noqa: E731
    assert left(of_stopped(middle)) == [pairs]
    own = lambda p, s: jnp.square(jnp.sin(s * p["keys"]) @ jnp.eye(D) - s).sum(-1)  # each point's own  # noqa: E731
    assert left(of_stopped(own)) == [pairs]


def test_pairs_that_something_else_reads_stay():
    def loss(p, s, t):
        pairs = jnp.square(p["keys"] - s * p["keys"][0, 0])
        return p["w"][0, 0] * stop_gradient(pairs.sum(-1).min() + pairs[0, 1, 2]), s

    assert left(loss) == [(2, N, D)]


def of_all(codes, bias):
    """How far the two nearest of a batch are, of a number for each, with what is computed in functions and loops of its own."""
    away = jax.jit(lambda x, y: jnp.sqrt(((x - y) ** 2).sum(-1) + 0.1))(codes[:, None], codes[None])
    return -jax.lax.top_k(-away, 2)[0].sum(-1) + bias


@pytest.mark.parametrize("stopped", [True, False])
def test_bodies_of_shared_functions(stopped):
    """Those of what is stopped, and of what is differentiated, as sums by hand."""
    batch, stop = 9, stop_gradient if stopped else lambda x: x
    p, carry = PARAMS | {"x": jax.random.normal(K[3], (T, batch, 3))}, jnp.linspace(0.5, 1.5, batch)

    def loss(p, scale, t):
        h = jnp.tanh(rlfx.inputs(p["x"])[t] @ p["w"])
        return jnp.sum(h) * rlfx.shared(of_all, stop(h), 0.5)[t.index("b")] * scale, 0.9 * scale

    def expected(p, scale):
        h = [jnp.tanh(p["x"][t] @ p["w"]) for t in range(T)]
        return sum((h[t].sum(-1) * of_all(stop(h[t]), 0.5) * 0.9**t * scale).mean() for t in range(T)) / T

    def compiled(target):
        fn = rlfx.compile(loss, length=T, batch=batch, target=target)
        return jax.jit(jax.value_and_grad(lambda p, c: fn(p, c)[0], argnums=(0, 1)))

    of_points.close(compiled(ALWAYS)(p, carry), jax.value_and_grad(expected, argnums=(0, 1))(p, carry))
    texts = [compiled(target).lower(p, carry).as_text() for target in (ALWAYS, NEVER)]
    assert ["9x9x5x" in text for text in texts] == [False, True]
