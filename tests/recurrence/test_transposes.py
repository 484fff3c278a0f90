"""Slices that are transposed: products and reductions take them as they are, with the same results."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.rewrite.transposes import absorb_transposes

T, BATCH, H, F = 6, 2, 2, 3
W = jax.random.normal(jax.random.key(0), (H, F)) / 2.0
X0 = jnp.linspace(-1.0, 1.0, BATCH * H * F).reshape(BATCH, H, F)


def attention(keys, query, w):
    """As einsum leaves it: scores of each head, turned."""
    weights = jax.nn.softmax(jnp.einsum("thw,hw->th", keys, query), axis=0)
    return jnp.einsum("th,thw->hw", weights, keys)


def masked(keys, query, w):
    """A mask that is repeated along heads, a bias of each head, another type on the way."""
    scores = jnp.einsum("thw,hw->th", keys, query) + w[:, 0][None]
    scores = jnp.where((keys[:, 0, 0] > 0.0)[:, None], scores, -3.0).astype(jnp.float32)
    return jnp.einsum("th,thw->hw", jnp.tanh(scores) * jnp.exp(-(scores**2)), keys)


def full(keys, query, w):
    """Another slice of the full shape, in the other order."""
    scores = jnp.einsum("thw,hw->th", keys, query) * keys[:, :, 0]
    return jnp.einsum("th,thw->hw", scores, keys)


def reduced(keys, query, w):
    """Reductions over heads and over t, each leaving the other."""
    turned = jnp.transpose(jnp.sin(keys), (2, 0, 1))
    scores = turned * w.T[:, None]
    return scores.sum(1).T + scores.max((0, 2)).sum() + scores.min(2).sum()


def both_sides(keys, query, w):
    """Products with a turned slice on the left, on the right and on both."""
    left, right = jnp.transpose(keys, (1, 2, 0)), jnp.transpose(jnp.cos(keys), (2, 1, 0))
    square = jnp.einsum("hft,ght->hfg", left, right)
    return square @ query[0] + jnp.einsum("hft,fht->hf", left, right) * w


def turned_twice(keys, query, w):
    once = jnp.transpose(keys, (2, 1, 0)) * 2.0
    return jnp.einsum("tfh->hf", jnp.transpose(jnp.tanh(once), (2, 0, 1)))


def free_axes(keys, query, w):
    """What a product leaves is still of symbolic length, and in another order."""
    turned = jnp.exp(jnp.transpose(keys, (2, 0, 1)))
    left = jnp.einsum("fth,hg->ftg", turned, query)
    return jnp.einsum("ftg,tg->gf", left, left.sum(0))[:H] * w


def used_otherwise(keys, query, w):
    """An operation that needs the order: one transpose either way, so nothing changes."""
    turned = jnp.transpose(keys, (1, 0, 2))
    return jnp.cumsum(turned * query[:, None], 1).max(1)


#: Transposes of slices before and after.
USES = {
    attention: (1, 0), masked: (1, 0), full: (1, 1), reduced: (1, 0), both_sides: (2, 0), turned_twice: (2, 0),
    free_axes: (1, 0), used_otherwise: (1, 1),
}  # fmt: skip
SLICES = {
    "until now": lambda s, t: s[: t + 1],
    "from now on": lambda s, t: s[t:],
    "half": lambda s, t: s[t // 2 : t + 1],
}


def of_points(x, w):
    """What no slice is of: maxima of columns under ``jax.vmap``, a softmax of turned scores, and one turned back."""
    each = jax.vmap(lambda e: jnp.tanh(e * w[:, 0]), in_axes=1, out_axes=1)(x)
    scores = jax.nn.softmax((x * w).T + w[:, 0][None], axis=0)
    again = jnp.sin(jnp.cos(x.T) * 2.0).T * w
    return each.max(1).sum() + scores[:, 0].sum() + again.sum()


def alone(x, w):
    """Two turned values, of which one is needed as it is."""
    needed = jnp.cumsum(x.T, 0) * 0.5
    return (jnp.sin(x.T) * 2.0).max(1) @ w[0] + needed[:, 0].sum() + (x.T * w.T).min(0).sum()


POINTS = {of_points: (5, 1), alone: (3, 1)}


@pytest.mark.parametrize("use", POINTS)
def test_what_points_have(use, monkeypatch):
    """Without slices: fewer are left, with the same values and gradients."""

    def f(w, x, t):
        return use(jnp.sin(x * w + 1.0 * t), w), jnp.cos(x)

    args = {"length": T, "batch": BATCH}
    got = jax.jit(jax.value_and_grad(lambda w: rlfx.compile(f, **args)(w, X0)[0]))(W)
    want = jax.value_and_grad(lambda w: rlfx.reference(f, **args)(w, X0)[0])(W)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)
    monkeypatch.setattr("rlfx.recurrence.api.traced.REWRITES", ())
    program = rlfx.trace(f, W, X0, **args)
    after = absorb_transposes(program)
    turned = lambda p: sum(e.op is J.primitive("transpose") and bool(p.dims_of(e.outputs[0])) for e in p.equations)  # noqa: E731
    assert (turned(program), turned(after)) == POINTS[use], after
    assert absorb_transposes(after) is after
    np.testing.assert_allclose(rlfx.reference(after)(W, X0)[0], rlfx.reference(program)(W, X0)[0], rtol=2e-6)


def program_of(use, cut):
    def program(w, x, t):
        keys = SLICES[cut](rlfx.series(jnp.sin(x * w)), t)
        return (use(keys, x, w) * w).sum(), jnp.cos(x)

    return program


def transposes(program):
    return sum(
        e.op is J.primitive("transpose") and bool(J.symbolic_axes(e.outputs[0].shape)) for e in program.equations
    )


@pytest.mark.parametrize("use", USES)
def test_the_rewrite_alone(use, monkeypatch):
    """What the reference says of the rewritten program is what it says of the program; twice is once."""
    monkeypatch.setattr("rlfx.recurrence.api.traced.REWRITES", ())
    program = rlfx.trace(program_of(use, "until now"), W, X0, length=T, batch=BATCH)
    after = absorb_transposes(program)
    counts = transposes(program), transposes(after)
    assert counts[1] < counts[0] or after is program
    assert counts == USES[use], after
    assert absorb_transposes(after) is after
    got, want = (rlfx.reference(p)(W, X0) for p in (after, program))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)


CASES = [(use, "until now") for use in USES] + [
    (u, cut) for u in (masked, free_axes) for cut in SLICES if cut != "until now"
]


@pytest.mark.parametrize(("use", "cut"), CASES)
def test_values_and_gradients(use, cut):
    f = program_of(use, cut)
    args = {"length": T, "batch": BATCH}
    got = jax.jit(jax.value_and_grad(lambda w: rlfx.compile(f, **args)(w, X0)[0]))(W)
    want = jax.value_and_grad(lambda w: rlfx.reference(f, **args)(w, X0)[0])(W)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


def test_attention_against_loops():
    w, x = np.asarray(W, np.float64), np.asarray(X0, np.float64)
    states = [x]
    for _ in range(T - 1):
        states.append(np.cos(states[-1]))
    total = 0.0
    for t in range(T):
        for b in range(BATCH):
            for h in range(H):
                keys = np.stack([np.sin(states[s][b, h] * w[h]) for s in range(t + 1)])
                scores = np.exp(keys @ states[t][b, h])
                total += ((scores / scores.sum()) @ keys) @ w[h] / (T * BATCH)
    loss, _ = jax.jit(rlfx.compile(program_of(attention, "until now"), length=T, batch=BATCH))(W, X0)
    np.testing.assert_allclose(loss, total, rtol=1e-5)
