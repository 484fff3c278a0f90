"""A causal transformer of several heads: the gradient of a loss at every timestep, and decoding step by step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import rlfx

from . import common as c
from .measure import Workload

OBS, ACTIONS, HEADS = 8, 4, 4
rescale = lambda x: (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)  # noqa: E731


def params_of(width, layers):
    k = jax.random.split(jax.random.key(0), 2 + layers)

    def layer(key):
        sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
        return {n: c.dense(k, *size) for k, (n, size) in zip(jax.random.split(key, 4), sizes.items(), strict=True)}

    return {"in": c.dense(k[0], OBS, width), "out": c.dense(k[1], width, ACTIONS), "layers": [layer(x) for x in k[2:]]}


def perceptron(layer, x):
    return x + c.linear(layer["down"], jax.nn.gelu(c.linear(layer["up"], rescale(x))))


def queries_keys_values(layer, x):
    """``[..., width]`` to three of ``[..., HEADS, width / HEADS]``; queries are divided by the root of the width."""
    parts = c.linear(layer["qkv"], rescale(x)).reshape(*x.shape[:-1], 3, HEADS, -1)
    q, k, v = jnp.moveaxis(parts, -3, 0)
    return q / np.float32(np.sqrt(q.shape[-1])), k, v


def timestep(p, obs, t):
    x = c.linear(p["in"], obs)
    for layer in p["layers"]:
        q, k, v = queries_keys_values(layer, x)
        keys, values = rlfx.series(k)[: t + 1], rlfx.series(v)[: t + 1]
        weights = jax.nn.softmax(jnp.einsum("thw,hw->th", keys, q), axis=0)
        x = x + c.linear(layer["out"], jnp.einsum("th,thw->hw", weights, values).ravel())
        x = perceptron(layer, x)
    return c.linear(p["out"], rescale(x))


# -- the gradient ----------------------------------------------------------------------------------------------------


def loss_by_rlfx(length, batch):
    def program(params, carry, t):
        p, obs, action = params
        logits = timestep(p, rlfx.inputs(obs)[t], t)
        return -jax.nn.log_softmax(logits)[rlfx.inputs(action)[t]], carry

    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, obs, action: jax.value_and_grad(lambda p: loss_fn((p, obs, action), jnp.zeros(batch))[0])(p)


def masked(q, k, v):
    """``[B, T, HEADS, W]``: all scores, half of them masked."""
    length = q.shape[1]
    scores = jnp.einsum("bqhw,bkhw->bhqk", q, k)
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30), -1)
    return jnp.einsum("bhqk,bkhw->bqhw", weights, v)


def library(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, scale=1.0, is_causal=True)


def in_blocks(q, k, v, size, again=False):
    """Blocks of ``size`` queries, each with the keys until its end; ``again``: scores are computed anew for the gradient."""
    length, parts = q.shape[1], []
    for begin in range(0, length, size):
        end = min(begin + size, length)
        rows = np.arange(begin, end)[:, None] >= np.arange(end)

        def block(q, k, v, rows=rows):
            weights = jax.nn.softmax(jnp.where(rows, jnp.einsum("bqhw,bkhw->bhqk", q, k), -1e30), -1)
            return jnp.einsum("bhqk,bkhw->bqhw", weights, v)

        parts.append((jax.checkpoint(block) if again else block)(q[:, begin:end], k[:, :end], v[:, :end]))
    return jnp.concatenate(parts, 1)


def loss_by_hand(attend):
    def net(p, x):
        x = c.linear(p["in"], x)
        for layer in p["layers"]:
            out = attend(*queries_keys_values(layer, x))
            x = perceptron(layer, x + c.linear(layer["out"], out.reshape(x.shape)))
        return c.linear(p["out"], rescale(x))

    def loss(p, obs, action):
        log_prob = jax.nn.log_softmax(net(p, jnp.swapaxes(obs, 0, 1)))
        return -c.pick(log_prob, jnp.swapaxes(action, 0, 1)).mean()

    return jax.value_and_grad(loss)


def gradient(length, batch, width=64, layers=2, block=64):
    obs = jax.random.normal(jax.random.key(1), (length, batch, OBS))
    action = jax.random.randint(jax.random.key(2), (length, batch), 0, ACTIONS)
    ways = {
        "plain": masked, "dot_product_attention": library, f"blocks of {block}": lambda *qkv: in_blocks(*qkv, block),
        f"blocks of {block}, again": lambda *qkv: in_blocks(*qkv, block, again=True),
    }  # fmt: skip
    forms = {"rlfx": loss_by_rlfx(length, batch), **{name: loss_by_hand(way) for name, way in ways.items()}}
    return Workload(forms, (params_of(width, layers), obs, action))


# -- decoding: the next observation is a function of the logits ---------------------------------------------------------


def following(obs, logits):
    return jnp.tanh(0.9 * obs + 0.1 * jnp.concatenate([logits, -logits], -1))


def decode_by_rlfx(length, batch):
    def program(p, obs, t):
        logits = timestep(p, obs, t)
        return following(obs, logits), logits

    run = rlfx.unroll(program, length=length, batch=batch)
    return lambda p, obs: run(p, obs)


#: Caches: their axes, the axis of time, and the two products.
BATCH_MAJOR = "bhtw", 2, "bhw,bhtw->bht", "bht,bhtw->bhw"
TIME_MAJOR = "tbhw", 0, "bhw,tbhw->bht", "bht,tbhw->bhw"


def decode_by_hand(length, batch, cache, sections=1):
    """``sections``: the loop in parts, each of which looks at the positions that there may be until its end."""
    axes, axis, scores_of, output_of = cache

    def body(p, seen):
        def step(carry, t):
            obs, caches = carry
            x, new = c.linear(p["in"], obs), []
            for layer, kept in zip(p["layers"], caches, strict=True):
                q, *written = queries_keys_values(layer, x)
                write = lambda m, x: jax.lax.dynamic_update_slice_in_dim(m, jnp.expand_dims(x, axis), t, axis)  # noqa: E731
                kept = jax.tree.map(write, kept, tuple(written))
                keys, values = (jax.lax.slice_in_dim(m, 0, seen, axis=axis) for m in kept)
                scores = jnp.where(jnp.arange(seen) <= t, jnp.einsum(scores_of, q, keys), -1e30)
                out = jnp.einsum(output_of, jax.nn.softmax(scores, -1), values)
                x = perceptron(layer, x + c.linear(layer["out"], out.reshape(x.shape)))
                new.append(kept)
            logits = c.linear(p["out"], rescale(x))
            return (following(obs, logits), new), logits

        return step

    def run(p, obs):
        width = p["in"]["b"].shape[0] // HEADS
        size = dict(zip("bthw", (batch, length, HEADS, width), strict=True))
        empty = jnp.zeros([size[a] for a in axes])
        carry, outs = (obs, [(empty, empty) for _ in p["layers"]]), []
        for part in np.array_split(np.arange(length), sections):
            carry, out = jax.lax.scan(body(p, int(part[-1]) + 1), carry, jnp.asarray(part))
            outs.append(out)
        return carry[0], jnp.concatenate(outs)

    return run


def decode(length, batch, width=64, layers=2):
    make = lambda *how: decode_by_hand(length, batch, *how)  # noqa: E731
    forms = {
        "rlfx": decode_by_rlfx(length, batch), "plain": make(BATCH_MAJOR), "time-major": make(TIME_MAJOR),
        "4 sections": make(BATCH_MAJOR, 4), "time-major, 4 sections": make(TIME_MAJOR, 4),
    }  # fmt: skip
    return Workload(forms, (params_of(width, layers), jax.random.normal(jax.random.key(1), (batch, OBS))))
