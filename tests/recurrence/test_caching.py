"""Activation caching: wide products that the learner does not compute again."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.rewrite.caching import is_wide, with_caching

T, B, WIDTH = 8, 4, 131  # a prime: its shape names the layers
KEY = jax.random.key(3)


def init(key):
    k1, k2, k3 = jax.random.split(key, 3)
    return {
        "in": jax.random.normal(k1, (WIDTH, WIDTH)) / 11.0,
        "hidden": jax.random.normal(k2, (WIDTH, WIDTH)) / 11.0,
        "out": jax.random.normal(k3, (WIDTH, 3)) / 11.0,
    }


def reinforce(params, state, t):
    """A wide policy on a linear environment."""
    logits = jnp.tanh(jnp.tanh(state @ params["in"]) @ params["hidden"]) @ params["out"]
    action = jax.random.categorical(t.key_for("action"), logits)
    reward = rlfx.series(state[0] * (action.astype(jnp.float32) - 1.0))
    loss = -jax.nn.log_softmax(logits)[action] * jax.lax.stop_gradient(rlfx.discounted_sum(reward[t:], 0.9))
    return loss, jax.lax.stop_gradient(jnp.roll(state, 1) * 0.9 + 0.1)


def n_step(params, state, t):
    """The same with four rewards: it can be streamed."""
    logits = jnp.tanh(state @ params["in"]) @ params["out"]
    action = jax.random.categorical(t.key_for("action"), logits)
    reward = rlfx.series(state[0] * (action.astype(jnp.float32) - 1.0), end=0.0)
    loss = -jax.nn.log_softmax(logits)[action] * jax.lax.stop_gradient(reward[t : t + 4].sum())
    return loss, jax.lax.stop_gradient(jnp.roll(state, 1) * 0.9 + 0.1)


def recurrent(params, hidden, t):
    """A recurrence through which the gradient flows."""
    hidden = jnp.tanh(hidden @ params["hidden"] + params["in"][0])
    return jnp.sum(hidden @ params["out"]), hidden


PARAMS, STATE = init(KEY), jax.random.normal(KEY, (B, WIDTH))
PLANS = [
    (reinforce, rlfx.Plan()),
    (reinforce, rlfx.Plan("blocks", 4)),
    (reinforce, rlfx.Plan("blocks", 3, 2)),
    (reinforce, rlfx.Plan("replay", 4)),
    (n_step, rlfx.Plan("stream", 2)),
    (recurrent, rlfx.Plan()),
]


def cached(plan):
    return rlfx.Plan(plan.form, plan.block, plan.environments, cached=True)


def wide_in(program):
    return frozenset(e for e in program.equations if is_wide(e, program))


def gradient(f, **options):
    fn = rlfx.compile(f, length=T, batch=B, **options)
    return jax.jit(jax.value_and_grad(lambda p: fn(p, STATE, KEY)[0]))


@functools.cache
def meaning(f):
    reference = rlfx.reference(f, length=T, batch=B)
    return jax.value_and_grad(lambda p: reference(p, STATE, KEY)[0])(PARAMS)


def products(jaxpr):
    """Products with a whole layer for their right operand, trips of loops counted."""
    count = 0
    for e in jaxpr.eqns:
        wide = e.primitive is J.primitives.dot_general_p and any(v.aval.shape == (WIDTH, WIDTH) for v in e.invars)
        trips = e.params.get("length", 1)
        count += wide + sum(trips * products(body) for body, _ in J.sub_jaxprs(dict(e.params)))
    return count


@pytest.mark.parametrize(("f", "plan"), PLANS, ids=lambda x: getattr(x, "__name__", None) or x.form)
def test_the_same_loss_and_gradient(f, plan):
    got = gradient(f, plan=cached(plan))(PARAMS)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-4, atol=2e-5), got, meaning(f))


def test_the_learner_does_not_multiply_forward_again():
    """Forward through both wide layers, then back: two products for the weights, one for the hidden layer."""
    counts = [
        products(J.without_dead_code(jax.make_jaxpr(gradient(reinforce, plan=plan))(PARAMS)).jaxpr)
        for plan in (rlfx.Plan("blocks", T), cached(rlfx.Plan("blocks", T)))
    ]
    acting, learning, backwards = 2 * T, 2, 1
    assert counts == [acting + learning + backwards, acting + backwards]


def two_nets(params, state, t):
    """What acts is the target network; of the one that learns, acting needs nothing."""
    by = lambda p: jnp.tanh(jnp.tanh(state @ p["in"]) @ p["hidden"]) @ p["out"]  # noqa: E731
    old = jax.lax.stop_gradient(by(params["target"]))
    action = jax.random.categorical(t.key_for("action"), old)
    v = by(params["v"])[0]
    value = rlfx.series(v, end=0.0)
    reward = rlfx.series(state[0] * (action.astype(jnp.float32) - 1.0))
    ahead = rlfx.discounted_sum(reward[t:], 0.9) + value[t + 1]
    gain = jax.lax.stop_gradient(ahead - v)
    loss = -jax.nn.log_softmax(by(params["pi"]))[action] * gain + (v - jax.lax.stop_gradient(ahead)) ** 2
    return loss, jax.lax.stop_gradient(jnp.roll(state, 1) * 0.9 + 0.1)


def test_acting_evaluates_nothing_for_the_learner_alone():
    """The critic, whose values acting needs, is kept; the policy, which learns alone, is evaluated in the learner, once."""
    params = {name: init(jax.random.fold_in(KEY, i)) for i, name in enumerate(("target", "v", "pi"))}
    plan = rlfx.Plan("blocks", T)
    fns = {kept: rlfx.compile(two_nets, length=T, batch=B, plan=cached(plan) if kept else plan) for kept in (False, True)}
    of = {kept: jax.value_and_grad(lambda p, fn=fn: fn(p, STATE, KEY)[0]) for kept, fn in fns.items()}
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-4, atol=2e-5), of[True](params), of[False](params))
    counts = [products(J.without_dead_code(jax.make_jaxpr(of[k])(params)).jaxpr) for k in (False, True)]
    acting, policy, critic, backwards = 4 * T, 2, 2, 2  # two wide layers a net, of which one passes a derivative on
    assert counts == [acting + policy + critic + backwards, acting + policy + backwards]


def test_narrow_programs_stay_as_they_are():
    program = rlfx.trace(lambda w, x, t: (jnp.tanh(x @ w).sum(), x), jnp.ones((64, 64)), jnp.ones(64), length=T)
    assert with_caching(program, wide_in(program)) is program
    wide = rlfx.trace(reinforce, PARAMS, STATE, KEY, length=T, batch=B)
    assert len(wide_in(wide)) == 3  # the last layer has 131 operations an output, too
    once = with_caching(wide, wide_in(wide))
    again = with_caching(once, wide_in(once))
    state = jax.jit(jax.value_and_grad(lambda p: rlfx.lower(again)(p, STATE, KEY)[0]))(PARAMS)
    expected = gradient(reinforce)(PARAMS)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-4, atol=2e-5), state, expected)


def test_explain_names_what_is_kept():
    compiled = rlfx.compile(reinforce, length=T, batch=B, plan=cached(rlfx.Plan("blocks", 4)))
    text = str(compiled.explain(PARAMS, STATE, KEY, verbose=True))
    assert "it keeps the actor's wide products" in text
    assert f"f32[{T},{B},{WIDTH}]" in text


def test_over_seeds_and_on_a_mesh():
    keys = jax.random.split(KEY, 2)
    fn = {c: rlfx.compile(reinforce, length=T, batch=B, plan=rlfx.Plan(cached=c)) for c in (False, True)}
    grads = {
        c: jax.jit(jax.vmap(jax.grad(lambda p, k, c=c: fn[c](p, STATE, k)[0]), (None, 0)))(PARAMS, keys) for c in fn
    }
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-4, atol=2e-5), grads[True], grads[False])
    mesh = jax.make_mesh((2,), ("b",))
    split = gradient(reinforce, plan=rlfx.Plan(cached=True), mesh=mesh)(PARAMS)
    whole = gradient(reinforce)(PARAMS)
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-4, atol=2e-5), split, whole)
