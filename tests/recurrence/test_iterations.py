"""Iterations of a loop over time that are one of the program's: the same values and gradients, whatever the length."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.execute.loops import _MOST
from rlfx.recurrence.schedule.physical import Repeated
from tests.sampling import met

CPU = rlfx.target("cpu")
BY_FOUR = dataclasses.replace(CPU, rewrites=dataclasses.replace(CPU.rewrites, unroll=4))
B, N = 3, 5
PLANS = {"one pass": rlfx.Plan("one pass"), "at once": rlfx.Plan(), "blocks": rlfx.Plan("blocks", 2), "default": None}


def learner(p, h, t):
    """A recurrence forwards that multiplies weights, and one backwards that is not affine."""
    x = rlfx.series(rlfx.inputs(p["x"])[t])
    new = jnp.tanh(p["w"] @ h + x[t])
    later = rlfx.solve(lambda later: jnp.sin(later[t + 1]) + jax.lax.stop_gradient(new).sum(), end=0.3)
    return (new**2).sum() * jax.lax.stop_gradient(later) + (new * x[t]).sum(), new, (new[0], later)


def by_hand(p, h):
    states, length = [], len(p["x"])
    for t in range(length):
        h = jnp.tanh(h @ p["w"].T + p["x"][t])
        states.append(h)
    later, found = jnp.full(B, 0.3), []
    for new in reversed(states):
        later = jnp.sin(later) + new.sum(-1)
        found.append(jax.lax.stop_gradient(later))
    total = sum((s**2).sum(-1) * r + (s * x).sum(-1) for s, r, x in zip(states, reversed(found), p["x"], strict=True))
    return total.sum() / (length * B), (h, (jnp.stack([s[:, 0] for s in states]), jnp.stack(found[::-1])))


def arguments(length):
    k = jax.random.split(jax.random.key(length), 3)
    p = {"w": 0.5 * jax.random.normal(k[0], (N, N)), "x": jax.random.normal(k[1], (length, B, N))}
    return p, jax.random.normal(k[2], (B, N))


def close(one, other):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), one, other)


def iterations(fn, *args):
    """How the loops of acting run."""
    return [str(node.iteration) for node in fn.physical(*args).acting.nodes if isinstance(node, Repeated)]


@pytest.mark.parametrize(("length", "plan"), met([1, 2, 3, 4, 5, 8, 11], [*PLANS]))
def test_values_and_gradients_whatever_is_left_over(length, plan):
    plan = None if length == 1 else PLANS[plan]
    fn = rlfx.compile(learner, length=length, batch=B, target=BY_FOUR, plan=plan)
    p, h = arguments(length)
    run = lambda f: jax.jit(jax.value_and_grad(lambda w: f({**p, "w": w}, h), has_aux=True))(p["w"])  # noqa: E731
    close(run(fn), run(by_hand))


def test_gradients_of_all_that_is_read():
    args = arguments(7)
    fn = rlfx.compile(learner, length=7, batch=B, target=BY_FOUR)
    run = lambda f: jax.jit(jax.grad(lambda p, h: f(p, h)[0], (0, 1)))(*args)  # noqa: E731
    close(run(fn), run(by_hand))


def test_loops_are_a_quarter_as_long():
    fn = rlfx.compile(learner, length=12, batch=B, target=BY_FOUR)
    assert iterations(fn, *arguments(12)) == ["scan, about 4 at a time"] * 2
    text = jax.jit(jax.grad(lambda *args: fn(*args)[0])).lower(*arguments(12)).as_text()
    assert text.count("stablehlo.while") > 0
    assert "dense<3> : tensor<i32>" in text
    assert "dense<12> : tensor<i32>" not in text
    assert iterations(rlfx.compile(learner, length=12, batch=B, target=CPU), *arguments(12)) == ["scan"] * 2


@pytest.mark.parametrize(("length", "together"), [(12, 4), (10, 5), (9, 3), (7, 7), (250, 5), (11, 4)])
def test_nothing_is_left_over_where_there_is_a_divisor(length, together):
    """What is left over is put behind the others, in copies."""
    fn = rlfx.compile(learner, length=length, batch=B, target=BY_FOUR)
    p, h = arguments(length)
    loops = str(jax.make_jaxpr(jax.grad(lambda w: fn({**p, "w": w}, h)[0]))(p["w"]))
    assert loops.count(f"unroll={together}\n") == loops.count("unroll=") > 1


def test_what_is_long_stays_one_by_one():
    def nested(p, h, t):
        h = jax.lax.scan(lambda h, _: (jnp.tanh(p["w"] @ h), None), h, None, length=100)[0]
        return h.sum(), h

    def wide(p, h, t):
        for _ in range(_MOST // 8):
            h = jnp.tanh(p["w"] @ h)
        return h.sum(), h

    for program in (nested, wide):
        fn = rlfx.compile(program, length=8, batch=B, target=BY_FOUR)
        assert iterations(fn, *arguments(8)) == ["scan"]


def test_copies_and_second_derivatives():
    fn = rlfx.compile(learner, length=6, batch=B, target=BY_FOUR)
    p, h = arguments(6)
    several = {**p, "w": jnp.stack([p["w"], -p["w"]])}
    axes = ({"w": 0, "x": None}, None)

    def product(f, p, h):
        """Of the Hessian with the weights themselves."""
        gradient = lambda w: jax.grad(lambda w: f({**p, "w": w}, h)[0])(w)  # noqa: E731
        return jax.jvp(gradient, (p["w"],), (p["w"],))

    mapped = lambda f: jax.jit(jax.vmap(jax.grad(lambda p, h: f(p, h)[0]), axes))(several, h)  # noqa: E731
    close(mapped(fn), mapped(by_hand))
    close(*(jax.jit(functools.partial(product, f))(p, h) for f in (fn, by_hand)))


def test_a_gpu_unrolls():
    assert rlfx.target("h100").rewrites.unroll == 4
    assert rlfx.target("v5e").rewrites.unroll == CPU.rewrites.unroll == 1
