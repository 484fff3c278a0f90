"""Rainbow by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.noisy_layers import noise_of
from benchmarks.untuned.sealed_twenty_second import rainbow as given
from benchmarks.untuned.sealed_twenty_second.rainbow import (
    ACTIONS,
    APART,
    ATOM,
    ATOMS,
    EVEN,
    LARGEST,
    OBS,
    OUTPUTS,
    STEPS,
    nearest,
    params_of,
    projected,
    relu,
)  # fmt: skip

PLACES = np.arange(ATOMS, dtype=np.float32)


def with_noise(p, noise):
    """Layers without noise of their own."""

    def layer(p, noise):
        inputs, outputs = noise
        return {"w": p["w"] + p["w noise"] * (inputs[:, None] * outputs), "b": p["b"] + p["b noise"] * outputs}

    made = {n: [layer(*x) for x in zip(p[n], noise[n], strict=True)] for n in OUTPUTS}
    return made | {"trunk": p["trunk"]}


def centred(p):
    """What advantages have in common is taken from their last layer, and not from every row: value and advantages of rows are
    of their own last layers then."""
    last = p["advantage"][1]
    less = lambda x: x.reshape(*x.shape[:-1], ACTIONS, ATOMS)  # noqa: E731
    taken = jax.tree.map(lambda x: (less(x) - less(x).mean(-2, keepdims=True)).reshape(x.shape), last)
    return p | {"advantage": [p["advantage"][0], taken]}


# -- distributions spread: ``probs[N, ATOMS]``


def scattered(probs, gained, left):
    return jax.vmap(projected)(probs, gained, left)


def place_of(gained, left, atom):
    return (jnp.clip(gained + left * atom, -LARGEST, LARGEST) + LARGEST) / APART


def shared(probs, gained, left):
    """Every atom's share of every other, as a product."""
    where = place_of(gained[:, None], left[:, None], ATOM)
    near = jnp.maximum(1.0 - jnp.abs(where[:, None] - PLACES[:, None]), 0.0)
    return jnp.einsum("nij,nj->ni", near, probs)


def in_turn(probs, gained, left):
    """Rows innermost, atom after atom of ``probs[ATOMS, N]``."""
    where = place_of(gained, left, ATOM[:, None])
    return jnp.stack([(jnp.maximum(1.0 - jnp.abs(where - i), 0.0) * probs).sum(0) for i in PLACES])


def in_loop(probs, gained, left):
    """The same in a loop over what is spread."""
    where = place_of(gained, left, ATOM[:, None])

    def body(total, x):
        where, probs = x
        return total + jnp.maximum(1.0 - jnp.abs(where - PLACES[:, None]), 0.0) * probs, None

    return jax.lax.scan(body, jnp.zeros_like(probs), (where, probs), unroll=3)[0]


# -- logits ``[N, ACTIONS, ATOMS]`` of rows, or ``[ACTIONS, ATOMS, N]`` of columns; the layers have their noise


def rows(p, obs):
    x = relu(c.linear(p["trunk"], obs))
    value, advantage = (c.mlp(p[n], x, relu) for n in OUTPUTS)
    return value[:, None] + advantage.reshape(-1, ACTIONS, ATOMS)


def rows_joined(p, obs):
    """First layers are one product; and values are added by another one of both."""
    x = relu(c.linear(p["trunk"], obs))
    first = jax.tree.map(lambda a, b: jnp.concatenate([a, b], -1), p["value"][0], p["advantage"][0])
    value, advantage = p["value"][1], p["advantage"][1]
    w = jnp.concatenate([jnp.tile(value["w"], (1, ACTIONS)), advantage["w"]])
    made = relu(c.linear(first, x)) @ w + jnp.tile(value["b"], ACTIONS) + advantage["b"]
    return made.reshape(-1, ACTIONS, ATOMS)


def columns(p, obs):
    x = relu(p["trunk"]["w"].T @ obs.T + p["trunk"]["b"][:, None])
    value, advantage = (c.columns(p[n], x, relu) for n in OUTPUTS)
    return value + advantage.reshape(ACTIONS, ATOMS, -1)


class Way(NamedTuple):
    logits: Any = rows
    spread: Any = shared
    turned: bool = False  # features first
    again: bool = False  # hidden layers are computed a second time
    chunk: int | None = None  # timesteps after the others, the last ones first


def by_hand(length, batch, hidden, way):
    """Noise is added once, and rows of both networks are asked once."""
    count = length * batch
    atoms, actions = (1, 0) if way.turned else (2, 1)  # axes
    axis = atoms - 1  # of atoms, of one action

    def hot(action):
        here = action[:, None] == jnp.arange(ACTIONS)
        return jnp.expand_dims(here.T if way.turned else here, atoms)

    def chosen(logits, action):
        return jnp.where(hot(action), logits, 0.0).sum(actions)

    def best_of(logits):
        grown = jnp.exp(logits - logits.max(atoms, keepdims=True))
        atom = ATOM[:, None] if way.turned else ATOM
        return jnp.argmax((grown * atom).sum(atoms) / grown.sum(atoms), actions)

    def learn(p, target, part, after):
        """Of timesteps ``[t, B]``; ``after``: distributions of the three behind. ``p``, ``target``: with noise."""
        x = c.rows_of(part)
        far = way.logits(target, x["obs"])

        def loss(p):
            logits = (jax.checkpoint(way.logits) if way.again else way.logits)(p, x["obs"])
            later = jax.nn.softmax(chosen(far, best_of(stop_gradient(logits))), axis)
            later = jnp.concatenate([later, after], 1 - axis)
            later, on = (jax.lax.slice_in_dim(later, *cut, axis=1 - axis) for cut in ((STEPS * batch, None), (0, STEPS * batch)))
            aim = stop_gradient(way.spread(later, x["gained"], x["left"]))
            lost = -(aim * jax.nn.log_softmax(chosen(logits, x["action"]), axis)).sum(axis)
            return (x["weight"] * lost).sum() / count, (lost.reshape(-1, batch), stop_gradient(on))

        return jax.value_and_grad(loss, has_aux=True)(p)

    def run(p, target, data, key):
        noise, target_noise = (noise_of(k, hidden, OUTPUTS) for k in jax.random.split(key))
        made, back = jax.vjp(lambda p: centred(with_noise(p, noise)), p)
        target = centred(with_noise(target, target_noise))
        gained, left = nearest(data)
        x = {name: data[name] for name in ("obs", "action", "weight")} | {"gained": gained, "left": left}
        even = jnp.broadcast_to(EVEN[:, None], (ATOMS, STEPS * batch))
        even = even if way.turned else even.T
        if way.chunk is None:
            (loss, (lost, _)), grads = learn(made, target, x, even)
            return loss, back(grads)[0], lost

        def body(carry, part):
            total, after = carry
            (loss, (lost, after)), grads = learn(made, target, part, after)
            return (jax.tree.map(jnp.add, total, (loss, grads)), after), lost

        start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, made)), even
        ((loss, grads), _), lost = jax.lax.scan(body, start, c.in_chunks(x, way.chunk), reverse=True)
        return loss, back(grads)[0], lost.reshape(length, batch)

    return run


def workload(length, batch, hidden, chunk=8):
    make = functools.partial(by_hand, length, batch, hidden)
    first, loop = Way(columns, in_turn, turned=True), Way(columns, in_loop, turned=True)
    forms = {
        "rlfx": given.by_rlfx(length, batch, hidden), "plain": given.plain(length, batch, hidden),
        "scattered": make(Way(spread=scattered)), "shared": make(Way()), "joined, shared": make(Way(rows_joined)),
        "features first": make(first), "features first, in a loop": make(loop), "again": make(loop._replace(again=True)),
        f"shared, blocks of {chunk}": make(Way(chunk=chunk)),
        f"scattered, blocks of {chunk}": make(Way(spread=scattered, chunk=chunk)),
        f"features first, blocks of {chunk}": make(first._replace(chunk=chunk)),
        f"features first, in a loop, blocks of {chunk}": make(loop._replace(chunk=chunk)),
        f"features first, in a loop, blocks of {chunk // 2}": make(loop._replace(chunk=chunk // 2)),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 7)
    data = c.episodes(k, (length, batch), OBS, ACTIONS)
    data["weight"] = jax.random.uniform(k[4], (length, batch), minval=0.2, maxval=1.0)
    del data["first"]
    return drawing(forms, (params_of(k[5], hidden), params_of(k[6], hidden), data), tolerance=2e-5)
