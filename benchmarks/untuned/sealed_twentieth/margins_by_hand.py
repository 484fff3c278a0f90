"""Safe control by an epigraph by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_twentieth import margins as given
from benchmarks.untuned.sealed_twentieth.margins import (
    ACTIONS,
    CENTRES,
    DT,
    ENTROPY,
    EPISODE,
    FORCES,
    GAMMA,
    LAMBDA,
    RADII,
    params_of,
    reset,
)  # fmt: skip

# -- estimates of all environments ``[T, B]``: what is told of both critics, and the total


def mapped(x):
    """The usual one."""
    after_risk, after_price, margin, cost, done, budget = x
    risk, price = (jnp.concatenate([after[:1], after[:-1]]) for after in (after_risk, after_price))
    last = jnp.stack([after_risk[-1], after_price[-1]], -1)
    return jax.vmap(given.estimates, (1, 1, 0, 1, 1, 1, 1), 1)(risk, price, last, margin, cost, done, budget)


def behind(x):
    """What critics say behind each timestep, of an episode that goes on."""
    risk, price, margin, cost, done, _ = x
    return jnp.where(done, margin, jnp.maximum(margin, risk)), cost + GAMMA * jnp.where(done, 0.0, price), *x[2:]


def weighed(rows, budget, axis=0):
    worst, spent, weight = rows
    total = jnp.maximum(worst, spent - budget)
    scale = 1.0 / weight.sum(axis)
    return tuple((weight * x).sum(axis) * scale for x in (worst, spent, total))


def backwards(rows, x, axis=0, unroll=1):
    """A loop whose rows ``[timesteps behind which critics are asked, B]`` are told of the timesteps ``x`` one after the other."""

    def body(rows, x):
        t, worst, spent, margin, cost, done, budget = x
        weight = jnp.where(done, 0.0, LAMBDA * rows[2])
        rows = jnp.maximum(margin, rows[0]), cost + GAMMA * rows[1], weight
        put = lambda row, now: jax.lax.dynamic_update_index_in_dim(row, now, t, axis)  # noqa: E731
        rows = put(rows[0], worst), put(rows[1], spent), put(weight, jnp.ones_like(worst))
        return rows, weighed(rows, budget if axis == 0 else budget[:, None], axis)

    def body_last(rows, x):
        """The same with rows last."""
        t, worst, spent, margin, cost, done, budget = x
        here = jnp.arange(rows[0].shape[-1]) == t
        rows = (
            jnp.where(here, worst[:, None], jnp.maximum(margin[:, None], rows[0])),
            jnp.where(here, spent[:, None], cost[:, None] + GAMMA * rows[1]),
            jnp.where(here, 1.0, jnp.where(done[:, None], 0.0, LAMBDA * rows[2])),
        )
        return rows, weighed(rows, budget[:, None], -1)

    return jax.lax.scan(body if axis == 0 else body_last, rows, x, reverse=True, unroll=unroll)


def together(x, axis=0, unroll=1):
    length, batch = x[0].shape
    zeros = jnp.zeros((length, batch) if axis == 0 else (batch, length))
    return backwards((zeros, zeros, zeros), (jnp.arange(length), *behind(x)), axis, unroll)[1]


def by_blocks(x, size):
    """Blocks of timesteps, the last one first: no rows but of what is behind."""
    length, batch = x[0].shape
    x, rows, made = behind(x), 3 * (jnp.zeros((0, batch)),), []
    for end in range(length, 0, -size):
        part = jax.tree.map(lambda x: x[max(end - size, 0) : end], x)
        now = len(part[0])
        rows = tuple(jnp.concatenate([jnp.zeros((now, batch)), row]) for row in rows)
        rows, found = backwards(rows, (jnp.arange(now), *part))
        made.append(found)
    return tuple(jnp.concatenate(x) for x in zip(*made[::-1], strict=True))


def dense(x):
    """All pairs ``[T, T, B]`` at once: maxima by doubling, sums by differences."""
    _, _, margin, cost, done, budget = x
    worst, spent, *_ = behind(x)
    length = len(worst)
    times = np.arange(length)
    later = (times[:, None] <= times)[..., None]
    ended = jnp.concatenate([jnp.zeros_like(done[:1]), done[:-1]]).cumsum(0)
    same = later & (ended[:, None] == ended)
    rate = (GAMMA ** times.astype(np.float32))[:, None]
    before = jnp.cumsum(rate * cost, 0) - rate * cost  # of all timesteps before
    spent = (before - before[:, None] + rate * spent) / rate[:, None]
    highest = jnp.where(later, margin, -jnp.inf)
    step = 1
    while step < length:
        earlier = jnp.pad(highest, ((0, 0), (step, 0), (0, 0)), constant_values=-jnp.inf)[:, :-step]
        highest = jnp.maximum(highest, earlier)
        step *= 2
    worst = jnp.maximum(jnp.where(later, highest, -1e9), worst)
    share = (LAMBDA ** np.maximum(times - times[:, None], 0).astype(np.float32))[..., None]
    return weighed((worst, spent, jnp.where(same, share, 0.0)), budget[:, None], 1)


# -- networks of rows: logits, and both critics


def apart(p, obs):
    return c.mlp(p["pi"], obs), c.mlp(p["v"], obs)


def joined(p, obs):
    """First layers as one product."""
    first = jax.tree.map(lambda *w: jnp.concatenate(w, -1), p["pi"][0], p["v"][0])
    actor, critic = jnp.split(jnp.tanh(c.linear(first, obs)), 2, -1)
    return c.mlp(p["pi"][1:], actor), c.mlp(p["v"][1:], critic)


def columns(p, obs):
    """Features first, rows innermost."""
    rows = obs.reshape(-1, obs.shape[-1]).T
    return tuple(c.columns(p[name], rows).T.reshape(*obs.shape[:-1], -1) for name in ("pi", "v"))


# -- the environment, of a batch


def observed(state):
    x = state["x"]
    far = jnp.sqrt(((x[:, None, :2] - CENTRES) ** 2).sum(-1))
    return jnp.concatenate([x, 0.1 * state["budget"][:, None], RADII - far], -1)


def stepped(fresh, state, obs, action):
    x = state["x"]
    cost = 0.3 * jnp.sqrt(x[:, 0] ** 2 + x[:, 1] ** 2 + 1e-3)
    force = jnp.where((action[:, None] == jnp.arange(ACTIONS))[..., None], FORCES, 0.0).sum(1)
    speed = 0.95 * x[:, 2:] + DT * force
    place = x[:, :2] + DT * speed
    count = state["count"] + 1
    done = (count >= EPISODE) | (jnp.abs(place).max(-1) > 2.0)
    new = {"x": jnp.concatenate([place, speed], -1), "budget": (state["budget"] - cost) / GAMMA, "count": count}
    choose = lambda start, new: jnp.where(done.reshape(-1, *(1,) * (new.ndim - 1)), start, new)  # noqa: E731
    return jax.tree.map(choose, fresh, new), obs[:, 5:].max(-1), cost, done


class Way(NamedTuple):
    estimates: Any = together
    net: Any = apart
    once: bool = False  # what networks make of all is kept for their slopes
    ahead: bool = False  # what is drawn comes before the loop
    chunk: int | None = None  # timesteps that learn after the others
    envs: int | None = None  # environments that act after the others
    unroll: int = 1  # of the loop that acts


def by_hand(length, batch, way):
    def run(p, carry, key):
        def drawn(keys, t):
            gumbel = jax.vmap(lambda k: jax.random.gumbel(k, (ACTIONS,)))(c.at(keys[0], t))
            return gumbel, jax.vmap(reset)(c.at(keys[1], t))

        def acted(x):
            carry, *keys = x
            draw, times = functools.partial(drawn, keys), jnp.arange(length)

            def body(carry, x):
                (state, episode), (gumbel, fresh) = carry, x if way.ahead else draw(x)
                obs = observed(state)
                action = jnp.argmax(c.mlp(p["pi"], obs) + gumbel, -1)
                after, margin, cost, done = stepped(fresh, state, obs, action)
                return (after, episode + done), (obs, action, margin, cost, done, state["budget"])

            return jax.lax.scan(body, carry, jax.vmap(draw)(times) if way.ahead else times, unroll=way.unroll)

        carry, told = c.acted_by_environments(acted, (carry, *c.streams(key, batch, "action", "env")), length, way.envs)
        obs, action, *told = told
        net = lambda p: way.net(p, obs)  # noqa: E731
        if way.once:
            (logits, both), back = jax.vjp(net, p)
        else:
            both = c.mlp(p["v"], obs)
        last = c.mlp(p["v"], observed(carry[0]))
        after = (c.shifted(both[..., i], last[:, i]) for i in (0, 1))
        worst, spent, total = way.estimates((*after, *told))
        found = worst, spent, total - jnp.maximum(both[..., 0], both[..., 1] - told[-1])

        def lost(made, x):
            (logits, both), (action, (worst, spent, advantage)) = made, x
            log_p = jax.nn.log_softmax(logits)
            missed = (both[..., 0] - worst) ** 2 + (both[..., 1] - spent) ** 2
            tried = jnp.where(action[..., None] == jnp.arange(ACTIONS), log_p, 0.0).sum(-1)
            negative = (jnp.exp(log_p) * log_p).sum(-1)
            return (0.5 * missed + tried * advantage + ENTROPY * negative).sum() / (length * batch)

        if way.once:
            loss, slopes = jax.value_and_grad(lost)((logits, both), (action, found))
            return loss, *back(slopes), carry
        rows = c.rows_of((obs, (action, found)))
        loss = lambda p, x: lost(way.net(p, x[0]), x[1])  # noqa: E731
        if way.chunk is None:
            return *jax.value_and_grad(loss)(p, rows), carry
        return *c.summed_gradient(loss, p, c.in_chunks(rows, way.chunk * batch)), carry

    return run


def workload(length, batch, hidden, chunk=8, block=16, envs=8):
    make, cut = functools.partial(by_hand, length, batch), {"chunk": chunk}
    blocks, ahead = functools.partial(by_blocks, size=block), {"ahead": True}
    best = Way(blocks, once=True)
    forms = {
        "rlfx": c.by_rlfx(given.program, length, batch), "plain": given.plain(length, batch),
        "environment by environment": make(Way(mapped)), "rows first": make(Way()),
        "rows last": make(Way(functools.partial(together, axis=-1))), "all pairs": make(Way(dense)),
        f"blocks of {block}": make(Way(blocks)), f"blocks of {block}, {chunk} timesteps learn": make(Way(blocks, **cut)),
        "joined": make(Way(blocks, joined, **cut)), "features first": make(Way(blocks, columns, **cut)),
        "networks once": make(best), f"{envs} environments": make(Way(blocks, envs=envs, **cut)),
        "drawn ahead": make(Way(blocks, **ahead, **cut)), "blocks, threefry unrolled": make(Way(blocks, **cut)),
        "rows first, threefry unrolled": make(Way(**cut)), "networks once, threefry unrolled": make(best),
        "drawn ahead, threefry unrolled": make(Way(blocks, **ahead, **cut)),
        "acting unrolled by 2, threefry unrolled": make(Way(blocks, unroll=2, **cut)),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0))
    state = c.batch_of(given.reset, batch)
    state["count"] = jax.random.randint(k[0], (batch,), 0, EPISODE)
    return drawing(forms, (params_of(k[1], hidden), (state, jnp.zeros(batch, jnp.int32))), tolerance=5e-5)
