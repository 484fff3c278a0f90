"""Means and sums over points of outer products are products of matrices: as the reference and plain loops say, and not made."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.schedule.tiling import Blocked

T, B, N = 5, 3, 4
K = jax.random.split(jax.random.key(0), 3)
DATA = jax.random.normal(K[0], (T, B, N))
W = jax.random.normal(K[1], (N, N)) / 2.0
CARRY = jnp.linspace(0.5, 1.5, B)


def values(w, s, t, x=None):
    x = rlfx.inputs(DATA)[t] if x is None else x
    return x, jnp.tanh(x @ w) * s


def moments(w, s, t, x=None):
    x, y = values(w, s, t, x)
    return (rlfx.mean(jnp.outer(y, y)) ** 2).sum() + (rlfx.sum(x[:, None] * y[None], over=("t", "b")) * w).sum()


def of_one_axis(w, s, t, x=None):
    """Over environments, over timesteps: the other one stays."""
    x, y = values(w, s, t, x)
    each = rlfx.mean(jnp.outer(x, y), over="b")
    return (jnp.cos(each) @ y).sum() + (rlfx.sum(jnp.einsum("i,j->ij", y, x), over="t") ** 2).mean()


def weighted(w, s, t, x=None):
    """By a number of each point, by one of each column, and by a constant."""
    x, y = values(w, s, t, x)
    return (rlfx.mean(s * jnp.outer(x, y)) ** 2).sum() + (rlfx.mean(0.5 * (jnp.outer(y, y) * x[None])) ** 3).sum()


def shared(w, s, t):
    """Factors that some points share."""
    _, y = values(w, s, t)
    common = rlfx.inputs(DATA[:, 0], axes="t")[t]
    return (rlfx.sum(jnp.outer(common, y)) ** 2).sum() + (rlfx.mean(jnp.outer(common, w[0]), over="t") * y[None]).sum()


def of_matrices(w, s, t):
    """Products of two narrow matrices, and rows with an axis in common."""
    x, y = values(w, s, t)
    a, b = jnp.stack([x, y]), jnp.stack([y, jnp.sin(x)])
    return (rlfx.mean(a.T @ b) ** 2).sum() + (rlfx.mean(a[:, :, None] * b[:, None, :]) ** 2).sum()


def larger_otherwise(w, s, t):
    """What something else needs, too; and what is no outer product."""
    x, y = values(w, s, t)
    pairs = jnp.outer(x, y)
    return (rlfx.mean(pairs) * pairs).sum() + rlfx.mean(x * y).sum()


PROGRAMS = [moments, of_one_axis, weighted, shared, of_matrices, larger_otherwise]


def with_carry(program, keeps=0.9):
    return lambda w, s, t: (program(w, s, t), keeps * s)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("over", ["at once", "until"])
def test_values_and_gradients(program, over):
    f, args = with_carry(program), {"length": T, "batch": B}
    if over == "until":
        args["until"] = lambda s: s < 0.7
    run = lambda make: jax.value_and_grad(lambda w: make(f, **args)(w, CARRY)[0])  # noqa: E731
    for x, y in zip(jax.jit(run(rlfx.compile))(W), run(rlfx.reference)(W), strict=True):
        np.testing.assert_allclose(x, y, rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize("program", [moments, of_one_axis, weighted])
def test_on_a_mesh(program):
    """Each device adds up its own environments."""
    data, carry = jnp.concatenate([DATA, DATA[:, :1]], 1), jnp.linspace(0.5, 1.5, 4)

    def f(w, s, t):
        return program(w, s, t, rlfx.inputs(data)[t]), 0.9 * s

    mesh = jax.make_mesh((2,), ("b",), devices=jax.devices()[:2])
    args = {"length": T, "batch": 4}
    run = lambda fn: jax.value_and_grad(lambda w: fn(w, carry)[0])(W)  # noqa: E731
    found, expected = run(rlfx.compile(f, mesh=mesh, **args)), run(rlfx.reference(f, **args))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=3e-5, atol=3e-6)


def test_against_numpy():
    def program(w, s, t):
        x, y = values(w, s, t)
        return y.sum(), s, rlfx.mean(jnp.outer(x, y))

    _, (_, found) = jax.jit(rlfx.compile(program, length=T, batch=B))(W, CARRY)
    y = np.tanh(np.asarray(DATA, np.float64) @ np.asarray(W, np.float64)) * np.asarray(CARRY, np.float64)[:, None]
    np.testing.assert_allclose(found, np.einsum("tbi,tbj->ij", DATA, y) / (T * B), rtol=1e-5, atol=1e-6)


def test_in_a_recurrence():
    """Of the environments of one timestep, on which the next depends."""

    def program(w, s, t):
        y = jnp.tanh(rlfx.inputs(DATA)[t] @ w) * s
        spread = rlfx.mean(jnp.outer(y, y), over="b")
        return y.sum(), jnp.sin(s + spread.sum() / 9.0)

    args = {"length": T, "batch": B}
    run = lambda make: jax.value_and_grad(lambda w: make(program, **args)(w, CARRY)[0])  # noqa: E731
    for x, y in zip(jax.jit(run(rlfx.compile))(W), run(rlfx.reference)(W), strict=True):
        np.testing.assert_allclose(x, y, rtol=3e-5, atol=3e-6)


def test_halves_are_added_up_as_wide_as_other_sums():
    def program(w, s, t):
        y = rlfx.inputs(DATA)[t].astype(jnp.bfloat16)
        return s, s, rlfx.mean(jnp.outer(y, y))

    _, (_, found) = jax.jit(rlfx.compile(program, length=T, batch=B))(W, CARRY)
    assert found.dtype == jnp.bfloat16
    y = np.asarray(DATA.astype(jnp.bfloat16), np.float64)
    np.testing.assert_allclose(found.astype(jnp.float32), np.einsum("tbi,tbj->ij", y, y) / (T * B), rtol=1e-2, atol=2e-3)


@pytest.mark.optimised
def test_the_products_are_not_made():
    """Memory is that of what they are made of, of losses and of statistics."""
    length, batch, width = 64, 16, 64
    data = jax.random.normal(K[2], (length, batch, width))

    def program(w, s, t):
        y = jnp.tanh(rlfx.inputs(data)[t] @ w)
        near = rlfx.mean(jnp.outer(y, y)) - jnp.eye(width)
        return y.sum() + (near**2).sum(), s, rlfx.mean(jnp.outer(y, y) * s)

    fn = rlfx.compile(program, length=length, batch=batch)
    step = jax.jit(jax.value_and_grad(lambda w: fn(w, jnp.zeros(batch)), has_aux=True))
    needed = step.lower(jnp.eye(width)).compile().memory_analysis().temp_size_in_bytes
    assert needed < 12 * data.nbytes < length * batch * width * width * 4 / 5, needed


@pytest.mark.parametrize("block", [2, 3, 4])
def test_what_acts_in_blocks_reduces_in_them(block):
    """Every reduction over timesteps of what blocks give; what is returned of all timesteps is there, too."""
    length, width = 12, 16
    data = jax.random.normal(K[2], (length, B, width))
    weights = jax.random.normal(K[1], (width, width)) / 4.0
    cpu = rlfx.target("cpu")
    with_room = lambda tile: dataclasses.replace(cpu, room=dataclasses.replace(cpu.room, cache=2 * tile, tile=tile))  # noqa: E731

    def program(w, s, t):
        y = jnp.tanh(rlfx.inputs(data)[t] @ w)
        z = jnp.tanh(y @ w)
        moments = rlfx.mean(jnp.outer(y, z)), rlfx.sum(z, over="t"), rlfx.max(y), rlfx.min(z), rlfx.mean(z, over=("t", "b"))
        return jax.lax.stop_gradient((z * s).sum()), s, (moments, z[0] - moments[-1][0])

    def compiled(tile):
        fn = rlfx.compile(program, length=length, batch=B, target=with_room(tile))
        (found,) = (p for node in fn.physical(weights, CARRY).acting.nodes for p in node.parts if isinstance(p, Blocked))
        return fn, found

    step = compiled(1)[1].largest // length
    fn, blocked = compiled(block * step)
    assert (blocked.block, len(blocked.sums)) == (block, 5)
    found = jax.jit(fn)(weights, CARRY)
    expected = rlfx.reference(program, length=length, batch=B)(weights, CARRY)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, expected)
