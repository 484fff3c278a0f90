"""GRPO (Shao et al. 2024) on stored completions: several answers to each prompt, whose rewards among themselves are advantages; a
causal transformer, the clipped ratio to the policy that wrote them, and a divergence from a reference policy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

TOKENS, HEADS, LAYERS, CLIP, BETA = 32, 4, 2, 0.2, 0.04


def params_of(key, length, width):
    k = jax.random.split(key, 3 + LAYERS)

    def layer(key):
        sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
        return {n: c.dense(k, *size) for k, (n, size) in zip(jax.random.split(key, 4), sizes.items(), strict=True)}

    return {
        "token": 0.5 * jax.random.normal(k[0], (TOKENS, width)), "place": 0.5 * jax.random.normal(k[1], (length, width)),
        "head": c.dense(k[2], width, TOKENS), "layers": [layer(x) for x in k[3:]],
    }  # fmt: skip


def normed(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def perceptron(layer, x):
    return x + c.linear(layer["down"], jax.nn.gelu(c.linear(layer["up"], normed(x))))


def model(p, token, t):
    """Log-probabilities of the token that follows, ``[TOKENS]``."""
    x = p["token"][token] + p["place"][t.now]
    for layer in p["layers"]:
        query, key, value = c.linear(layer["qkv"], normed(x)).reshape(3, HEADS, -1)
        keys, values = rlfx.series(key)[: t + 1], rlfx.series(value)[: t + 1]
        scores = jnp.einsum("shw,hw->sh", keys, query) / np.float32(np.sqrt(query.shape[-1]))
        found = jnp.einsum("sh,shw->hw", jax.nn.softmax(scores, axis=0), values)
        x = perceptron(layer, x + c.linear(layer["out"], found.ravel()))
    return jax.nn.log_softmax(c.linear(p["head"], normed(x)))


def point_loss(log_prob, old, reference, advantage):
    ratio, apart = jnp.exp(log_prob - old), reference - log_prob
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    return BETA * (jnp.exp(apart) - apart - 1.0) - gain


def program(params, carry, t):
    """Of a token of an answer; ``follows`` is the token behind it, which counts if it is ``written`` and not asked or empty."""
    (p, reference), data, advantage = params
    x, advantage = rlfx.inputs(data)[t], rlfx.inputs(advantage, axes="b")[t]
    log_prob = model(p, x["token"], t)[x["follows"]]
    of_reference = stop_gradient(model(reference, x["token"], t)[x["follows"]])
    written = x["written"].astype(jnp.float32)
    count = rlfx.sum(written, over="t")  # each answer counts as much as any other
    return t.length * written / count * point_loss(log_prob, x["old"], of_reference, advantage), carry


def advantages(reward, group):
    """Of answers, ``group`` to each prompt."""
    reward = reward.reshape(-1, group)
    return ((reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-4)).reshape(-1)


def by_rlfx(length, batch, group):
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, reference, data, reward):
        given = data, advantages(reward, group)
        return jax.value_and_grad(lambda p: loss_fn(((p, reference), *given), jnp.zeros(batch))[0])(p)

    return run


# -- by hand, as usual


def log_probs_of(p, tokens):
    """``[B, T, TOKENS]`` of ``tokens[B, T]``."""
    b, length = tokens.shape
    x, mask = p["token"][tokens] + p["place"], jnp.tril(jnp.ones((length, length), bool))
    for layer in p["layers"]:
        q, k, v = jnp.moveaxis(c.linear(layer["qkv"], normed(x)).reshape(b, length, 3, HEADS, -1), 2, 0)
        scores = jnp.einsum("bqhw,bkhw->bhqk", q, k) / np.float32(np.sqrt(q.shape[-1]))
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
        found = jnp.einsum("bhqk,bkhw->bqhw", weights, v).reshape(b, length, -1)
        x = perceptron(layer, x + c.linear(layer["out"], found))
    return jax.nn.log_softmax(c.linear(p["head"], normed(x)))


def plain(length, batch, group):
    def run(p, reference, data, reward):
        x = jax.tree.map(lambda x: x.swapaxes(0, 1), data)
        advantage, written = advantages(reward, group), x["written"].astype(jnp.float32)
        of_reference = c.pick(log_probs_of(reference, x["token"]), x["follows"])

        def loss(p):
            log_prob = c.pick(log_probs_of(p, x["token"]), x["follows"])
            made = point_loss(log_prob, x["old"], of_reference, advantage[:, None])
            return ((made * written).sum(1) / written.sum(1)).mean()

        return jax.value_and_grad(loss)(p)

    return run
