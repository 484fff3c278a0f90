"""A2C with networks of 16 units and thousands of environments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, GAMMA, LAMBDA = 6, 3, 0.99, 0.95
drift = c.drift_step(OBS, 40)


def heads(p, obs):
    return c.mlp(p["pi"], obs), c.mlp(p["v"], obs)[..., 0]


def transposed(layers, x):
    """An MLP on ``x[features, N]``: the rows of a batch are innermost."""
    for i, layer in enumerate(layers):
        x = layer["w"].T @ x + layer["b"][:, None]
        x = jnp.tanh(x) if i + 1 < len(layers) else x
    return x


def features_first(p, obs):
    """The same heads for ``obs[N, OBS]``."""
    x = obs.T
    return transposed(p["pi"], x).T, transposed(p["v"], x)[0]


def joined_features_first(p, obs):
    """And with the first layers of both networks as one product."""
    first = jax.tree.map(lambda a, b: jnp.concatenate([a, b], -1), p["pi"][0], p["v"][0])
    actor, critic = jnp.split(jnp.tanh(transposed([first], obs.T)), 2)
    return transposed(p["pi"][1:], actor).T, transposed(p["v"][1:], critic)[0]


def program(p, state, t):
    logits, v = heads(p, state["x"])
    action = jax.random.categorical(t.key_for("action"), stop_gradient(logits))
    state, step = drift(t.key_for("env"), state, action)
    value = rlfx.series(v)
    advantage = stop_gradient(rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=LAMBDA))
    log_prob = jax.nn.log_softmax(logits)[action]
    return c.actor_critic_loss(logits, v, log_prob, advantage, advantage + stop_gradient(v)), state


def by_hand(length, batch, acting=heads, learning=heads, flat=True, chunk=None):
    def run(p, state, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")

        def body(state, t):
            logits, v = acting(p, state["x"])
            action = c.categorical(c.at(action_keys, t), logits)
            after, step = jax.vmap(drift)(c.at(env_keys, t), state, action)
            return after, (state["x"], action, v, step.reward, step.terminated)

        after, (obs, action, v, reward, done) = jax.lax.scan(body, state, jnp.arange(length))
        advantage = c.gae(v, acting(p, after["x"])[1], reward, done, GAMMA, LAMBDA)

        def loss(p, data):
            obs, action, advantage, target = data
            logits, v = learning(p, obs)
            log_prob = c.pick(jax.nn.log_softmax(logits), action)
            return c.actor_critic_loss(logits, v, log_prob, advantage, target).sum() / (length * batch)

        data = obs, action, advantage, advantage + v
        if not flat:
            return *jax.value_and_grad(loss)(p, data), after
        if chunk is None:
            return *jax.value_and_grad(loss)(p, c.rows_of(data)), after
        return *c.summed_gradient(loss, p, c.in_chunks(c.rows_of(data), chunk * batch)), after

    return run


def workload(length, batch, hidden):
    k = jax.random.split(jax.random.key(0))
    p = {"pi": c.mlp_params(k[0], (OBS, hidden, hidden, ACTIONS)), "v": c.mlp_params(k[1], (OBS, hidden, hidden, 1))}
    make = lambda **how: by_hand(length, batch, **how)  # noqa: E731
    first, joined = ({"acting": net, "learning": net} for net in (features_first, joined_features_first))
    forms = {
        "rlfx": c.by_rlfx(program, length, batch), "plain": make(), "not flattened": make(flat=False),
        "blocks of 1": make(chunk=1),
        "features first": make(**first), "features first, blocks of 1": make(**first, chunk=1),
        "joined, features first, blocks of 1": make(**joined, chunk=1),
    }  # fmt: skip
    return Workload(forms, (p, c.batch_of(c.drift_reset(OBS), batch), jax.random.key(2)))
