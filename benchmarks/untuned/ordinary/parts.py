"""What these workloads share: stored sequences, networks of one observation or of rows, and the two forms beside each other."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload, drawing

relu = jax.nn.relu


def learner(program, plain, length, batch, p, others, data, start=None, random=False):
    """The loss of stored data and its gradient by ``p``, by rlfx and as usual."""
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    carry = jnp.zeros(batch) if start is None else start

    def run(p, others, data, key=None):
        return jax.value_and_grad(lambda p: loss_fn(((p, others), data), carry, key)[0])(p)

    forms, given = {"rlfx": run, "plain": plain}, (p, others, data)
    return drawing(forms, given) if random else Workload(forms, given)


def usual(loss):
    """``loss(p, others, data[, key])`` of all points, differentiated by ``p``."""
    return jax.value_and_grad(loss)


def stored(seed, length, batch, obs=(), actions=None, ends=0.05, dtype=jnp.float32):
    """Sequences ``[T, B]``; ``obs``: the shape of one; ``actions``: how many, or the shape of a continuous one."""
    k, size = jax.random.split(jax.random.key(seed), 6), (length, batch)

    def seen(key, lead):
        if dtype == jnp.uint8:
            return jax.random.randint(key, (*lead, *obs), 0, 256).astype(jnp.uint8)
        return jax.random.normal(key, (*lead, *obs), dtype)

    discrete = isinstance(actions, int)
    acted = (
        jax.random.randint(k[1], size, 0, actions) if discrete else jnp.tanh(jax.random.normal(k[1], (*size, *actions)))
    )
    return {
        "obs": seen(k[0], size), "last": seen(k[2], (batch,)), "action": acted,
        "reward": jax.random.normal(k[3], size), "done": jax.random.uniform(k[4], size) < ends,
    }  # fmt: skip


def axes(data, **own):
    """Of `rlfx.inputs`: what follows the last timestep has no time."""
    return {name: "b" if name.startswith("last") else "tb" for name in data} | own


def step_of(x):
    return c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))


def advantage_and_target(x, t, gamma):
    """Of stored values, as PPO has them: GAE, normalised over all points, and what values are drawn to."""
    following = rlfx.series(x["value"], end=x["last_value"])[t + 1]
    advantage = rlfx.gae(step_of(x), x["value"], following, gamma=gamma, lam=0.95)
    target = advantage + x["value"]
    return (advantage - rlfx.mean(advantage)) / (rlfx.std(advantage) + 1e-8), target


def advantages_and_targets(data, gamma):
    """The same of arrays ``[T, B]``."""
    advantage = c.gae(data["value"], data["last_value"], data["reward"], data["done"], gamma, 0.95)
    target = advantage + data["value"]
    return (advantage - advantage.mean()) / (advantage.std() + 1e-8), target


def nets(key, obs, hidden, outputs):
    """A policy and a critic, of two hidden layers each."""
    k = jax.random.split(key)
    return {"pi": c.mlp_params(k[0], (obs, hidden, hidden, outputs)), "v": c.mlp_params(k[1], (obs, hidden, hidden, 1))}


def value_of(p, obs):
    return c.mlp(p["v"], obs)[..., 0]


def going(data, gamma):
    return gamma * (1.0 - data["done"].astype(jnp.float32))


def with_last(data):
    """Observations ``[T + 1, B, ...]``."""
    return jnp.concatenate([data["obs"], data["last"][None]])


# -- images: of rows ``[N, H, W, C]``

DIMENSIONS = "NHWC", "HWIO", "NHWC"


def kernel(key, side, rows, columns):
    scale = np.float32(1.0 / math.sqrt(side * side * rows))
    return {"w": scale * jax.random.normal(key, (side, side, rows, columns)), "b": jnp.zeros(columns)}


def conv(p, x, stride=1, padding="VALID"):
    return jax.lax.conv_general_dilated(x, p["w"], (stride, stride), padding, dimension_numbers=DIMENSIONS) + p["b"]


def pixels(x):
    return x.astype(jnp.float32) / 255.0


def small(p, images):
    """What two convolutions of every other place, and a layer, see."""
    x = pixels(images)
    for layer in p["conv"]:
        x = relu(conv(layer, x, 2))
    return relu(c.linear(p["hidden"], x.reshape(len(x), -1)))


# -- cells


def gru_params(key, rows, hidden):
    k = jax.random.split(key)
    return {"x": c.dense(k[0], rows, 3 * hidden), "h": c.dense(k[1], hidden, 3 * hidden)}


def gru(p, h, x):
    rx, zx, nx = jnp.split(c.linear(p["x"], x), 3, -1)
    rh, zh, nh = jnp.split(c.linear(p["h"], h), 3, -1)
    z = jax.nn.sigmoid(zx + zh)
    return (1.0 - z) * jnp.tanh(nx + jax.nn.sigmoid(rx + rh) * nh) + z * h


def lstm_params(key, rows, hidden):
    k = jax.random.split(key)
    return {"x": c.dense(k[0], rows, 4 * hidden), "h": c.dense(k[1], hidden, 4 * hidden)}


def lstm(p, state, x):
    cell, h = state
    i, f, g, o = jnp.split(c.linear(p["x"], x) + c.linear(p["h"], h), 4, -1)
    cell = jax.nn.sigmoid(f + 1.0) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    return cell, jax.nn.sigmoid(o) * jnp.tanh(cell)


def layer_norm(p, x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


def unit(x):
    """Of length one."""
    return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def norm_params(width):
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}
