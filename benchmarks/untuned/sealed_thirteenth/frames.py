"""PlaNet's world model (Hafner et al. 2019) of small frames: convolutions see them, a GRU and a normal latent go from one to the
next, with a prior and a posterior that should not be far apart, and transposed convolutions tell frames again, a network tells
rewards."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.gru import gates

CHANNELS, ACTIONS, LATENT, FREE = 3, 4, 16, 1.0
LAYOUT = ("NCHW", "OIHW", "NCHW")
relu = jax.nn.relu


def params_of(key, side, channels, hidden):
    """Kernels ``[out, in, 3, 3]``."""
    k = jax.random.split(key, 12)
    first, second = channels
    kernel = lambda k, a, b: jax.random.normal(k, (b, a, 3, 3)) / (9 * a) ** 0.5  # noqa: E731
    flat = (side // 4) ** 2 * second
    return {
        "first": {"w": kernel(k[0], CHANNELS, first), "b": jnp.zeros(first)},
        "second": {"w": kernel(k[1], first, second), "b": jnp.zeros(second)},
        "code": c.dense(k[2], flat, hidden), "x": c.dense(k[3], LATENT + ACTIONS, 3 * hidden),
        "h": c.dense(k[4], hidden, 3 * hidden), "prior": c.mlp_params(k[5], (hidden, hidden, 2 * LATENT)),
        "posterior": c.mlp_params(k[6], (2 * hidden, hidden, 2 * LATENT)), "decode": c.dense(k[7], hidden + LATENT, flat),
        "third": {"w": kernel(k[8], second, first), "b": jnp.zeros(first)},
        "fourth": {"w": kernel(k[9], first, CHANNELS), "b": jnp.zeros(CHANNELS)},
        "reward": c.mlp_params(k[10], (hidden + LATENT, hidden, 1)),
    }  # fmt: skip


def down(p, x):
    """``[N, channels, side, side]`` to half the side."""
    return jax.lax.conv_general_dilated(x, p["w"], (2, 2), "SAME", dimension_numbers=LAYOUT) + p["b"][:, None, None]


def up(p, x):
    """To twice the side."""
    return jax.lax.conv_transpose(x, p["w"], (2, 2), "SAME", dimension_numbers=LAYOUT) + p["b"][:, None, None]


def code_of(p, frames):
    """Of frames ``[N, CHANNELS, side, side]``."""
    x = relu(down(p["second"], relu(down(p["first"], frames))))
    return relu(c.linear(p["code"], x.reshape(len(x), -1)))


def told(p, features):
    """Frames of ``[N, hidden + LATENT]``, and rewards."""
    second = p["third"]["w"].shape[1]
    x = relu(c.linear(p["decode"], features))
    quarter = int((x.shape[-1] // second) ** 0.5)
    x = x.reshape(-1, second, quarter, quarter)
    return up(p["fourth"], relu(up(p["third"], x))), c.mlp(p["reward"], features, relu)[..., 0]


def normal_of(made):
    mean, spread = jnp.split(made, 2, -1)
    return mean, 0.1 + jax.nn.softplus(spread)


def apart(one, other):
    """Kullback-Leibler divergence of normal distributions, at least ``FREE``."""
    (m, s), (mean, std) = one, other
    divergence = (jnp.log(std / s) + (s**2 + (m - mean) ** 2) / (2.0 * std**2) - 0.5).sum(-1)
    return jnp.maximum(divergence, FREE)


def program(params, carry, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    h, z = jax.tree.map(lambda m: jnp.where(x["first"], 0.0, m), carry)
    h = gates(c.linear(p["x"], jnp.concatenate([z, x["acted"]])), c.linear(p["h"], h), h)
    prior = normal_of(c.mlp(p["prior"], h, relu))
    code = code_of(p, x["frame"][None])[0]
    mean, std = normal_of(c.mlp(p["posterior"], jnp.concatenate([h, code]), relu))
    z = mean + std * jax.random.normal(t.key_for("latent"), (LATENT,))
    frame, reward = told(p, jnp.concatenate([h, z])[None])
    errors = 0.5 * ((frame[0] - x["frame"]) ** 2).sum() + 0.5 * (reward[0] - x["reward"]) ** 2
    return errors + apart((mean, std), prior), (h, z)


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, carry, data, key: jax.value_and_grad(lambda p: loss_fn((p, data), carry, key)[0])(p)


# -- by hand, as usual


def drawing(key, batch):
    (keys,) = c.streams(key, batch, "latent")
    return lambda t: jax.vmap(lambda k: jax.random.normal(k, (LATENT,)))(c.at(keys, t))


def plain(length, batch):
    """All frames are seen before the loop, and told behind it."""

    def run(p, carry, data, key):
        draw, frames = drawing(key, batch), c.rows_of(data["frame"])

        def loss(p):
            def step(carry, x):
                code, acted, first, t = x
                h, z = jax.tree.map(lambda m: jnp.where(first[:, None], 0.0, m), carry)
                h = gates(c.linear(p["x"], jnp.concatenate([z, acted], -1)), c.linear(p["h"], h), h)
                posterior = normal_of(c.mlp(p["posterior"], jnp.concatenate([h, code], -1), relu))
                z = posterior[0] + posterior[1] * draw(t)
                return (h, z), (h, z, posterior)

            codes = code_of(p, frames).reshape(length, batch, -1)
            hs, zs, posterior = jax.lax.scan(step, carry, (codes, data["acted"], data["first"], jnp.arange(length)))[1]
            frame, reward = told(p, c.rows_of(jnp.concatenate([hs, zs], -1)))
            errors = 0.5 * ((frame - frames) ** 2).sum() + 0.5 * ((reward - data["reward"].reshape(-1)) ** 2).sum()
            prior = normal_of(c.mlp(p["prior"], hs, relu))
            return (errors + apart(posterior, prior).sum()) / (length * batch)

        return jax.value_and_grad(loss)(p)

    return run
