"""Deep coordination graphs by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_twentieth import coordination as given
from benchmarks.untuned.sealed_twentieth.coordination import (
    ACTIONS,
    GAMMA,
    OBS,
    ROUNDS,
    edges,
    params_of,
    relu,
)  # fmt: skip

# -- memories ``[T, rows, hidden]`` of what is made of observations before, ``[T, rows, 3 hidden]``; ``going[T, rows, 1]``


def halved(x):
    """A sigmoid as a tanh."""
    return 0.5 + 0.5 * jnp.tanh(0.5 * x)


def gates(sigmoid, pre, made, h):
    (xr, xz, xn), (hr, hz, hn) = jnp.split(pre, 3, -1), jnp.split(made, 3, -1)
    keep, reset = sigmoid(xz + hz), sigmoid(xr + hr)
    new = jnp.tanh(xn + reset * hn)
    return keep * h + (1.0 - keep) * new, (reset, keep, new, hn)


def scanned(p, pre, going, sigmoid=jax.nn.sigmoid):
    def body(h, x):
        pre, going = x
        h = h * going
        h = gates(sigmoid, pre, c.linear(p, h), h)[0]
        return h, h

    return jax.lax.scan(body, jnp.zeros_like(pre[0, :, : len(p["w"])]), (pre, going))[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def written(p, pre, going, sigmoid=jax.nn.sigmoid):
    """The same with a way back of its own: weights' slopes by one product behind the loop."""
    return scanned(p, pre, going, sigmoid)


def written_forwards(p, pre, going, sigmoid):
    def body(h, x):
        pre, going = x
        h = h * going
        after, kept = gates(sigmoid, pre, c.linear(p, h), h)
        return after, (after, (h, *kept))

    h, kept = jax.lax.scan(body, jnp.zeros_like(pre[0, :, : len(p["w"])]), (pre, going))[1]
    return h, (p["w"], going, kept)


def written_backwards(sigmoid, saved, by):
    w, going, kept = saved

    def body(by_h, x):
        by, going, (h, reset, keep, new, hn) = x
        by_h = by + by_h
        by_new = by_h * (1.0 - keep) * (1.0 - new * new)
        by_keep = by_h * (h - new) * keep * (1.0 - keep)
        by_reset = by_new * hn * reset * (1.0 - reset)
        on = jnp.concatenate([by_reset, by_keep, by_new * reset], -1)
        return going * (by_h * keep + on @ w.T), (on, by_new)

    on, by_new = jax.lax.scan(body, jnp.zeros_like(by[0]), (by, going, kept), reverse=True)[1]
    hidden = by.shape[-1]
    by_pre = jnp.concatenate([on[..., : 2 * hidden], by_new], -1)
    h, on = kept[0].reshape(-1, hidden), on.reshape(-1, 3 * hidden)
    return {"w": h.T @ on, "b": on.sum(0)}, by_pre, jnp.zeros_like(going)


written.defvjp(written_forwards, written_backwards)


def memories(p, data, loop, sigmoid):
    """``[T, B, agents, hidden]``."""
    obs = data["obs"]
    length, batch, agents, _ = obs.shape
    going = jnp.repeat(1.0 - data["first"].astype(jnp.float32), agents, 1)[..., None]
    pre = c.linear(p["gru"]["x"], obs.reshape(length, batch * agents, -1))
    return loop(p["gru"]["h"], pre, going, sigmoid).reshape(length, batch, agents, -1)


# -- graphs of rows ``h[N, agents, hidden]``: what agents' actions are worth, ``[N, agents, A]``, and pairs' ``[N, edges, A, A]``


def swapped(w):
    """Of outputs ``[..., A * A]``."""
    return w.reshape(*w.shape[:-1], ACTIONS, ACTIONS).mT.reshape(w.shape)


def mapped(p, h):
    return jax.vmap(given.graph, (None, 0))(p, h)


def hidden_of(p, h):
    """The first layer, multiplied once for each agent: ``[N, edges, hidden]`` of both orders."""
    i, j = edges(h.shape[1])
    first, size = p["pair"][0], h.shape[-1]
    one, two = h @ first["w"][:size] + first["b"], h @ first["w"][size:]
    return relu(one[:, i] + two[:, j]), relu(one[:, j] + two[:, i])


def once(p, h):
    there, back = hidden_of(p, h)
    last = p["pair"][1]
    pairs = 0.5 * (c.linear(last, there) + swapped(c.linear(last, back)))
    return c.linear(p["own"], h), pairs.reshape(*pairs.shape[:2], ACTIONS, ACTIONS)


def both_orders(p):
    """The last layer of both orders side by side."""
    last = p["pair"][1]
    return 0.5 * jnp.concatenate([last["w"], swapped(last["w"])]), 0.5 * (last["b"] + swapped(last["b"]))


def side_by_side(p, h):
    """And both orders by one product."""
    w, b = both_orders(p)
    pairs = jnp.concatenate(hidden_of(p, h), -1) @ w + b
    return c.linear(p["own"], h), pairs.reshape(*pairs.shape[:2], ACTIONS, ACTIONS)


# -- the best actions ``[N, agents]``


def by_rows(own, pairs):
    return jax.vmap(given.greedy)(own, pairs)


def innermost(own, pairs):
    """Rows innermost; who hears of what, by a product."""
    agents, count = own.shape[1], pairs.shape[1]
    i, j = edges(agents)
    one, two = (np.eye(agents, dtype=np.float32)[x].T for x in (i, j))  # [agents, edges]
    own, pairs = jnp.moveaxis(own, 0, -1), jnp.moveaxis(pairs, 0, -1)
    shared, payoff = own / agents, pairs / count
    hear = lambda w, x: (w @ x.reshape(count, -1)).reshape(own.shape)  # noqa: E731

    def reached(action):
        mine = jnp.take_along_axis(own, action[:, None], 1).sum((0, 1)) / agents
        index = action[i] * ACTIONS + action[j]
        return mine + jnp.take_along_axis(pairs.reshape(count, ACTIONS**2, -1), index[:, None], 1).sum((0, 1)) / count

    none = jnp.zeros((count, ACTIONS, own.shape[-1]))
    to_first, to_second, worth, best = none, none, -jnp.inf, 0
    for n in range(ROUNDS):
        heard = shared + hear(one, to_first) + hear(two, to_second) if n else shared
        action = jnp.argmax(heard, 1)
        found = reached(action)
        best, worth = jnp.where(found > worth, action, best), jnp.maximum(found, worth)
        if n < ROUNDS - 1:
            on = ((heard[i] - to_first)[:, :, None] + payoff).max(1)
            to_first = ((heard[j] - to_second)[:, None] + payoff).max(2)
            to_first, to_second = (x - x.mean(1, keepdims=True) for x in (to_first, on))
    return best.T


def valued(own, pairs, action):
    """What actions of rows are worth, by indices."""
    i, j = edges(own.shape[1])
    index = action[:, i] * ACTIONS + action[:, j]
    return c.pick(own, action).mean(-1) + c.pick(pairs.reshape(*pairs.shape[:2], -1), index).mean(-1)


def valued_by_masks(own, pairs, action):
    i, j = edges(own.shape[1])
    one = action[..., None] == jnp.arange(ACTIONS)
    both = one[:, i, :, None] & one[:, j, None]
    mine, ours = jnp.where(one, own, 0.0).sum((1, 2)), jnp.where(both, pairs, 0.0).sum((1, 2, 3))
    return mine / own.shape[1] + ours / pairs.shape[1]


def valued_alone(p, h, action):
    """Without what other actions are worth: columns of the last layers by indices."""
    i, j = edges(h.shape[1])
    w, b = both_orders(p)
    index = action[:, i] * ACTIONS + action[:, j]
    hidden = jnp.concatenate(hidden_of(p, h), -1)
    pairs = (hidden * w.T[index]).sum((1, 2)) + b[index].sum(-1)
    own = (h * p["own"]["w"].T[action]).sum((1, 2)) + p["own"]["b"][action].sum(-1)
    return own / h.shape[1] + pairs / len(i)


class Way(NamedTuple):
    loop: Any = scanned
    sigmoid: Any = jax.nn.sigmoid
    graph: Any = side_by_side
    greedy: Any = innermost
    valued: Any = valued
    aims: bool = False  # of targets, only the best actions are looked at
    alone: bool = False  # only what was done has a gradient of its own, and not what all actions are worth
    chunk: int | None = None  # timesteps after the others, the last ones first


def by_hand(length, batch, way):
    def run(p, old, data):
        heads = {name: p[name] for name in ("own", "pair")}
        points = {name: data[name] for name in ("action", "reward", "done")}

        def of_points(heads, h, old_h, x, after):
            """Of timesteps ``[t, B]``; ``after``: what is worth what comes behind them."""
            size = x["reward"].shape
            flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
            h, old_h, action = flat(h), flat(old_h), flat(x["action"])
            own, pairs = way.graph(*stop_gradient((heads, h))) if way.alone else way.graph(heads, h)
            best = way.greedy(*stop_gradient((own, pairs)))
            aims = valued_alone(old, old_h, best) if way.aims else way.valued(*way.graph(old, old_h), best)
            aims = aims.reshape(size)
            target = x["reward"] + GAMMA * jnp.where(x["done"], 0.0, c.shifted(aims, after))
            found = valued_alone(heads, h, action) if way.alone else way.valued(own, pairs, action)
            return (0.5 * (found.reshape(size) - stop_gradient(target)) ** 2).sum() / (length * batch), aims[0]

        recur = lambda gru: memories({"gru": gru}, data, way.loop, way.sigmoid)  # noqa: E731
        h, back = jax.vjp(recur, p["gru"])
        old_h = memories(old, data, scanned, way.sigmoid)
        learn = jax.value_and_grad(of_points, (0, 1), has_aux=True)
        if way.chunk is None:
            (loss, _), (grads, by_h) = learn(heads, h, old_h, points, jnp.zeros(batch))
        else:

            def body(total, x):
                loss, grads, after = total
                (found, after), (more, by_h) = learn(heads, *x, after)
                return (loss + found, jax.tree.map(jnp.add, grads, more), after), by_h

            none = jnp.zeros(()), jax.tree.map(jnp.zeros_like, heads), jnp.zeros(batch)
            (loss, grads, _), by_h = jax.lax.scan(body, none, c.in_chunks((h, old_h, points), way.chunk), reverse=True)
            by_h = by_h.reshape(h.shape)
        return loss, {"gru": back(by_h)[0], **grads}

    return run


def environments(length, batch, chunk, way):
    """``chunk``: so many environments after the others, memories too."""
    one = by_hand(length, chunk, way)

    def run(p, old, data):
        parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(length, -1, chunk, *x.shape[2:]), 1, 0), data)
        add = lambda total, x: (jax.tree.map(jnp.add, total, one(p, old, x)), None)  # noqa: E731
        total = jax.lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)), parts)[0]
        return jax.tree.map(lambda x: x * (chunk / batch), total)

    return run


def workload(length, batch, agents, hidden, chunk=2, envs=4):
    make, cut = functools.partial(by_hand, length, batch), {"chunk": chunk}
    best, tanh = Way(written), Way(written, halved, aims=True, **cut)
    forms = {
        "rlfx": given.by_rlfx(length, batch), "plain": given.plain(length, batch),
        "rows": make(Way(graph=mapped, greedy=by_rows)), "agents once": make(Way(graph=once, greedy=by_rows)),
        "both orders": make(Way(greedy=by_rows)), "rows innermost": make(Way()),
        "masks": make(Way(valued=valued_by_masks)), "weights after": make(best),
        "aims alone": make(best._replace(aims=True)), "alone": make(best._replace(alone=True, aims=True)),
        f"agents once, blocks of {chunk}": make(Way(graph=once, greedy=by_rows, **cut)),
        f"weights after, blocks of {chunk}": make(best._replace(**cut)),
        f"aims alone, blocks of {chunk}": make(best._replace(aims=True, **cut)),
        f"alone, blocks of {chunk}": make(best._replace(alone=True, aims=True, **cut)),
        f"aims alone, tanh, blocks of {chunk}": make(tanh), f"alone, tanh, blocks of {chunk}": make(tanh._replace(alone=True)),
        f"alone, tanh, blocks of {2 * chunk}": make(tanh._replace(alone=True, chunk=2 * chunk)),
        f"alone, {envs} environments": environments(length, batch, envs, tanh._replace(alone=True, chunk=None)),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 8)
    data = c.episodes(k, (length, batch), 1, 2)
    data["obs"] = jax.random.normal(k[4], (length, batch, agents, OBS))
    data["action"] = jax.random.randint(k[5], (length, batch, agents), 0, ACTIONS)
    return Workload(forms, (params_of(k[6], hidden), params_of(k[7], hidden), data), tolerance=5e-5)
