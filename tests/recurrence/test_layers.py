"""Layers of recurrences that multiply nothing: products between them are of all timesteps at once, and a few environments at a
time go through everything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.plan.once import ROWS_OF_PRODUCTS
from rlfx.recurrence.schedule.schedule import Loop

T, B, W = 5, 4, 6
K = jax.random.split(jax.random.key(0), 8)
OBS = jax.random.normal(K[0], (T, B, 5))
CPU = rlfx.target("cpu")


def params_of(layers):
    def layer(key):
        return {n: 0.4 * jax.random.normal(k, (W, W)) for n, k in zip("abc", jax.random.split(key, 3), strict=True)}

    return {"in": jax.random.normal(K[1], (5, W)), "layers": [layer(k) for k in jax.random.split(K[2], layers)]}


def gated(p, h, x):
    """Its gates depend on what it is given alone."""
    gate = jax.nn.sigmoid(x @ p["a"])
    return (1 - gate) * h + gate * jnp.tanh(x @ p["b"])


def recurrent(p, h, x):
    """Its state is multiplied with weights."""
    return jnp.tanh(x @ p["a"] + h @ p["b"])


def own(p, h, x):
    """Its state, a matrix, is multiplied with values of its environment."""
    key, value = 0.3 * jnp.tanh(x @ p["a"]), jnp.tanh(x @ p["b"])
    return 0.9 * h + jnp.outer(key, value - h.T @ key)


def read(h, x):
    return h if h.ndim == 1 else h @ x


def stacked(*cells):
    def program(params, states, t):
        p, data = params
        x, after = rlfx.inputs(data)[t] @ p["in"], []
        for layer, cell, h in zip(p["layers"], cells, states, strict=True):
            h = cell(layer, h, x)
            x = x + read(h, x) @ layer["c"]
            after.append(h)
        return jnp.mean(x**2), after

    states = [jnp.ones((B, W, W) if cell is own else (B, W)) for cell in cells]
    return program, params_of(len(cells)), states


def loops_of(cells):
    program, p, states = stacked(*cells)
    learner = rlfx.compile(program, length=T, batch=B).explain((p, OBS), states, wrt=(True, False)).learner
    return [s for s in learner.region.stages if isinstance(s, Loop)]


@pytest.mark.parametrize(
    ("cells", "count"),
    [
        ((gated,), 1), ((gated, gated), 2), ((gated,) * 3, 3), ((own, own), 2), ((own, gated), 2),
        ((recurrent, recurrent), 1), ((gated, recurrent), 1), ((recurrent, gated, gated), 1), ((gated, gated, recurrent), 2),
    ],
)  # fmt: skip
def test_layers_that_multiply_no_weights_have_loops_of_their_own(cells, count):
    assert len(loops_of(cells)) == count


def test_what_is_elementwise_between_two_recurrences_keeps_them_in_one_loop():
    def program(p, states, t):
        (w, data), (a, b) = p, states
        a = 0.9 * a + rlfx.inputs(data)[t] @ w
        b = 0.8 * b + jnp.tanh(a)
        return jnp.sum(b**2), (a, b)

    p, states = (params_of(1)["in"], OBS), (jnp.zeros((B, W)),) * 2
    learner = rlfx.compile(program, length=T, batch=B).explain(p, states, wrt=(True, False)).learner
    assert len([s for s in learner.region.stages if isinstance(s, Loop)]) == 1


def close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-4, atol=3e-5), a, b)


PLANS = None, rlfx.Plan("blocks", 2), rlfx.Plan(), rlfx.Plan(environments=2)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("cells", [(gated, gated), (own, gated), (gated, recurrent)])
def test_values_and_gradients(cells, plan):
    program, p, states = stacked(*cells)

    def found(make, **how):
        fn = make(program, length=T, batch=B, **how)

        def loss(p, states):
            return fn((p, OBS), states)[:2]

        with_states = plan is None or plan.environments is None  # whose gradient needs all environments
        return jax.value_and_grad(loss, argnums=(0, 1) if with_states else 0, has_aux=True)(p, states)

    close(found(rlfx.compile, plan=plan), found(rlfx.reference))


def test_the_loop_by_hand():
    """An oracle that shares no code: the last states of two gated layers, by loops over arrays."""
    program, p, states = stacked(gated, own)
    last = rlfx.compile(program, length=T, batch=B)((p, OBS), states)[1][0]
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), p)
    h, m = np.ones((B, W)), np.ones((B, W, W))
    for t in range(T):
        x = np.asarray(OBS[t], np.float64) @ w["in"]
        gate = 1 / (1 + np.exp(-(x @ w["layers"][0]["a"])))
        h = (1 - gate) * h + gate * np.tanh(x @ w["layers"][0]["b"])
        x = x + h @ w["layers"][0]["c"]
        for b in range(B):
            key, value = 0.3 * np.tanh(x[b] @ w["layers"][1]["a"]), np.tanh(x[b] @ w["layers"][1]["b"])
            m[b] = 0.9 * m[b] + np.outer(key, value - m[b].T @ key)
    close(list(last), [h, m])


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("plan", [None, rlfx.Plan("blocks", 2), rlfx.Plan(environments=2)], ids=str)
def test_an_environment_ends_by_what_either_layer_holds(which, plan):
    program, p, states = stacked(gated, gated)

    def ends(params, carry, t):
        loss, after = program(params, carry[0], t)
        return loss, (after, carry[1] | (after[which].sum() > 1.1))

    def found(make, **how):
        fn = make(ends, length=T, batch=B, until=lambda carry: carry[1], **how)
        carry = [0.1 * h for h in states], jnp.zeros(B, bool)
        return jax.value_and_grad(lambda p: fn((p, OBS), carry)[:2], has_aux=True)(p)

    expected = found(rlfx.reference)
    assert 0 < jnp.sum(expected[0][1][0][1]) < B  # some end before the others
    close(found(rlfx.compile, plan=plan), expected)


@pytest.mark.parametrize("make", [rlfx.reference, rlfx.compile])
def test_effects_of_a_timestep_are_in_the_order_of_the_program(make):
    seen = []
    cells = [lambda p, h, x, i=i: logged(seen, i, gated(p, h, x)) for i in range(2)]
    program, p, states = stacked(*cells)
    jax.value_and_grad(lambda p: make(program, length=T, batch=B)((p, OBS), states)[0])(p)
    jax.effects_barrier()
    assert seen == [(t, i) for t in range(T) for i in range(2)]


def logged(seen, layer, h):
    rlfx.effect(lambda h: seen.append((sum(i == layer for _, i in seen), layer)), h)
    return h


def test_under_vmap():
    program, p, states = stacked(gated, own)
    several = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), p)

    def gradient(p):
        return jax.value_and_grad(lambda p: rlfx.compile(program, length=T, batch=B)((p, OBS), states)[0])(p)

    each = [gradient(jax.tree.map(lambda x: x[i], several)) for i in range(2)]
    close(jax.vmap(gradient)(several), jax.tree.map(lambda *x: jnp.stack(x), *each))


def test_products_of_an_environments_own_values_have_rows_enough():
    """Where there are no blocks of timesteps."""

    def later(p, h, t):
        w, data = p
        x = rlfx.series(rlfx.inputs(data)[t] @ w["in"], end=0.0)
        h = own(w["layers"][0], h, x[t])
        return jnp.sum((h @ x[t + 1]) ** 2), h

    def plan(f, p, h, batch):
        fn = rlfx.compile(f, length=256, batch=batch, target=CPU)
        return fn.plan((p, jnp.ones((256, batch, 5))), h, wrt=(True, False))

    p = params_of(1)
    assert plan(later, p, jnp.ones((64, W, W)), 64).environments >= ROWS_OF_PRODUCTS


def test_a_recurrence_of_which_nothing_is_kept():
    """A loss of the state that a program began with: its loop computes nothing that is differentiated."""

    def first(p, carry, t):
        low = rlfx.min(rlfx.last(carry["h"], "t"), ("t", "b"))
        return 0.5 * low, {"h": carry["h"], "v": jnp.tanh(1.5 * carry["v"]), "done": t % 2 == 0}

    def gradient(make):
        fn = make(first, length=3, until=lambda carry: carry["done"])
        rest = {"v": jnp.ones(2), "done": jnp.array(False)}
        return jax.value_and_grad(lambda h: fn(None, rest | {"h": h})[0])(jnp.float32(0.7))

    close(gradient(rlfx.compile), gradient(rlfx.reference))
