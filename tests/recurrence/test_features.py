"""Narrow networks with features first: the same values and gradients, and the arrays as they should be."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.execute.features import evaluate_mapped, rows_first, rows_last
from rlfx.recurrence.execute.values import Value
from rlfx.recurrence.schedule import physical
from tests import strategies
from tests.recurrence.test_generated import check
from tests.sampling import met, spread

CPU = rlfx.target("cpu")
OFF = dataclasses.replace(CPU, rewrites=dataclasses.replace(CPU.rewrites, narrow=0))


def actor_critic(p, state, t):
    hidden = jnp.tanh(state @ p["w"] + p["b"])
    logits, v = hidden @ p["pi"], (p["v"] @ hidden)[0]
    action = jax.random.categorical(t.key_for("action"), jax.lax.stop_gradient(logits))
    drift = jnp.concatenate([state[1:], state[:1]]) * 0.9 + 0.1 * action.astype(jnp.float32)
    noise = 0.1 * jax.random.normal(t.key_for("env"), state.shape)
    value = rlfx.series(v)
    target = jax.lax.stop_gradient(
        rlfx.discounted_sum(jnp.full(3, drift.mean()), jnp.full(3, 0.9)) + 0.5 * value[t + 1]
    )
    log_p = jax.nn.log_softmax(logits)
    loss = (
        (v - target) ** 2 - log_p[action] * (target - jax.lax.stop_gradient(v)) + 0.01 * jnp.sum(log_p * jnp.exp(log_p))
    )
    return loss, jax.lax.stop_gradient(drift + noise), logits


def recurrent(p, h, t):
    x = jax.random.normal(t.key_for("x"), (p["w"].shape[0],))
    h = jnp.tanh(x @ p["w"] + h @ p["h"])
    return jnp.mean((p["v"] @ h) ** 2), h


def arguments(width, batch):
    keys = jax.random.split(jax.random.key(0), 6)
    draw = lambda i, *shape: 0.4 * jax.random.normal(keys[i], shape)  # noqa: E731
    p = {"w": draw(0, 4, width), "b": draw(1, width), "pi": draw(2, width, 3), "v": draw(3, 1, width)}
    return p, p | {"h": draw(4, width, width)}, draw(5, batch, 4)


PLANS = [rlfx.Plan(), rlfx.Plan("blocks", 4), rlfx.Plan("blocks", 3, environments=32), rlfx.Plan("one pass")]


@pytest.mark.parametrize(("plan", "program"), met(PLANS, [actor_critic, recurrent]))
def test_values_and_gradients_are_those_of_rows_first(program, plan):
    p, with_h, state = arguments(16, 64)
    params, carry = (p, state) if program is actor_critic else (with_h, jnp.zeros((64, 16)))
    if (plan.form == "one pass") != (program is recurrent) and plan.form == "one pass":
        pytest.skip("no recurrence")
    results = []
    for target in (CPU, OFF):
        fn = rlfx.compile(program, length=8, batch=64, plan=plan, target=target)
        passes = fn.physical(params, carry, jax.random.key(1))
        assert passes.acting.features_first == (target is CPU)
        results.append(jax.jit(jax.value_and_grad(fn, has_aux=True))(params, carry, jax.random.key(1)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5), *results)


def test_only_narrow_networks_of_many_rows():
    key = jax.random.key(1)
    for width, batch, expected in [(16, 64, True), (16, 8, False), (32, 32, False), (32, 64, True), (64, 512, False)]:
        p, _, state = arguments(width, batch)
        fn = rlfx.compile(actor_critic, length=2, batch=batch)
        assert fn.physical(p, state, key).acting.features_first == expected, (width, batch)


@pytest.mark.parametrize(("outputs", "expected"), [(2, True), (16, False)])
def test_only_networks_with_vectors_shorter_than_the_machine_s(outputs, expected):
    """Where all fill one, rows first are as fast: 16 and 32 units alone, 1.0 and 1.4 of their time with features first."""

    def program(p, x, t):
        return jnp.sum((jnp.tanh(x @ p["w"]) @ p["out"]) ** 2), 0.9 * x

    p = {"w": jnp.ones((16, 16)), "out": jnp.ones((16, outputs))}
    fn = rlfx.compile(program, length=2, batch=64)
    assert fn.physical(p, jnp.ones((64, 16))).learning.features_first == expected


def agents(p, state, t):
    """Three of them, each with its own observation and weights; one critic for each sees all."""
    hidden = jnp.tanh(jnp.einsum("an,ank->ak", state.reshape(3, 4), p["own"]))
    actions = jnp.tanh(jax.vmap(lambda h, w: w @ h)(hidden, p["out"]))
    seen = jnp.concatenate([state, actions.reshape(-1)])
    values = jax.vmap(lambda w, v: jnp.tanh(seen @ w) @ v)(p["see"], p["v"])
    return jnp.sum(values**2) + 0.1 * jnp.sum(actions * state.reshape(3, 4)[:, :2]), 0.9 * state


@pytest.mark.parametrize("plan", [rlfx.Plan(), rlfx.Plan("blocks", 4)], ids=str)
def test_agents_with_weights_of_their_own(plan):
    keys = iter(jax.random.split(jax.random.key(2), 9))
    shapes = {"own": (3, 4, 40), "out": (3, 2, 40), "see": (3, 18, 24), "v": (3, 24)}
    p = {name: 0.3 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    state, results = jax.random.normal(next(keys), (64, 12)), []
    for target in (CPU, OFF):
        fn = rlfx.compile(agents, length=8, batch=64, plan=plan, target=target)
        assert fn.physical(p, state).learning.features_first == (target is CPU)
        results.append(jax.jit(jax.value_and_grad(fn, has_aux=True))(p, state))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5), *results)


def test_members_that_see_one_thing_have_rows_first():
    def critics(p, state, t):
        hidden = jax.vmap(lambda w: jnp.tanh(state @ w))(p["in"])
        return jnp.sum(jnp.einsum("mn,mnk->mk", jnp.tanh(hidden), p["out"]) ** 2), 0.9 * state

    p = {"in": jnp.ones((3, 4, 20)), "out": jnp.ones((3, 20, 2))}
    assert not rlfx.compile(critics, length=8, batch=64).physical(p, jnp.ones((64, 4))).learning.features_first


@pytest.mark.parametrize("seed", spread(range(24), 8))
def test_generated_programs(seed, monkeypatch):
    """Whatever a program has: all of it with features first, against the reference."""
    monkeypatch.setattr(physical, "is_narrow", lambda *a: True)
    found, _ = check(strategies.program(seed))
    assert not found, "\n".join(found)


ROWS = {"t": 3, "b": 5}


@pytest.mark.parametrize("dims", ["t", "b", "tb"])
@pytest.mark.parametrize(
    "one",
    [
        lambda x: x.reshape(2, 3).T,
        lambda x: x[1:5:2],
        lambda x: x[::-1].cumsum(),
        lambda x: jnp.broadcast_to(x.max(), (4,)),
        lambda x: jnp.concatenate([x, 2 * x[:2]]),
        lambda x: jnp.argmax(x),
        lambda x: jnp.clip(x, x.min(), 1.0),
        lambda x: jax.lax.dynamic_slice(x, (7,), (1,)),
        lambda x: jnp.arange(18.0).reshape(3, 6) @ x,
        lambda x: x @ jnp.arange(18.0).reshape(6, 3),
        lambda x: jnp.einsum("an,ank->ak", x.reshape(2, 3), jnp.arange(24.0).reshape(2, 3, 4)),
        lambda x: jnp.einsum("akn,an->ak", jnp.arange(24.0).reshape(2, 4, 3), x.reshape(2, 3)),
        lambda x: jnp.einsum("na,nak->ak", x.reshape(3, 2), jnp.arange(24.0).reshape(3, 2, 4)),
        lambda x: jnp.einsum("n,ank->ak", x, jnp.arange(48.0).reshape(2, 6, 4)),
        lambda x: jnp.einsum("ank,n->ak", jnp.arange(48.0).reshape(2, 6, 4), x),
        lambda x: jnp.einsum("an,nk->ak", x.reshape(2, 3), jnp.arange(12.0).reshape(3, 4)),
        lambda x: jnp.einsum("ank,an->nk", jnp.arange(24.0).reshape(2, 3, 4), x.reshape(2, 3)),
        lambda x: jnp.einsum("an,ank->k", x.reshape(2, 3), jnp.arange(24.0).reshape(2, 3, 4)),
        lambda x: jnp.sort(x),
    ],
)
def test_each_rule_is_the_mapped_equation(one, dims):
    sizes = [ROWS[d] for d in dims]
    x = jax.random.normal(jax.random.key(0), (*sizes, 6))
    closed = jax.make_jaxpr(one)(x.reshape(-1, 6)[0])
    known = {closed.jaxpr.invars[0]: rows_last(Value(x, frozenset(dims)))}
    known |= {v: Value(c) for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True)}

    def of(atom):
        return Value(jnp.asarray(atom.val)) if hasattr(atom, "val") else known[atom]

    for e in closed.jaxpr.eqns:

        def bind(*xs, e=e):
            outs = e.primitive.bind(*xs, **e.params)
            return outs if e.primitive.multiple_results else [outs]

        known.update(zip(e.outvars, evaluate_mapped(e.primitive, e.params, [*map(of, e.invars)], bind), strict=True))
    expected = one
    for _ in dims:
        expected = jax.vmap(expected)
    np.testing.assert_allclose(rows_first(of(closed.jaxpr.outvars[0])).data, expected(x), rtol=1e-5, atol=1e-5)
