"""Diffusion policy by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_nineteenth import chunks as given
from benchmarks.untuned.sealed_nineteenth.chunks import (
    ACTIONS,
    CHUNK,
    GROUPS,
    KEPT,
    LAYOUT,
    OBS,
    RATES,
    chunks_of,
    drawn_for_all,
    mish,
    params_of,
)  # fmt: skip

# -- of chunks ``[N, time, features]``: convolutions, and twice as many timesteps


class Rows:
    """Chunks first, then time."""

    time, axes = 1, (1, 3)

    @staticmethod
    def turned(x):
        return x

    @staticmethod
    def told(x):
        return x[:, None]

    @staticmethod
    def conv(p, x, stride=1):
        return jax.lax.conv_general_dilated(x, p["w"], (stride,), "SAME", dimension_numbers=LAYOUT) + p["b"]

    @staticmethod
    def grown(p, x):
        return jax.lax.conv_transpose(x, p["w"], (2,), "SAME", dimension_numbers=LAYOUT) + p["b"]


class Patches(Rows):
    """Products of patches."""

    @classmethod
    def patches(cls, x, taps, stride=1, low=None):
        """``low``: how much is padded before."""
        n, axis = x.shape[cls.time], cls.time
        out = -(-n // stride)
        total = max((out - 1) * stride + taps - n, 0)
        low = total // 2 if low is None else low
        pad = [(0, 0)] * x.ndim
        pad[axis] = (low, max(total - low, 0))
        x = jnp.pad(x, pad)
        cut = lambda i: jax.lax.slice_in_dim(x, i, i + (out - 1) * stride + 1, stride, axis)  # noqa: E731
        return [cut(i) for i in range(taps)]

    @classmethod
    def conv(cls, p, x, stride=1):
        taps = cls.patches(x, len(p["w"]), stride)
        return jnp.concatenate(taps, -1) @ p["w"].reshape(-1, p["w"].shape[-1]) + p["b"]

    @classmethod
    def grown(cls, p, x):
        """Each gives two: one of it and the one before, the other of it and the one behind."""
        before, here, after = cls.patches(x, 3)
        w = p["w"]
        even = jnp.concatenate([before, here], -1) @ jnp.concatenate([w[0], w[2]])
        odd = jnp.concatenate([here, after], -1) @ jnp.concatenate([w[1], w[3]])
        both = jnp.stack([even, odd], cls.time + 1)
        shape = list(x.shape[:-1])
        shape[cls.time] *= 2
        return both.reshape(*shape, -1) + p["b"]


class Taps(Patches):
    """Sums of products, a tap each."""

    @classmethod
    def conv(cls, p, x, stride=1):
        return sum(x @ w for x, w in zip(cls.patches(x, len(p["w"]), stride), p["w"], strict=True)) + p["b"]


class First:
    """Time first, then chunks."""

    time, axes = 0, (0, 3)

    @staticmethod
    def turned(x):
        return jnp.moveaxis(x, 1, 0)

    @staticmethod
    def told(x):
        return x[None]


class TimeFirst(First, Patches):
    """Products of patches."""


class Whole(Rows):
    """One product of all timesteps and features, with zeros."""

    @classmethod
    def product(cls, x, w, rows):
        """``w[taps, a, b]``; ``rows[time, out, taps]``: which tap of what comes in is in what comes out."""
        full = jnp.einsum("sok,kab->saob", rows, w)
        full = full.reshape(x.shape[1] * x.shape[2], -1)
        return (x.reshape(len(x), -1) @ full).reshape(len(x), rows.shape[1], -1)

    @classmethod
    def conv(cls, p, x, stride=1):
        n, taps = x.shape[1], len(p["w"])
        out = -(-n // stride)
        low = max((out - 1) * stride + taps - n, 0) // 2
        s, o, k = np.ogrid[:n, :out, :taps]
        return cls.product(x, p["w"], (s == o * stride + k - low).astype(np.float32)) + p["b"]

    @classmethod
    def grown(cls, p, x):
        s, o, k = np.ogrid[: x.shape[1], : 2 * x.shape[1], :4]
        return cls.product(x, p["w"], (2 * s == o + k - 2).astype(np.float32)) + p["b"]


class Mixed(Patches):
    """One product with zeros of the halved chunk, patches elsewhere."""

    @classmethod
    def conv(cls, p, x, stride=1):
        return (Whole if x.shape[1] < CHUNK else Patches).conv(p, x, stride)


# -- the network


def two_passes(way, x):
    """``x[.., .., GROUPS, features]``, normalised."""
    x = x - x.mean(way.layer.axes, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(way.layer.axes, keepdims=True) + 1e-5)


def one_pass(way, x):
    """By means of numbers and of their squares."""
    mean, square = (v.mean(way.layer.axes, keepdims=True) for v in (x, x**2))
    return (x - mean) * jax.lax.rsqrt(square - mean**2 + 1e-5)


def quick_mish(x):
    """tanh(log(1 + e)) is (e * e + 2 * e) / (e * e + 2 * e + 2)."""
    e = jnp.exp(jnp.minimum(x, 20.0))
    n = e * (e + 2.0)
    return x * (n / (n + 2.0))


class Way(NamedTuple):
    layer: Any = Rows
    norm: Any = two_passes
    act: Any = mish
    table: bool = False  # levels are told once each


def normed(way, p, x):
    made = way.norm(way, x.reshape(*x.shape[:-1], GROUPS, -1)).reshape(x.shape)
    return made * p["scale"] + p["shift"]


def block(way, p, x, told):
    layer = way.layer
    scale, shift = jnp.split(layer.told(told), 2, -1)
    h = way.act(normed(way, p["norm"], layer.conv(p["first"], x)))
    h = h * (1.0 + scale) + shift
    h = way.act(normed(way, p["last"], layer.conv(p["second"], h)))
    return h + (c.linear(p["skip"], x) if "skip" in p else x)


def noise_in(way, p, x, level, obs):
    """In ``x[N, CHUNK, ACTIONS]``."""
    layer = way.layer

    def embedded(level):
        angles = level[:, None] * RATES
        return c.mlp(p["level"], jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1), way.act)

    level = embedded(jnp.arange(given.LEVELS))[level] if way.table else embedded(level)
    cond = way.act(c.linear(p["cond"], jnp.concatenate([level, obs], -1)))
    names = "one", "two", "middle", "three"
    joined = jax.tree.map(lambda *w: jnp.concatenate(w, -1), *(p[n]["told"] for n in names))
    ends = np.cumsum([p[n]["told"]["b"].size for n in names])[:-1]
    told = dict(zip(names, jnp.split(c.linear(joined, cond), ends, -1), strict=True))
    one = block(way, p["one"], layer.turned(x), told["one"])
    h = block(way, p["two"], layer.conv(p["down"], one, 2), told["two"])
    h = block(way, p["middle"], h, told["middle"])
    h = block(way, p["three"], jnp.concatenate([layer.grown(p["up"], h), one], -1), told["three"])
    return c.linear(p["out"], h)


def by_hand(length, batch, way, chunk=None, loop=True):
    """``chunk``: points after the others."""
    scale = 1.0 / (length * batch * CHUNK * ACTIONS)

    def loss(p, x):
        actions, going, obs, level, noise = x
        kept = jnp.asarray(KEPT)[level][:, None, None]
        noised = jnp.sqrt(kept) * actions + jnp.sqrt(1.0 - kept) * noise
        missed = noise_in(way, p, noised, level, obs) - way.layer.turned(noise)
        return scale * (way.layer.turned(going[..., None]) * missed**2).sum()

    def run(p, _, data, key):
        x = c.rows_of((*chunks_of(data), *drawn_for_all(length, batch, key)))
        if chunk is None:
            return jax.value_and_grad(loss)(p, x)
        if loop:
            return c.summed_gradient(loss, p, c.in_chunks(x, chunk))
        found = [jax.value_and_grad(loss)(p, tuple(v[i : i + chunk] for v in x)) for i in range(0, len(x[0]), chunk)]
        return functools.reduce(functools.partial(jax.tree.map, jnp.add), found)

    return run


def workload(length, batch, width, chunk=32):
    make = functools.partial(by_hand, length, batch)
    quick = lambda layer: Way(layer, one_pass, quick_mish)  # noqa: E731
    forms = {
        "rlfx": c.learner_by_rlfx(given.program, length, batch), "plain": given.plain(length, batch),
        "rows": make(Way()), "rows, quick": make(quick(Rows)), "patches, quick": make(quick(Patches)),
        "taps, quick": make(quick(Taps)), "time first, quick": make(quick(TimeFirst)),
        "whole products, quick": make(quick(Whole)),
        "whole products of halves, quick": make(quick(Mixed)),
        "time first, levels of a table": make(Way(TimeFirst, table=True)),
        f"rows, quick, {chunk} points": make(quick(Rows), chunk, loop=False),
        f"time first, quick, {chunk} points": make(quick(TimeFirst), chunk),
        f"patches, quick, {chunk} points": make(quick(Patches), chunk),
        f"whole products of halves, quick, {chunk} points": make(quick(Mixed), chunk),
        "time first, quick, threefry unrolled": make(quick(TimeFirst)),
        f"time first, quick, {chunk} points, threefry unrolled": make(quick(TimeFirst), chunk),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    told = c.episodes(k, size, OBS, 2)
    action = jnp.tanh(jnp.cumsum(0.4 * jax.random.normal(k[4], (*size, ACTIONS)), 0))
    data = {"obs": told["obs"], "action": action, "done": told["done"], "first": told["first"]}
    return drawing(forms, (params_of(k[5], width), None, data), tolerance=2e-5)
