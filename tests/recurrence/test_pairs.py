"""Sums over pairs as loops over one of the two: the same values and gradients; only of what is computed of pairs alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.rewrite.pairs import with_loops_over_pairs
from tests.recurrence import of_points

CPU = rlfx.target("cpu")
ALWAYS, NEVER = (dataclasses.replace(CPU, rewrites=dataclasses.replace(CPU.rewrites, pairs=n)) for n in (1, 0))
T, B, N, M = 6, 2, 9, 11
K = jax.random.split(jax.random.key(0), 6)
PARAMS = {
    "w": jax.random.normal(K[0], (3, N)),
    "v": jax.random.normal(K[1], (3, M)),
    "m": jax.random.uniform(K[2], (N,)),
    "x": jax.random.normal(K[3], (T, B, 3)),
}
J_OF = np.arange(M, dtype=np.float32)
CARRY = jnp.linspace(0.5, 1.5, B)


def quantiles(p, x, scale):
    """The quantile Huber loss of every pair: means over targets, sums over quantiles."""
    error = scale * (x @ p["v"])[None, :] - (x @ p["w"])[:, None]
    size = jnp.abs(error)
    loss = jnp.where(size <= 1.0, 0.5 * error**2, size - 0.5)
    return (jnp.abs(p["m"][:, None] - (error < 0).astype(jnp.float32)) * loss).mean(-1).sum(-1)


def over_the_first(p, x, scale):
    return (jnp.tanh((x @ p["w"])[:, None] * scale - (x @ p["v"])[None, :]) ** 2).sum(0).max()


def over_both(p, x, scale):
    """Kernels of all pairs of points, three numbers each."""
    a, b = p["w"].T * x[None], p["v"].T * scale
    return jnp.exp(-jnp.square(a[:, None] - b[None]).sum(-1)).sum() + jnp.cos(a[:, None, 0] * b[None, :, 1] + 1.0).sum()


def of_integers(p, x, scale):
    """A comparison of what has no derivative is part of what has one."""
    ranks = jnp.arange(N)[:, None] < jnp.arange(M)[None, :]
    return jnp.sum(jnp.where(ranks, jnp.exp((x @ p["w"])[:, None] * scale), jnp.sin((x @ p["v"])[None, :])) ** 2, 1).sum()


SUMS = [quantiles, over_the_first, over_both, of_integers]


def gradient(sums, target, wrt=(0, 1), **how):
    return of_points.gradient(sums, target, CARRY, T, wrt, **how)


@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize(("plan", "wrt"), [(None, (0, 1)), (rlfx.Plan(), (0, 1)), (rlfx.Plan("blocks", 4), (0,))])
def test_values_and_gradients_are_those_of_pairs(sums, plan, wrt):
    of_points.close(gradient(sums, ALWAYS, wrt, plan=plan)(PARAMS, CARRY), of_points.by_hand(sums, CARRY, T, wrt)(PARAMS, CARRY))


def whiles(sums, target):
    return gradient(sums, target).lower(PARAMS, CARRY).as_text().count("stablehlo.while")


@pytest.mark.parametrize("sums", SUMS)
def test_no_array_of_pairs_is_left(sums):
    assert whiles(sums, ALWAYS) > whiles(sums, NEVER)
    assert not rlfx.target("h200").rewrites.pairs


@pytest.mark.parametrize(
    ("given", "iterations"),
    [((), N), (("v",), M), (("w",), N), (("w", "v"), N), (("w", "x"), N), (("v", "x"), M)],
)
def test_the_loop_is_over_what_is_given(given, iterations):
    """The derivative of what an iteration reads alone is a sum; of two axes that are alike the shorter one."""

    def loss(p, scale, t):
        a, b = (jax.lax.stop_gradient(p[k]) if k in given else p[k] for k in ("w", "v"))
        x = p["x"][:, 0].sum() if "x" in given else rlfx.inputs(p["x"][:, 0])[t].sum()
        pairs = jnp.tanh((a[0] * x)[:, None] * jax.lax.stop_gradient(scale) - b[0][None, :])
        return (pairs**2).sum(), 0.9 * scale

    traced = rlfx.trace(loss, PARAMS, jnp.float32(1.0), length=T)
    (loop,) = [e for e in with_loops_over_pairs(traced, 1).equations if e.op is J.SCAN]
    assert loop.params["length"] == iterations


@pytest.mark.parametrize(
    ("total", "iterations"),
    [
        (lambda x: x.sum(0).mean(), M), (lambda x: x.mean(0).sum(), M), (lambda x: (x.sum(0) * 3.0 / 7.0).sum() / 2.0, M),
        (lambda x: x.mean(1).sum(), M), (lambda x: x.sum(1).mean() + 1.0, M), (lambda x: x.sum((0, 1)), M),
        (lambda x: jnp.tanh(x.sum(0)).sum(), N), (lambda x: (x.sum(0) * J_OF).sum(), N), (lambda x: (2.0 / x.sum(0)).sum(), N),
    ],
)  # fmt: skip
def test_a_sum_of_sums_is_one(total, iterations):
    """Over quantiles first, and then over aims, which are given; the loop is over aims if nothing but numbers is between."""

    def loss(p, scale, t):
        aims, x = jax.lax.stop_gradient(p["v"][0]), rlfx.inputs(p["x"][:, 0])[t].sum()
        return total(jnp.tanh((p["w"][0] * x)[:, None] - aims[None]) ** 2 + 1.0), 0.9 * scale

    traced = rlfx.trace(loss, PARAMS, jnp.float32(1.0), length=T)
    once = with_loops_over_pairs(traced, 1)
    (loop,) = [e for e in once.equations if e.op is J.SCAN]
    assert loop.params["length"] == iterations
    assert with_loops_over_pairs(once, 1) is once
    compiled = [rlfx.compile(loss, length=T, target=at) for at in (ALWAYS, NEVER)]
    found, expected = (jax.value_and_grad(lambda p, fn=fn: fn(p, jnp.float32(1.0))[0])(PARAMS) for fn in compiled)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)


def test_a_sum_that_is_read_stays_one():
    def loss(p, scale, t):
        each = (jnp.tanh((p["w"][0] * scale)[:, None] - jax.lax.stop_gradient(p["v"][0])[None]) ** 2).sum(0)
        return each.mean(), 0.9 * scale, each

    traced = rlfx.trace(loss, PARAMS, jnp.float32(1.0), length=T)
    (loop,) = [e for e in with_loops_over_pairs(traced, 1).equations if e.op is J.SCAN]
    assert loop.params["length"] == N


def test_temporaries_have_no_pairs():
    def many(p, x, scale):
        return quantiles({**p, "v": jnp.tile(p["v"], 40), "w": jnp.tile(p["w"], 40), "m": jnp.tile(p["m"], 40)}, x, scale)

    sizes = [gradient(many, at).lower(PARAMS, CARRY).compile().memory_analysis().temp_size_in_bytes for at in (ALWAYS, NEVER)]
    assert sizes[0] < 0.2 * sizes[1]


def kept(loss, fewest=1):
    traced = rlfx.trace(loss, PARAMS, jnp.float32(1.0), length=T)
    return with_loops_over_pairs(traced, fewest) is traced


def summed(x):
    return jnp.tanh(jnp.cos(x) * x).sum(1)


def test_other_sums_stay():
    assert kept(lambda p, s, t: (jnp.sum(jnp.tanh(s * p["w"]) ** 2 * s), s))  # its operands are as large
    assert kept(lambda p, s, t: ((s * p["m"][:, None] * jnp.ones(M)[None]).sum(), 0.9 * s))  # a product


def test_pairs_that_something_else_reads_stay():
    def loss(p, s, t):
        pairs = jnp.tanh(jnp.cos(s * p["m"][:, None] - J_OF[None]) ** 2)
        return pairs.sum(1).mean() + pairs[2, 3], 0.9 * s

    assert kept(loss)


def test_few_pairs_stay_and_short_axes_do():
    loss = lambda p, s, t: (summed(s * p["m"][:, None] - J_OF[None]).sum(), 0.9 * s)  # noqa: E731
    assert not kept(loss, N * M)
    assert kept(loss, N * M + 1)
    assert kept(lambda p, s, t: (summed(s * p["m"][:, None] - J_OF[None, :7]).sum(), 0.9 * s))


def test_sums_of_a_recurrence_stay():
    def loss(p, s, t):
        return s, summed(s * p["m"][:, None] - J_OF[None]).mean()

    assert kept(loss)


def test_half_precision_stays():
    def loss(p, s, t):
        m = p["m"].astype(jnp.bfloat16)
        return summed(s.astype(jnp.bfloat16) * m[:, None] - J_OF[None].astype(jnp.bfloat16)).sum(), s

    assert kept(loss)


def test_it_is_idempotent():
    loss = lambda p, s, t: (summed(s * p["m"][:, None] - J_OF[None]).sum(), 0.9 * s)  # noqa: E731
    once = with_loops_over_pairs(rlfx.trace(loss, PARAMS, jnp.float32(1.0), length=T), 1)
    assert any(e.op is J.SCAN for e in once.equations)
    assert with_loops_over_pairs(once, 1) is once
