"""A gated transformer by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_fifteenth import gated as given
from benchmarks.untuned.sealed_fifteenth.gated import (
    ACTIONS,
    HEADS,
    MEMORY,
    OBS,
    episodes,
    loss_of,
    normed,
    params_of,
    relu,
    sines,
)  # fmt: skip

# -- gates of rows ``x[N, width], y[N, width]``


def gate_joined(p, x, y):
    """Products with the same rows are one."""
    width = x.shape[1]
    of_y = y @ jnp.concatenate([p["wr"], p["wz"], p["wg"]], -1)
    of_x = x @ jnp.concatenate([p["ur"], p["uz"]], -1)
    reset = jax.nn.sigmoid(of_y[:, :width] + of_x[:, :width])
    update = jax.nn.sigmoid(of_y[:, width : 2 * width] + of_x[:, width:] - p["bias"])
    return x + update * (jnp.tanh(of_y[:, 2 * width :] + (reset * x) @ p["ug"]) - x)


def gate_stacked(p, x, y):
    """Both gates are one product of both inputs."""
    width = x.shape[1]
    w = jnp.concatenate([jnp.concatenate([p["wr"], p["wz"]], -1), jnp.concatenate([p["ur"], p["uz"]], -1)])
    made = jnp.concatenate([y, x], -1) @ w
    reset, update = jax.nn.sigmoid(made[:, :width]), jax.nn.sigmoid(made[:, width:] - p["bias"])
    last = jnp.concatenate([y, reset * x], -1) @ jnp.concatenate([p["wg"], p["ug"]])
    return x + update * (jnp.tanh(last) - x)


# -- attention: ``query, key, value[T, B, HEADS, W]``, the products of ``by_place[T, B, HEADS, MEMORY]`` with places, the oldest
#    first, and ``episode[T, B]``; queries are divided already


def ago(x, age):
    """``x[T, ...]`` some timesteps ago, zeros before the first."""
    return x if age == 0 else jnp.concatenate([jnp.zeros_like(x[:age]), x[:-age]])


def windows(x):
    """``[T, MEMORY, ...]``."""
    return jnp.stack([ago(x, age) for age in range(MEMORY - 1, -1, -1)], 1)


def by_windows(query, key, value, by_place, episode):
    """Windows as arrays."""
    seen = windows(episode) == episode[:, None]
    scores = jnp.einsum("tbhw,tmbhw->tbhm", query, windows(key)) + by_place
    weights = jax.nn.softmax(jnp.where(jnp.moveaxis(seen, 1, 2)[:, :, None], scores, -jnp.inf))
    return jnp.einsum("tbhm,tmbhw->tbhw", weights, windows(value))


def slanted(by_place, columns):
    """``[..., Q, MEMORY]`` to ``[..., Q, columns]``, each row one further to the right, from 1 on."""
    *size, rows, _ = by_place.shape
    wide = jnp.pad(by_place, [*[(0, 0)] * (len(size) + 1), (1, columns - MEMORY)])
    return wide.reshape(*size, -1)[..., : rows * columns].reshape(*size, rows, columns)


def banded(query, key, value, by_place, episode):
    """Blocks of as many queries as are remembered, each with the keys of its own block and of the one before."""
    length = len(query)
    blocks = lambda x: x.reshape(length // MEMORY, MEMORY, *x.shape[1:])  # noqa: E731
    both = lambda x: jnp.concatenate([jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]]), x], 1)  # noqa: E731
    key, value, old, new = both(blocks(key)), both(blocks(value)), both(blocks(episode)), blocks(episode)
    age = np.arange(MEMORY)[:, None] + MEMORY - np.arange(2 * MEMORY)
    seen = (new.mT[..., None] == old.mT[:, :, None]) & ((age >= 0) & (age < MEMORY))
    scores = jnp.einsum("nqbhw,nkbhw->nbhqk", blocks(query), key)
    scores = scores + slanted(jnp.moveaxis(blocks(by_place), 1, 3), 2 * MEMORY)
    weights = jax.nn.softmax(jnp.where(seen[:, :, None], scores, -1e30))
    return jnp.einsum("nbhqk,nkbhw->nqbhw", weights, value).reshape(query.shape)


def all_pairs(query, key, value, by_place, episode):
    """The whole of ``[T, T]``, masked."""
    length = len(query)
    age = np.arange(length)[:, None] - np.arange(length)
    seen = (episode.T[:, :, None] == episode.T[:, None]) & ((age >= 0) & (age < MEMORY))
    # a row too wide on the left by what is remembered
    place = slanted(jnp.moveaxis(by_place, 0, 2), length + MEMORY)[..., MEMORY:]
    scores = jnp.einsum("tbhw,sbhw->bhts", query, key) + place
    return jnp.einsum("bhts,sbhw->tbhw", jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30)), value)


# -- layers of rows


def attention(layer, x, episode, attend, joined):
    y, width = normed(layer["norm"], x), x.shape[1]
    each = (*episode.shape, HEADS, width // HEADS)
    if joined:
        made = jnp.split(y @ jnp.concatenate([layer["q"], layer["k"], layer["v"]], -1), 3, -1)
    else:
        made = [y @ layer[name] for name in "qkv"]
    query, key, value = (x.reshape(each) for x in made)
    size = np.float32(1.0 / np.sqrt(width // HEADS))
    places = (sines(width) @ layer["place"]).reshape(MEMORY, HEADS, -1)
    by_place = jnp.einsum("tbhw,mhw->tbhm", size * (query + layer["of_place"]), places)
    made = attend(size * (query + layer["of_content"]), key, value, by_place, episode)
    return relu(made.reshape(x.shape) @ layer["out"])


def by_hand(length, batch, attend=banded, gate=gate_joined, joined=True, again=False, chunk=None):
    """``again``: layers are made again for the gradient; ``chunk``: so many environments after the others."""
    scale = 1.0 / (length * batch)

    def of_layer(layer, h, episode):
        h = gate(layer["gate"], h, attention(layer, h, episode, attend, joined))
        return gate(layer["then_gate"], h, given.perceptron(layer, h))

    made = jax.checkpoint(of_layer) if again else of_layer

    def loss(p, x):
        data, _ = x
        size, episode = data["action"].shape, episodes(data)
        h = c.linear(p["in"], data["obs"].reshape(-1, OBS))
        for layer in p["layers"]:
            h = made(layer, h, episode)
        out = c.linear(jax.tree.map(lambda a, b: jnp.concatenate([a, b], -1), p["pi"], p["v"]), h)
        return scale * loss_of(out[:, :ACTIONS].reshape(*size, -1), out[:, ACTIONS].reshape(size), data)

    learn = c.gradient_by_environments(loss, chunk)
    return lambda p, data: learn(p, data, jnp.zeros(batch))


def workload(length, batch, width, chunk=4):
    make = functools.partial(by_hand, length, batch)
    window, pairs, stacked = {"attend": by_windows}, {"attend": all_pairs}, {"gate": gate_stacked}
    forms = {
        "rlfx": given.by_rlfx(length, batch), "plain": given.plain(length, batch),
        "bands, apart": make(joined=False, gate=given.gated), "bands": make(), "bands, stacked": make(**stacked),
        "windows": make(**window), "all pairs": make(**pairs), "bands, again": make(again=True),
        f"bands, {chunk} environments": make(chunk=chunk), f"all pairs, {chunk} environments": make(**pairs, chunk=chunk),
        f"bands, stacked, {chunk} environments": make(**stacked, chunk=chunk),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    data = c.episodes(k, size, OBS, ACTIONS) | {"log_prob": -2.0 * jax.random.uniform(k[4], size)}
    return Workload(forms, (params_of(k[5], width), data), tolerance=2e-5)
