"""One element of every row, as an accelerator takes it in the update of a minibatch: the values and derivatives of gathers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.ir.interpret import rewritten
from rlfx.recurrence.rewrite.picks import picking

ROWS, N = 7, 3
INDICES = np.array([0, 2, -1, 1, -3, 3, -5], np.int32)  # the last two are outside

FORMS = {
    "take_along_axis": lambda q, i: jnp.take_along_axis(q, i[:, None], axis=1)[:, 0],
    "several of a row": lambda q, i: jnp.take_along_axis(q, jnp.stack([i, i, -i], 1), axis=1).sum(1),
    "clipped": lambda q, i: jnp.take_along_axis(q, i[:, None], axis=1, mode="clip")[:, 0],
    "vmap": lambda q, i: jax.vmap(lambda q, i: q[i])(q, i),
    "two axes of rows": lambda q, i: jnp.take_along_axis(jnp.stack([q, 2 * q]), jnp.stack([i, i])[..., None], axis=2).sum((0, 2)),
    "whole numbers": lambda q, i: jnp.take_along_axis((10 * q).astype(jnp.int32), i[:, None], axis=1)[:, 0].astype(jnp.float32),
}  # fmt: skip


def values():
    draw = np.random.default_rng(0)
    return (jnp.asarray(draw.normal(size=s), jnp.float32) for s in ((ROWS, N), (ROWS,)))


@pytest.mark.parametrize("form", FORMS)
def test_picks_are_gathers_and_their_derivatives(form):
    q, weight = values()

    def both(q):
        value = FORMS[form](q, jnp.asarray(INDICES))
        return value, jax.grad(lambda q: jnp.nansum(FORMS[form](q, jnp.asarray(INDICES)) * weight))(q)

    picked = rewritten(both, picking(64))
    text = str(jax.make_jaxpr(picked)(q))
    assert "gather" not in text
    assert "scatter" not in text
    for expected, found in zip(both(q), picked(q), strict=True):
        assert expected.dtype == found.dtype
        np.testing.assert_allclose(expected, found, rtol=1e-6)


def test_others_stay_gathers():
    q, _ = values()
    rows = lambda q: q[jnp.asarray([1, 0])]  # noqa: E731
    for fn, most in ((rows, 64), (lambda q: FORMS["take_along_axis"](q, jnp.asarray(INDICES)), N - 1)):
        picked = rewritten(fn, picking(most))
        assert "gather" in str(jax.make_jaxpr(picked)(q))
        np.testing.assert_array_equal(fn(q), picked(q))


def test_minibatches_on_an_accelerator(monkeypatch):
    """An update with a picked action: the same parameters as with gathers."""
    data = {"q": jnp.asarray(np.random.default_rng(1).normal(size=(4, 6, N)), jnp.float32), "a": jnp.ones((4, 6), jnp.int32)}

    def update(w, x):
        loss = lambda w: jnp.mean(jnp.take_along_axis(x["q"] * w[None], x["a"][:, None], axis=1) ** 2)  # noqa: E731
        return w - 0.1 * jax.grad(loss)(w), None

    def run(w):
        return rlfx.minibatch_epochs(update, w, data, epochs=2, minibatches=2, key=jax.random.key(0))[0]

    here = run(jnp.ones(N))
    monkeypatch.setattr("rlfx.epochs.target", lambda: rlfx.target("h200"))
    assert "scatter" not in str(jax.make_jaxpr(run)(jnp.ones(N)))
    np.testing.assert_allclose(here, run(jnp.ones(N)), rtol=1e-6)
