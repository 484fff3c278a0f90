"""Temporal cycle consistency by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.untuned import common as c
from benchmarks.untuned.halved import deep, multiplied
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_nineteenth import cycles as given
from benchmarks.untuned.sealed_nineteenth.cycles import (
    CHANNELS,
    CODE,
    LEAST,
    SPREAD,
    TEMPERATURE,
    conv,
    params_of,
    relu,
)

SHARP = 2.0 / (CODE * TEMPERATURE)  # of products of codes

# -- losses ``[pairs, T]`` of codes ``[pairs, T, CODE]``, summed


def differences(mine, theirs):
    """As usual, of all pairs."""
    times = jnp.arange(mine.shape[1]) / mine.shape[1]
    far = lambda a, b: ((a[:, :, None] - b[:, None]) ** 2).mean(-1)  # noqa: E731
    found = jax.nn.softmax(-far(mine, theirs) / TEMPERATURE) @ theirs
    share = jax.nn.softmax(-far(found, mine) / TEMPERATURE)
    return given.missed(share, times, times).sum()


def likeness(a, b, both=None):
    """What a softmax over b's timesteps cannot tell from negative distances: products, and lengths of b."""
    both = a @ b.mT if both is None else both
    return SHARP * (both - 0.5 * (b**2).sum(-1)[:, None])


def products(mine, theirs, both=None):
    """``both``: the products of mine and theirs, if there are any."""
    times = jnp.arange(mine.shape[1]) / mine.shape[1]
    found = jax.nn.softmax(likeness(mine, theirs, both)) @ theirs
    return given.missed(jax.nn.softmax(likeness(found, mine)), times, times).sum()


def moments(mine, theirs, both=None):
    """Softmax is divided after the products with codes and with times, of which the squares are beside; times from now on."""
    length = mine.shape[1]
    times = np.arange(length, dtype=np.float32) / length
    score = likeness(mine, theirs, both)
    share = jnp.exp(score - jax.lax.stop_gradient(score.max(-1, keepdims=True)))
    found = (share @ theirs) / share.sum(-1, keepdims=True)
    score = likeness(found, mine)
    share = jnp.exp(score - jax.lax.stop_gradient(score.max(-1, keepdims=True)))
    centred = times - times.mean()
    told = share @ np.stack([np.ones_like(times), centred, centred**2], -1)
    where, square = told[..., 1] / told[..., 0], told[..., 2] / told[..., 0]
    spread = square - where**2 + LEAST
    return ((where - centred) ** 2 / spread + SPREAD * jnp.log(spread)).sum()


@jax.custom_vjp
def written_out(mine, theirs):
    """With its derivative."""
    return ahead(mine, theirs)[0]


def ahead(mine, theirs):
    length = mine.shape[1]
    times = np.arange(length, dtype=np.float32) / length
    first = jax.nn.softmax(likeness(mine, theirs))
    found = first @ theirs
    second = jax.nn.softmax(likeness(found, mine))
    off = times - (second * times).sum(-1, keepdims=True)
    spread = (second * off**2).sum(-1) + LEAST
    error = -jnp.diagonal(off, axis1=-2, axis2=-1)  # where it comes back to, from now
    value = (error**2 / spread + SPREAD * jnp.log(spread)).sum()
    return value, (mine, theirs, first, found, second, off, spread, error)


def back(kept, by):
    mine, theirs, first, found, second, off, spread, error = kept
    by_error = 2.0 * error / spread
    by_spread = (SPREAD - error**2 / spread) / spread
    # the mean moves nothing of the variance; what a softmax is told is centred, as are the offsets
    square = off**2 - (spread - LEAST)[..., None]
    by_score = (by * SHARP) * second * (by_error[..., None] * off + by_spread[..., None] * square)
    by_mine = by_score.mT @ found - by_score.sum(-2)[..., None] * mine
    by_found = by_score @ mine
    by_first = SHARP * first * (by_found @ theirs.mT - (by_found * found).sum(-1, keepdims=True))
    by_theirs = first.mT @ by_found + by_first.mT @ mine - by_first.sum(-2)[..., None] * theirs
    return by_mine + by_first @ theirs, by_theirs


written_out.defvjp(ahead, back)


def each_way(way, one, other):
    return way(one, other) + way(other, one)


def at_once(way, one, other):
    """Both ways are one batch."""
    return way(jnp.concatenate([one, other]), jnp.concatenate([other, one]))


def shared(way, one, other):
    """The products of the first comparison are those of both ways."""
    both = one @ other.mT
    return way(one, other, both) + way(other, one, both.mT)


class Way(NamedTuple):
    conv: Any = conv
    second: Any = conv
    cycle: Any = products
    ways: Any = each_way
    apart: bool = False  # the two videos are not seen as one batch


def codes_of(way, p, frames):
    """Of ``frames[N, side, side, CHANNELS]``."""
    x = relu(way.second(p["b"], relu(way.conv(p["a"], frames))))
    return relu(c.linear(p["hidden"], x.reshape(len(x), -1))) @ p["code"]


def by_hand(length, batch, way, chunk=None, loop=False):
    """``chunk``: pairs after the others; ``loop``: by a loop, in which convolutions may be slow."""

    def loss(p, x):
        one, other = x  # [pairs, T, ...]
        if way.apart:
            codes = [codes_of(way, p, v.reshape(-1, *v.shape[2:])) for v in x]
        else:
            codes = jnp.split(codes_of(way, p, jnp.concatenate([v.reshape(-1, *v.shape[2:]) for v in x])), 2)
        one, other = (v.reshape(-1, length, CODE) for v in codes)
        return way.ways(way.cycle, one, other) / (2 * length * batch)

    def run(p, data):
        x = tuple(jnp.moveaxis(data[name], 0, 1) for name in ("one", "other"))
        if chunk is None:
            return jax.value_and_grad(loss)(p, x)
        if loop:
            return c.summed_gradient(loss, p, c.in_chunks(x, chunk))
        found = [jax.value_and_grad(loss)(p, tuple(v[i : i + chunk] for v in x)) for i in range(0, batch, chunk)]
        return functools.reduce(functools.partial(jax.tree.map, jnp.add), found)

    return run


def workload(length, batch, side, hidden, chunk=2):
    make = functools.partial(by_hand, length, batch)
    patches, mixed = Way(multiplied, multiplied, written_out), Way(multiplied, cycle=written_out)
    forms = {
        "rlfx": given.by_rlfx(length, batch), "plain": given.plain(length, batch),
        "one batch of frames": make(Way(cycle=differences)), "products": make(Way()),
        "products, videos apart": make(Way(apart=True)),
        "moments": make(Way(cycle=moments)), "moments, both ways shared": make(Way(cycle=moments, ways=shared)),
        "written out": make(Way(cycle=written_out)),
        "written out, both ways at once": make(Way(cycle=written_out, ways=at_once)),
        "patches, written out": make(patches), "patches, then convolved, written out": make(mixed),
        "to depth, written out": make(Way(deep, deep, written_out)),
        f"products, {chunk} pairs": make(Way(), chunk), f"moments, {chunk} pairs": make(Way(cycle=moments), chunk),
        f"written out, {chunk} pairs": make(Way(cycle=written_out), chunk),
        f"written out, videos apart, {chunk} pairs": make(Way(cycle=written_out, apart=True), chunk),
        f"patches, then convolved, written out, {chunk} pairs": make(mixed, chunk),
        f"patches, written out, {chunk} pairs in a loop": make(patches, chunk, loop=True),
        "patches, written out, a pair in a loop": make(patches, 1, loop=True),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 4)
    size = length, batch, side, side, CHANNELS
    # frames of a video change slowly, and two videos are of one task
    task = jnp.cumsum(jax.random.normal(k[0], size), 0) / length**0.5
    data = {"one": task + 0.5 * jax.random.normal(k[1], size), "other": task + 0.5 * jax.random.normal(k[2], size)}
    return Workload(forms, (params_of(k[3], side, hidden), data), tolerance=2e-5)
