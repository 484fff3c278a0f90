"""Windows ``x.window(lo, hi)`` without a derivative, in blocks of timesteps: no array has a copy of what each timestep sees."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.execute.loops import WhileGoing
from rlfx.recurrence.gradient.rule import GradientRule
from rlfx.recurrence.plan.planner import Options
from rlfx.recurrence.schedule import windows
from rlfx.recurrence.schedule.physical import physical

T, BATCH, WIDTH = 23, 3, 4
W = jax.random.normal(jax.random.key(0), (3, WIDTH, WIDTH)) / 2.0
X0 = jnp.linspace(-1.0, 1.0, BATCH * WIDTH).reshape(BATCH, WIDTH)


def nearest(w, x, t):
    """Episodic novelty: how far a code is from the nearest before, which are fewer in the beginning."""
    code = jnp.tanh(x @ w[0])
    before = rlfx.series(jax.lax.stop_gradient(code)).window(-9, 0)
    apart = ((before - jax.lax.stop_gradient(code)[None]) ** 2).sum(-1)
    apart = jnp.where(jnp.arange(9, 0, -1) <= t.now, apart, jnp.inf)
    closest = -jax.lax.top_k(-apart, 2)[0]
    return (code.sum() - jnp.where(closest < jnp.inf, closest, 0.0).sum()) ** 2, jnp.cos(x + code)


def attending(w, x, t):
    """Attention over a memory of stopped values, by a query and a value that are learned."""
    memory = rlfx.series(jax.lax.stop_gradient(jnp.sin(x))).window(-8, 2, fill=0.25)
    shares = jax.nn.softmax(memory @ (w[0] @ x))
    return ((shares @ memory) @ w[1]).sum() ** 2, jax.lax.stop_gradient(jnp.cos(x))


def around(w, x, t):
    """A moving mean and a largest one, of what is acted; and a window of that."""
    seen = rlfx.series(jax.lax.stop_gradient(jnp.cos(x))).window(-4, 5, fill=0.5)
    smooth = seen.mean(0) + seen.max(0)
    later = rlfx.series(smooth).window(1, 10).min(0)
    return ((jnp.tanh(x @ w[0]) - smooth) ** 2 * later).sum(), jax.lax.stop_gradient(jnp.cos(2.0 * x))


def added(w, x, t):
    """A window of data that is added up over time: it is needed as it is."""
    near = rlfx.series(rlfx.inputs(jnp.sin(jnp.arange(1.0 * T)), axes="t")[t]).window(-8, 0)
    return (w[0].sum() - near.max() * rlfx.sum(near).max()) ** 2, jnp.cos(x)


def kernel(w, x, t):
    """Neural episodic control: values of what is remembered, weighed by how near their codes are to a learned one."""
    code, reward = jax.lax.stop_gradient(jnp.sin(x)), jax.lax.stop_gradient(jnp.cos(x).sum())
    codes, rewards = rlfx.series((code, reward)).window(-8, 2, fill=(0.25, -1.0))
    apart = jnp.square(codes * w[2, 0][None] - jnp.tanh(x @ w[0])[None])
    near = 1.0 / (apart.sum(-1) + apart.max(-1) + 0.1)
    return ((near * rewards).sum() / near.sum() - x @ w[1, 0]) ** 2, jax.lax.stop_gradient(jnp.cos(x))


def images(w, x, t):
    """Codes that are matrices, and a mask of positions and time."""
    seen = rlfx.series(jax.lax.stop_gradient(x[:, None] * x[None, :])).window(2, 13, fill=0.5)
    apart = jnp.abs(seen - 0.1 * t.now.astype(jnp.float32)).sum((1, 2))
    return jnp.where(jnp.arange(11) + 2 + t < t.length, apart, 9.0).min() * (x @ w[0, 0]), jax.lax.stop_gradient(
        jnp.sin(x)
    )


def nowhere(w, x, t):
    """Windows that reach nothing, and of what is the same at every timestep but for the ends."""
    outside = rlfx.series(jax.lax.stop_gradient(jnp.sin(x))).window(T, T + 10, fill=0.5)
    steady = rlfx.series(jnp.float32(0.5)).window(-4, 6, fill=-1.0)
    return ((outside - x[None]) ** 2).sum(-1).min() * (x @ w[0, 0]) + steady.sum() * w[1, 0, 0], jnp.cos(x)


PROGRAMS = {f.__name__: f for f in (nearest, attending, around, added, kernel, images, nowhere)}
#: Those whose windows are only reduced: what the learner differentiates functions of is stored for it.
REDUCED = ("nearest", "around", "images")


@pytest.fixture
def few(monkeypatch):
    """However few bytes a timestep has, positions are last."""
    monkeypatch.setattr(windows, "LEAST", 0)
    monkeypatch.setattr(windows, "VECTOR", 1)


def small(**room):
    cpu = rlfx.target("cpu")
    return replace(cpu, room=replace(cpu.room, **{"in_block": 1 << 7, "tile": 1 << 10, **room}))


def gradient(name, **options):
    fn = rlfx.compile(PROGRAMS[name], length=T, batch=BATCH, **options)
    return fn, jax.jit(jax.value_and_grad(lambda w, key: fn(w, X0, key)[0]))


@functools.cache
def reference(name):
    fn = rlfx.reference(PROGRAMS[name], length=T, batch=BATCH)
    return jax.value_and_grad(lambda w: fn(w, X0, jax.random.key(3))[0])(W)


def assert_equal(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("plan", [rlfx.Plan(), rlfx.Plan(environments=1), None])
def test_values_and_gradients_in_blocks(name, plan):
    fn, run = gradient(name, plan=plan, target=small())
    assert_equal(run(W, jax.random.key(3)), reference(name))
    if plan == rlfx.Plan():
        text = str(fn.physical(W, X0, jax.random.key(3)))
        assert ("filled]: blocks of" in text) == (name in REDUCED), text


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("plan", [rlfx.Plan(), rlfx.Plan(environments=1)])
def test_positions_last(few, name, plan):
    fn, run = gradient(name, plan=plan, target=small())
    assert_equal(run(W, jax.random.key(3)), reference(name))
    assert ("positions last" in str(fn.physical(W, X0, jax.random.key(3)))) == (name in ("nearest", "images"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_acting_alone(few, name):
    """Without a learner nothing is stored: windows whose features are added up have positions last."""
    step = lambda w, x, t: PROGRAMS[name](w, x, t)[::-1]  # noqa: E731
    fn = rlfx.unroll(step, length=T, batch=BATCH, target=small())
    assert_equal(
        fn(W, X0, jax.random.key(3)), rlfx.reference(step, length=T, batch=BATCH, loss=False)(W, X0, jax.random.key(3))
    )
    rule = GradientRule(rlfx.trace(step, W, X0, length=T, batch=BATCH, loss=False), Options(), small())
    text = str(physical(rule.forward, small(), WhileGoing(), batch=BATCH))
    assert ("positions last" in text) == (name in ("nearest", "kernel", "images")), text


def test_positions_last_without_a_batch(few):
    fn, expected = (
        make(nearest, length=T, **options)
        for make, options in ((rlfx.compile, {"target": small(), "plan": rlfx.Plan()}), (rlfx.reference, {}))
    )
    assert "positions last" in str(fn.physical(W, X0[0]))
    assert_equal(*(jax.value_and_grad(lambda w, f=f: f(w, X0[0])[0])(W) for f in (fn, expected)))


def test_what_a_window_holds_is_not_turned_back(few):
    """Where positions are weighed, a product needs the window as it is."""

    def weighed(w, x, t):
        memory = rlfx.series(jax.lax.stop_gradient(jnp.sin(x))).window(-8, 2, fill=0.25)
        near = jax.nn.softmax(-((memory - x[None]) ** 2).sum(-1))
        return ((near @ memory) @ w[0, 0]) ** 2, jax.lax.stop_gradient(jnp.cos(x))

    fn, expected = (
        make(weighed, length=T, batch=BATCH, **options)
        for make, options in ((rlfx.compile, {"target": small(), "plan": rlfx.Plan()}), (rlfx.reference, {}))
    )
    assert "filled]: blocks" in (text := str(fn.physical(W, X0)))
    assert "positions last" not in text
    assert_equal(*(jax.value_and_grad(lambda w, f=f: f(w, X0)[0])(W) for f in (fn, expected)))


def test_the_target_decides():
    """What fits there is read for all timesteps at once."""
    assert "filled" not in str(gradient("nearest", plan=rlfx.Plan())[0].physical(W, X0, jax.random.key(3)))
    wide = small(tile=None, in_block=1 << 13)
    fn, run = gradient("nearest", target=wide)
    assert "filled]: blocks of 9 timesteps" in str(fn.physical(W, X0, jax.random.key(3)))
    assert_equal(run(W, jax.random.key(3)), reference("nearest"))


def test_a_window_that_is_differentiated_is_whole():
    def learned(w, x, t):
        near = rlfx.series(jnp.tanh(x @ w[0])).window(-9, 0)
        return (near**2).sum(), jax.lax.stop_gradient(jnp.cos(x))

    fn, expected = (
        make(learned, length=T, batch=BATCH, **options)
        for make, options in ((rlfx.compile, {"target": small()}), (rlfx.reference, {}))
    )
    assert "filled" not in str(fn.physical(W, X0))
    assert_equal(*(jax.value_and_grad(lambda w, f=f: f(w, X0)[0])(W) for f in (fn, expected)))


def test_under_vmap_and_until():
    fn = rlfx.compile(nearest, length=T, batch=BATCH, target=small())
    run = jax.value_and_grad(lambda w: fn(w, X0)[0])
    both = jax.vmap(run)(jnp.stack([W, 0.5 * W]))
    assert_equal(both, jax.tree.map(lambda *x: jnp.stack(x), run(W), run(0.5 * W)))

    def ends(w, x, t):
        loss, after = nearest(w, x, t)
        return loss, {"x": after, "done": jnp.sin(3.0 * t + x[0]) > 0.9}

    start = {"x": X0, "done": jnp.zeros(BATCH, bool)}
    step = lambda w, c, t: ends(w, c["x"], t)  # noqa: E731
    fns = (rlfx.compile, {"target": small()}), (rlfx.reference, {})
    found = [make(step, length=T, batch=BATCH, until=lambda c: c["done"], **how) for make, how in fns]
    assert_equal(*(jax.value_and_grad(lambda w, f=f: f(w, start)[0])(W) for f in found))


@pytest.mark.optimised
def test_no_copy_of_what_each_timestep_sees():
    """256 timesteps of 16 environments that each see 64 codes of 16 numbers: 16 MiB of copies."""

    def program(w, x, t):
        code = jnp.tanh(x @ w)
        before = rlfx.series(jax.lax.stop_gradient(code)).window(-64, 0)
        closest = ((before - jax.lax.stop_gradient(code)[None]) ** 2).sum(-1).min()
        return closest * code.sum(), jax.lax.stop_gradient(jnp.cos(x + code))

    fn = rlfx.compile(program, length=256, batch=16, plan=rlfx.Plan())
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 16), (16, 16))]
    compiled = jax.jit(jax.grad(lambda w, x: fn(w, x)[0])).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 << 20
