"""Distributional Q-learning by maximum mean discrepancy (MMD-DQN, Nguyen et al. 2021): returns are particles that no order or
fraction ties down; how far particles are from those of the target is told by kernels of several widths, of all pairs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, GAMMA, WIDTHS = 12, 6, 0.99, (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
relu = jax.nn.relu


def params_of(key, hidden, count):
    return c.mlp_params(key, (OBS, hidden, hidden, ACTIONS * count))


def particles(p, obs):
    """Of every action: ``[..., ACTIONS, count]``."""
    made = c.mlp(p, obs, relu)
    return made.reshape(*made.shape[:-1], ACTIONS, -1)


def kernel(x, y):
    """Its mean over all pairs of ``x[n]`` and ``y[m]``."""
    far = (x[:, None] - y) ** 2
    return sum(jnp.exp(-far / width) for width in WIDTHS).mean()


def discrepancy(x, y):
    return kernel(x, x) + kernel(y, y) - 2.0 * kernel(x, y)


def program(params, carry, t):
    (p, old), data = params
    x = rlfx.inputs(data)[t]
    following = particles(old, x["obs"])
    following = rlfx.series(following[jnp.argmax(following.mean(-1))], end=jnp.zeros(following.shape[-1]))
    target = x["reward"] + GAMMA * jnp.where(x["done"], 0.0, following[t + 1])
    return discrepancy(particles(p, x["obs"])[x["action"]], stop_gradient(target)), carry


# -- by hand, as usual


def targets(old, data):
    """``[T, B, count]``."""
    found = particles(old, data["obs"])
    best = jnp.argmax(found.mean(-1), -1)
    following = jnp.take_along_axis(found, best[..., None, None], -2)[..., 0, :]
    following = c.shifted(following, jnp.zeros_like(following[0]))
    return data["reward"][..., None] + GAMMA * jnp.where(data["done"][..., None], 0.0, following)


def plain(p, old, data):
    target = targets(old, data)

    def loss(p):
        found = particles(p, data["obs"])
        found = jnp.take_along_axis(found, data["action"][..., None, None], -2)[..., 0, :]
        return jax.vmap(jax.vmap(discrepancy))(found, target).mean()

    return jax.value_and_grad(loss)(p)
