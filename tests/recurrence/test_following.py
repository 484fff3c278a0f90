"""Gradients through reads of the next timestep, in blocks: each computes the first timestep of the block behind it, too."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import stop_gradient

import rlfx
from rlfx.errors import ScheduleError
from tests.sampling import met

T, BATCH = 11, 2
PLANS = [
    rlfx.Plan(), rlfx.Plan("blocks", 1), rlfx.Plan("blocks", 3), rlfx.Plan("blocks", T, 1), rlfx.Plan("blocks", 4, 1),
    rlfx.Plan("blocks", 4, offload=1),
]  # fmt: skip
DATA = jnp.sin(jnp.arange(T * BATCH * 3.0)).reshape(T, BATCH, 3)
W = jax.random.normal(jax.random.key(0), (4, 3)) / 2.0
X0 = jnp.linspace(-1.0, 1.0, BATCH * 3).reshape(BATCH, 3)


def inverse_model(w, x, t):
    """The action, of the codes around it: at T the code of where the environment went."""
    action = jax.random.categorical(t.key_for("action"), w[0] * x)
    code = jnp.tanh(x * w[1])
    logits = code * w[2] - rlfx.series(code)[t + 1] * w[3]
    return -jax.nn.log_softmax(logits)[action], stop_gradient(jnp.cos(x + action.astype(jnp.float32)))


def residual(w, x, t):
    """A residual gradient, which moves what follows, too; normalised by what all timesteps have."""
    value = jnp.tanh(x @ w[0])
    following = rlfx.series(value, end=0.25)[t + 1]
    error = x.sum() + 0.9 * following - value
    return error**2 / (1.0 + stop_gradient(rlfx.mean(error**2))), stop_gradient(jnp.cos(1.3 * x))


def with_time(w, x, t):
    """What is read draws numbers of its own time, and knows the time."""
    noise = jax.random.normal(t.key_for("noise"), (3,))
    code = jnp.sin(x * w[0] + noise + 0.1 * t)
    smooth = rlfx.series({"code": code, "value": code @ w[1]})[t + 1]
    return ((smooth["code"] - code) ** 2).sum() * smooth["value"], stop_gradient(jnp.cos(x + noise))


def ends_with_itself(w, x, t):
    """At T what the last timestep has."""
    code = jnp.tanh(x * w[0])
    return ((rlfx.series(code, end=code)[t + 1] - 2.0 * code) ** 2 @ w[1]), stop_gradient(jnp.cos(x))


def of_data(w, x, t):
    """Of stored data: there is nothing at T, and no loss that needs it."""
    code = jnp.tanh(rlfx.inputs(DATA)[t] * w[0])
    following = rlfx.series(code, end=0.0)[t + 1]
    return jnp.where(t + 1 < t.length, ((following - w[1] * code) ** 2).sum(), 0.0), x


def of_weights(w, x, t):
    """What is the same at every timestep, but for the end: a sum over a window that gets shorter there."""
    return jnp.tanh(rlfx.series(w[0])[t : t + 2].sum(0) @ w[1]) * x.sum(), jnp.cos(x)


PROGRAMS = {f.__name__: f for f in (inverse_model, residual, with_time, ends_with_itself, of_data, of_weights)}


@functools.cache
def reference(name):
    fn = rlfx.reference(PROGRAMS[name], length=T, batch=BATCH)
    value, aux = fn(W, X0, jax.random.key(3))
    return value, aux, jax.grad(lambda w: fn(w, X0, jax.random.key(3))[0])(W)


@pytest.mark.parametrize(("name", "plan"), met(PROGRAMS, PLANS))
def test_values_and_gradients_under_every_plan(name, plan):
    if plan.offload is not None:  # no plan for a CPU, but a transform runs there
        make, plan = functools.partial(rlfx.offload, PROGRAMS[name], min_bytes=1), rlfx.Plan("blocks", plan.block)
    else:
        make = lambda: PROGRAMS[name]  # noqa: E731
    fn = rlfx.compile(make(), length=T, batch=BATCH, plan=plan)
    (value, aux), grads = jax.jit(jax.value_and_grad(fn, has_aux=True))(W, X0, jax.random.key(3))
    for got, want in zip(jax.tree.leaves((value, aux, grads)), jax.tree.leaves(reference(name)), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_under_vmap():
    fn = rlfx.compile(inverse_model, length=T, batch=BATCH, plan=rlfx.Plan("blocks", 3))
    run = lambda w, key: jax.grad(lambda w: fn(w, X0, key)[0])(w)  # noqa: E731
    keys, ws = jax.random.split(jax.random.key(1), 2), jnp.stack([W, 2.0 * W])
    for i, got in enumerate(jax.vmap(run)(ws, keys)):
        np.testing.assert_allclose(got, run(ws[i], keys[i]), rtol=2e-5, atol=2e-6)


def two_ahead(w, x, t):
    return (rlfx.series(jnp.tanh(x @ w[0]))[t + 2] - x @ w[1]) ** 2, stop_gradient(jnp.cos(x))


def before(w, x, t):
    return (rlfx.series(jnp.tanh(x @ w[0]), start=0.0)[t - 1] - x @ w[1]) ** 2, stop_gradient(jnp.cos(x))


def of_reads(w, x, t):
    first = rlfx.series(jnp.tanh(x @ w[0]), end=0.5)[t + 1]
    return (rlfx.series(first * w[1, 0], end=0.0)[t + 1] - x @ w[1]) ** 2, stop_gradient(jnp.cos(x))


REFUSED = {
    two_ahead: "reads of other timesteps", before: "reads of other timesteps", of_reads: "what reads other timesteps, too",
}  # fmt: skip


@pytest.mark.parametrize("program", REFUSED, ids=lambda f: f.__name__)
def test_other_reads_have_no_blocks(program):
    with pytest.raises(ScheduleError, match=rf"{REFUSED[program]}.*\(.*test_following.py:"):
        rlfx.compile(program, length=T, batch=BATCH, plan=rlfx.Plan("blocks", 3)).plan(W, X0)
    want = jax.grad(lambda w: rlfx.reference(program, length=T, batch=BATCH)(w, X0)[0])(W)
    got = jax.grad(lambda w: rlfx.compile(program, length=T, batch=BATCH)(w, X0)[0])(W)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_environments_that_end_have_no_blocks():
    program = lambda w, x, t: (residual(w, x, t)[0], jnp.cos(1.3 * x))  # noqa: E731
    fn = rlfx.compile(program, length=T, batch=BATCH, until=lambda x: x[0] > 0.9, plan=rlfx.Plan("blocks", 3))
    with pytest.raises(ScheduleError, match=r"reads of other timesteps|where environments end at other timesteps"):
        fn.plan(W, X0)


@pytest.mark.optimised
def test_the_memory_of_blocks():
    """One block's activations, and the codes of all timesteps nowhere."""

    def program(w, x, t):
        code = jnp.tanh(x @ w["in"])
        return ((rlfx.series(code)[t + 1] @ w["out"] - code @ w["out"]) ** 2).sum(), stop_gradient(jnp.cos(x))

    w = {"in": jnp.zeros((4, 64)), "out": jnp.zeros((64, 64))}

    def measured(plan):
        fn = rlfx.compile(program, length=256, batch=8, plan=plan)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (w, jnp.zeros((8, 4))))
        compiled = jax.jit(jax.grad(lambda w, x: fn(w, x)[0])).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert measured(rlfx.Plan("blocks", 16)) < measured(rlfx.Plan()) / 4
