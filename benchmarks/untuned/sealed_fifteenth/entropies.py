"""Active pre-training (APT, Liu and Abbeel 2021; on features of ICM, as in URLB): the reward is how far the nearest of a
timestep's batch are from a state's code, which is learnt by what was done in between and by what follows; an advantage actor
critic learns from it, with lambda returns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, NEAREST, GAMMA, LAMBDA = 24, 6, 12, 0.99, 0.95
relu = jax.nn.relu


def params_of(key, code, hidden):
    sizes = {
        "encoder": (OBS, hidden, code), "inverse": (2 * code, hidden, ACTIONS), "ahead": (code + ACTIONS, hidden, code),
        "pi": (OBS, hidden, hidden, ACTIONS), "v": (OBS, hidden, hidden, 1),
    }  # fmt: skip
    k = jax.random.split(key, len(sizes))
    return {name: c.mlp_params(k, size) for k, (name, size) in zip(k, sizes.items(), strict=True)}


def encoded(p, obs):
    return c.mlp(p["encoder"], obs, relu)


def of_codes(p, z, after, action):
    """What is learnt of a code and the one that follows."""
    log_p = jax.nn.log_softmax(c.mlp(p["inverse"], jnp.concatenate([z, after], -1), relu))
    foreseen = c.mlp(p["ahead"], jnp.concatenate([z, jax.nn.one_hot(action, ACTIONS)], -1), relu)
    return 0.5 * ((foreseen - after) ** 2).mean(-1) - c.pick(log_p, action)


def surprise(codes):
    """Of ``codes[B, code]``, the log of the mean distance of each to its nearest."""
    away = jnp.sqrt(((codes[:, None] - codes[None]) ** 2).sum(-1))
    nearest = -jax.lax.top_k(-away, min(NEAREST, len(codes)))[0]
    return jnp.log(1.0 + nearest.mean(-1))


def program(params, carry, t):
    (p, last), data = params
    x, last = rlfx.inputs(data)[t], rlfx.inputs(last, axes="b")[t]
    z = encoded(p, x["obs"])
    after = rlfx.series(z, end=encoded(p, last))[t + 1]
    codes = jnp.where(x["done"], 0.0, of_codes(p, z, after, x["action"]))  # what follows is of another episode

    reward = rlfx.shared(surprise, stop_gradient(z))[t.index("b")]
    reward = (reward - rlfx.mean(reward)) / (rlfx.std(reward) + 1e-6)
    value = c.mlp(p["v"], x["obs"], relu)[0]
    following = rlfx.series(value, end=c.mlp(p["v"], last, relu)[0])[t + 1]
    step = c.Step(reward, x["done"], jnp.zeros_like(x["done"]))
    target = stop_gradient(rlfx.lambda_return(step, following, gamma=GAMMA, lam=LAMBDA))
    logits = c.mlp(p["pi"], x["obs"], relu)
    log_prob = jax.nn.log_softmax(logits)[x["action"]]
    return codes + c.actor_critic_loss(logits, value, log_prob, target - stop_gradient(value), target), carry


# -- by hand, as usual


def normal(reward):
    return (reward - reward.mean()) / (reward.std() + 1e-6)


def plain(length, batch):
    def run(p, last, data):
        def loss(p):
            obs = jnp.concatenate([data["obs"], last[None]])
            z, value, logits = encoded(p, obs), c.mlp(p["v"], obs, relu)[..., 0], c.mlp(p["pi"], data["obs"], relu)
            codes = jnp.where(data["done"], 0.0, of_codes(p, z[:-1], z[1:], data["action"]))
            reward = stop_gradient(normal(jax.vmap(surprise)(z[:-1])))
            fixed = stop_gradient(value)
            advantage = c.gae(fixed[:-1], fixed[-1], reward, data["done"], GAMMA, LAMBDA)
            log_prob = c.pick(jax.nn.log_softmax(logits), data["action"])
            target = advantage + fixed[:-1]
            return (codes + c.actor_critic_loss(logits, value[:-1], log_prob, advantage, target)).mean()

        return jax.value_and_grad(loss)(p)

    return run
