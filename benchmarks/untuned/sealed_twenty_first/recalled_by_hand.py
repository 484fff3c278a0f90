"""IMPALA with an LSTM by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_twenty_first import recalled as given
from benchmarks.untuned.sealed_twenty_first.recalled import (
    ACTIONS,
    ENTROPY,
    GAMMA,
    OBS,
    core_of,
    gates,
    params_of,
    with_last,
)  # fmt: skip

# -- what gates make of products; features last, or first


def halved(z, cell, axis=-1):
    """Of products whose sigmoids' parts were halved (`halves`): one tanh of all."""
    i, f, g, o = jnp.split(jnp.tanh(z), 4, axis)
    cell = (0.5 + 0.5 * f) * cell + (0.5 + 0.5 * i) * g
    return (0.5 + 0.5 * o) * jnp.tanh(cell), cell


def halves(hidden):
    return np.repeat(np.float32([0.5, 0.5, 1.0, 0.5]), hidden)


# -- memories ``h[T, B, hidden]`` of what was made of inputs before, ``pre[T, B, 4 hidden]``; ``going[T, B, 1]``


def scanned(w, pre, going, memory, gates=gates, unroll=1):
    def step(memory, x):
        pre, going = x
        memory = gates(pre + (memory[0] * going) @ w, memory[1] * going)
        return memory, memory[0]

    return jax.lax.scan(step, memory, (pre, going), unroll=unroll)[1]


def scanned_turned(w, pre, going, memory, gates=gates, unroll=1):
    """Features first: ``pre[T, 4 hidden, B]`` and ``going[T, 1, B]``."""

    def step(memory, x):
        pre, going = x
        memory = gates(pre + w.T @ (memory[0] * going), memory[1] * going)
        return memory, memory[0]

    return jax.lax.scan(step, memory, (pre, going), unroll=unroll)[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def after(w, pre, going, memory, gates, unroll, loop):
    """The same; the gradient of weights is one product behind the loop."""
    return loop(w, pre, going, memory, gates, unroll)


def after_forwards(w, pre, going, memory, gates, unroll, loop):
    h, back = jax.vjp(lambda pre: loop(w, pre, going, memory, gates, unroll), pre)
    return h, (w, back, going * jnp.concatenate([memory[0][None], h[:-1]]))


def after_backwards(gates, unroll, loop, saved, by):
    w, back, before = saved
    (by,) = back(by)
    product = (lambda w: before @ w) if loop is scanned else (lambda w: jnp.einsum("ij,tib->tjb", w, before))
    return *jax.vjp(product, w)[1](by), by, None, None


after.defvjp(after_forwards, after_backwards)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def remade(w, x, going, memory, gates, whole):
    """The same, which keeps products and cells, and makes gates again on the way back; ``whole``: ``x`` goes into the products of
    the loop."""
    return remade_forwards(w, x, going, memory, gates, whole)[0]


def remade_forwards(w, x, going, memory, gates, whole):
    def step(memory, x):
        x, going = x
        h, cell = memory[0] * going, memory[1] * going
        seen = jnp.concatenate([x, h], -1) if whole else h
        z = seen @ w if whole else x + seen @ w
        memory = gates(z, cell)
        return memory, (memory[0], seen, z, cell)

    _, (made, seen, z, cell) = jax.lax.scan(step, memory, (x, going))
    return made, (w, going, seen, z, cell)


def remade_backwards(gates, whole, saved, by):
    w, going, seen, z, cell = saved
    n = len(w) - by.shape[-1]

    def step(carry, x):
        (by_h, by_cell), (by, going, z, cell) = carry, x
        by_z, by_cell = jax.vjp(gates, z, cell)[1]((by + by_h, by_cell))
        by_seen = by_z @ w.T
        return (going * by_seen[:, n:], going * by_cell), (by_z, by_seen[:, :n])

    none = jnp.zeros_like(by[0])
    _, (by_z, by_x) = jax.lax.scan(step, (none, none), (by, going, z, cell), reverse=True)
    return *jax.vjp(lambda w: seen @ w, w)[1](by_z), by_x if whole else by_z, None, None


remade.defvjp(remade_forwards, remade_backwards)


def made_of(p, x, w, b):
    """Products ``[T, B, 4 hidden]`` of what goes into the LSTM: of what was done it is a row of weights."""
    n = len(p["h"])
    torso = jax.nn.relu(x["obs"].reshape(-1, OBS) @ p["torso"]["w"] + p["torso"]["b"])
    small = jnp.concatenate([jax.nn.one_hot(x["acted"], ACTIONS), jnp.clip(x["gained"], -1.0, 1.0)[..., None]], -1)
    return (torso @ w[:n]).reshape(*x["gained"].shape, -1) + (small @ w[n:] + b)


class Way(NamedTuple):
    loop: Any = scanned
    after: bool = True
    halved: bool = True
    joined: bool = True  # heads are one product
    split: bool = False  # inputs' products apart
    whole: bool = False  # inputs' products in the loop, with those of memories; with `remade` only
    unroll: int = 1
    envs: int | None = None  # environments after the others


def by_hand(length, batch, way):
    first = way.loop is scanned_turned
    squash = functools.partial(halved, axis=0 if first else -1) if way.halved else gates
    if first and not way.halved:
        squash = lambda z, cell: tuple(x.T for x in gates(z.T, cell.T))  # noqa: E731
    how = {"gates": squash, "unroll": way.unroll}
    loop = functools.partial(after, **how, loop=way.loop) if way.after else functools.partial(way.loop, **how)
    if way.loop is remade:
        loop = lambda *args: remade(*args, squash, way.whole)  # noqa: E731

    def some(p, memory, data, last):
        seen = with_last(data, last)
        going = 1.0 - seen["first"].astype(jnp.float32)

        def loss(p):
            hidden, size = len(p["h"]), going.shape[1]
            scale = halves(hidden) if way.halved else np.ones(4 * hidden, np.float32)
            bias = p["x"]["b"] + (np.repeat(np.float32([0, 1, 0, 0]), hidden) if way.halved else 0.0)
            w, b = p["x"]["w"] * scale, bias * scale
            if way.whole:
                core = jnp.concatenate([core_of(p, seen), jnp.ones((length + 1, size, 1))], -1)
                h = loop(jnp.concatenate([w, b[None], p["h"] * scale]), core, going[..., None], memory)
            elif first:
                pre = jnp.einsum("ij,tbi->tjb", w, core_of(p, seen)) + b[:, None]
                h = loop(p["h"] * scale, pre, going[:, None], jax.tree.map(jnp.transpose, memory)).mT
            else:
                pre = made_of(p, seen, w, b) if way.split else core_of(p, seen) @ w + b
                h = loop(p["h"] * scale, pre, going[..., None], memory)
            if way.joined:
                heads = jax.tree.map(lambda a, b: jnp.concatenate([a, b], -1), p["pi"], p["v"])
                made = c.linear(heads, h.reshape(-1, hidden)).reshape(length + 1, size, -1)
                logits, value = made[:-1, :, :ACTIONS], made[..., ACTIONS]
            else:
                logits, value = c.linear(p["pi"], h[:-1]), c.linear(p["v"], h)[..., 0]
            log_prob = c.pick(jax.nn.log_softmax(logits), data["action"])
            clipped = data | {"reward": jnp.clip(data["reward"], -1.0, 1.0)}
            target, advantage = stop_gradient(c.vtrace(value[:-1], value[-1], log_prob - data["log_mu"], clipped, GAMMA))
            made = c.actor_critic_loss(logits, value[:-1], log_prob, advantage, target, ENTROPY)
            return made.sum() / (length * batch)

        return jax.value_and_grad(loss)(p)

    def run(p, memory, data, last):
        if way.envs is None:
            return some(p, memory, data, last)
        over_time = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(length, -1, way.envs, *x.shape[2:]), 1, 0), data)
        parts = c.in_chunks(memory, way.envs), over_time, c.in_chunks(last, way.envs)
        add = lambda total, x: (jax.tree.map(jnp.add, total, some(p, *x)), None)  # noqa: E731
        return jax.lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)), parts)[0]

    return run


def workload(length, batch, hidden, envs=16):
    make, way = functools.partial(by_hand, length, batch), Way()
    turned, again = way._replace(loop=scanned_turned), way._replace(loop=remade)
    forms = {
        "rlfx": given.by_rlfx(length, batch), "plain": given.plain(length, batch),
        "inputs before, heads joined": make(way._replace(after=False, halved=False)),
        "weights after": make(way._replace(halved=False)), "turned, weights after, halved": make(turned),
        "weights after, halved, unrolled by 2": make(way._replace(unroll=2)),
        f"weights after, {envs} environments": make(way._replace(envs=envs, halved=False)),
        "gates made again, halved": make(again), "gates made again, halved, in one product": make(again._replace(whole=True)),
        f"gates made again, halved, split, {envs} environments": make(again._replace(split=True, envs=envs)),
        f"gates made again, halved, {envs} environments": make(again._replace(envs=envs)),
        f"gates made again, halved, in one product, {envs} environments": make(again._replace(whole=True, envs=envs)),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 10)
    data = c.episodes(k, (length, batch), OBS, ACTIONS)
    acted = jax.random.randint(k[4], (length + 1, batch), 0, ACTIONS)
    gained = jnp.concatenate([jax.random.normal(k[5], (1, batch)), data["reward"]])
    data["done"] = data["done"].at[-1].set(jax.random.uniform(k[9], (batch,)) < 0.2)
    data["first"] = data["first"].at[0].set(jax.random.uniform(k[8], (batch,)) < 0.2)
    data |= {"acted": acted[:-1], "gained": gained[:-1], "log_mu": -1.8 + 0.3 * jax.random.normal(k[6], (length, batch))}
    data["acted"] = jnp.concatenate([acted[:1], data["action"][:-1]])
    last = {"acted": data["action"][-1], "gained": gained[-1], "first": data["done"][-1]}
    last["obs"] = jax.random.normal(k[7], (batch, OBS))
    memory = jax.random.normal(k[6], (2, batch, hidden)) * 0.3
    return Workload(forms, (params_of(k[7], hidden), (memory[0], memory[1]), data, last), tolerance=5e-5)
