"""Stream AC(lambda) by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_fourteenth import streaming
from benchmarks.untuned.sealed_fourteenth.streaming import (
    ACTIONS,
    ENTROPY,
    EPISODE,
    GAMMA,
    KAPPA,
    LAMBDA,
    OBS,
    SLOPE,
    begins,
    counted,
    deviation,
)  # fmt: skip

# -- how agents' weights lie: environments first, ``w[B, in, out]`` and ``x[B, in]``, or last, ``w[in, out, B]`` and ``x[in, B]``


class Layout(NamedTuple):
    axis: int  # of features
    times: Callable  # x and w: the layer's product
    back: Callable  # d and w: that of the way back
    outer: Callable  # x and d: the weights' gradient


def outer_first(x, d):
    return x[:, :, None] * d[:, None, :]


PRODUCTS = Layout(
    -1,
    lambda x, w: (x[:, None] @ w)[:, 0],
    lambda d, w: (w @ d[..., None])[..., 0],
    outer_first,
)
SUMS = Layout(-1, lambda x, w: (x[:, :, None] * w).sum(1), lambda d, w: (w * d[:, None]).sum(2), outer_first)
LAST = Layout(
    0, lambda x, w: (x[:, None] * w).sum(0), lambda d, w: (w * d[None]).sum(1), lambda x, d: x[:, None] * d[None]
)
#: Environments in the middle, ``w[in, B, out]`` and ``x[B, in]``.
MIDDLE = Layout(
    -1,
    lambda x, w: (x.T[:, :, None] * w).sum(0),
    lambda d, w: (w * d[None]).sum(2).T,
    lambda x, d: x.T[:, :, None] * d[None],
)


def laid(tree, layout):
    """Of what has environments first."""
    if layout is LAST:
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), tree)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1) if layout is MIDDLE and x.ndim == 3 else x, tree)


def relaid(tree, layout):
    if layout is LAST:
        return jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), tree)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0) if layout is MIDDLE and x.ndim == 3 else x, tree)


# -- networks, and their way back


def forwards(layers, x, layout, first=None):
    """Outputs, and what the way back needs; ``first``: the first product, where it is made."""
    kept = []
    for i, layer in enumerate(layers[:-1]):
        made = first if i == 0 and first is not None else layout.times(x, layer["w"]) + layer["b"]
        away = made - made.mean(layout.axis, keepdims=True)
        scale = jax.lax.rsqrt((away * away).mean(layout.axis, keepdims=True) + 1e-5)
        y = away * scale
        kept.append((x, y, scale))
        x = jnp.where(y >= 0.0, y, SLOPE * y)
    return layout.times(x, layers[-1]["w"]) + layers[-1]["b"], [*kept, (x, None, None)]


def backwards(layers, kept, d, layout):
    """Gradients of layers as pairs of which they are outer products: ``(x, d)``."""
    pairs = []
    for i in range(len(layers) - 1, -1, -1):
        pairs.append((kept[i][0], d))
        if i > 0:
            _, y, scale = kept[i - 1]
            d = layout.back(d, layers[i]["w"])
            d = jnp.where(y >= 0.0, d, SLOPE * d)
            d = scale * (d - d.mean(layout.axis, keepdims=True) - y * (d * y).mean(layout.axis, keepdims=True))
    return pairs[::-1]


def values_apart(layers, obs, after, layout, first=None):
    value, kept = forwards(layers, obs, layout, first)
    return value, forwards(layers, after, layout)[0], kept


def values_at_once(layers, obs, after, layout, first=None):
    """Both observations of an environment meet its weights in one product."""
    both = jnp.stack([obs, after], 1)
    values, kept = jax.vmap(lambda x: forwards(layers, x, layout), 1, 1)(both)
    take = lambda x, i: x[:, i]  # noqa: E731
    return take(values, 0), take(values, 1), jax.tree.map(lambda x: take(x, 0), kept)


# -- traces, and steps along them


def batch_axis(x, layout):
    if layout is LAST:
        return x.ndim - 1
    return 1 if layout is MIDDLE and x.ndim == 3 else 0


def along(x, size, layout):
    """Numbers of environments ``size[B]`` beside ``x``."""
    return size.reshape([-1 if i == batch_axis(x, layout) else 1 for i in range(x.ndim)])


def stepped(layers, traces, size, layout):
    return jax.tree.map(lambda w, z: w + along(w, size, layout) * z, layers, traces)


def traced(traces, pairs, decay, layout):
    """Traces with what was found added, and how long they are."""
    grads = [{"w": layout.outer(x, d), "b": d} for x, d in pairs]
    traces = jax.tree.map(lambda z, g: along(z, decay, layout) * z + g, traces, grads)
    over = lambda x: tuple(i for i in range(x.ndim) if i != batch_axis(x, layout))  # noqa: E731
    return traces, sum(jnp.abs(z).sum(over(z)) for z in jax.tree.leaves(traces))


# -- the whole loop


def of_environments(some, length, batch, chunk):
    """Of all at once, or of so many after the others."""

    def run(carry, key):
        keys = c.streams(key, batch, "action", "world")
        if chunk is None:
            return some(carry, keys)
        nets, out = jax.lax.map(lambda x: some(*x), c.in_chunks((carry, keys), chunk))
        back = lambda x: jnp.moveaxis(x, 0, 1).reshape(length, batch)  # noqa: E731
        return jax.tree.map(lambda x: x.reshape(batch, *x.shape[2:]), nets), jax.tree.map(back, out)

    return run


def by_hand(length, batch, layout=PRODUCTS, values=values_apart, joined=False, ahead=False, unroll=1, chunk=None):
    """``joined``: the first layers of both networks are one product; ``chunk``: so many environments after the others."""
    axis = layout.axis
    wide = (lambda x: x[:, None]) if axis == -1 else (lambda x: x[None])  # of environments, beside features

    def draw(keys, t):
        starts = jax.vmap(lambda k: jax.random.normal(k, (OBS,)))(c.at(keys[1], t))
        gumbels = jax.vmap(lambda k: jax.random.gumbel(k, (ACTIONS,)))(c.at(keys[0], t))
        return (starts, gumbels) if axis == -1 else (starts.T, gumbels.T)

    def step(carry, drawn):
        nets, world, (start, gumbel) = carry["nets"], carry["world"], drawn
        count, mean, squares = counted((wide(carry["seen"][0]), *carry["seen"][1:]), world["x"])
        scale = 1.0 / deviation((count, mean, squares))
        told = lambda x: (x - mean) * scale  # noqa: E731
        obs, first = told(world["x"]), (None, None)
        if joined:
            both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis if axis == -1 else -2), nets["pi"][0], nets["v"][0])
            first = jnp.split(layout.times(obs, both["w"]) + both["b"], 2, axis)
        logits, kept = forwards(nets["pi"], obs, layout, first[0])
        action = jnp.argmax(logits + gumbel, axis)
        pushed = 0.05 * (wide(action).astype(jnp.float32) - 1.5)
        x = jnp.tanh(0.95 * world["x"] + 0.1 * jnp.roll(world["x"], 1, axis) + pushed)
        terminated, counter = jnp.take(x, 0, axis) > 0.9, world["count"] + 1
        done, reward = terminated | (counter >= EPISODE), -jnp.mean(x * x, axis)
        gain = GAMMA * carry["gain"] + reward
        gains = counted(carry["gains"], gain)

        value, value_after, kept_v = values(nets["v"], obs, told(x), layout, first[1])
        following = GAMMA * jnp.where(terminated, 0.0, jnp.take(value_after, 0, axis))
        error = reward / deviation(gains) + following - jnp.take(value, 0, axis)
        log_p = jax.nn.log_softmax(logits, axis)
        chance = jnp.exp(log_p)
        away = log_p - (chance * log_p).sum(axis, keepdims=True)
        by_logits = jax.nn.one_hot(action, ACTIONS, axis=axis) - chance - wide(ENTROPY * jnp.sign(error)) * chance * away

        found = {
            "pi": backwards(nets["pi"], kept, by_logits, layout),
            "v": backwards(nets["v"], kept_v, jnp.ones_like(value), layout),
        }
        after, traces = {}, {}
        for name, pairs in found.items():
            traces[name], long = traced(carry["traces"][name], pairs, carry["decay"], layout)
            size = error / jnp.maximum(1.0, KAPPA[name] * jnp.maximum(jnp.abs(error), 1.0) * long)
            after[name] = stepped(nets[name], traces[name], size, layout)
        carry = {
            "world": {"x": jnp.where(wide(done), start, x), "count": jnp.where(done, 0, counter)},
            "nets": after, "traces": traces, "seen": (carry["seen"][0] + 1.0, mean, squares), "gains": gains,
            "gain": jnp.where(done, 0.0, gain), "decay": jnp.where(done, 0.0, GAMMA * LAMBDA),
        }  # fmt: skip
        return carry, {"error": error, "reward": reward}

    def some(carry, keys):
        """``decay``: a trace that begins anew is told so at the next timestep."""
        times = jnp.arange(length)
        carry = laid(carry, layout) | {"decay": jnp.full(len(carry["gain"]), GAMMA * LAMBDA)}
        if ahead:
            carry, out = jax.lax.scan(step, carry, jax.vmap(lambda t: draw(keys, t))(times), unroll=unroll)
        else:
            carry, out = jax.lax.scan(lambda carry, t: step(carry, draw(keys, t)), carry, times, unroll=unroll)
        return relaid(carry["nets"], layout), out

    return of_environments(some, length, batch, chunk)


def drawn_before(length, batch, chunk=None):
    """As usual, but that keys are made before the loop; ``chunk``: so many environments after the others."""

    def some(carry, keys):
        made = jax.vmap(lambda t: tuple(c.at(k, t) for k in keys))(jnp.arange(length))
        carry, out = jax.lax.scan(lambda carry, keys: jax.vmap(streaming.timestep)(carry, *keys), carry, made)
        return carry["nets"], out

    return of_environments(some, length, batch, chunk)


def workload(length, batch, hidden, chunk=8):
    make, both = functools.partial(by_hand, length, batch), {"values": values_at_once}
    ahead, joined = {"ahead": True}, {"joined": True}
    sums, last, middle, double = {"layout": SUMS}, {"layout": LAST}, {"layout": MIDDLE}, 2 * chunk
    forms = {
        "rlfx": streaming.by_rlfx(length, batch), "plain": streaming.plain(length, batch),
        "keys before": drawn_before(length, batch), f"keys before, {chunk} environments": drawn_before(length, batch, chunk),
        "products": make(), "products, both values": make(**both), "products, joined": make(**joined),
        "products, drawn ahead": make(**ahead), "products, both values, drawn ahead": make(**both, **ahead),
        "sums": make(**sums), "sums, drawn ahead": make(**sums, **ahead), "sums, joined": make(**sums, **joined),
        "environments last": make(**last), "environments last, both values": make(**last, **both),
        "environments last, drawn ahead": make(**last, **ahead),
        "environments middle": make(**middle), "environments middle, drawn ahead": make(**middle, **ahead),
        f"products, {chunk} environments": make(chunk=chunk), f"products, {double} environments": make(chunk=double),
        f"sums, {chunk} environments": make(chunk=chunk, **sums),
        f"environments last, {double}": make(chunk=double, **last), "products, one environment": make(chunk=1),
        "products, unrolled by 2": make(unroll=2), "products, threefry unrolled": make(),
        "products, drawn ahead, threefry unrolled": make(**ahead),
        "products, both values, drawn ahead, threefry unrolled": make(**ahead, **both),
        "sums, drawn ahead, threefry unrolled": make(**sums, **ahead),
        "environments last, drawn ahead, threefry unrolled": make(**last, **ahead),
        "environments middle, drawn ahead, threefry unrolled": make(**middle, **ahead),
        f"products, drawn ahead, {chunk} environments, threefry unrolled": make(chunk=chunk, **ahead),
        f"products, joined, {double} environments, threefry unrolled": make(chunk=double, **joined),
        "products, joined, threefry unrolled": make(**joined),
        "products, joined, drawn ahead, threefry unrolled": make(**joined, **ahead),
        "products, both values, threefry unrolled": make(**both),
    }  # fmt: skip
    return drawing(forms, (begins(jax.random.key(0), batch, hidden),), tolerance=1e-4)
