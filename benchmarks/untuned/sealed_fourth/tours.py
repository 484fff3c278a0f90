"""POMO (Kwon et al. 2020): tours of cities, built city by city from every city as a start; an encoder sees the cities once, a
decoder points at the next one, and the mean of all tours of the same cities is the baseline."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

HEADS, CLIP, NEVER = 4, 10.0, np.float32(-1e9)


class Tour(NamedTuple):
    visited: jax.Array
    first: jax.Array
    current: jax.Array


def begun(cities):
    """A tour from each city."""
    start = jnp.arange(cities, dtype=jnp.int32)
    return Tour(jnp.eye(cities, dtype=bool), start, start)


def params_of(key, width, layers):
    keys = iter(jax.random.split(key, 6 + 4 * layers))

    def block():
        sizes = {
            "qkv": (width, 3 * width),
            "out": (width, width),
            "wide": (width, 2 * width),
            "back": (2 * width, width),
        }
        made = {name: c.dense(next(keys), *size) for name, size in sizes.items()}
        made |= {name: made[name]["w"] for name in ("qkv", "out", "back")}  # a norm takes their biases away
        return made | {name: {"scale": jnp.ones(width), "bias": jnp.zeros(width)} for name in ("norm", "norm2")}

    blocks = [block() for _ in range(layers)]
    made = {"query": c.dense(next(keys), 3 * width, width), "out": c.dense(next(keys), width, width), "blocks": blocks}
    sizes = {"in": (2, width), "k": (width, width), "v": (width, width), "point": (width, width)}
    made |= {name: c.dense(next(keys), *size)["w"] for name, size in sizes.items()}
    return made | {"in": 1.5 * made["in"]}  # cities far apart, so that attention tells them apart


def normed(p, h):
    """Among the cities of an instance."""
    h = h - h.mean(0)
    return h * jax.lax.rsqrt((h**2).mean(0) + 1e-5) * p["scale"] + p["bias"]


def in_heads(x):
    return x.reshape(*x.shape[:-1], HEADS, -1)


def encoded(p, cities):
    """``[N, width]``."""
    h = cities @ p["in"]
    for b in p["blocks"]:
        q, k, v = (in_heads(x) for x in jnp.split(h @ b["qkv"], 3, -1))
        shares = jax.nn.softmax(jnp.einsum("nhd,mhd->hnm", q, k) / np.float32(np.sqrt(q.shape[-1])), -1)
        h = normed(b["norm"], h + jnp.einsum("hnm,mhd->nhd", shares, v).reshape(h.shape) @ b["out"])
        h = normed(b["norm2"], h + jax.nn.relu(c.linear(b["wide"], h)) @ b["back"])
    return h


def prepared(p, cities):
    """All that a decoder needs of the cities."""
    h = encoded(p, cities)
    return {"nodes": h, "k": in_heads(h @ p["k"]), "v": in_heads(h @ p["v"]), "point": h @ p["point"]}


def decided(p, made, tour):
    """The logits of the next city: a glimpse at those left, and what it points at."""
    h = made["nodes"]
    q = in_heads(c.linear(p["query"], jnp.concatenate([h.mean(0), h[tour.first], h[tour.current]])))
    scores = jnp.einsum("hd,nhd->hn", q, made["k"]) / np.float32(np.sqrt(q.shape[-1]))
    shares = jax.nn.softmax(jnp.where(tour.visited, NEVER, scores), -1)
    glimpse = c.linear(p["out"], jnp.einsum("hn,nhd->hd", shares, made["v"]).reshape(-1))
    logits = CLIP * jnp.tanh(made["point"] @ glimpse / np.float32(np.sqrt(len(glimpse))))
    return jnp.where(tour.visited, NEVER, logits)


def distance(a, b):
    return jnp.sqrt(((a - b) ** 2).sum(-1))


def visit(tour, city):
    return Tour(tour.visited | (jnp.arange(len(tour.visited)) == city), tour.first, city)


def program(params, tour, t):
    p, cities = params
    logits = decided(p, prepared(p, cities), tour)
    city = jax.random.categorical(t.key_for("city"), stop_gradient(logits)).astype(jnp.int32)
    way = distance(cities[tour.current], cities[city])
    home = jnp.where(t == t.length - 1, distance(cities[city], cities[tour.first]), 0.0)
    length = rlfx.sum(way + home, over="t")
    advantage = stop_gradient(length - rlfx.mean(length, over="b"))
    return jax.nn.log_softmax(logits)[city] * advantage, visit(tour, city)


def by_rlfx(cities):
    loss_fn = rlfx.compile(program, length=cities - 1, batch=cities)

    def run(p, instances, tours, keys):
        def loss(p):
            of_one = lambda cities, tours, key: loss_fn((p, cities), tours, key)  # noqa: E731
            found, (tours_after, _) = jax.vmap(of_one)(instances, tours, keys)
            return found.mean(), tours_after

        (found, after), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, after

    return run
