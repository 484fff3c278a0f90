"""Sums of wide products: the learner is given the sum alone, and the derivatives are those of all products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import Plan
from rlfx.recurrence.rewrite import caching
from rlfx.recurrence.rewrite.sums import sums_of
from tests.recurrence.test_fusion import Case, compare, compiled, outcome

T, B, W = 3, 2, 4
KEYS = jax.random.split(jax.random.key(1), 6)
PARAMS = {name: 0.5 * jax.random.normal(k, (W, W)) for name, k in zip("abcd", KEYS, strict=False)} | {
    "bias": jnp.ones(W)
}
START, DATA = jax.random.normal(KEYS[4], (B, W)), jax.random.normal(KEYS[5], (T, B, W))


@pytest.fixture(autouse=True)
def every_product_is_wide(monkeypatch):
    monkeypatch.setattr(caching, "WIDE", 1)


@pytest.mark.parametrize("case", [Case(), Case("gru", 2)], ids=str)
def test_recurrent_cells(case):
    for plan in (Plan(cached=True), Plan("blocks", 2, cached=True)):
        compare(outcome(compiled(case, plan=plan), case, case.data), case)


def difference(p, h, x):
    return (x @ p["a"] + p["bias"]) - h @ p["b"]


def used_apart(p, h, x):
    """One of the products is used by itself, too."""
    other, alone = h @ p["b"], x @ p["a"]
    return jnp.tanh(alone) * (alone + 1.0 + other)


def of_each_other(p, h, x):
    """One product is of what the other one gives: they are not evaluated at one place."""
    first = x @ p["a"] + h @ p["c"]
    return first + jnp.tanh(first) @ p["b"] + (first @ p["d"])


def parts(p, h, x):
    """Of the parts of two products some are added, some are used by themselves."""
    one, two = jnp.split(x @ p["a"] + p["bias"], 2)
    three, four = jnp.split(h @ p["b"], 2)
    return jnp.concatenate([jnp.tanh(one + three), two * jnp.tanh(four)])


def with_a_stopped_operand(p, h, x):
    return jax.lax.stop_gradient(h) @ p["a"] + x @ jax.lax.stop_gradient(p["b"]) + h @ p["c"]


def program(f):
    def step(params, h, t):
        p, data = params
        h = jnp.tanh(f(p, h, rlfx.inputs(data)[t]))
        return jnp.sum(h**2), h

    return step


def by_hand(f, p, h):
    total = 0.0
    for b in range(B):
        state = h[b]
        for t in range(T):
            state = jnp.tanh(f(p, state, DATA[t, b]))
            total += jnp.sum(state**2)
    return total / (T * B)


@pytest.mark.parametrize("f", [difference, used_apart, of_each_other, parts, with_a_stopped_operand])
def test_values_and_gradients_are_those_of_loops(f):
    expected = jax.jit(jax.value_and_grad(lambda p, h: by_hand(f, p, h), (0, 1)))(PARAMS, START)
    fn = rlfx.compile(program(f), length=T, batch=B, plan=Plan("blocks", 2, cached=True))
    found = jax.jit(jax.value_and_grad(lambda p, h: fn((p, DATA), h)[0], (0, 1)))(PARAMS, START)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, expected)


@pytest.mark.parametrize(
    ("f", "count", "outputs"),
    [(difference, 1, 1), (used_apart, 1, 2), (of_each_other, 0, 0), (parts, 1, 3), (with_a_stopped_operand, 1, 1)],
)
def test_what_is_one_sum(f, count, outputs):
    traced = rlfx.trace(program(f), (PARAMS, DATA), START, length=T, batch=B)
    wide = frozenset(e for e in traced.equations if caching.is_wide(e, traced))
    sums = sums_of(traced, wide)
    assert (len(sums), sum(len(s.outputs) for s in sums)) == (count, outputs)


def test_one_value_is_kept_for_two_products():
    def cell(params, h, t):
        p, data = params
        h = jnp.tanh(rlfx.inputs(data)[t] @ p["x"] + h @ p["h"])
        return jnp.sum(h**2), h

    p = {name: jax.ShapeDtypeStruct((64, 64), jnp.float32) for name in "xh"}
    data, h = jax.ShapeDtypeStruct((T, B, 64), jnp.float32), jax.ShapeDtypeStruct((B, 64), jnp.float32)
    learner = rlfx.compile(cell, length=T, batch=B, plan=Plan(cached=True))
    passes = learner.physical((p, data), h, wrt=(True, False))
    again = [e for e in passes.learning.graph.equations if e.op.name == "dot_general"]
    kept = [v for n in passes.acting.nodes for v in getattr(getattr(n, "loop", None), "stacked", ())]
    assert (again, [v.shape for v in kept]) == ([], [(64,)])
