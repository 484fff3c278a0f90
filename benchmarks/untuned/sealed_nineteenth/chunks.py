"""Diffusion policy (Chi et al. 2023, as LeRobot's) on stored demonstrations: a U-Net of convolutions over a chunk of the actions
that follow tells what noise is in them, given the last two observations and how far the diffusion is, which scale and shift the
features of every block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, CHUNK, LEVELS, TAPS, GROUPS, EMBEDDED, TOLD = 10, 4, 16, 100, 5, 4, 16, 64
LAYOUT = ("NWC", "WIO", "NWC")
KEPT = np.cumprod(1.0 - np.linspace(1e-4, 0.06, LEVELS)).astype(np.float32)  # of the signal's variance
RATES = np.exp(-np.log(1e4) * np.arange(EMBEDDED // 2) / (EMBEDDED // 2 - 1)).astype(np.float32)


def mish(x):
    return x * jnp.tanh(jax.nn.softplus(x))


def params_of(key, width):
    k = jax.random.split(key, 8)
    kernel = lambda key, n, a, b: {"w": jax.random.normal(key, (n, a, b)) / (n * a) ** 0.5, "b": jnp.zeros(b)}  # noqa: E731
    norm = lambda n: {"scale": jnp.ones(n), "shift": jnp.zeros(n)}  # noqa: E731

    def block(key, a, b):
        k = jax.random.split(key, 4)
        made = {"first": kernel(k[0], TAPS, a, b), "second": kernel(k[1], TAPS, b, b), "norm": norm(b), "last": norm(b)}
        made["told"] = c.dense(k[2], TOLD, 2 * b)
        return made if a == b else made | {"skip": c.dense(k[3], a, b)}

    return {
        "level": c.mlp_params(k[0], (EMBEDDED, 4 * EMBEDDED, EMBEDDED)), "cond": c.dense(k[1], EMBEDDED + 2 * OBS, TOLD),
        "one": block(k[2], ACTIONS, width), "down": kernel(k[3], 3, width, width), "two": block(k[4], width, 2 * width),
        "middle": block(k[5], 2 * width, 2 * width), "up": kernel(k[6], 4, 2 * width, width),
        "three": block(k[7], 2 * width, width), "out": c.dense(k[1], width, ACTIONS),
    }  # fmt: skip


def conv(p, x, stride=1):
    """Of ``x[CHUNK, features]``."""
    return jax.lax.conv_general_dilated(x[None], p["w"], (stride,), "SAME", dimension_numbers=LAYOUT)[0] + p["b"]


def grown(p, x):
    """Twice as many timesteps."""
    return jax.lax.conv_transpose(x[None], p["w"], (2,), "SAME", dimension_numbers=LAYOUT)[0] + p["b"]


def normed(p, x):
    """By moments of groups of features."""
    x, shape = x.reshape(len(x), GROUPS, -1), x.shape
    x = x - x.mean((0, 2), keepdims=True)
    x = x * jax.lax.rsqrt((x**2).mean((0, 2), keepdims=True) + 1e-5)
    return x.reshape(shape) * p["scale"] + p["shift"]


def block(p, x, cond):
    scale, shift = jnp.split(c.linear(p["told"], cond), 2)
    h = mish(normed(p["norm"], conv(p["first"], x)))
    h = h * (1.0 + scale) + shift
    h = mish(normed(p["last"], conv(p["second"], h)))
    return h + (c.linear(p["skip"], x) if "skip" in p else x)


def noise_in(p, x, level, obs):
    """In a chunk ``x[CHUNK, ACTIONS]``; ``obs[2 * OBS]``."""
    angles = level * RATES
    level = c.mlp(p["level"], jnp.concatenate([jnp.sin(angles), jnp.cos(angles)]), mish)
    cond = mish(c.linear(p["cond"], jnp.concatenate([level, obs])))
    one = block(p["one"], x, cond)
    h = block(p["middle"], block(p["two"], conv(p["down"], one, 2), cond), cond)
    h = block(p["three"], jnp.concatenate([grown(p["up"], h), one], -1), cond)
    return c.linear(p["out"], h)


def drawn(keys):
    """The level and the noise."""
    return jax.random.randint(keys[0], (), 0, LEVELS), jax.random.normal(keys[1], (CHUNK, ACTIONS))


def loss_of(p, actions, going, obs, level, noise):
    """Of one chunk; ``going[CHUNK]``: 1.0 where the episode goes on."""
    kept = jnp.asarray(KEPT)[level]
    noised = jnp.sqrt(kept) * actions + jnp.sqrt(1.0 - kept) * noise
    return (going[:, None] * (noise_in(p, noised, level, obs) - noise) ** 2).mean()


def program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data)[t]
    actions = rlfx.series(x["action"]).window(0, CHUNK, fill=0.0)
    lasting = rlfx.series(1.0 - x["done"]).window(0, CHUNK, fill=0.0)
    going = jnp.concatenate([jnp.ones(1), jnp.cumprod(lasting[:-1])])
    before = rlfx.series(x["obs"], start=x["obs"])[t - 1]
    obs = jnp.concatenate([jnp.where(x["first"], x["obs"], before), x["obs"]])
    level, noise = drawn((t.key_for("level"), t.key_for("noise")))
    return loss_of(p, actions, going, obs, level, noise), carry


# -- by hand, as usual


def chunks_of(data):
    """Actions ``[T, B, CHUNK, ACTIONS]``, where episodes go on ``[T, B, CHUNK]``, and two observations ``[T, B, 2 * OBS]``."""
    length = len(data["obs"])
    index = jnp.arange(length)[:, None] + jnp.arange(CHUNK)
    inside = index < length
    index = jnp.minimum(index, length - 1)
    actions = jnp.where(inside[..., None, None], data["action"][index], 0.0)
    lasting = jnp.where(inside[..., None], 1.0 - data["done"][index], 0.0)
    going = jnp.concatenate([jnp.ones_like(lasting[:, :1]), jnp.cumprod(lasting[:, :-1], 1)], 1)
    before = jnp.where(data["first"][..., None], data["obs"], jnp.roll(data["obs"], 1, 0))
    return jnp.moveaxis(actions, 1, 2), jnp.moveaxis(going, 1, 2), jnp.concatenate([before, data["obs"]], -1)


def drawn_for_all(length, batch, key):
    keys = c.streams(key, batch, "level", "noise")
    return jax.vmap(lambda t: jax.vmap(drawn)(tuple(c.at(k, t) for k in keys)))(jnp.arange(length))


def plain(length, batch):
    every = jax.vmap(jax.vmap(loss_of, (None, *(0,) * 5)), (None, *(0,) * 5))

    def run(p, _, data, key):
        level, noise = drawn_for_all(length, batch, key)
        actions, going, obs = chunks_of(data)
        return jax.value_and_grad(lambda p: every(p, actions, going, obs, level, noise).mean())(p)

    return run
