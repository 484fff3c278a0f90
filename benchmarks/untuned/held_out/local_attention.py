"""Attention over a sliding window, with rotary positions: the gradient of a loss at every timestep."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.attention import ACTIONS, OBS, params_of, perceptron, queries_keys_values, rescale
from benchmarks.untuned.measure import Workload


def rotated(x, position):
    """Pairs of features ``x[..., W]`` turned by angles that grow with the position, ``[...]`` but for heads and W."""
    half = x.shape[-1] // 2
    rates = 100.0 ** (-np.arange(half, dtype=np.float32) / half)
    angle = position * rates
    first, second = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], -1)


def by_rlfx(length, batch, window):
    def program(params, carry, t):
        p, obs, action = params
        x = c.linear(p["in"], rlfx.inputs(obs)[t])
        for layer in p["layers"]:
            q, k, v = queries_keys_values(layer, x)
            q, k = rotated(q, t.now), rotated(k, t.now)
            keys, values = (rlfx.series(s)[t - window + 1 : t + 1] for s in (k, v))
            weights = jax.nn.softmax(jnp.einsum("thw,hw->th", keys, q), axis=0)
            x = x + c.linear(layer["out"], jnp.einsum("th,thw->hw", weights, values).ravel())
            x = perceptron(layer, x)
        logits = c.linear(p["out"], rescale(x))
        return -jax.nn.log_softmax(logits)[rlfx.inputs(action)[t]], carry

    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, obs, action: jax.value_and_grad(lambda p: loss_fn((p, obs, action), jnp.zeros(batch))[0])(p)


def masked(q, k, v, window):
    """All scores ``[T, T]``, those outside of the band masked."""
    ago = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])
    scores = jnp.where((ago >= 0) & (ago < window), jnp.einsum("bqhw,bkhw->bhqk", q, k), -1e30)
    return jnp.einsum("bhqk,bkhw->bqhw", jax.nn.softmax(scores, -1), v)


def library(q, k, v, window):
    return jax.nn.dot_product_attention(q, k, v, scale=1.0, is_causal=True, local_window_size=(window - 1, 0))


def banded(q, k, v, window):
    """Blocks of ``window`` queries, each with the keys of its own block and the one before."""
    batch, length, *rest = q.shape
    blocks = lambda x: x.reshape(batch, length // window, window, *rest)  # noqa: E731
    before = lambda x: jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], 1)  # noqa: E731
    keys, values = (jnp.concatenate([before(blocks(x)), blocks(x)], 2) for x in (k, v))
    ago = np.arange(window)[:, None] + window - np.arange(2 * window)
    there = (np.arange(length // window)[:, None, None] > 0) | (np.arange(2 * window) >= window)
    valid = ((ago >= 0) & (ago < window))[None] & there
    scores = jnp.where(valid[None, :, None], jnp.einsum("bnqhw,bnkhw->bnhqk", blocks(q), keys), -1e30)
    return jnp.einsum("bnhqk,bnkhw->bnqhw", jax.nn.softmax(scores, -1), values).reshape(q.shape)


def by_hand(attend, window, again=False):
    def net(p, x):
        x = c.linear(p["in"], x)
        positions = np.arange(x.shape[1], dtype=np.float32)[:, None, None]

        def block(layer, x):
            q, k, v = queries_keys_values(layer, x)
            out = attend(rotated(q, positions), rotated(k, positions), v, window)
            return perceptron(layer, x + c.linear(layer["out"], out.reshape(x.shape)))

        for layer in p["layers"]:
            x = (jax.checkpoint(block) if again else block)(layer, x)
        return c.linear(p["out"], rescale(x))

    def loss(p, obs, action):
        log_prob = jax.nn.log_softmax(net(p, jnp.swapaxes(obs, 0, 1)))
        return -c.pick(log_prob, jnp.swapaxes(action, 0, 1)).mean()

    return jax.value_and_grad(loss)


def one_sequence_at_a_time(fn, batch):
    """Gradients of the sequences of a batch, added up."""

    def run(p, obs, action):
        parts = tuple(jnp.swapaxes(x, 0, 1)[:, :, None] for x in (obs, action))
        total = c.summed_gradient(lambda p, x: fn(p, *x)[0] / batch, p, parts)
        return total

    return run


def workload(length, batch, window, width=64, layers=2):
    obs = jax.random.normal(jax.random.key(1), (length, batch, OBS))
    action = jax.random.randint(jax.random.key(2), (length, batch), 0, ACTIONS)
    forms = {
        "rlfx": by_rlfx(length, batch, window), "plain": by_hand(masked, window),
        "dot_product_attention": by_hand(library, window), "banded": by_hand(banded, window),
        "banded, checkpointed": by_hand(banded, window, again=True),
        "banded, by sequence": one_sequence_at_a_time(by_hand(banded, window), batch),
    }  # fmt: skip
    return Workload(forms, (params_of(width, layers), obs, action))
