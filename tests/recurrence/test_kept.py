"""Outputs that are not kept for every timestep: equal to slices of all, and flat in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import DomainError, ProgramError

T, B = 7, 2


def outputs(w, x, t):
    return {"x": jnp.sin(w * x), "pair": (x + 1.0 * t, 2 * t.now)}


def plain(w, x, t):
    return x + w, outputs(w, x, t)


def kept(w, x, t):
    all_ = outputs(w, x, t)
    return x + w, {"all": all_["x"], "last": rlfx.Last(all_), "every": rlfx.Every(3, all_), "one": rlfx.Every(1, x)}


def expected(stacked, lengths=None):
    last = lambda y: y[-1]  # noqa: E731
    if lengths is not None:
        last = lambda y: jnp.stack([y[n - 1, b] for b, n in enumerate(lengths)])  # noqa: E731
    return jax.tree.map(last, stacked), jax.tree.map(lambda y: y[::3], stacked)


def test_they_are_slices_of_all():
    w = jnp.float32(0.3)
    for batch, x in ((None, jnp.float32(0.1)), (B, jnp.array([0.1, 0.6]))):
        carry, stacked = rlfx.unroll(plain, length=T, batch=batch)(w, x)
        f = rlfx.unroll(kept, length=T, batch=batch)
        for run in (f, f, rlfx.reference(kept, length=T, batch=batch, loss=False)):  # the second time it is known
            end, got = run(w, x)
            jax.tree.map(np.testing.assert_array_equal, end, carry)
            jax.tree.map(np.testing.assert_allclose, (got["last"], got["every"]), expected(stacked))
            np.testing.assert_allclose(got["all"], stacked["x"])
            assert got["one"].shape[0] == T


def test_where_environments_end_apart():
    w, x, until = jnp.float32(0.3), jnp.array([0.1, 0.6]), lambda x: x > 1.4
    _, stacked, lengths = rlfx.unroll(plain, length=T, batch=B, until=until)(w, x)
    assert lengths.tolist() == [5, 3]
    for run in (
        rlfx.unroll(kept, length=T, batch=B, until=until),
        rlfx.reference(kept, length=T, batch=B, until=until, loss=False),
    ):
        _, got, ends = run(w, x)
        np.testing.assert_array_equal(ends, lengths)
        jax.tree.map(np.testing.assert_allclose, (got["last"], got["every"]), expected(stacked, lengths))


def loss(w, x, t):
    y = jnp.sin(w * x)
    return y**2, 0.9 * x + 0.1 * y, {"last": rlfx.Last(y), "every": rlfx.Every(2, y * rlfx.mean(y))}


def test_with_a_loss_and_derivatives():
    """Of the loss, and of what is kept; in a program that is called in another; under vmap."""
    x = jnp.array([0.1, 0.6])

    def outer(_, w, i):
        run = rlfx.compile(loss, length=3, batch=B)
        (value, (_, aux)), g = jax.value_and_grad(lambda w: run(w, x), has_aux=True)(w)
        return w - 0.1 * g, rlfx.Last((value, aux["last"], aux["every"]))

    def total(run):
        return lambda w: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(run(None, w)[1]))

    compiled = total(rlfx.unroll(outer, length=2, dim="i"))
    interpreted = total(rlfx.reference(outer, length=2, dim="i", loss=False))
    w = jnp.float32(0.7)
    np.testing.assert_allclose(jax.value_and_grad(compiled)(w), jax.value_and_grad(interpreted)(w), rtol=1e-5)
    many = jnp.array([0.7, 0.2])
    np.testing.assert_allclose(jax.vmap(compiled)(many), [compiled(v) for v in many], rtol=1e-6)


def test_memory_is_flat_in_the_number_of_iterations():
    """Temporary bytes of 10 and of 10,000 iterations, and of outputs; by XLA."""

    def step(_, w, i):
        w = 0.99 * w + jax.random.normal(i.key, w.shape)
        return w, {"last": rlfx.Last(w), "log": rlfx.Every(5000, jnp.mean(w))}

    def bytes_of(n):
        run = jax.jit(rlfx.unroll(step, length=n, dim="i"))
        found = run.lower(None, jnp.ones(1000), jax.random.key(0)).compile().memory_analysis()
        return found.temp_size_in_bytes, found.output_size_in_bytes

    (few, small), (many, large) = bytes_of(10), bytes_of(10_000)
    assert many <= few + 512  # stacked, they would be 40 MB
    assert large <= small + 64


def test_a_mesh():
    mesh = jax.make_mesh((1,), ("b",))
    w, x = jnp.float32(0.3), jnp.array([0.1, 0.6])
    got = rlfx.unroll(kept, length=T, batch=B, mesh=mesh)(w, x)
    want = rlfx.unroll(kept, length=T, batch=B)(w, x)
    jax.tree.map(np.testing.assert_allclose, got, want)


def test_refusals():
    for n in (0, -1, 2.5, True):
        with pytest.raises(DomainError, match=r"rlfx\.Every: n must be a positive integer"):
            rlfx.Every(n, 0.0)
    program = rlfx.trace(kept, jnp.float32(0.3), jnp.float32(0.1), length=T, loss=False)
    with pytest.raises(
        ProgramError, match=r"kept returns rlfx\.Last or rlfx\.Every, which are kept by the compiled function"
    ):
        rlfx.lower(program)
