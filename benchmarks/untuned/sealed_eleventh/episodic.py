"""Neural episodic control (Pritzel et al. 2017) on replayed sequences: of every action a dictionary of keys and values, in which
the nearest neighbours of what a network makes of an observation tell its value; n steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, WIDTH, NEAREST, STEPS, GAMMA, DELTA = 32, 4, 16, 8, 5, 0.99, 1e-3
relu = jax.nn.relu


def params_of(key, hidden, entries):
    k = jax.random.split(key, 3)
    return {
        "net": c.mlp_params(k[0], (OBS, hidden, hidden, WIDTH)),
        "keys": 0.6 * jax.random.normal(k[1], (ACTIONS, entries, WIDTH)),
        "values": jax.random.normal(k[2], (ACTIONS, entries)),
    }


def estimate(keys, values, h):
    """The value of one action, by its dictionary ``keys[entries, WIDTH]``."""
    far = ((keys - h) ** 2).sum(-1)
    near = jax.lax.top_k(-stop_gradient(far), NEAREST)[1]
    weight = 1.0 / (far[near] + DELTA)
    return (weight * values[near]).sum() / weight.sum()


def program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data)[t]
    h = c.mlp(p["net"], x["obs"], relu)
    q = jax.vmap(estimate, (0, 0, None))(p["keys"], p["values"], h)
    value = rlfx.series(stop_gradient(q.max()), end=0.0)
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    target = rlfx.n_step_return(step, value[t + 1], gamma=GAMMA, n=STEPS)
    return 0.5 * (q[x["action"]] - target) ** 2, carry


# -- by hand, as usual


def targets(value, reward, done):
    """Returns of n steps, over ``[T, B]``; nothing follows the end."""
    going, target = GAMMA * (1.0 - done.astype(jnp.float32)), value
    for _ in range(STEPS):
        target = reward + going * c.shifted(target, jnp.zeros_like(value[0]))
    return target


def plain(length, batch):
    def of_point(p, obs):
        h = c.mlp(p["net"], obs, relu)
        return jax.vmap(estimate, (0, 0, None))(p["keys"], p["values"], h)

    def run(p, _, data, key=None):
        def loss(p):
            q = jax.lax.map(lambda obs: jax.vmap(of_point, (None, 0))(p, obs), data["obs"])
            target = targets(stop_gradient(q.max(-1)), data["reward"], data["done"])
            return (0.5 * (c.pick(q, data["action"]) - target) ** 2).mean()

        return jax.value_and_grad(loss)(p)

    return run
