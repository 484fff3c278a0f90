"""Stochastic ensemble value expansion (STEVE, Buckman et al. 2018) on replayed sequences: from every state each of an ensemble of
models goes on with the policy, and what horizons promise is weighed by how far models and critics agree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, MODELS, CRITICS, HORIZON, GAMMA, LEAST = 17, 6, 4, 2, 3, 0.99, 1e-2
relu = jax.nn.relu


def ensemble(key, count, sizes):
    return jax.vmap(lambda k: c.mlp_params(k, sizes))(jax.random.split(key, count))


def params_of(key, hidden):
    k = jax.random.split(key, 3)
    return {
        "models": ensemble(k[0], MODELS, (OBS + ACTIONS, hidden, hidden, OBS + 2)),
        "critics": ensemble(k[1], CRITICS, (OBS + ACTIONS, hidden, hidden, 1)),
        "policy": c.mlp_params(k[2], (OBS, hidden, hidden, ACTIONS)),
    }


def acts(policy, obs):
    return jnp.tanh(c.mlp(policy, obs, relu))


def moved(made, obs):
    """What follows by what a model has made, the reward, and how likely it goes on."""
    return obs + 0.1 * jnp.tanh(made[..., :OBS]), made[..., OBS], jax.nn.sigmoid(made[..., OBS + 1])


def weighed(promised):
    """The value by all horizons' promises ``[HORIZON + 1, members, ...]``."""
    certain = 1.0 / (promised.var(1) + LEAST)
    return (certain * promised.mean(1)).sum(0) / certain.sum(0)


def expanded(models, target, obs):
    """The value of ``obs[..., OBS]``, by models that go on from it."""
    obs = jnp.broadcast_to(obs, (MODELS, *obs.shape))
    gained, left, promised = jnp.zeros(obs.shape[:-1]), jnp.ones(obs.shape[:-1]), []
    for i in range(HORIZON + 1):
        action = acts(target["policy"], obs)
        q = c.mapped(target["critics"], obs, action)
        promised.append((gained + left * q).reshape(-1, *q.shape[2:]))
        if i < HORIZON:
            x = jnp.concatenate([obs, action], -1)
            made = jax.vmap(lambda p, x: c.mlp(p, x, relu))(models, x)
            obs, reward, going = moved(made, obs)
            gained, left = gained + left * reward, GAMMA * left * going
    return weighed(jnp.stack(promised))


def model_loss(made, x, after, goes_on, known):
    """Of points, summed over models ``made[MODELS, ..., OBS + 2]``; ``known[...]``: whether there is a next observation."""
    found, reward, _ = moved(made, x["obs"])
    far = known * goes_on * ((found - after) ** 2).sum(-1) + (reward - x["reward"]) ** 2
    ends = jax.nn.softplus(made[..., OBS + 1]) - goes_on * made[..., OBS + 1]
    return (jnp.moveaxis(x["mask"], -1, 0) * (far + ends)).sum(0)


def program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data)[t]
    obs, action = x["obs"], x["action"]
    known, goes_on = (t + 1 < t.length).astype(jnp.float32), 1.0 - x["done"]
    after = rlfx.series(obs, end=jnp.zeros(OBS))[t + 1]
    value = rlfx.series(stop_gradient(expanded(p["models"], target, obs)), end=0.0)
    aim = x["reward"] + GAMMA * goes_on * value[t + 1]
    made = jax.vmap(lambda p: c.mlp(p, jnp.concatenate([obs, action]), relu))(p["models"])
    critics = known * ((c.mapped(p["critics"], obs, action) - aim) ** 2).sum()
    judged = c.mapped(stop_gradient(p["critics"]), obs, acts(p["policy"], obs)).mean()
    return critics + model_loss(made, x, after, goes_on, known) - judged, carry


# -- by hand, as usual


def plain(length, batch):
    def run(p, target, data, key=None):
        obs, action = data["obs"], data["action"]
        value = expanded(p["models"], target, obs)
        goes_on = 1.0 - data["done"].astype(jnp.float32)
        known = (jnp.arange(length) + 1 < length).astype(jnp.float32)[:, None]
        aim = data["reward"] + GAMMA * goes_on * c.shifted(value, jnp.zeros(batch))
        after = c.shifted(obs, jnp.zeros((batch, OBS)))

        def loss(p):
            made = jax.vmap(lambda p: c.mlp(p, jnp.concatenate([obs, action], -1), relu))(p["models"])
            critics = known * ((c.mapped(p["critics"], obs, action) - aim) ** 2).sum(0)
            judged = c.mapped(stop_gradient(p["critics"]), obs, acts(p["policy"], obs)).mean(0)
            return (critics + model_loss(made, data, after, goes_on, known) - judged).mean()

        return jax.value_and_grad(loss)(p)

    return run
