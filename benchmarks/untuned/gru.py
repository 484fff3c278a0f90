"""Recurrent A2C: a GRU that acts, is reset where an episode ends, and learns through time, from one rollout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx

from . import common as c
from .measure import Workload

OBS, ACTIONS, GAMMA, LAMBDA, EPISODE = 8, 4, 0.99, 0.95, 50
step_of, reset = c.drift_step(OBS, EPISODE), c.drift_reset(OBS)


def params_of(hidden):
    k = jax.random.split(jax.random.key(0), 5)
    sizes = {
        "in": (OBS, hidden),
        "x": (hidden, 3 * hidden),
        "h": (hidden, 3 * hidden),
        "pi": (hidden, ACTIONS),
        "v": (hidden, 1),
    }
    return {name: c.dense(key, *size) for key, (name, size) in zip(k, sizes.items(), strict=True)}


def gates(x, hh, h):
    xr, xz, xn = jnp.split(x, 3, -1)
    hr, hz, hn = jnp.split(hh, 3, -1)
    z = jax.nn.sigmoid(xz + hz)
    return z * h + (1 - z) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)


def before(p, obs):
    """The cell's products with the observation, which no recurrence needs."""
    return c.linear(p["x"], jnp.tanh(c.linear(p["in"], obs)))


def cell(p, h, obs):
    return gates(before(p, obs), c.linear(p["h"], h), h)


def heads(p, h):
    return c.linear(p["pi"], h), c.linear(p["v"], h)[..., 0]


def program(p, carry, t):
    state, h = carry
    h = cell(p, h, state["x"])
    logits, v = heads(p, h)
    action = jax.random.categorical(t.key_for("action"), stop_gradient(logits))
    state, step = step_of(t.key_for("env"), state, action)
    value = rlfx.series(v)
    advantage = stop_gradient(rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=LAMBDA))
    log_prob = jax.nn.log_softmax(logits)[action]
    loss = c.actor_critic_loss(logits, v, log_prob, advantage, advantage + stop_gradient(v))
    return loss, (state, jnp.where(step.terminated, 0.0, h))


def by_hand(length, batch, form, chunk):
    def rollout(p, carry, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")

        def body(carry, t):
            state, h = carry
            h = cell(p, h, state["x"])
            logits, v = heads(p, h)
            action = c.categorical(c.at(action_keys, t), logits)
            after, step = jax.vmap(step_of)(c.at(env_keys, t), state, action)
            kept = jnp.where(step.terminated[:, None], 0.0, h)
            return (after, kept), (state["x"], action, v, logits, step.reward, step.terminated)

        return jax.lax.scan(body, carry, jnp.arange(length))

    def advantages(p, carry, v, reward, done):
        state, h = carry
        return c.gae(v, heads(p, cell(p, h, state["x"]))[1], reward, done, GAMMA, LAMBDA)

    def total(logits, v, action, advantage, target):
        log_prob = c.pick(jax.nn.log_softmax(logits), action)
        return c.actor_critic_loss(logits, v, log_prob, advantage, target).sum() / (length * batch)

    def learn(p, h, xs, hoisted):
        obs, done, action, advantage, target = xs

        def body(h, x):
            x, done = x
            h = gates(x, c.linear(p["h"], h), h) if hoisted else cell(p, h, x)
            return jnp.where(done[:, None], 0.0, h), h

        h, hs = jax.lax.scan(body, h, (before(p, obs) if hoisted else obs, done))
        return h, total(*heads(p, hs), action, advantage, target)

    def two_pass(p, carry, key, hoisted=False, chunk=None):
        after, (obs, action, v, _, reward, done) = rollout(p, carry, key)
        advantage = advantages(p, after, v, reward, done)
        xs = obs, done, action, advantage, advantage + v

        def loss(p):
            if chunk is None:
                return learn(p, carry[1], xs, hoisted)[1]
            part = jax.checkpoint(lambda h, x: learn(p, h, x, hoisted), prevent_cse=False)
            return jax.lax.scan(part, carry[1], c.in_chunks(xs, chunk))[1].sum()

        return *jax.value_and_grad(loss)(p), after

    def one_pass(p, carry, key):
        def loss(p):
            after, (_, action, v, logits, reward, done) = rollout(p, carry, key)
            fixed = stop_gradient(v)
            advantage = stop_gradient(advantages(p, after, fixed, reward, done))
            return total(logits, v, action, advantage, advantage + fixed), after

        (loss, after), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return loss, grads, after

    forms = {
        "plain": two_pass,
        "hoisted": lambda *a: two_pass(*a, hoisted=True),
        "one pass": one_pass,
        "checkpointed": lambda *a: two_pass(*a, chunk=min(chunk, length)),
    }
    return forms[form]


def workload(length, batch, hidden, chunk=32):
    carry = c.batch_of(reset, batch), jnp.zeros((batch, hidden))
    forms = {name: by_hand(length, batch, name, chunk) for name in ("plain", "hoisted", "one pass", "checkpointed")}
    return Workload({"rlfx": c.by_rlfx(program, length, batch), **forms}, (params_of(hidden), carry, jax.random.key(2)))
