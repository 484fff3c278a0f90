"""A2C from stacked frames by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_twenty_first import paddle as given
from benchmarks.untuned.sealed_twenty_first.curious_by_hand import known
from benchmarks.untuned.sealed_twenty_first.paddle import (
    ACTIONS,
    ENTROPY,
    REACH,
    convolved,
    drawn,
    params_of,
    relu,
    reset,
    returns_of,
)  # fmt: skip

LAST = ("NHWC", "HWIO", "NHWC")


class Pixels(NamedTuple):
    """How points are laid out: what frames ``[N, FRAMES, side, side]`` become; convolutions, dense layers; where points are."""

    enter: Any
    conv: Any
    dense: Any
    points: int = 0


def places(x, size, axes):
    """What is in each place of patches, two apart."""
    n = (x.shape[axes[0]] - size) // 2 + 1

    def cut(x, i, axis):
        return jax.lax.slice_in_dim(x, i, i + 2 * n - 1, stride=2, axis=axis)

    return [cut(cut(x, i, axes[0]), j, axes[1]) for i in range(size) for j in range(size)]


def conv_last(p, x):
    w = p["w"].transpose(2, 3, 1, 0)
    return relu(jax.lax.conv_general_dilated(x, w, (2, 2), "VALID", dimension_numbers=LAST) + p["b"])


def patches_last(p, x):
    x = jnp.concatenate(places(x, p["w"].shape[-1], (1, 2)), -1)
    return relu(x @ p["w"].transpose(2, 3, 1, 0).reshape(x.shape[-1], -1) + p["b"])


def patches_turned(p, x):
    """Points innermost: ``x[channels, side, side, N]``."""
    x = jnp.concatenate(places(x, p["w"].shape[-1], (1, 2)))
    w = p["w"].transpose(0, 2, 3, 1).reshape(len(p["w"]), -1)
    return relu((w @ x.reshape(len(x), -1)).reshape(-1, *x.shape[1:]) + p["b"][:, None, None, None])


def dense_first(p, x):
    return c.linear(p, x.reshape(len(x), -1))


def dense_last(p, x):
    """The weights are of channels first."""
    if x.ndim == 2:
        return c.linear(p, x)
    w = p["w"].reshape(x.shape[-1], *x.shape[1:3], -1).transpose(1, 2, 0, 3)
    return x.reshape(len(x), -1) @ w.reshape(-1, w.shape[-1]) + p["b"]


def dense_turned(p, x):
    return p["w"].T @ x.reshape(-1, x.shape[-1]) + p["b"][:, None]


FIRST = Pixels(lambda x: x, convolved, dense_first)
CHANNELS_LAST = Pixels(lambda x: x.transpose(0, 2, 3, 1), conv_last, dense_last)
PATCHES = CHANNELS_LAST._replace(conv=patches_last)
TURNED = Pixels(lambda x: x.transpose(1, 2, 3, 0), patches_turned, dense_turned, -1)


def layers_of(p, layout):
    """``(layer, its parameters)``; the last one is of policy and value."""
    heads = jax.tree.map(lambda a, b: jnp.concatenate([a, b], -1), p["pi"], p["v"])
    hidden = lambda p, x: relu(layout.dense(p, x))  # noqa: E731
    return (layout.conv, p["first"]), (layout.conv, p["second"]), (hidden, p["dense"]), (layout.dense, heads)


def outputs(p, layout, frames, kept=None):
    """Logits ``[N, ACTIONS]``, values, and what all layers made; ``kept``: what they made before."""
    x, made = layout.enter(frames), []
    for i, (layer, weights) in enumerate(layers_of(p, layout)):
        x = layer(weights, x) if kept is None else known(layer, weights, x, kept[i])
        made.append(x)
    x = x.T if layout.points else x
    return x[:, :ACTIONS], x[:, ACTIONS], made


def moved(side, state, fresh, action):
    """The environment, of a batch, with what new episodes begin with."""
    paddle = jnp.clip(state["paddle"] + action - 1, REACH, side - 1 - REACH)
    row, column = state["ball"][:, 0] + 1, state["ball"][:, 1] + state["way"]
    way = jnp.where((column <= 0) | (column >= side - 1), -state["way"], state["way"])
    column, done = jnp.clip(column, 0, side - 1), row == side - 1
    reward = jnp.where(done, jnp.where(jnp.abs(column - paddle) <= REACH, 1.0, -1.0), 0.0)
    paddle = jnp.where(done, side // 2, paddle)
    ball = jnp.where(done[:, None], fresh["ball"], jnp.stack([row, column], -1))
    frame = jax.vmap(drawn, (0, 0, None))(ball, paddle, side)
    older = jnp.where(done[:, None, None, None], 0.0, state["frames"][:, 1:])
    after = {"frames": jnp.concatenate([older, frame[:, None]], 1), "ball": ball, "paddle": paddle}
    return after | {"way": jnp.where(done, fresh["way"], way)}, reward, done


def chances(side, keys, t):
    """Of all environments: noise of actions, and what new episodes begin with."""
    noise = jax.vmap(lambda k: jax.random.gumbel(k, (ACTIONS,)))(c.at(keys[0], t))
    fresh = jax.vmap(reset(side))(c.at(keys[1], t))
    return noise, {"ball": fresh["ball"], "way": fresh["way"]}


class Way(NamedTuple):
    acts: Any = TURNED
    learns: Any = TURNED
    kept: bool = False  # what the layers made when acting; then both layouts are the same
    ahead: bool = True  # what is drawn comes before the loop
    chunk: int | None = None  # timesteps that learn after the others
    once: bool = False  # values are known from learning


def by_hand(length, batch, side, way):
    def flat(x):
        """``[T, ..., B]`` as ``[..., T * B]``, or ``[T, B, ...]`` as ``[T * B, ...]``."""
        if way.acts.points:
            x = jnp.moveaxis(x, 0, -2)
            return x.reshape(*x.shape[:-2], -1)
        return x.reshape(-1, *x.shape[2:])

    def run(p, state, key):
        keys, times = c.streams(key, batch, "action", "env"), jnp.arange(length)
        draw = functools.partial(chances, side, keys)

        def body(state, x):
            noise, fresh = x if way.ahead else draw(x)
            logits, v, made = outputs(p, way.acts, state["frames"])
            action = jnp.argmax(logits + noise, -1)
            after, reward, done = moved(side, state, fresh, action)
            told = {"frames": state["frames"], "action": action, "value": v, "reward": reward, "done": done}
            return after, (told, made if way.kept else ())

        state, (data, made) = jax.lax.scan(body, state, jax.vmap(draw)(times) if way.ahead else times)
        last = outputs(p, way.acts, state["frames"])[1]

        def loss(p, x, kept=None):
            logits, v, _ = outputs(p, way.learns, x["frames"], kept)
            log_prob = c.pick(jax.nn.log_softmax(logits), x["action"])
            lost = c.actor_critic_loss(logits, v, log_prob, x["returns"] - x["value"], x["returns"], ENTROPY)
            return lost.sum() / (length * batch)

        data["returns"] = returns_of(data["value"], last, data["reward"], data["done"])
        x = c.rows_of(data)
        if way.chunk is None:
            kept = [flat(y) for y in made] if way.kept else None
            return *jax.value_and_grad(loss)(p, x, kept), state
        parts = c.in_chunks(x, way.chunk * batch)
        if not way.kept:
            return *c.summed_gradient(loss, p, parts), state
        some = [jax.vmap(flat)(y) for y in c.in_chunks(made, way.chunk)]
        return *c.summed_gradient(lambda p, part: loss(p, *part), p, (parts, some)), state

    return run


def workload(length, batch, side, channels, hidden, chunk=4):
    make, some = functools.partial(by_hand, length, batch, side), {"chunk": chunk}
    last, patches = Way(CHANNELS_LAST, CHANNELS_LAST), Way(PATCHES, **some)
    forms = {
        "rlfx": given.by_rlfx(length, batch, side), "plain": given.plain(length, batch, side),
        "channels first": make(Way(FIRST, FIRST)), "channels last": make(last),
        "channels last, kept": make(last._replace(kept=True)), "turned": make(Way()),
        "channels last, turned": make(Way(CHANNELS_LAST)),
        f"turned, blocks of {chunk}": make(Way(**some)), f"patches, turned, blocks of {chunk}": make(patches),
        f"channels last, turned, blocks of {chunk}": make(Way(CHANNELS_LAST, **some)),
        f"patches, turned, blocks of {chunk}, threefry unrolled": make(patches),
        f"channels last, turned, blocks of {chunk}, threefry unrolled": make(Way(CHANNELS_LAST, **some)),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 2)
    state = c.batch_of(reset(side), batch)
    state["ball"] = state["ball"].at[:, 0].set(jax.random.randint(k[0], (batch,), 0, side - 1))
    return drawing(forms, (params_of(k[1], side, channels, hidden), state), tolerance=5e-5)
