"""Neural bandits that are sure of little by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_twentieth import confident as given
from benchmarks.untuned.sealed_twentieth.confident import (
    ARMS,
    BONUS,
    CONTEXT,
    NOISE,
    bandits_of,
    params_of,
    relu,
    unit,
)  # fmt: skip

# -- of arms ``x[..., CONTEXT]``: their worth, and what their slopes are made of: inputs of layers, and slopes of their outputs


def parts_of(p, x):
    first, second, last = p
    h = relu(c.linear(first, x))
    g = relu(c.linear(second, h))
    by_g = jnp.where(g > 0.0, last["w"][:, 0], 0.0)
    by_h = jnp.where(h > 0.0, by_g @ second["w"].T, 0.0)
    return c.linear(last, g)[..., 0], (x, h, g, by_h, by_g)


def squares(parts):
    """Of slopes, by layer: ``[..., rows]`` and ``[..., columns]``, whose products are those of weights."""
    x, h, g, by_h, by_g = (a * a for a in parts)
    return (x, by_h), (h, by_g), (g, jnp.ones_like(g[..., :1]))


def gradient(parts, error):
    """Of what is learnt, of chosen arms ``[N, ...]``."""
    x, h, g, by_h, by_g = parts
    e = error[:, None]
    return [
        {"w": x.T @ (e * by_h), "b": (e * by_h).sum(0)}, {"w": h.T @ (e * by_g), "b": (e * by_g).sum(0)},
        {"w": g.T @ e, "b": e.sum(0)},
    ]  # fmt: skip


# -- what is unsure of arms, ``[B, ARMS]``, of ``seen`` of a batch; and what is seen after an arm


def by_products(pairs, seen):
    """Rows by weights by columns: batches of products."""
    total = 0.0
    for (rows, columns), s in zip(pairs, seen, strict=True):
        through = rows @ (1.0 / s["w"]) + (1.0 / s["b"])[:, None]
        total = total + (through * columns).sum(-1)
    return total


def by_sums(pairs, seen):
    """Without products: sums over all parameters."""
    total = 0.0
    for (rows, columns), s in zip(pairs, seen, strict=True):
        inverse = 1.0 / s["w"]
        through = (rows[..., None] * inverse[:, None]).sum(-2) + (1.0 / s["b"])[:, None]
        total = total + (through * columns).sum(-1)
    return total


def whole(pairs, seen):
    """Biases as one more row, so that there is one product of a layer."""
    total = 0.0
    for (rows, columns), s in zip(pairs, seen, strict=True):
        inverse = 1.0 / jnp.concatenate([s["w"], s["b"][:, None]], 1)
        rows = jnp.concatenate([rows, jnp.ones_like(rows[..., :1])], -1)
        total = total + ((rows @ inverse) * columns).sum(-1)
    return total


def added(seen, pairs):
    """``pairs`` of the chosen arm."""
    one = lambda s, pair: {"w": s["w"] + pair[0][..., None] * pair[1][..., None, :], "b": s["b"] + pair[1]}  # noqa: E731
    return [one(s, pair) for s, pair in zip(seen, pairs, strict=True)]


def chosen(tree, arm):
    """Of ``[B, ARMS, ...]``."""
    return jax.tree.map(lambda x: jnp.take_along_axis(x, arm.reshape(-1, *(1,) * (x.ndim - 1)), 1)[:, 0], tree)


def picked(tree, arm):
    """The same without indices."""
    here = arm[:, None] == jnp.arange(ARMS)
    return jax.tree.map(lambda x: jnp.where(here.reshape(*here.shape, *(1,) * (x.ndim - 2)), x, 0).sum(1), tree)


class Way(NamedTuple):
    unsure: Any = by_products
    choose: Any = chosen
    ahead: str = ""  # what comes before the loop: "drawn", or "all" but what is seen
    again: bool = False  # what is learnt has its own forward pass
    envs: int | None = None  # bandits after the others
    block: int | None = None  # so many timesteps come before the loop


def by_hand(length, batch, way):
    def run(p, bandits, key):
        def drawn(keys, t):
            arms = unit(jax.vmap(lambda k: jax.random.normal(k, (ARMS, CONTEXT)))(c.at(keys[0], t)))
            return arms, NOISE * jax.vmap(jax.random.normal)(c.at(keys[1], t))

        def found(task, arms, noise):
            value, parts = parts_of(p, arms)
            rewards = jnp.cos(3.0 * jnp.einsum("...ai,...i->...a", arms, task)) + noise[..., None]
            return value, parts, rewards

        def acted(x):
            bandits, *keys = x
            task, times = bandits["task"], jnp.arange(length)
            draw = functools.partial(drawn, keys)

            def body(seen, x):
                if way.ahead != "all":
                    x = found(task, *(x if way.ahead else draw(x)))
                value, parts, rewards = x
                pairs = squares(parts)
                arm = jnp.argmax(value + BONUS * jnp.sqrt(way.unsure(pairs, seen)), -1)
                parts, value, reward = way.choose((parts, value, rewards), arm)
                return added(seen, squares(parts)), ((parts[0] if way.again else parts), value, reward)

            def some(seen, times):
                x = jax.vmap(draw)(times) if way.ahead else times
                x = found(task, *x) if way.ahead == "all" else x
                return jax.lax.scan(body, seen, x)

            if way.block is None:
                seen, told = some(bandits["seen"], times)
            else:
                seen, told = jax.lax.scan(some, bandits["seen"], c.in_chunks(times, way.block))
                told = c.rows_of(told)
            return {"task": task, "seen": seen}, told

        given_ = bandits, *c.streams(key, batch, "arms", "noise")
        bandits, told = c.acted_by_environments(acted, given_, length, way.envs)
        parts, value, reward = c.rows_of(told)
        if way.again:
            loss = lambda p: (0.5 * (c.mlp(p, parts, relu)[:, 0] - reward) ** 2).mean()  # noqa: E731
            return *jax.value_and_grad(loss)(p), bandits
        error = value - reward
        return 0.5 * (error**2).mean(), gradient(parts, error / (length * batch)), bandits

    return run


def workload(length, batch, hidden, envs=8, block=8):
    make, best = functools.partial(by_hand, length, batch), Way(ahead="all")
    forms = {
        "rlfx": c.by_rlfx(given.program, length, batch), "plain": given.plain(length, batch),
        "products, learnt again": make(Way(again=True)), "products, slopes kept": make(Way()),
        "slopes kept, drawn ahead": make(Way(ahead="drawn")), "all ahead": make(best),
        "all ahead, sums": make(best._replace(unsure=by_sums)), "biases joined": make(Way(whole)),
        "slopes kept, picked": make(Way(choose=picked)), f"slopes kept, {envs} bandits": make(Way(envs=envs)),
        f"all ahead, blocks of {block}": make(best._replace(block=block)),
        "products, slopes kept, threefry unrolled": make(Way()), "all ahead, threefry unrolled": make(best),
        "slopes kept, drawn ahead, threefry unrolled": make(Way(ahead="drawn")),
        f"all ahead, blocks of {block}, threefry unrolled": make(best._replace(block=block)),
        f"slopes kept, {envs} bandits, threefry unrolled": make(Way(envs=envs)),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0))
    p = params_of(k[0], hidden)
    return drawing(forms, (p, bandits_of(k[1], p, batch)), tolerance=2e-5)
