"""Double Q-learning, lambda returns, by objects that slot attention finds in small frames (Locatello et al. 2020; for control,
Yoon et al. 2023): slots compete for the tokens of convolutions, three times, and what attention gave each of them goes through
a GRU and a residual network; action values are means over slots."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

CHANNELS, FIRST, ACTIONS, ROUNDS, GAMMA, LAMBDA, SMALL = 3, 16, 5, 3, 0.99, 0.7, 1e-4
LAYOUT = ("NHWC", "HWIO", "NHWC")
relu = jax.nn.relu


def params_of(key, side, width, slots):
    k = jax.random.split(key, 12)
    square = lambda key, many=1: jax.random.normal(key, (width, many * width)) / np.float32(np.sqrt(width))  # noqa: E731
    norm = functools.partial(jnp.ones, width)
    kernel = lambda key, a, b: {"w": jax.random.normal(key, (3, 3, a, b)) / (9 * a) ** 0.5, "b": jnp.zeros(b)}  # noqa: E731
    return {
        "first": kernel(k[0], CHANNELS, FIRST), "second": kernel(k[1], FIRST, width),
        "place": 0.5 * jax.random.normal(k[2], ((side // 2) ** 2, width)), "of_tokens": norm(), "of_slots": norm(),
        "of_moved": norm(), "slots": jax.random.normal(k[3], (slots, width)), "q": square(k[4]), "k": square(k[5]),
        "v": square(k[6]), "x": {"w": square(k[7], 3), "b": jnp.zeros(3 * width)}, "h": square(k[8], 3),
        "up": c.dense(k[9], width, 2 * width), "down": c.dense(k[10], 2 * width, width),
        "head": c.mlp_params(k[11], (width, width, ACTIONS)),
    }  # fmt: skip


def normed(scale, x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale


def tokens_of(p, frames):
    """Of ``[N, side, side, CHANNELS]``, ``[N, tokens, width]``."""
    conv = lambda layer, x, stride: (  # noqa: E731
        jax.lax.conv_general_dilated(x, layer["w"], (stride, stride), "SAME", dimension_numbers=LAYOUT) + layer["b"]
    )
    x = relu(conv(p["second"], relu(conv(p["first"], frames, 1)), 2))
    return normed(p["of_tokens"], x.reshape(len(x), -1, x.shape[-1]) + p["place"])


def gated(of_x, of_h, h):
    """A GRU's next state, of the products with its input and its state."""
    (reset, update, new), (h_reset, h_update, h_new) = jnp.split(of_x, 3, -1), jnp.split(of_h, 3, -1)
    update = jax.nn.sigmoid(update + h_update)
    return update * h + (1.0 - update) * jnp.tanh(new + jax.nn.sigmoid(reset + h_reset) * h_new)


def refined(p, slots):
    return slots + c.linear(p["down"], relu(c.linear(p["up"], normed(p["of_moved"], slots))))


def found(p, tokens):
    """Slots ``[slots, width]`` of one frame."""
    slots, width = p["slots"], tokens.shape[-1]
    key, value = tokens @ p["k"], tokens @ p["v"]
    for _ in range(ROUNDS):
        scores = (normed(p["of_slots"], slots) @ p["q"]) @ key.T / width**0.5
        share = jax.nn.softmax(scores, axis=0) + SMALL  # slots compete for a token
        taken = (share / share.sum(1, keepdims=True)) @ value
        slots = refined(p, gated(c.linear(p["x"], taken), slots @ p["h"], slots))
    return slots


def values(p, slots):
    return c.mlp(p["head"], slots, relu).mean(-2)


def program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data)[t]
    q, old = (values(nets, found(nets, tokens_of(nets, x["frame"][None])[0])) for nets in (p, target))
    following = rlfx.series(stop_gradient(old[jnp.argmax(q)]), end=0.0)[t + 1]
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    aim = stop_gradient(rlfx.lambda_return(step, following, gamma=GAMMA, lam=LAMBDA))
    return 0.5 * (q[x["action"]] - aim) ** 2, carry


# -- by hand, as usual


def loss_of(q, old, data):
    """Of ``[T, B, ACTIONS]``, summed."""
    going = GAMMA * (1.0 - data["done"].astype(jnp.float32))
    chosen = stop_gradient(c.pick(old, jnp.argmax(q, -1)))
    following = c.shifted(chosen, jnp.zeros_like(chosen[0]))
    aim = c.discounted(data["reward"] + going * (1.0 - LAMBDA) * following, LAMBDA * going)
    return 0.5 * ((c.pick(q, data["action"]) - stop_gradient(aim)) ** 2).sum()


def plain(length, batch):
    def run(p, target, data):
        frames = c.rows_of(data["frame"])

        def network(nets):
            slots = jax.vmap(found, (None, 0))(nets, tokens_of(nets, frames))
            return values(nets, slots).reshape(length, batch, ACTIONS)

        def loss(p):
            return loss_of(network(p), network(target), data) / (length * batch)

        return jax.value_and_grad(loss)(p)

    return run
