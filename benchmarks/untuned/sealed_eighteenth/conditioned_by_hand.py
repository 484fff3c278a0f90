"""A decision transformer by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_eighteenth import conditioned as given
from benchmarks.untuned.sealed_eighteenth.conditioned import (
    ACTIONS,
    HEADS,
    KINDS,
    LONGEST,
    OBS,
    SCALE,
    normed,
    params_of,
    widened,
)  # fmt: skip

# -- attention ``[B, HEADS, N, size]`` of queries, keys and values of such shapes; ``mask[queries, keys]``


def masked(query, key, value, mask):
    scores = query @ key.mT
    share = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
    return share @ value


def added(query, key, value, mask):
    """Divided after the product with values; what is masked is added."""
    scores = query @ key.mT + np.where(mask, 0.0, -1e9).astype(np.float32)
    share = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return (share @ value) / share.sum(-1, keepdims=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def written_out(query, key, value, mask):
    """With its derivative."""
    return ahead(query, key, value, mask)[0]


def ahead(query, key, value, mask):
    share = jax.nn.softmax(query @ key.mT + np.where(mask, 0.0, -1e9).astype(np.float32))
    made = share @ value
    return made, (query, key, value, share, made)


def back(mask, kept, by):
    query, key, value, share, made = kept
    by_scores = share * (by @ value.mT - (by * made).sum(-1, keepdims=True))
    return by_scores @ key, by_scores.mT @ query, share.mT @ by


written_out.defvjp(ahead, back)


def library(query, key, value, mask):
    turn = lambda x: jnp.moveaxis(x, 1, 2)  # noqa: E731
    made = jax.nn.dot_product_attention(turn(query), turn(key), turn(value), scale=1.0, mask=jnp.asarray(mask)[None, None])
    return turn(made)


class Way(NamedTuple):
    attend: Any = masked
    few: bool = True  # in the last layer, queries are of states alone
    apart: bool = False  # tokens are of one kind after the other, and not of one timestep after the other
    pieces: int = 1  # of the queries, each of which reads no more of the past than it must


def mask_of(length, apart):
    """``[N, N]``, and which tokens are states."""
    kind, time = np.arange(KINDS), np.arange(length)
    if apart:
        kind, time = np.repeat(kind, length), np.tile(time, KINDS)
    else:
        kind, time = np.tile(kind, length), np.repeat(time, KINDS)
    before = (time[:, None] > time) | ((time[:, None] == time) & (kind[:, None] >= kind))
    return before, slice(length, 2 * length) if apart else slice(1, None, KINDS)


def attention(way, layer, x, mask, of):
    """Of ``x[B, N, width]``; queries of the tokens ``of`` alone: ``[B, queries, width]``."""
    batch, _, width = x.shape
    heads = lambda x: jnp.moveaxis(x.reshape(batch, -1, HEADS, width // HEADS), 1, 2)  # noqa: E731
    scaled = layer["q"] / (width // HEADS) ** 0.5
    seen = normed(layer["first"], x)
    if of is None:
        joined = seen.reshape(-1, width) @ jnp.concatenate([scaled, layer["k"], layer["v"]], -1)
        query, key, value = (heads(x) for x in jnp.split(joined, 3, -1))
    else:
        joined = seen.reshape(-1, width) @ jnp.concatenate([layer["k"], layer["v"]], -1)
        key, value = (heads(x) for x in jnp.split(joined, 2, -1))
        x, seen, mask = x[:, of], seen[:, of], mask[of]
        query = heads(seen.reshape(-1, width) @ scaled)
    cuts = np.linspace(0, len(mask), way.pieces + 1).astype(int)
    made = []
    for i, j in zip(cuts[:-1], cuts[1:], strict=True):
        end = np.flatnonzero(mask[i:j].any(0)).max() + 1
        made.append(way.attend(query[:, :, i:j], key[:, :, :end], value[:, :, :end], mask[i:j, :end]))
    made = jnp.concatenate(made, 2) if len(made) > 1 else made[0]
    read = jnp.moveaxis(made, 1, 2).reshape(-1, width)
    return x + c.linear(layer["out"], read).reshape(x.shape)


def block(way, layer, x, mask, of):
    x = attention(way, layer, x, mask, of)
    return widened(layer, x.reshape(-1, x.shape[-1])).reshape(x.shape)


def actions(way, p, data):
    """``[B, T, ACTIONS]``."""
    length, batch = data["reward"].shape
    to_go = (jnp.cumsum(data["reward"][::-1], 0)[::-1] + data["later"]).T / SCALE
    obs, action = (jnp.moveaxis(data[name], 0, 1) for name in ("obs", "action"))
    told = to_go[..., None] * p["to_go"]["w"][0] + p["to_go"]["b"], c.linear(p["obs"], obs), c.linear(p["action"], action)
    times = p["time"][data["start"][:, None] + jnp.arange(length)]
    axis = 1 if way.apart else 2
    x = jnp.stack(told, axis) + jnp.expand_dims(times, axis)
    x = normed(p["begin"], x.reshape(batch, KINDS * length, -1))
    mask, states = mask_of(length, way.apart)
    *layers, last = p["layers"]
    for layer in layers:
        x = block(way, layer, x, mask, None)
    x = block(way, last, x, mask, states) if way.few else block(way, last, x, mask, None)[:, states]
    return jnp.tanh(c.linear(p["head"], normed(p["end"], x)))


def by_hand(length, batch, way, chunk=None):
    """``chunk``: environments after the others."""
    scale = 1.0 / (length * batch * ACTIONS)

    def loss(p, x):
        data, (later, start) = x
        made = actions(way, p, {**data, "later": later, "start": start})
        return scale * ((made - jnp.moveaxis(data["action"], 0, 1)) ** 2).sum()

    learn = c.gradient_by_environments(loss, chunk)

    def run(p, data):
        steps = {name: data[name] for name in ("obs", "action", "reward")}
        return learn(p, steps, (data["later"], data["start"]))

    return run


def workload(length, batch, width, chunk=4):
    make, four = functools.partial(by_hand, length, batch), 4
    forms = {
        "rlfx": given.by_rlfx(length, batch), "plain": given.plain(length, batch),
        "one product of queries, keys and values": make(Way(few=False)), "last layer of states": make(Way()),
        "last layer of states, divided after": make(Way(added)), "last layer of states, library": make(Way(library)),
        "last layer of states, written out": make(Way(written_out)),
        "kinds apart, written out": make(Way(written_out, apart=True)),
        "in pieces, written out": make(Way(written_out, pieces=four)),
        f"kinds apart, written out, {chunk} sequences": make(Way(written_out, apart=True), chunk),
        f"divided after, {chunk} sequences": make(Way(added), chunk),
        f"last layer of states, {chunk} sequences": make(Way(), chunk),
        f"written out, {chunk} sequences": make(Way(written_out), chunk),
        f"in pieces, written out, {chunk} sequences": make(Way(written_out, pieces=four), chunk),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    data = {
        "obs": jax.random.normal(k[0], (length, batch, OBS)),
        "action": jnp.tanh(jax.random.normal(k[1], (length, batch, ACTIONS))),
        "reward": jax.random.normal(k[2], (length, batch)), "later": 5.0 * jax.random.normal(k[3], (batch,)),
        "start": jax.random.randint(k[4], (batch,), 0, LONGEST - length),
    }  # fmt: skip
    return Workload(forms, (params_of(k[5], width), data), tolerance=2e-5)
