"""DDPG with hindsight (Andrychowicz et al. 2017) on replayed episodes: most of the goals are what was achieved later on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, GOAL, ACTIONS, GAMMA, NEAR, AGAIN = 10, 3, 4, 0.98, 0.5, 0.8
relu = jax.nn.relu


def params_of(key, hidden):
    actor, critic = jax.random.split(key)
    return {
        "actor": c.mlp_params(actor, (OBS + GOAL, hidden, hidden, hidden, ACTIONS)),
        "critic": c.mlp_params(critic, (OBS + GOAL + ACTIONS, hidden, hidden, hidden, 1)),
    }


def mu(net, x):
    """What is done, and what it is the tanh of."""
    before = c.mlp(net, x, relu)
    return jnp.tanh(before), before


def q_of(net, x, action):
    return c.mlp(net, jnp.concatenate([x, action], -1), relu)[..., 0]


def reward_of(achieved, goal):
    return -(((achieved - goal) ** 2).sum(-1) > NEAR**2).astype(jnp.float32)


def loss_of(p, old, x, goal):
    """Of one transition, or of many ``[..., features]``."""
    after = jnp.concatenate([x["after"], goal], -1)
    value = q_of(old["critic"], after, mu(old["actor"], after)[0])
    target = jnp.clip(reward_of(x["achieved"], goal) + GAMMA * value, -1.0 / (1.0 - GAMMA), 0.0)
    seen = jnp.concatenate([x["obs"], goal], -1)
    error = q_of(p["critic"], seen, x["action"]) - stop_gradient(target)
    action, before = mu(p["actor"], seen)
    return 0.5 * error**2 - q_of(stop_gradient(p["critic"]), seen, action) + (before**2).mean(-1)


def program(params, carry, t):
    (p, old), data = params
    seen = rlfx.inputs(data)
    x = seen[t]
    again = jax.random.bernoulli(t.key_for("again"), AGAIN)
    later = jax.random.randint(t.key_for("later"), (), 0, t.length - t)
    goal = jnp.where(again, seen[t:]["achieved"][later], x["goal"])
    return loss_of(p, old, x, goal), carry


# -- by hand, as usual


def drawn(key, length, batch):
    """Whether a goal is another one, and the timestep at which it was achieved, ``[T, B]``."""
    again_keys, later_keys = c.streams(key, batch, "again", "later")

    def at(t):
        again = jax.vmap(lambda k: jax.random.bernoulli(k, AGAIN))(c.at(again_keys, t))
        later = jax.vmap(lambda k: jax.random.randint(k, (), 0, length - t))(c.at(later_keys, t))
        return again, t + later

    return jax.vmap(at)(jnp.arange(length))


def plain(length, batch):
    def run(p, old, data, key):
        again, when = drawn(key, length, batch)
        later = jnp.take_along_axis(data["achieved"], when[..., None], 0)
        goal = jnp.where(again[..., None], later, data["goal"])
        return jax.value_and_grad(lambda p: loss_of(p, old, data, goal).mean())(p)

    return run
