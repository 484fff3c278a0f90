"""MADDPG (Lowe et al. 2017) on replayed sequences: every agent has an actor and a critic of its own; a critic sees what all
observe and do, and an actor learns by its own critic, while the others do what they did."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, GAMMA, DECAY = 10, 2, 0.95, 1e-3
relu = jax.nn.relu


def params_of(key, agents, hidden):
    """Actors and critics, each stacked, ``[agents, ...]``."""

    def nets(key, sizes):
        return jax.vmap(lambda key: c.mlp_params(key, sizes))(jax.random.split(key, agents))

    k = jax.random.split(key)
    return {
        "actors": nets(k[0], (OBS, hidden, hidden, ACTIONS)),
        "critics": nets(k[1], (agents * (OBS + ACTIONS), hidden, hidden, 1)),
    }


def pushes(actors, obs):
    """Before the tanh: ``[..., agents, ACTIONS]``."""
    return jax.vmap(lambda p, obs: c.mlp(p, obs, relu), (0, -2), -2)(actors, obs)


def seen(obs, action):
    """All that critics see, of ``[..., agents, OBS]`` and ``[..., agents, ACTIONS]``."""
    return jnp.concatenate([obs.reshape(*obs.shape[:-2], -1), action.reshape(*action.shape[:-2], -1)], -1)


def values(critics, obs, action):
    """Of every critic, ``[..., agents]``."""
    x = seen(obs, action)
    return jax.vmap(lambda p: c.mlp(p, x, relu)[..., 0], out_axes=-1)(critics)


def own_values(critics, obs, action, mine):
    """Of every critic, had its own agent done what is ``mine``: ``[..., agents]``."""
    agents = obs.shape[-2]

    def of(i, critic):
        tried = jnp.where((jnp.arange(agents) == i)[:, None], mine, action)
        return c.mlp(critic, seen(obs, tried), relu)[..., 0]

    return jax.vmap(of, out_axes=-1)(jnp.arange(agents), critics)


def program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data)[t]
    old = values(target["critics"], x["obs"], jnp.tanh(pushes(target["actors"], x["obs"])))
    following = rlfx.series(stop_gradient(old), end=0.0)[t + 1]
    aim = x["reward"] + GAMMA * (1.0 - x["done"]) * following
    errors = 0.5 * ((values(p["critics"], x["obs"], x["action"]) - aim) ** 2).sum()
    push = pushes(p["actors"], x["obs"])
    gained = own_values(stop_gradient(p["critics"]), x["obs"], x["action"], jnp.tanh(push)).sum()
    return jnp.where(t + 1 < t.length, errors, 0.0) - gained + DECAY * (push**2).sum(), carry


# -- by hand, as usual


def plain(length, batch):
    def run(p, target, data):
        def loss(p):
            obs, action = data["obs"], data["action"]
            after = obs[1:]
            following = stop_gradient(values(target["critics"], after, jnp.tanh(pushes(target["actors"], after))))
            aim = data["reward"][:-1] + GAMMA * (1.0 - data["done"][:-1, :, None]) * following
            errors = 0.5 * ((values(p["critics"], obs[:-1], action[:-1]) - aim) ** 2).sum()
            push = pushes(p["actors"], obs)
            gained = own_values(stop_gradient(p["critics"]), obs, action, jnp.tanh(push)).sum()
            return (errors - gained + DECAY * (push**2).sum()) / (length * batch)

        return jax.value_and_grad(loss)(p)

    return run
