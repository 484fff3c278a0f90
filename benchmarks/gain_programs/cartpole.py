"""CartPole as one writes it in jax, for the programs beside it."""

import jax
import jax.numpy as jnp


def reset(key):
    return jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)


def step(key, state, action):
    x, v, angle, turn = state
    force = 20.0 * action - 10.0
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    common = (force + 0.05 * turn**2 * sin) / 1.1
    faster = (9.8 * sin - cos * common) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    moved = jnp.stack(
        [x + 0.02 * v, v + 0.02 * (common - 0.05 * faster * cos / 1.1), angle + 0.02 * turn, turn + 0.02 * faster]
    )
    done = (jnp.abs(moved[0]) > 2.4) | (jnp.abs(moved[2]) > 0.2095)
    return jnp.where(done, reset(key), moved), 1.0, done


def network(key, inputs=4, outputs=3, width=64):
    keys = jax.random.split(key, 3)
    sizes = ((inputs, width), (width, width), (width, outputs))
    return [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, sizes, strict=True)]


def apply(params, x):
    for w in params[:-1]:
        x = jnp.tanh(x @ w)
    out = x @ params[-1]
    return out[..., :2], out[..., 2]
