"""Networks of one point: layers, attention, convolutions, sets and graphs, ensembles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.zoo.parts import (
    CHANNELS,
    ENTITIES,
    HIDDEN,
    IN,
    LAYERS,
    SIDE,
    TOKENS,
    hidden,
    network,
    square,
    weights,
)  # fmt: skip

LAYOUT = ("NHWC", "HWIO", "NHWC")
ATTENTION = {"w": weights(1, IN, 3 * IN), "o": weights(2, IN, IN)}
CAUSAL = np.tril(np.ones((TOKENS, TOKENS), bool))
EDGES = np.random.default_rng(0).integers(0, ENTITIES, (2, 24))


@network(**LAYERS)
def layers(p, x):
    return square(hidden(p, x) @ p["c"])


@network(**LAYERS)
def normalised_layers(p, x):
    norm = lambda y: (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)  # noqa: E731
    return square(jax.nn.gelu(norm(jax.nn.gelu(norm(x @ p["a"])) @ p["b"])) @ p["c"])


@network(**LAYERS)
def batch_of_one(p, x):
    return square(jax.nn.relu(jax.nn.relu(x[None] @ p["a"]) @ p["b"]) @ p["c"])


@network(**LAYERS)
def residual_layers(p, x):
    y = x @ p["a"]
    for _ in range(3):
        y = y + jax.nn.relu(y @ p["b"])
    return square(y @ p["c"])


@network(**LAYERS)
def gated_layers(p, x):
    y = x @ p["a"]
    return square((y * jax.nn.sigmoid(y @ p["b"])) @ p["c"])


@network(a=weights(1, IN, HIDDEN), left=weights(2, IN, 4), right=weights(3, 4, HIDDEN))
def low_rank(p, x):
    return square(jnp.tanh(x @ (p["a"] + p["left"] @ p["right"])))


@network(**LAYERS)
def spectral_norm(p, x):
    def normed(w):
        u = jnp.ones(w.shape[0])
        for _ in range(3):
            v = w.T @ u
            v /= jnp.linalg.norm(v)
            u = w @ v
            u /= jnp.linalg.norm(u)
        return w / (u @ w @ v)

    return square(jnp.tanh(jnp.tanh(x @ normed(p["a"])) @ normed(p["b"])) @ p["c"])


def heads(p, x):
    """Queries, keys and values, ``[TOKENS, 4, IN / 4]`` each."""
    return (y.reshape(TOKENS, 4, IN // 4) for y in jnp.split(x @ p["w"], 3, -1))


@network(TOKENS, IN, **ATTENTION)
def attention(p, x):
    q, k, v = heads(p, x)
    scores = jnp.where(CAUSAL, jnp.einsum("qhd,khd->hqk", q, k) / 2.0, -1e9)
    return square(jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, -1), v).reshape(TOKENS, IN) @ p["o"])


@network(TOKENS, IN, **ATTENTION)
def library_attention(p, x):
    return square(jax.nn.dot_product_attention(*heads(p, x), is_causal=True).reshape(TOKENS, IN) @ p["o"])


@network(TOKENS, IN, **ATTENTION)
def first_token(p, x):
    """Of what becomes of all tokens one is read."""
    q, k, v = heads(p, x)
    share = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k), -1)
    return square((jnp.tanh(jnp.einsum("hqk,khd->qhd", share, v).reshape(TOKENS, IN)) @ p["o"])[0])


@network(ENTITIES, IN, w=weights(1, IN, IN), q=weights(2, 4, IN), o=weights(3, IN, IN))
def pooled_by_queries(p, x):
    return square(jax.nn.softmax(p["q"] @ (x @ p["w"]).T, -1) @ x @ p["o"])


@network(ENTITIES, IN, **LAYERS)
def entities_one_by_one(p, x):
    return square(sum(jax.nn.relu(jax.nn.relu(x[i] @ p["a"]) @ p["b"]) for i in range(ENTITIES)) @ p["c"])


@network(ENTITIES, IN, **LAYERS)
def entities_mapped(p, x):
    return square(jax.vmap(lambda e: jax.nn.relu(jax.nn.relu(e @ p["a"]) @ p["b"]))(x).sum(0) @ p["c"])


@network(ENTITIES, IN, **LAYERS)
def entities_in_a_loop(p, x):
    return square(lax.map(lambda e: jax.nn.relu(jax.nn.relu(e @ p["a"]) @ p["b"]), x).sum(0) @ p["c"])


@network(ENTITIES, IN, a=weights(1, 2 * IN, HIDDEN), b=weights(2, HIDDEN, IN))
def pairs_of_entities(p, x):
    shape = (ENTITIES, ENTITIES, IN)
    pair = jnp.concatenate([jnp.broadcast_to(x[:, None], shape), jnp.broadcast_to(x[None], shape)], -1)
    return square(jax.nn.relu(pair @ p["a"]).sum((0, 1)) @ p["b"])


@network(ENTITIES, IN, a=weights(1, 2 * IN, 32), b=weights(2, 32, IN))
def graph(p, x):
    messages = jax.nn.relu(jnp.concatenate([x[EDGES[0]], x[EDGES[1]]], -1) @ p["a"])
    return square(jax.ops.segment_sum(messages, EDGES[1], ENTITIES) @ p["b"])


def convolved(x, kernel, padding="VALID", **how):
    return lax.conv_general_dilated(x[None], kernel, (1, 1), padding, dimension_numbers=LAYOUT, **how)[0]


FIRST = weights(1, 9 * CHANNELS, 8).reshape(3, 3, CHANNELS, 8)


@network(SIDE, SIDE, CHANNELS, k=FIRST, then=weights(2, 72, 8).reshape(3, 3, 8, 8), w=weights(3, 288, IN))
def convolutions(p, x):
    return square(jax.nn.relu(convolved(jax.nn.relu(convolved(x, p["k"])), p["then"])).reshape(-1) @ p["w"])


@network(SIDE, SIDE, CHANNELS, k=FIRST, w=weights(3, 128, IN))
def pooled_convolution(p, x):
    y = jax.nn.relu(convolved(x, p["k"]))
    return square(lax.reduce_window(y, -jnp.inf, lax.max, (2, 2, 1), (2, 2, 1), "VALID").reshape(-1) @ p["w"])


@network(SIDE, SIDE, CHANNELS, k=weights(1, 16, 4).reshape(4, 4, 1, 4), w=weights(2, 4, IN))
def depthwise_convolution(p, x):
    return square(jax.nn.relu(convolved(x, p["k"], feature_group_count=CHANNELS)) @ p["w"])


@network(w=weights(0, IN, 72), k=weights(1, 72, 4).reshape(3, 3, 8, 4))
def transposed_convolution(p, x):
    y = jax.nn.relu(x @ p["w"]).reshape(1, 3, 3, 8)
    return square(lax.conv_transpose(y, p["k"], (2, 2), "VALID", dimension_numbers=LAYOUT))


@network(TOKENS, IN, k=weights(1, 3 * IN, 32).reshape(3, IN, 32), then=weights(2, 96, IN).reshape(3, 32, IN))
def convolutions_of_sequences(p, x):
    layer = lambda y, k: lax.conv_general_dilated(y[None], k, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))[0]  # noqa: E731
    return square(layer(jax.nn.relu(layer(x, p["k"])), p["then"]))


MEMBERS = {"a": weights(1, 5, IN, HIDDEN), "b": weights(2, 5, HIDDEN, HIDDEN), "c": weights(3, 5, HIDDEN, 1)}


@network(**MEMBERS)
def ensemble(p, x):
    member = lambda p: jax.nn.relu(jax.nn.relu(x @ p["a"]) @ p["b"]) @ p["c"]  # noqa: E731
    q = jax.vmap(member)(p)
    return q.min() + q.std()


@network(a=weights(1, IN, 256), b=weights(2, IN, IN))
def weights_of_each_point(p, x):
    return square(jnp.tanh(x @ p["a"]).reshape(IN, IN) @ (x @ p["b"]))


@network(a=weights(1, 4, IN, HIDDEN), c=weights(2, HIDDEN, 4))
def weights_by_index(p, x):
    return square(jnp.tanh(x @ p["a"][(jnp.abs(x[0]) * 10.0).astype(int) % 4]) @ p["c"])


@network(e=weights(1, 50, IN), a=weights(2, IN, HIDDEN))
def embedding(p, x):
    return square(jax.nn.relu(p["e"][(jnp.abs(x) * 20.0).astype(int) % 50] @ p["a"]).sum(0))


@network(e=weights(1, 50, IN), a=weights(2, IN, 8))
def nearest_code(p, x):
    code = p["e"][jnp.argmin(((x[None] - p["e"]) ** 2).sum(-1))]
    return square((x + lax.stop_gradient(code - x)) @ p["a"]) + square(code - lax.stop_gradient(x))


@network(e=weights(1, 50, IN), a=weights(2, 50, 8))
def radial_functions(p, x):
    return square(jnp.exp(-((x[None] - p["e"]) ** 2).sum(-1) / 8.0) @ p["a"])


@network(f=weights(1, IN, 32), a=weights(2, 64, 8))
def fourier_features(p, x):
    y = x @ p["f"]
    return square(jnp.concatenate([jnp.sin(y), jnp.cos(y)]) @ p["a"])


@network(m=weights(1, IN, IN, 8), a=weights(2, IN, IN))
def bilinear(p, x):
    return square(jnp.einsum("i,ijk,j->k", x, p["m"], x @ p["a"]))
