"""RL^2 by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.gru import gates
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_tenth import trials
from benchmarks.untuned.sealed_tenth.trials import (
    ACTIONS,
    EPISODE,
    INPUTS,
    STATES,
    advantages,
    gru,
    heads,
    learnt,
    params_of,
    seen,
    tasks_of,
    told_first,
    world,
)  # fmt: skip

# -- what the cell makes of what it is told, before its recurrence: ``[..., 3 * hidden]``


def by_ones(p, told):
    return c.linear(p["x"], seen(told))


def looked_up(p, told):
    """Rows of weights, of what is one of few."""
    w, more = p["x"]["w"], told["reward"][..., None] * p["x"]["w"][-2] + told["done"][..., None] * p["x"]["w"][-1]
    return w[told["state"]] + w[STATES + told["action"]] + more + p["x"]["b"]


# -- acting


def choices(key, batch):
    streams = c.streams(key, batch, "action", "state", "reward")

    def of(t):
        action, state, reward = (c.at(k, t) for k in streams)
        gumbel = lambda keys, count: jax.vmap(lambda k: jax.random.gumbel(k, (count,)))(keys)  # noqa: E731
        return gumbel(action, ACTIONS), gumbel(state, STATES), jax.vmap(jax.random.normal)(reward)

    return of


def rows_of_tasks(tasks):
    """One table of all environments' states and actions."""
    return tasks["mean"].reshape(-1), tasks["log_next"].reshape(-1, STATES)


def moved(tables, told, action, gumbel, noise):
    mean, log_next = tables
    at = (jnp.arange(len(action)) * STATES + told["state"]) * ACTIONS + action
    done = told["count"] == EPISODE - 1
    return {
        "state": jnp.where(done, 0, jnp.argmax(log_next[at] + gumbel, -1)), "action": action, "reward": mean[at] + noise,
        "done": done.astype(jnp.float32), "count": jnp.where(done, 0, told["count"] + 1),
    }  # fmt: skip


def cell(p, h, x):
    """The next memory, and what a way back needs."""
    xr, xz, xn = jnp.split(x, 3, -1)
    hr, hz, hn = jnp.split(c.linear(p["h"], h), 3, -1)
    r, z = jax.nn.sigmoid(xr + hr), jax.nn.sigmoid(xz + hz)
    n = jnp.tanh(xn + r * hn)
    return z * h + (1.0 - z) * n, (h, r, z, n, hn)


def acted(p, tasks, carry, key, length, before, ahead=False, unroll=1, tables=False):
    """The last carry, and of all timesteps: what was told, actions, rewards, memories, logits, and what a way back needs."""
    draw, times = choices(key, len(carry[1])), jnp.arange(length)
    flat = rows_of_tasks(tasks)

    def body(carry, x):
        gumbel, following, noise = x if ahead else draw(x)
        told, h = carry
        h, kept = cell(p, h, before(p, told))
        logits = c.linear(p["pi"], h)
        action = jnp.argmax(logits + gumbel, -1)
        if tables:
            after = moved(flat, told, action, following, noise)
        else:
            after = jax.vmap(world)(tasks, told, action, following, noise)
        return (after, h), (told, action, after["reward"], h, logits, kept)

    return jax.lax.scan(body, carry, jax.vmap(draw)(times) if ahead else times, unroll=unroll)


# -- learning: memories ``[T, B, hidden]`` of what was told


def stepwise(p, h, told, unroll=1):
    def step(h, told):
        h = gru(p, h, seen(told))
        return h, h

    return jax.lax.scan(step, h, told, unroll=unroll)[1]


def hoisted(p, h, told, unroll=1, again=False, before=by_ones):
    def step(h, x):
        h = gates(x, c.linear(p["h"], h), h)
        return h, h

    step = jax.checkpoint(step, prevent_cse=False) if again else step
    return jax.lax.scan(step, h, before(p, told), unroll=unroll)[1]


def joined(p, h, told):
    """One product of what is told and remembered."""
    hidden = h.shape[-1]
    rows = jnp.concatenate([p["x"]["w"], jnp.zeros((INPUTS, hidden))], -1)  # what is told has no part in the fourth
    below = jnp.concatenate(
        [p["h"]["w"][:, : 2 * hidden], jnp.zeros((hidden, hidden)), p["h"]["w"][:, 2 * hidden :]], -1
    )
    w = jnp.concatenate([rows, below])
    b = jnp.concatenate([p["x"]["b"], jnp.zeros(hidden)])
    b = b.at[: 2 * hidden].add(p["h"]["b"][: 2 * hidden]).at[3 * hidden :].add(p["h"]["b"][2 * hidden :])

    def step(h, x):
        r, z, xn, hn = jnp.split(jnp.concatenate([x, h], -1) @ w + b, 4, -1)
        z = jax.nn.sigmoid(z)
        h = z * h + (1.0 - z) * jnp.tanh(xn + jax.nn.sigmoid(r) * hn)
        return h, h

    return jax.lax.scan(step, h, seen(told))[1]


def in_blocks(p, h, told, chunk):
    """The recurrence of some timesteps is computed again for the gradient."""
    block = jax.checkpoint(lambda h, told: last_of(hoisted(p, h, told)), prevent_cse=False)
    hs = jax.lax.scan(block, h, c.in_chunks(told, chunk))[1]
    return hs.reshape(-1, *h.shape)


def last_of(hs):
    return hs[-1], hs


def way_back(p, kept, by, start=None, unroll=1):
    """By memories' slopes ``by[T, B, hidden]``: the first memory's, and those of what is told and remembered, before gates."""
    turned = p["h"]["w"].T

    def step(by_h, x):
        by, (h, r, z, n, hn) = x
        by = by + by_h
        on = by * (1.0 - z) * (1.0 - n * n)
        first = jnp.concatenate([on * hn * r * (1.0 - r), by * (h - n) * z * (1.0 - z)], -1)
        second = jnp.concatenate([first, on * r], -1)
        return by * z + second @ turned, (jnp.concatenate([first, on], -1), second)

    start = jnp.zeros_like(by[0]) if start is None else start
    return jax.lax.scan(step, start, (by, kept), reverse=True, unroll=unroll)


def of_weights(kept, by_h):
    """The recurrent weights' gradient, of all timesteps at once."""
    rows = c.rows_of(by_h)
    return {"w": c.rows_of(kept[0]).T @ rows, "b": rows.sum(0)}


def weights_after(p, h, told, unroll=1, before=by_ones):
    def forwards(recurrent, x, h):
        def step(h, x):
            h, kept = cell({"h": recurrent}, h, x)
            return h, (h, kept)

        hs, kept = jax.lax.scan(step, h, x, unroll=unroll)[1]
        return hs, (recurrent, kept)

    @jax.custom_vjp
    def run(recurrent, x, h):
        return forwards(recurrent, x, h)[0]

    def backwards(residuals, by):
        recurrent, kept = residuals
        by_x, by_h = way_back({"h": recurrent}, kept, by, unroll=unroll)[1]
        return of_weights(kept, by_h), by_x, jnp.zeros_like(by[0])

    run.defvjp(forwards, backwards)
    return run(p["h"], before(p, told), h)


def heads_joined(p, h):
    both = c.linear(jax.tree.map(lambda a, b: jnp.concatenate([a, b], -1), p["pi"], p["v"]), h)
    return both[..., :ACTIONS], both[..., ACTIONS]


def by_hand(length, batch, recurrence=stepwise, before=by_ones, flat=True, both=heads, **how):
    """Acts, and then goes through what it was told again."""

    def run(p, tasks, carry, key):
        end, (told, action, reward, hs, *_) = acted(p, tasks, carry, key, length, before, **how)
        v = c.linear(p["v"], hs)[..., 0]
        advantage = advantages(v, reward)
        rest = action, advantage, advantage + v

        def loss(p):
            hs = recurrence(p, carry[1], told)
            hs, *others = c.rows_of((hs, *rest)) if flat else (hs, *rest)
            return learnt(*both(p, hs), *others) / (length * batch)

        return *jax.value_and_grad(loss)(p), end

    return run


def through_acting(length, batch, before=by_ones, again=False, **how):
    """The loop that acts is differentiated itself."""

    def run(p, tasks, carry, key):
        def loss(p):
            end, (_, action, reward, hs, *_) = acted(p, tasks, carry, key, length, before, **how)
            logits, v = heads(p, hs)
            fixed = stop_gradient(v)
            advantage = advantages(fixed, reward)
            return learnt(logits, v, action, advantage, advantage + fixed) / (length * batch), end

        (found, end), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, end

    return run


def gates_again(p, h, told):
    """What a way back needs, of memories before ``h[T, B, hidden]`` that are known: many timesteps at once."""
    return cell(p, h, by_ones(p, told))[1]


def of_inputs(p, told, by_x, lookups=False):
    """The gradient of the weights of what is told."""
    told, rows = c.rows_of(told), c.rows_of(by_x)
    if lookups:
        return jax.vjp(lambda x: looked_up({"x": x}, told), p["x"])[1](rows)[0]
    return {"w": seen(told).T @ rows, "b": rows.sum(0)}


def kept_by_acting(
    length, batch, before=by_ones, both=heads, back_unroll=1, lookups=False, chunk=None, again=False, **how
):
    """Nothing is evaluated twice: acting keeps its gates, of which the way back is written out. ``chunk``: weights' gradients are
    added up after so many timesteps; ``again``: acting keeps memories only, of which gates are computed again, many at once."""

    def run(p, tasks, carry, key):
        end, (told, action, reward, hs, _, kept) = acted(p, tasks, carry, key, length, before, **how)
        of_heads = {"pi": p["pi"], "v": p["v"]}
        made, back = jax.vjp(lambda p, hs: both(p, hs), of_heads, c.rows_of(hs))
        v = made[1].reshape(length, batch)
        advantage = advantages(v, reward)
        rest = c.rows_of((action, advantage, advantage + v))
        loss, slopes = jax.value_and_grad(lambda made: learnt(*made, *rest) / (length * batch))(made)
        grads, by = back(slopes)
        kept = jnp.concatenate([carry[1][None], hs[:-1]]) if again else kept

        def block(so_far, part):
            (by_h, total), (kept, by, told) = so_far, part
            kept = gates_again(p, kept, told) if again else kept
            by_h, (of_x, of_h) = way_back(p, kept, by, by_h, back_unroll)
            found = {"x": of_inputs(p, told, of_x, lookups), "h": of_weights(kept, of_h)}
            return (by_h, jax.tree.map(jnp.add, total, found)), None

        none = {"x": p["x"], "h": p["h"]}
        start = jnp.zeros_like(carry[1]), jax.tree.map(jnp.zeros_like, none)
        part = kept, by.reshape(hs.shape), told
        if chunk is None:
            (_, found), _ = block(start, part)
        else:
            (_, found), _ = jax.lax.scan(block, start, c.in_chunks(part, chunk), reverse=True)
        return loss, grads | found, end

    return run


def workload(length, batch, hidden, chunk=24):
    make, keeps = functools.partial(by_hand, length, batch), functools.partial(kept_by_acting, length, batch)
    through, cut = functools.partial(through_acting, length, batch), functools.partial
    ahead, tables, found, one = {"ahead": True}, {"tables": True}, {"before": looked_up}, {"both": heads_joined}
    best, two, after = {**ahead, **tables}, {"unroll": 2}, weights_after
    forms = {
        "rlfx": c.actor_by_rlfx(trials.program, length, batch), "plain": trials.plain(length, batch), "rows": make(),
        "tables": make(**tables), "hoisted": make(hoisted), "hoisted, not flattened": make(hoisted, flat=False),
        "hoisted, looked up": make(cut(hoisted, **found), **found), "joined": make(joined),
        "hoisted, again": make(cut(hoisted, again=True)), f"hoisted, blocks of {chunk}": make(cut(in_blocks, chunk=chunk)),
        "hoisted, unrolled by 2": make(cut(hoisted, **two)), "weights after": make(after),
        "weights after, unrolled by 2": make(cut(after, **two)), "through acting": through(),
        "through acting, drawn ahead, tables": through(**best), "kept": keeps(), "kept, looked up": keeps(**found),
        "kept, heads joined, tables": keeps(**one, **tables), "kept, drawn ahead, tables": keeps(**best),
        "hoisted, threefry unrolled": make(hoisted), "weights after, drawn ahead, tables, threefry unrolled": make(after, **best),
        "kept, threefry unrolled": keeps(), "kept, drawn ahead, threefry unrolled": keeps(**ahead),
        "kept, drawn ahead, tables, threefry unrolled": keeps(**best),
        "kept, drawn ahead, tables, heads joined, threefry unrolled": keeps(**best, **one),
        "kept, drawn ahead, tables, looked up, threefry unrolled": keeps(**best, **found),
        "kept, drawn ahead, tables, looked up, lookups back, threefry unrolled": keeps(**best, **found, lookups=True),
        "kept, drawn ahead, tables, unrolled by 2, threefry unrolled": keeps(**best, **two, back_unroll=2),
        "gates again, tables": keeps(again=True, **tables),
        "gates again, drawn ahead, tables, threefry unrolled": keeps(again=True, **best),
        f"kept, drawn ahead, tables, blocks of {chunk}, threefry unrolled": keeps(chunk=chunk, **best),
        f"kept, drawn ahead, tables, blocks of {2 * chunk}, threefry unrolled": keeps(chunk=2 * chunk, **best),
        f"gates again, drawn ahead, tables, blocks of {chunk}, threefry unrolled": keeps(again=True, chunk=chunk, **best),
        f"gates again, drawn ahead, tables, blocks of {2 * chunk}, threefry unrolled": keeps(again=True, chunk=2 * chunk, **best),
        f"gates again, tables, blocks of {chunk}, threefry unrolled": keeps(again=True, chunk=chunk, **tables),
        "kept, drawn ahead, tables, way back unrolled by 4, threefry unrolled": keeps(**best, back_unroll=4),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0))
    carry = told_first(batch), jnp.zeros((batch, hidden))
    return drawing(forms, (params_of(k[0], hidden), tasks_of(k[1], batch), carry), tolerance=2e-5)
