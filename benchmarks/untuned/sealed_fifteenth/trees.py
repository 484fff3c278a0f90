"""TreeQN (Farquhar et al. 2018) on stored sequences: a state's code is moved by every action, twice, and values of the leaves and
rewards along the way are backed up by soft maxima; lambda returns of a target network, and rewards that are foreseen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, DEPTH, GAMMA, LAMBDA, DEEPER = 20, 4, 2, 0.99, 0.8, 0.8
relu = jax.nn.relu


def params_of(key, code, hidden):
    k = jax.random.split(key, 4)
    return {
        "encoder": c.mlp_params(k[0], (OBS, hidden, code)), "reward": c.mlp_params(k[1], (code, hidden, ACTIONS)),
        "move": {
            "w": jax.random.normal(k[2], (ACTIONS, code, code)) / np.float32(np.sqrt(code)), "b": jnp.zeros((ACTIONS, code)),
        },
        "value": c.dense(k[3], code, 1),
    }  # fmt: skip


def unit(x):
    return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def encoded(p, obs):
    return unit(jnp.tanh(c.mlp(p["encoder"], obs, relu)))


def moved(p, z):
    """Codes ``[..., code]`` after each action, ``[..., ACTIONS, code]``."""
    push = jnp.einsum("...i,aij->...aj", z, p["move"]["w"]) + p["move"]["b"]
    return unit(z[..., None, :] + jnp.tanh(push))


def backed_up(q):
    return (jax.nn.softmax(q) * q).sum(-1)


def expanded(p, z, depth=DEPTH):
    """Values ``[..., ACTIONS]`` by a tree, and the rewards at its root."""
    reward, after = c.mlp(p["reward"], z, relu), moved(p, z)
    value = c.linear(p["value"], after)[..., 0]
    if depth > 1:
        value = (1.0 - DEEPER) * value + DEEPER * backed_up(expanded(p, after, depth - 1)[0])
    return reward + GAMMA * value, reward


def program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data)[t]
    old = expanded(target, encoded(target, x["obs"]))[0].max()
    following = rlfx.series(stop_gradient(old), end=0.0)[t + 1]
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    aim = stop_gradient(rlfx.lambda_return(step, following, gamma=GAMMA, lam=LAMBDA))
    q, reward = expanded(p, encoded(p, x["obs"]))
    return 0.5 * (q[x["action"]] - aim) ** 2 + 0.5 * (reward[x["action"]] - x["reward"]) ** 2, carry


# -- by hand, as usual


def aims_of(old, data):
    """Lambda returns of the target network's greatest values ``[T, B]``."""
    going = GAMMA * (1.0 - data["done"].astype(jnp.float32))
    following = c.shifted(old, jnp.zeros_like(old[0]))
    return c.discounted(data["reward"] + going * (1.0 - LAMBDA) * following, LAMBDA * going)


def plain(length, batch):
    def run(p, target, data):
        def loss(p):
            aim = stop_gradient(aims_of(expanded(target, encoded(target, data["obs"]))[0].max(-1), data))
            q, reward = expanded(p, encoded(p, data["obs"]))
            error, missed = c.pick(q, data["action"]) - aim, c.pick(reward, data["action"]) - data["reward"]
            return 0.5 * (error**2 + missed**2).mean()

        return jax.value_and_grad(loss)(p)

    return run
