"""Latent actions by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.halved import deep, multiplied
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_eighteenth import latent_actions as given
from benchmarks.untuned.sealed_eighteenth.latent_actions import (
    CHANNELS,
    CODE,
    COMMIT,
    FIRST,
    GROUPS,
    around,
    conv,
    grown,
    params_of,
    quantised,
    relu,
)  # fmt: skip

# -- twice as many pixels


def in_blocks(x):
    """``[N, 2 * rows, 2 * columns, features]`` as ``[N, rows, columns, 2, 2, features]``."""
    n, rows, columns, _ = x.shape
    return jnp.moveaxis(x.reshape(n, rows // 2, 2, columns // 2, 2, -1), 2, 3)


def apart(x):
    """``[N, rows, columns, 2, 2, features]`` as ``[N, 2 * rows, 2 * columns, features]``."""
    n, rows, columns = x.shape[:3]
    return jnp.moveaxis(x, 3, 2).reshape(n, 2 * rows, 2 * columns, -1)


def folded(p):
    """Weights ``[2, 2, features, 4 * outputs]`` of four pixels."""
    w = p["w"]
    w = jnp.stack([w[0], jnp.zeros_like(w[0]), w[2], w[1]])
    w = jnp.stack([w[:, 0], jnp.zeros_like(w[:, 0]), w[:, 2], w[:, 1]], 1)
    w = w.reshape(2, 2, 2, 2, *w.shape[2:])
    return jnp.moveaxis(w, (1, 3), (3, 4)).reshape(2, 2, w.shape[-2], -1)


def in_fours(p, x):
    """A convolution of two by two, which gives four pixels of every one: ``[N, rows, columns, 2, 2, outputs]``."""
    made = jax.lax.conv_general_dilated(x, folded(p), (1, 1), ((1, 0), (1, 0)), dimension_numbers=given.LAYOUT)
    return made.reshape(*made.shape[:3], 2, 2, -1) + p["b"]


def without_zeros(p, x):
    return apart(in_fours(p, x))


def summed(p, x):
    """One product for all nine weights, and then sums."""
    made = (x @ jnp.moveaxis(p["w"], 2, 0).reshape(x.shape[-1], -1)).reshape(*x.shape[:3], 3, 3, -1)
    before = lambda x, axis: jnp.roll(jnp.pad(x, [(0, int(i == axis)) for i in range(5)]), 1, axis)  # noqa: E731
    even = lambda x, axis: (  # noqa: E731
        jax.lax.slice_in_dim(before(x[0], axis), 0, x[0].shape[axis], axis=axis) + x[2]
    )
    rows = [made[:, :, :, i] for i in range(3)]  # [N, rows, columns, 3, features]
    rows = jnp.stack([even(rows, 1), rows[1]], 3)  # [N, rows, columns, 2, 3, features]
    of = [rows[:, :, :, :, i] for i in range(3)]
    return apart(jnp.stack([even(of, 2), of[1]], 4)) + p["b"]


# -- the first layers: of all three networks ``[N, side // 2, side // 2, FIRST]``, of three frames ``[N, side, side, 9]``


def stacked(way, p, frames):
    pair = frames[..., : 2 * CHANNELS]
    a = {name: p[name]["see"]["a"] for name in ("inverse", "forward", "policy")}
    return way.conv(a["inverse"], frames), way.conv(a["forward"], pair), way.conv(a["policy"], pair)


def joined(way, p, frames):
    """One of both that see two frames, and one of three."""
    both = jax.tree.map(lambda *w: jnp.concatenate(w, -1), *(p[name]["see"]["a"] for name in ("forward", "policy")))
    made = jnp.split(way.conv(both, frames[..., : 2 * CHANNELS]), 2, -1)
    return way.conv(p["inverse"]["see"]["a"], frames), *made


def all_joined(way, p, frames):
    """One of three frames: of the last one, two networks have weights of zero."""
    pad = lambda w: jnp.pad(w, ((0, 0), (0, 0), (0, CHANNELS), (0, 0)))  # noqa: E731
    kernels = [p[name]["see"]["a"] for name in ("inverse", "forward", "policy")]
    w = jnp.concatenate([kernels[0]["w"], *(pad(k["w"]) for k in kernels[1:])], -1)
    every = {"w": w, "b": jnp.concatenate([k["b"] for k in kernels])}
    return jnp.split(way.conv(every, frames), 3, -1)


def once(way, p, data):
    """Every frame of ``[T, B]`` is convolved once with all weights, and what comes of it is added where it is seen."""
    a = {name: p[name]["see"]["a"] for name in ("inverse", "forward", "policy")}
    parts = [jnp.split(a[name]["w"], n, 2) for name, n in (("inverse", 3), ("forward", 2), ("policy", 2))]
    (i0, i1, i2), (f0, f1), (p0, p1) = parts
    w = jnp.concatenate([i0, f0, p0, i1, f1, p1, i2], -1)
    made = way.conv({"w": w, "b": jnp.zeros(w.shape[-1])}, c.rows_of(data["frame"]))
    before, now, after = jnp.split(made, [3 * FIRST, 6 * FIRST], -1)
    batch, first = data["first"].shape[1], data["first"].reshape(-1, 1, 1, 1)
    earlier = jnp.pad(before[:-batch], ((batch, 0), (0, 0), (0, 0), (0, 0)))
    later = jnp.pad(after[batch:], ((0, batch), (0, 0), (0, 0), (0, 0)))
    both = now + jnp.where(first, before, earlier) + jnp.concatenate([a[n]["b"] for n in a])
    inverse, forward, policy = jnp.split(both, 3, -1)
    return inverse + later, forward, policy


# -- codes of ``z[N, GROUPS * CODE]``


def by_products(book, z):
    """Distances by a product, codes by another one; both costs have the same value."""
    z = z.reshape(-1, CODE)
    far = 0.5 * (book**2).sum(-1) - stop_gradient(z) @ book.T
    code = jax.nn.one_hot(jnp.argmin(far, -1), len(book)) @ book
    moved = code - z
    cost = (stop_gradient(z) - code) ** 2 + COMMIT * (z - stop_gradient(code)) ** 2
    code = z + stop_gradient(moved)
    return code.reshape(-1, GROUPS * CODE), cost.reshape(-1, GROUPS * CODE).mean(-1)


class Way(NamedTuple):
    conv: Any = conv
    second: Any = conv
    grown: Any = grown
    first: Any = stacked
    book: Any = quantised
    fours: Any = None  # the last layer, if what it tells is compared as four pixels of every one


def losses(way, p, seen, frames, done):
    """Of rows, summed; ``seen``: what the first layers are given, of ``frames[N, side, side, 9]``."""
    inverse, forward, policy = (relu(x) for x in way.first(way, p, seen))
    told = {}
    for name, x in (("inverse", inverse), ("policy", policy)):
        x = relu(way.second(p[name]["see"]["b"], x))
        told[name] = c.mlp(p[name]["tell"], x.reshape(len(x), -1), relu)
    code, cost = way.book(p["book"], told["inverse"])
    x = relu(way.second(p["forward"]["see"]["b"], forward))
    x = relu(x + c.linear(p["forward"]["code"], code).reshape(x.shape))
    x = relu(way.grown(p["forward"]["up"], x))
    _, now, after = jnp.split(frames, 3, -1)
    if way.fours:
        missed = way.fours(p["forward"]["out"], x) - in_blocks(after - now)
    else:
        missed = now + way.grown(p["forward"]["out"], x) - after
    error = (missed**2).reshape(len(missed), -1).mean(-1)
    cloned = ((told["policy"] - stop_gradient(code)) ** 2).mean(-1)
    return jnp.where(done, 0.0, error + cost + cloned).sum()


def by_hand(length, batch, way, chunk=None):
    """``chunk``: points after the others, not in a loop, in which convolutions are slow."""

    def run(p, data):
        before, after = around(data)
        frames, done = c.rows_of((jnp.concatenate([before, data["frame"], after], -1), data["done"]))

        def loss(p, x):
            frames, done = x
            return losses(way, p, data if way.first is once else frames, frames, done) / (length * batch)

        if chunk is None:
            return jax.value_and_grad(loss)(p, (frames, done))
        found = [jax.value_and_grad(loss)(p, (frames[i : i + chunk], done[i : i + chunk])) for i in range(0, len(done), chunk)]
        return functools.reduce(functools.partial(jax.tree.map, jnp.add), found)

    return run


def workload(length, batch, side, hidden, chunk=64):
    make = functools.partial(by_hand, length, batch)
    patches = Way(multiplied, multiplied, without_zeros)
    best = Way(grown=without_zeros, first=joined, book=by_products, fours=in_fours)
    forms = {
        "rlfx": given.by_rlfx(length, batch), "plain": given.plain(length, batch),
        "two joined": make(Way(first=joined)), "frames once": make(Way(first=once)),
        "without zeros": make(Way(grown=without_zeros)), "summed": make(Way(grown=summed)),
        "two joined, without zeros, codes by products": make(Way(grown=without_zeros, first=joined, book=by_products)),
        "to depth, without zeros": make(Way(deep, deep, without_zeros)),
        "patches, without zeros": make(patches),
        "patches, two joined, without zeros": make(patches._replace(first=joined)),
        "two joined, fours": make(best),
        "all joined, fours": make(best._replace(first=all_joined)), "stacked, fours": make(best._replace(first=stacked)),
        f"two joined, fours, {chunk} points": make(best, chunk),
        f"patches, two joined, {chunk} points": make(patches._replace(first=joined), chunk),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    told = c.episodes(k, (length, batch), 1, 2)
    frame = jax.random.uniform(k[4], (length, batch, side, side, CHANNELS))
    data = {"frame": frame, "first": told["first"], "done": told["done"]}
    return Workload(forms, (params_of(k[5], side, hidden), data), tolerance=2e-5)
