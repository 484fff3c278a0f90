"""Loops whose derivative is a loop of rlfx's own, against those of jax.lax.scan, and what they keep."""

import chex
import jax
import jax.numpy as jnp
import pytest

from rlfx import _jaxpr as J
from rlfx.recurrence.execute.loops import Scan
from rlfx.recurrence.gradient import own
from rlfx.recurrence.gradient.deferred import Deferring

T, B, H = 5, 3, 7
K = jax.random.split(jax.random.key(3), 8)
WEIGHTS = {"h": jax.random.normal(K[0], (H, 4 * H)) / 3, "b": jax.random.normal(K[1], (4 * H,)), "s": jnp.array(0.7)}
XS = {
    "x": jax.random.normal(K[2], (T, B, 4 * H)),
    "first": jax.random.bernoulli(K[3], 0.3, (T, B)),
    "obs": jax.random.normal(K[4], (T, B, H)),
}
INIT = {"cell": jax.random.normal(K[5], (B, H)), "h": jax.random.normal(K[6], (B, H))}


def lstm(p, state, x):
    """Gates, and a state that is forgotten: values, slopes and masks that a linearised iteration keeps."""
    cell, h = (jnp.where(x["first"][:, None], 0.0, state[k]) for k in ("cell", "h"))
    i, f, g, o = jnp.split(h @ p["h"] + x["x"] + p["b"][None], 4, -1)
    cell = jax.nn.sigmoid(f + 1.0) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(cell)
    return {"cell": cell, "h": h}, h


def counted(p, state, x):
    """Integers and keys in the state, a value that is passed on as it is, one that is given and put out, and a constant."""
    h, count, key = state["h"], state["count"], state["key"]
    noise = jax.random.normal(jax.random.fold_in(key, count), h.shape)
    h = jnp.tanh(h @ p["h"][:, :H] + x["obs"] * p["s"] + 0.1 * noise)
    return {"h": h, "count": count + 1, "key": key, "still": state["still"]}, (h * state["still"], x["obs"], count, jnp.ones(2))


def nested(p, state, x):
    """A loop and a branch inside, a weight on the left, one that is made of others, and two uses of one."""

    def inner(z, _):
        z = jnp.sin(z @ p["h"][:, :H]) + x["obs"]
        return z, z.sum()

    z, sums = jax.lax.scan(inner, state["h"], length=2)
    w = jnp.tanh(p["h"][:, H : 2 * H])
    z = jax.lax.cond(x["first"][0], lambda z: z @ w, lambda z: jnp.exp(-(z**2)), z)
    z = z + (p["h"][:, :H].T @ z.T).T * p["s"]
    return {"cell": state["cell"] * 0.5 + z, "h": jnp.tanh(z)}, (sums, jax.nn.log_softmax(z))


def stopped(p, state, x):
    """Nothing flows back through time, nor to what is given."""
    h = jnp.tanh(jax.lax.stop_gradient(state["h"]) @ p["h"][:, :H] + jax.lax.stop_gradient(x["obs"]))
    return {"cell": jax.lax.stop_gradient(h), "h": h}, h


STEPS = {
    lstm: INIT,
    counted: {"h": INIT["h"], "count": jnp.int32(2), "key": jax.random.key(1), "still": INIT["cell"]},
    nested: INIT,
    stopped: INIT,
}


def run(by, step, backward=False):
    """The loop as a function of what it reads, its state, and what it is given; keys and integers apart."""

    def loop(p, state, xs):
        state = {**STEPS[step], **state}
        return by(lambda s, x: step(p, s, x), state, {**XS, **xs}, backward, None)

    return loop


def floats(tree):
    return [x for x in jax.tree.leaves(tree) if J.is_inexact(x)]


def arguments(step):
    state = {k: v for k, v in STEPS[step].items() if J.is_inexact(v)}
    return WEIGHTS, state, {k: v for k, v in XS.items() if J.is_inexact(v)}


def total(loop):
    """Of all that it returns, each number by a weight of its own."""

    def of(*args):
        outs = floats(loop(*args))
        return sum((x * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)).sum() for x in outs)

    return of


def close(found, expected, tolerance=2e-5):
    chex.assert_trees_all_close(found, expected, rtol=tolerance, atol=tolerance)


ROWS = pytest.mark.parametrize("rows", [0, 100], ids=["in the loop", "after it"])


@ROWS
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_it_is_the_derivative_of_a_scan(step, backward, rows):
    both = [run(by, step, backward) for by in (Deferring(most_rows=rows), Scan())]
    assert "custom_vjp" in str(jax.make_jaxpr(both[0])(*arguments(step)))
    found, expected = (jax.jit(jax.value_and_grad(total(f), (0, 1, 2)))(*arguments(step)) for f in both)
    close(found, expected)
    close(floats(both[0](*arguments(step))), floats(both[1](*arguments(step))), 1e-6)


@ROWS
@pytest.mark.parametrize("step", [lstm, counted, nested], ids=lambda f: f.__name__)
def test_derivatives_of_the_derivative(step, rows):
    """Backwards of it, and forwards of it."""

    def bends(by):
        slope = jax.grad(total(run(by, step)), (0, 1, 2))
        size = lambda *args: sum((x**2).sum() for x in floats(slope(*args)))  # noqa: E731
        args = arguments(step)
        return jax.jit(jax.grad(size, (0, 1, 2)))(*args), jax.jit(lambda a: jax.jvp(slope, a, a))(args)

    close(bends(Deferring(most_rows=rows)), bends(Scan()), 2e-4)


@ROWS
def test_under_vmap_and_in_sixteen_bits(rows):
    seeds = jnp.array([0.5, 1.0, 2.0])
    scaled = lambda by: lambda s: jax.grad(total(run(by, lstm)), (0, 1, 2))(  # noqa: E731
        jax.tree.map(lambda x: x * s, WEIGHTS), *arguments(lstm)[1:]
    )
    close(jax.vmap(scaled(Deferring(most_rows=rows)))(seeds), jax.vmap(scaled(Scan()))(seeds))

    half = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16) if J.is_inexact(x) else x, tree)  # noqa: E731
    p, state, xs = map(half, arguments(lstm))
    found = jax.grad(total(run(Deferring(most_rows=rows), lstm)))(p, state, xs)
    expected = jax.grad(total(run(Scan(), lstm)))(*arguments(lstm))
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(found))
    close(jax.tree.map(lambda x: x.astype(jnp.float32), found), expected, 0.2)


def loops(jaxpr):
    found = [e for e in jaxpr.eqns if e.primitive is J.SCAN]
    return found + [e for eqn in jaxpr.eqns if eqn.primitive is not J.SCAN for b, _ in J.sub_jaxprs(eqn.params) for e in loops(b)]


def test_of_gates_their_values_are_kept_and_nothing_twice():
    """Four gates, the cell and its tangent, and what the weight multiplies; the cotangent that two have is put out once."""
    closed = jax.make_jaxpr(jax.value_and_grad(total(run(Deferring(most_rows=100), lstm)), (0, 1, 2)))(*arguments(lstm))
    forward, back = loops(J.without_dead_code(closed).jaxpr)
    stacks = lambda e: [v.aval.shape[1:] for v in e.outvars if v.aval.shape[:1] == (T,)]  # noqa: E731
    kept = stacks(forward)
    assert len(kept) <= 9, kept  # h, which is put out, and eight more
    assert all(shape == (B, H) for shape in kept), kept  # no masks
    assert sorted(stacks(back)) == [(B, H * 4)], stacks(back)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("step", [lstm, counted], ids=lambda f: f.__name__)
def test_cotangents_of_products_are_contracted_block_by_block(step, backward, monkeypatch):
    """Where those of all timesteps would be far: of as many as are near, or have rows enough."""
    monkeypatch.setattr(own, "ROWS", 8)
    monkeypatch.setitem(globals(), "XS", jax.tree.map(lambda x: jnp.concatenate([x] * 16), XS))  # 80 timesteps
    blocks, whole = (run(by, step, backward) for by in (Deferring(most_rows=100, near=800.0), Scan()))
    slope = jax.value_and_grad(total(blocks), (0, 1, 2))
    (_, outer) = loops(J.without_dead_code(jax.make_jaxpr(slope)(*arguments(step))).jaxpr)
    (inner,) = loops(outer.params["jaxpr"].jaxpr)
    assert inner.params["length"] < 80 == inner.params["length"] * outer.params["length"]
    close(jax.jit(slope)(*arguments(step)), jax.jit(jax.value_and_grad(total(whole), (0, 1, 2)))(*arguments(step)), 1e-4)


def test_an_effect_happens_once():
    seen = []

    def step(p, state, x):
        h = jnp.tanh(state["h"] @ p["h"][:, :H])
        jax.debug.callback(lambda n: seen.append(int(n)), x["first"].sum())
        return {**state, "h": h}, h

    loop = lambda p: Deferring(most_rows=100)(lambda s, x: step(p, s, x), INIT, XS, False, None)[1].sum()  # noqa: E731
    jax.block_until_ready(jax.jit(jax.grad(loop))(WEIGHTS))
    jax.effects_barrier()
    assert sorted(seen) == sorted(int(n) for n in XS["first"].sum(1))
