"""Derivatives of the largest and the smallest: XLA may compute an element twice, and round it differently."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.execute.extremes import largest_or_smallest
from tests.sampling import met

T, MEMBERS = 5, 12
KINDS = {
    "b": (lambda op, v, t: getattr(rlfx, op)(v, "b"), lambda v, t, b: v[t]),
    "t": (lambda op, v, t: getattr(rlfx, op)(v, "t"), lambda v, t, b: v[:, b]),
    "tb": (lambda op, v, t: getattr(rlfx, op)(v, "tb"), lambda v, t, b: v),
    "ahead": (lambda op, v, t: getattr(rlfx.series(v)[t : t + 3], op)(), lambda v, t, b: v[t : t + 3, b]),
    "so far": (lambda op, v, t: getattr(rlfx.series(v)[: t // 2 + 1], op)(), lambda v, t, b: v[: t // 2 + 1, b]),
}


def loss(kind, op, h):
    """Float64, and loops."""
    v = np.array([[0.3 * (T - t) * x * np.sin(x) for x in h] for t in range(T)])
    _, elements = KINDS[kind]
    extremes = [[getattr(np, op)(elements(abs(v - 0.01), t, b)) for b in range(len(h))] for t in range(T)]
    return np.mean((v - v.mean()) / (np.array(extremes) + 0.5))


@pytest.mark.parametrize(("kind", "op", "batch"), met(KINDS, ["max", "min"], [2, 7]))
def test_there_is_always_one_that_attains_it(kind: str, op: str, batch: int):
    """240 members. By hand, ``jit(grad(...))`` of such programs is NaN for more than half of the numbers."""

    def program(_, h, t):
        s = rlfx.series(h)
        scores = s[t:]
        v = 0.3 * (scores @ jnp.sin(scores))
        found = KINDS[kind][0](op, jnp.abs(v - 0.01), t)
        return (v - rlfx.mean(v)) / (found + 0.5), h

    unrolled = rlfx.compile(program, length=T, batch=batch, transform=rlfx.vectorize)
    run = jax.jit(jax.value_and_grad(lambda h: unrolled(None, h)[0]))
    rng, compared = np.random.default_rng(batch), 0
    while compared < MEMBERS:
        h = rng.uniform(-1, 1, batch)
        steps = 1e-5 * np.eye(batch)
        slopes, near = (
            np.array([(loss(kind, op, h + k * d) - loss(kind, op, h - k * d)) / (2e-5 * k) for d in steps])
            for k in (1, 20)
        )
        if not np.allclose(slopes, near, rtol=1e-3, atol=1e-4):
            continue  # a kink is near
        compared += 1
        got, gradient = run(jnp.asarray(h, jnp.float32))
        np.testing.assert_allclose(got, loss(kind, op, h), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(gradient, slopes, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("op", ["max", "min"])
def test_ties_share_as_in_jax(op: str):
    """Values, first and second derivatives of 24 arrays with ties, over one axis and two; integers have none."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(0, 3, (12, 4, 3, 2)), jnp.float32)
    for axes in ((1,), (0, 2)):
        w = jnp.asarray(rng.uniform(-1, 1, (12, *jnp.max(x[0], axes).shape)), jnp.float32)

        def results(f, axes=axes, w=w):
            def square(x, w):
                return (f(x, axes) ** 2 * w).sum()

            slope = jax.grad(square)
            return jax.jit(jax.vmap(lambda x, w: (f(x, axes), slope(x, w), jax.grad(lambda x: slope(x, w).sum())(x))))(
                x, w
            )

        ours = results(lambda x, axes: largest_or_smallest(op, x, axes))
        theirs = results(lambda x, axes: getattr(jnp, op)(x, axis=axes))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, theirs)
    assert largest_or_smallest(op, jnp.arange(3), (0,)) == (2 if op == "max" else 0)


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize("seed", [2, 9, 16])
def test_extremes_of_one_point(seed, narrow):
    """Compiled, of a softmax that XLA computes once for the maximum and once for its derivative (seed 9 was 0.014 off)."""
    cpu = rlfx.target("cpu")
    target = cpu if narrow else dataclasses.replace(cpu, rewrites=dataclasses.replace(cpu.rewrites, narrow=0))
    keys, length, batch, width = jax.random.split(jax.random.key(seed), 3), 4, 10, 12
    w, u = (0.6 * jax.random.normal(k, (width, width)) for k in keys[:2])
    carry = jax.random.normal(keys[2], (batch, width))

    def point(w, x):
        y = jax.nn.softmax(x @ w) + jax.nn.softmax(x)
        return jnp.max(y) + jnp.min(y * y) + jnp.max(y - jnp.mean(y))

    def by_hand(w):
        x, total = carry, 0.0
        for _ in range(length):
            total += jnp.mean(jax.vmap(point, (None, 0))(w, x))
            x = jnp.tanh(x @ u)
        return total / length

    fn = rlfx.compile(lambda w, x, t: (point(w, x), jnp.tanh(x @ u)), length=length, batch=batch, target=target)
    got = jax.jit(jax.grad(lambda w: fn(w, carry)[0]))(w)
    np.testing.assert_allclose(got, jax.grad(by_hand)(w), rtol=2e-5, atol=1e-6)  # by hand operation by operation


def test_a_cpu_takes_no_pairs_of_value_and_place():
    """Elements, the largest, and which attain it: of one call that XLA does not inline, whatever rewrites the program."""
    x, w = jax.random.normal(jax.random.key(0), (16, 8)), jnp.eye(8) + 0.1
    fn = rlfx.compile(lambda w, x, t: (jnp.max(jnp.tanh(x @ w)) ** 2, 0.9 * x), length=4, batch=16)
    gradient = jax.jit(jax.grad(lambda w: fn(w, x)[0])).lower(w).compile().as_text()
    assert "call(" in gradient
    assert "iota" not in gradient

    def by_hand(w):
        return sum(jnp.mean(jnp.max(jnp.tanh(0.9**t * x @ w), 1) ** 2) for t in range(4)) / 4

    np.testing.assert_allclose(jax.grad(lambda w: fn(w, x)[0])(w), jax.grad(by_hand)(w), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("op", ["max", "min"])
def test_nothing_but_infinities_and_nan_as_in_jax(dtype, op):
    inf, nan = jnp.inf, jnp.nan
    x = jnp.array([[inf, 1, inf], [-inf, -inf, -inf], [nan, 1, 2], [nan, nan, nan], [0, -0.0, 0]], dtype)
    for axes in ((1,), (0,), (0, 1)):
        ours = jax.grad(lambda x, axes=axes: largest_or_smallest(op, x, axes).sum())(x)
        theirs = jax.grad(lambda x, axes=axes: getattr(jnp, op)(x, axes).sum())(x)
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


def test_of_functions_that_are_mapped_and_differentiated_again():
    x = jax.random.normal(jax.random.key(0), (3, 4, 5))

    def twice(f):
        one = lambda x: (f(jnp.sin(x)) ** 3).sum()  # noqa: E731
        return jax.jit(jax.vmap(jax.hessian(one), 1))(x), jax.jit(jax.vmap(jax.jacfwd(jax.grad(one)), 2))(x)

    ours, theirs = twice(lambda x: largest_or_smallest("max", x, (0,))), twice(lambda x: jnp.max(x, 0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, theirs)
