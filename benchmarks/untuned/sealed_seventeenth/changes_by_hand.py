"""Pixel control by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_seventeenth import changes
from benchmarks.untuned.sealed_seventeenth.changes import (
    ACTIONS,
    CHANNELS,
    CONTROL,
    DEPTH,
    OF_CHANGES,
    acted,
    cells_of,
    changed,
    params_of,
    to_come,
)

LAYOUT = ("NHWC", "HWIO", "NHWC")
relu = jax.nn.relu


def dense(layer, x):
    return x @ layer["kernel"] + layer["bias"]


def convolved(x, w, stride):
    return jax.lax.conv_general_dilated(x, w, (stride, stride), "VALID", dimension_numbers=LAYOUT)


# -- convolutions of frames ``[N, side, side, CHANNELS]``: features ``[N, features]``


def strided(p, frames):
    x = relu(convolved(frames, p["first"]["kernel"], 2) + p["first"]["bias"])
    return relu(convolved(x, p["second"]["kernel"], 2) + p["second"]["bias"]).reshape(len(frames), -1)


def to_depth(x):
    """Two by two pixels as features of one."""
    n, rows, columns, features = x.shape
    x = jnp.moveaxis(x.reshape(n, rows // 2, 2, columns // 2, 2, features), 2, 3)
    return x.reshape(n, rows // 2, columns // 2, 4 * features)


def deep(p, frames):
    """The first one of half as many pixels, without a stride."""
    w = p["first"]["kernel"]
    w = jnp.moveaxis(w.reshape(2, 2, 2, 2, CHANNELS, -1), 1, 2).reshape(2, 2, 4 * CHANNELS, -1)
    x = relu(convolved(to_depth(frames), w, 1) + p["first"]["bias"])
    return relu(convolved(x, p["second"]["kernel"], 2) + p["second"]["bias"]).reshape(len(frames), -1)


def unfolded(x, size):
    """Patches of two strides, ``[N, rows, columns, size * size * features]``."""
    out = (x.shape[1] - size) // 2 + 1
    cut = lambda i, j: x[:, i : i + 2 * out - 1 : 2, j : j + 2 * out - 1 : 2]  # noqa: E731
    return jnp.concatenate([cut(i, j) for i in range(size) for j in range(size)], -1)


def multiplied(p, frames):
    """As products of patches."""
    x = frames
    for name, size in (("first", 4), ("second", 3)):
        w = p[name]["kernel"]
        x = relu(unfolded(x, size) @ w.reshape(-1, w.shape[-1]) + p[name]["bias"])
    return x.reshape(len(frames), -1)


# -- from grids ``[N, small, small, DEPTH]``: action values ``[N, cells, cells, ACTIONS]``, or those of what was done


def folded(p):
    """Both transposed convolutions as one: a base, and how much better than the mean."""
    better = p["better"]["kernel"], p["better"]["bias"]
    return tuple(
        p["base"][name] + x - x.mean(-1, keepdims=True)
        for name, x in zip(("kernel", "bias"), better, strict=True)
    )  # fmt: skip


def transposed(w, grid):
    return jax.lax.conv_transpose(grid, w, (2, 2), "VALID", dimension_numbers=LAYOUT)


def both_transposed(p, grid):
    base = transposed(p["base"]["kernel"], grid) + p["base"]["bias"]
    better = transposed(p["better"]["kernel"], grid) + p["better"]["bias"]
    return base + better - better.mean(-1, keepdims=True)


def one_transposed(p, grid):
    w, b = folded(p)
    return transposed(w, grid) + b


def without_zeros(p, grid):
    """A convolution of two by two to four cells each, which are put where they belong."""
    w, b = folded(p)
    w = jnp.moveaxis(w.reshape(2, 2, 2, 2, DEPTH, ACTIONS)[:, ::-1, :, ::-1], (1, 3), (3, 4))
    grid = jnp.pad(grid, ((0, 0), (1, 1), (1, 1), (0, 0)))
    made = convolved(grid, w.reshape(2, 2, DEPTH, -1), 1)
    return apart(made.reshape(*made.shape[:3], 2, 2, ACTIONS)) + b


def apart(x):
    """``[N, rows, columns, 2, 2, ...]`` as ``[N, 2 * rows, 2 * columns, ...]``."""
    n, rows, columns = x.shape[:3]
    return jnp.moveaxis(x, 3, 2).reshape(n, 2 * rows, 2 * columns, *x.shape[5:])


def spread(p, grid):
    """What every place of a grid gives to its four by four cells, ``[N, small, small, 2, 2, 2, 2, ACTIONS]``; one product."""
    w, b = folded(p)
    w = jnp.moveaxis(w[::-1, ::-1], 2, 0).reshape(DEPTH, -1)
    return (grid @ w).reshape(*grid.shape[:3], 2, 2, 2, 2, ACTIONS), b


def gathered(made):
    """Summed where they overlap, of ``[N, small, small, 2, 2, 2, 2, ...]``: rows of pairs, of cells, and columns likewise."""
    none, total = ((0, 0),) * (made.ndim - 5), 0.0
    for i in range(2):
        for j in range(2):
            part = made[:, :, :, i, :, j]
            total = total + jnp.pad(part, ((0, 0), (i, 1 - i), (j, 1 - j), *none))
    return apart(total)


def summed(p, grid):
    made, b = spread(p, grid)
    return gathered(made) + b


def picked(of):
    """Values of what was done ``action[N]``, and all of the last frames."""

    def run(p, grid, action, last):
        control = of(p, grid)
        return (control * jax.nn.one_hot(action, ACTIONS)[:, None, None]).sum(-1), control[-last:].max(-1)

    return run


def chosen_first(p, grid, action, last):
    """What was done is chosen before sums are made."""
    made, b = spread(p, grid)
    chosen = (made * jax.nn.one_hot(action, ACTIONS)[:, None, None, None, None, None, None]).sum(-1)
    return gathered(chosen) + b[action][:, None, None], (gathered(made[-last:]) + b).max(-1)


# -- targets, of ``[T, B, cells, cells]``


def as_product(data, best):
    """One product of a matrix of discounts of every environment, for all cells."""
    frame, going = data["frame"], 1.0 - data["done"].astype(jnp.float32)
    length, cells = len(frame), best.shape[-1]
    change = changed(frame[:-1], frame[1:]).reshape(length - 1, -1, cells**2)
    ended = jnp.cumsum(1.0 - going, 0) - (1.0 - going)  # before t
    after = jnp.arange(length)[None] - jnp.arange(length)[:, None]  # [t, s]
    alone = ended[None] == ended[:, None]
    weights = jnp.where((after >= 0)[..., None] & alone, OF_CHANGES ** jnp.maximum(after, 0)[..., None], 0.0) * going
    by_change = jnp.concatenate([change, OF_CHANGES * best.reshape(1, -1, cells**2)])
    return jnp.einsum("tsb,sbc->tbc", weights, by_change).reshape(length, -1, cells, cells)


# -- what is learnt


class Way(NamedTuple):
    seen: Any
    control: Any
    heads: bool = False  # all products of the torso are one
    targets: Any = to_come
    again: bool = False  # convolutions are made again for the gradient


def network(way, p, data, last):
    frames = c.rows_of(data["frame"])
    small = cells_of(frames.shape[1])[1]
    seen = jax.checkpoint(way.seen) if way.again else way.seen
    x = relu(dense(p["torso"], seen(p, frames)))
    if way.heads:
        joined = {name: jnp.concatenate([p[n][name] for n in ("grid", "pi", "v")], -1) for name in ("kernel", "bias")}
        grid, logits, value = jnp.split(dense(joined, x), [small**2 * DEPTH, small**2 * DEPTH + ACTIONS], -1)
    else:
        grid, logits, value = (dense(p[name], x) for name in ("grid", "pi", "v"))
    grid = relu(grid).reshape(-1, small, small, DEPTH)
    return logits, value[..., 0], *way.control(p, grid, data["action"].reshape(-1), last)


def by_hand(length, batch, way, chunk=None):
    """``chunk``: environments after the others."""
    scale = 1.0 / (length * batch)

    def loss(p, x):
        data, _ = x
        size = data["action"].shape
        logits, value, chosen, best = network(way, p["params"], data, size[1])
        target = way.targets(data, stop_gradient(best))
        controlled = CONTROL * 0.5 * ((chosen.reshape(target.shape) - target) ** 2).sum()
        return scale * (acted(logits.reshape(*size, -1), value.reshape(size), data) + controlled)

    learn = c.gradient_by_environments(loss, chunk)
    return lambda p, data: learn(p, data, jnp.zeros(batch))


def workload(length, batch, side, hidden, chunk=4):
    make = functools.partial(by_hand, length, batch)
    first, product = Way(strided, chosen_first, heads=True), Way(multiplied, chosen_first, heads=True)
    forms = {
        "rlfx": changes.by_rlfx(length, batch, hidden), "plain": changes.plain(length, batch, hidden),
        "two transposed": make(Way(strided, picked(both_transposed))),
        "one transposed": make(Way(strided, picked(one_transposed))),
        "without zeros": make(Way(strided, picked(without_zeros))), "summed": make(Way(strided, picked(summed))),
        "chosen first": make(Way(strided, chosen_first)), "chosen first, heads joined": make(first),
        "chosen first, targets by a product": make(first._replace(targets=as_product)),
        "chosen first, to depth": make(first._replace(seen=deep)), "chosen first, patches": make(product),
        "chosen first, again": make(first._replace(again=True)),
        f"chosen first, patches, {chunk} environments": make(product, chunk),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 5)
    size = length, batch
    data = {
        "frame": jax.random.uniform(k[0], (*size, side, side, CHANNELS)), "reward": jax.random.normal(k[1], size),
        "action": jax.random.randint(k[2], size, 0, ACTIONS), "done": jax.random.uniform(k[3], size) < 0.05,
    }  # fmt: skip
    return Workload(forms, (params_of(k[4], side, hidden), data), tolerance=2e-5)
