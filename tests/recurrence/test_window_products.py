"""Products with windows of all timesteps: as the reference and plain loops say, and nothing of what is not seen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.execute import window_products as executed

T, BATCH, HEADS, WIDTH = 16, 2, 2, 8
DATA = jax.random.normal(jax.random.key(0), (T, BATCH, 6))
W = jax.random.normal(jax.random.key(1), (3, 6, HEADS * WIDTH)) / 4.0


def attention(lo, hi, fill=0.0):
    """Scores of a window, and a sum of it by weights."""

    def program(w, carry, t):
        x = rlfx.inputs(DATA)[t]
        q, k, v = ((x @ w[i]).reshape(HEADS, WIDTH) for i in range(3))
        keys, values = rlfx.series((k, v)).window(lo, hi, fill=(fill, fill))
        weights = jax.nn.softmax(jnp.einsum("hw,mhw->hm", q, keys))
        return (jnp.einsum("hm,mhw->hw", weights, values) ** 2).sum(), carry

    return program


def turned(w, carry, t):
    """The other side of a product, and a window of rows without an axis of their own."""
    x = jnp.tanh(rlfx.inputs(DATA)[t] @ w[0])
    near = rlfx.series(x).window(-7, 1, fill=0.5)
    scores = near @ (x * 0.3)
    return (jnp.cos(scores) @ near).sum() + (x[:6] @ w[1] @ near.T).sum(), carry


def mixed(w, carry, t):
    """A product of a window with itself, and a window that something else reads: none runs so."""
    x = jnp.tanh(rlfx.inputs(DATA)[t] @ w[0])
    near, kept = rlfx.series(x).window(-8, 0), rlfx.series(x @ x * x).window(0, 8)
    return (near @ near.T).mean() + (kept @ x).sum() + jnp.sin(kept).sum(), carry


def of_two(w, carry, t):
    """A product of two windows is one of the first of them; what else is made of the second is not."""
    x = jnp.tanh(rlfx.inputs(DATA)[t] @ w[0])
    first, second = rlfx.series(x).window(-8, 0), rlfx.series(jnp.cos(x)).window(-4, 4)
    return (first @ second.T).sum() ** 2 + (jnp.sin(second @ x)).sum(), carry


def without_environments(w, carry, t):
    """Rows that all environments share, seen by each in its own way."""
    shared = rlfx.series(jnp.tanh(rlfx.inputs(DATA[:, 0], axes="t")[t] @ w[0])).window(-7, 1)
    return (jax.nn.softmax(shared @ (rlfx.inputs(DATA)[t] @ w[1])) @ shared).sum() ** 2, carry


def halves(w, carry, t):
    x = (rlfx.inputs(DATA)[t] @ w[0]).astype(jnp.bfloat16)
    near = rlfx.series(x).window(-7, 1)
    return jnp.einsum("mw,w->m", near, x, preferred_element_type=jnp.float32).sum(), carry


def narrow(w, carry, t):
    """Four numbers at a position: a block would multiply more than it spares in copies."""
    x = jnp.tanh(rlfx.inputs(DATA)[t] @ w[0])[:4]
    near = rlfx.series(x).window(-7, 1)
    return (jax.nn.softmax(near @ x) @ near).sum() ** 2, carry


PROGRAMS = {
    "ahead": (attention(2, 10, 0.25), 2), "turned": (turned, 3), "mixed": (mixed, 0), "of two": (of_two, 1),
    "without environments": (without_environments, 2), "halves": (halves, 1),
    "narrow": (narrow, 0),
}  # fmt: skip


def both(program, **given):
    fn = rlfx.compile(program, length=T, batch=BATCH, **given)
    return jax.jit(jax.value_and_grad(fn, has_aux=True))(W, jnp.zeros(BATCH))


@pytest.fixture
def made(monkeypatch):
    """The products that ran so."""
    found, run = [], executed.run_window_product

    def counted(part, *rest):
        found.append(part)
        run(part, *rest)

    monkeypatch.setattr("rlfx.recurrence.execute.executor.run_window_product", counted)
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients(name, made):
    program, count = PROGRAMS[name]
    fn = rlfx.reference(program, length=T, batch=BATCH)
    want = jax.value_and_grad(fn, has_aux=True)(W, jnp.zeros(BATCH))
    tolerance = {"rtol": 2e-2, "atol": 1e-1} if name == "halves" else {"rtol": 2e-5, "atol": 3e-6}
    for plan in (None, *([rlfx.Plan("at once", environments=1)] if name == "ahead" else [])):
        made.clear()
        for x, y in zip(jax.tree.leaves(both(program, plan=plan)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, **tolerance)
        if jax.default_backend() == "cpu":
            assert len({p.equation for p in made}) == count


def by_loops(w, lo, hi, fill):
    """NumPy, float64: the loss of ``attention``."""
    w, data, total = np.asarray(w, np.float64), np.asarray(DATA, np.float64), 0.0
    q, k, v = ((data @ w[i]).reshape(T, BATCH, HEADS, WIDTH) for i in range(3))
    nothing = np.full((HEADS, WIDTH), fill)
    for t in range(T):
        for b in range(BATCH):
            keys, values = (np.stack([x[u, b] if 0 <= u < T else nothing for u in range(t + lo, t + hi)]) for x in (k, v))
            scores = (q[t, b] * keys).sum(-1)
            weights = np.exp(scores - scores.max(0))
            total += (((weights / weights.sum(0))[..., None] * values).sum(0) ** 2).sum() / (T * BATCH)
    return total


@pytest.mark.parametrize(("lo", "hi", "fill"), [(-7, 1, 0.0), (2, 10, 0.25), (-3, 5, -1.0), (-8, 0, 0.0)])
def test_against_loops(lo, hi, fill):
    (loss, _), grads = both(attention(lo, hi, fill))
    np.testing.assert_allclose(loss, by_loops(W, lo, hi, fill), rtol=1e-5)
    step = 1e-4 * np.asarray(jax.random.normal(jax.random.key(2), W.shape), np.float64)
    there, back = (by_loops(np.asarray(W, np.float64) + s * step, lo, hi, fill) for s in (1, -1))
    np.testing.assert_allclose((np.asarray(grads) * step).sum(), (there - back) / 2, rtol=2e-4)


def test_rows_that_are_not_finite_reach_those_alone_that_see_them(made):
    """And where nobody asks for what they reach, nor for what is computed of them, gradients are as the reference says."""
    data, at = DATA.at[9, 1, 2].set(jnp.inf), 9

    def program(w, carry, t):
        x = rlfx.inputs(data)[t]
        rows = jnp.where(jnp.isfinite(x).all(), x @ w[0], jnp.inf)
        near = rlfx.series(rows).window(-6, 2)
        scores = near @ (rlfx.inputs(DATA)[t] @ w[1])
        y = (jax.nn.softmax(scores) @ near).sum()
        sees = (t.now >= at - 1) & (t.now <= at + 6)
        return jnp.where(sees, 0.0, y), carry, {"y": y, "scores": scores}

    ((loss, (_, out)), grads), fn = both(program), rlfx.reference(program, length=T, batch=BATCH)
    (wanted, (_, there)), slope = jax.value_and_grad(fn, has_aux=True)(W, jnp.zeros(BATCH))
    assert made or jax.default_backend() != "cpu"
    assert np.isfinite(loss)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    finite = np.isfinite(there["y"])
    assert not finite[at - 1 : at + 7, 1].any()
    assert finite.sum() == T * BATCH - 8
    for name in there:
        np.testing.assert_array_equal(np.isfinite(out[name]), np.isfinite(there[name]))
        fits = np.isfinite(there[name])
        np.testing.assert_allclose(np.asarray(out[name])[fits], np.asarray(there[name])[fits], rtol=1e-5, atol=1e-6)
    # What was chosen away is multiplied by zero in the way back, in the reference, too.
    np.testing.assert_array_equal(np.isfinite(grads), np.isfinite(slope))


def test_under_vmap_and_again_differentiated():
    fn = rlfx.compile(attention(-7, 1), length=T, batch=BATCH)
    slope = jax.jit(jax.grad(lambda w: fn(w, jnp.zeros(BATCH))[0]))
    several = jnp.stack([W, 0.5 * W])
    np.testing.assert_allclose(jax.vmap(slope)(several), jnp.stack([slope(w) for w in several]), rtol=2e-5, atol=3e-6)
    along = jnp.cos(W)
    _, change = jax.jit(lambda w: jax.jvp(slope, (w,), (along,)))(W)
    np.testing.assert_allclose(change, (slope(W + 2e-3 * along) - slope(W - 2e-3 * along)) / 4e-3, rtol=1e-2, atol=2e-3)


def test_explain_says_so():
    said = str(rlfx.compile(attention(-7, 1), length=T, batch=BATCH, plan=rlfx.Plan()).explain(W, jnp.zeros(BATCH)))
    if jax.default_backend() == "cpu":
        assert said.count("x[t + -7 : t + 1, filled]: products of blocks of 8 timesteps with all rows that they see") == 2
