"""Discrete SAC (Christodoulou 2019) on stored sequences: a policy of classes, twin critics of all actions, and a temperature that
learns; what follows is worth what the policy expects of the target critics, behind five rewards or less at the end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, GAMMA, STEPS, ENTROPY = 12, 6, 0.99, 5, float(0.6 * np.log(6.0))
AXES = {"obs": "tb", "action": "tb", "reward": "tb", "done": "tb", "last": "b"}
relu = jax.nn.relu


def params_of(key, hidden):
    k = jax.random.split(key)
    net = lambda key: c.mlp_params(key, (OBS, hidden, hidden, ACTIONS))  # noqa: E731
    return {"policy": net(k[0]), "critics": jax.vmap(net)(jax.random.split(k[1])), "log_alpha": jnp.float32(-1.0)}


def all_of(critics, obs):
    """Of both critics ``[2, ..., ACTIONS]``."""
    return jax.vmap(lambda p: c.mlp(p, obs, relu))(critics)


def soft_value(log_pi, q, alpha):
    return (jnp.exp(log_pi) * (q.min(0) - alpha * log_pi)).sum(-1)


def program(params, carry, t):
    (p, old), data = params
    x = rlfx.inputs(data, axes=AXES)[t]
    alpha = stop_gradient(jnp.exp(p["log_alpha"]))

    def following(obs):
        log_pi = jax.nn.log_softmax(c.mlp(p["policy"], obs, relu))
        return stop_gradient(soft_value(log_pi, all_of(old, obs), alpha))

    value = rlfx.series(following(x["obs"]), end=following(x["last"]))
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    target = rlfx.n_step_return(step, value[t + 1], gamma=GAMMA, n=STEPS)

    q = all_of(p["critics"], x["obs"])
    log_pi = jax.nn.log_softmax(c.mlp(p["policy"], x["obs"], relu))
    critic_loss = ((q[:, x["action"]] - target) ** 2).sum()
    actor_loss = -soft_value(log_pi, stop_gradient(q), alpha)
    entropy = -(jnp.exp(log_pi) * log_pi).sum()
    return critic_loss + actor_loss + p["log_alpha"] * stop_gradient(entropy - ENTROPY), carry


# -- by hand, as usual


def returns(data, following):
    """``following[T + 1, B]``."""
    going = GAMMA * (1.0 - data["done"].astype(jnp.float32))
    aim = following[1:]
    for i in range(STEPS):
        aim = data["reward"] + going * (aim if i == 0 else c.shifted(aim, following[-1]))
    return aim


def plain(length, batch):
    def run(p, old, data, key=None):
        obs, alpha = jnp.concatenate([data["obs"], data["last"][None]]), jnp.exp(p["log_alpha"])
        log_pi = jax.nn.log_softmax(c.mlp(p["policy"], obs, relu))
        target = returns(data, soft_value(log_pi, all_of(old, obs), alpha))

        def loss(p):
            q = all_of(p["critics"], data["obs"])
            log_pi = jax.nn.log_softmax(c.mlp(p["policy"], data["obs"], relu))
            taken = jnp.take_along_axis(q, data["action"][None, ..., None], -1)[..., 0]
            actor_loss = -soft_value(log_pi, stop_gradient(q), alpha)
            entropy = -(jnp.exp(log_pi) * log_pi).sum(-1)
            temperature = p["log_alpha"] * stop_gradient(entropy - ENTROPY)
            return (((taken - target) ** 2).sum(0) + actor_loss + temperature).mean()

        return jax.value_and_grad(loss)(p)

    return run
