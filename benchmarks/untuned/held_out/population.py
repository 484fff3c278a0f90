"""A population: whole updates of A2C, each member with its own weights, learning rate and discount, under `jax.vmap`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, LAMBDA = 8, 4, 0.95
drift = c.drift_step(OBS, 50)
scaled = optax.scale_by_adam()


def heads(p, obs):
    return c.mlp(p["pi"], obs), c.mlp(p["v"], obs)[..., 0]


def program(params, state, t):
    p, gamma = params
    gamma = stop_gradient(gamma)
    logits, v = heads(p, state["x"])
    action = jax.random.categorical(t.key_for("action"), stop_gradient(logits))
    state, step = drift(t.key_for("env"), state, action)
    value = rlfx.series(v)
    advantage = stop_gradient(rlfx.gae(step, value, value[t + 1], gamma=gamma, lam=LAMBDA))
    log_prob = jax.nn.log_softmax(logits)[action]
    return c.actor_critic_loss(logits, v, log_prob, advantage, advantage + stop_gradient(v)), state


def gradient_by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, gamma, state, key):
        (_, (state, _)), grads = jax.value_and_grad(lambda p: loss_fn((p, gamma), state, key), has_aux=True)(p)
        return grads, state

    return run


def gradient_by_hand(length, batch, flat=True, chunk=None):
    def run(p, gamma, state, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")

        def body(state, t):
            logits, v = heads(p, state["x"])
            action = c.categorical(c.at(action_keys, t), logits)
            after, step = jax.vmap(drift)(c.at(env_keys, t), state, action)
            return after, (state["x"], action, v, step.reward, step.terminated)

        after, (obs, action, v, reward, done) = jax.lax.scan(body, state, jnp.arange(length))
        advantage = c.gae(v, heads(p, after["x"])[1], reward, done, gamma, LAMBDA)

        def loss(p, data):
            obs, action, advantage, target = data
            logits, v = heads(p, obs)
            log_prob = c.pick(jax.nn.log_softmax(logits), action)
            return c.actor_critic_loss(logits, v, log_prob, advantage, target).sum() / (length * batch)

        data = obs, action, advantage, advantage + v
        if not flat:
            return jax.grad(loss)(p, data), after
        if chunk is None:
            return jax.grad(loss)(p, c.rows_of(data)), after
        return c.summed_gradient(loss, p, c.in_chunks(c.rows_of(data), chunk * batch))[1], after

    return run


def updates(gradient, count):
    """``count`` updates of one member."""

    def run(member, key):
        gamma, rate = member["gamma"], member["rate"]

        def body(carry, key):
            p, opt_state, state = carry
            grads, state = gradient(p, gamma, state, key)
            steps, opt_state = scaled.update(grads, opt_state, p)
            return (jax.tree.map(lambda w, s: w - rate * s, p, steps), opt_state, state), None

        p, opt_state, state = member["p"], scaled.init(member["p"]), member["state"]
        return jax.lax.scan(body, (p, opt_state, state), jax.random.split(key, count))[0][0]

    return run


def workload(members, length, batch, hidden, count, chunk=16):
    def member(key):
        k = jax.random.split(key, 5)
        p = {
            "pi": c.mlp_params(k[0], (OBS, hidden, hidden, ACTIONS)),
            "v": c.mlp_params(k[1], (OBS, hidden, hidden, 1)),
        }
        rate, gamma = 10.0 ** jax.random.uniform(k[2], minval=-4.0, maxval=-3.0), 1.0 - 0.1 * jax.random.uniform(k[3])
        state = jax.vmap(c.drift_reset(OBS))(jax.random.split(k[4], batch))
        return {"p": p, "rate": rate, "gamma": gamma, "state": state}

    everyone = jax.vmap(member)(jax.random.split(jax.random.key(0), members))
    rows, blocks = gradient_by_hand(length, batch), gradient_by_hand(length, batch, chunk=chunk)

    def at_once(gradient):
        return jax.vmap(updates(gradient, count))

    def by_turns(gradient, size=None):
        update = updates(gradient, count)
        return lambda members, keys: jax.lax.map(lambda x: update(*x), (members, keys), batch_size=size)

    forms = {
        "rlfx": at_once(gradient_by_rlfx(length, batch)), "plain": at_once(gradient_by_hand(length, batch, flat=False)),
        "rows": at_once(rows), f"blocks of {chunk}": at_once(blocks), "member by member": by_turns(rows),
        f"member by member, blocks of {chunk}": by_turns(blocks), "four members at a time": by_turns(rows, min(4, members)),
    }  # fmt: skip
    return Workload(forms, (everyone, jax.random.split(jax.random.key(1), members)), tolerance=2e-3)
