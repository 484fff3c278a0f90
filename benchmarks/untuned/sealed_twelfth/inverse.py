"""An inverse dynamics model (VPT, Baker et al. 2022): what was done at a timestep, told by frames before and after it, by a
convolution over time and space, convolutions of each timestep, and a convolution over time."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.untuned import common as c

CHANNELS, ACTIONS, FRAMES, AROUND = 3, 8, 5, 7
relu = jax.nn.relu


def params_of(key, side, channels, hidden):
    k = jax.random.split(key, 5)
    first, second = channels
    places = (-(-side // 4)) ** 2
    kernel = lambda k, rows, columns: jax.random.normal(k, (columns, rows, 3, 3)) / (9 * rows) ** 0.5  # noqa: E731
    return {
        "first": {"w": kernel(k[0], FRAMES * CHANNELS, first), "b": jnp.zeros(first)},
        "second": {"w": kernel(k[1], first, second), "b": jnp.zeros(second)},
        "code": c.dense(k[2], places * second, hidden), "near": c.dense(k[3], AROUND * hidden, hidden),
        "action": c.dense(k[4], hidden, ACTIONS),
    }  # fmt: skip


def convolved(p, x):
    """Of one image ``[channels, side, side]``."""
    made = jax.lax.conv_general_dilated(x[None], p["w"], (2, 2), "SAME")[0]
    return relu(made + p["b"][:, None, None])


def code_of(p, frames):
    """Of frames ``[FRAMES, CHANNELS, side, side]``."""
    x = convolved(p["second"], convolved(p["first"], frames.reshape(-1, *frames.shape[2:])))
    return relu(c.linear(p["code"], x.reshape(-1)))


def logits_of(p, near):
    """Of codes ``[AROUND, hidden]``."""
    return c.linear(p["action"], relu(c.linear(p["near"], near.reshape(-1))))


def program(params, carry, t):
    (p, _), data = params
    frames = rlfx.inputs(data["frame"]).window(-2, 3)
    near = rlfx.series(code_of(p, frames)).window(-3, 4)
    return -jax.nn.log_softmax(logits_of(p, near))[rlfx.inputs(data["action"])[t]], carry


# -- by hand, as usual


def windows(x, size):
    """``[T, ...]`` as ``[T, size, ...]``: what is around each timestep, and zeros beyond the ends."""
    half = size // 2
    padded = jnp.pad(x, ((half, half),) + ((0, 0),) * (x.ndim - 1))
    return jnp.stack([padded[i : i + len(x)] for i in range(size)], 1)


def plain(length, batch):
    def of_one(p, data):
        codes = jax.vmap(code_of, (None, 0))(p, windows(data["frame"], FRAMES))
        logits = jax.vmap(logits_of, (None, 0))(p, windows(codes, AROUND))
        return -c.pick(jax.nn.log_softmax(logits), data["action"])

    def run(p, _, data, key=None):
        over = jax.vmap(of_one, (None, 1))
        return jax.value_and_grad(lambda p: over(p, data).mean())(p)

    return run
