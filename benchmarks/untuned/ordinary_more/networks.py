"""Policies of other networks, before an actor and a critic: experts of which each point chooses two, features scaled by a
task, weights made of a task, state spaces that are diagonal."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.fixed import ACTIONS, GAMMA, OBS, judged
from benchmarks.untuned.ordinary.parts import relu

TASKS = 8


def heads(key, width):
    k = jax.random.split(key)
    return {"pi": c.dense(k[0], width, ACTIONS), "v": c.dense(k[1], width, 1)}


def at_points(features, p, length, batch):
    """Of ``features(p, x)``, of a point or of all."""

    def program(params, carry, t):
        (p, _), data = params
        x = rlfx.inputs(data)[t]
        going = rlfx.series(jnp.where(x["done"], 0.0, GAMMA))
        target = rlfx.discounted_sum(rlfx.series(x["reward"])[t:], going[t:])
        h, extra = features(p, x)
        return judged(p, h, x["action"], target) + extra, carry

    def plain(p, _, data):
        target = c.discounted(data["reward"], parts.going(data, GAMMA))
        h, extra = features(p, data)
        return (judged(p, h, data["action"], target) + extra).mean()

    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    del data["last"]
    data["task"] = jax.random.normal(jax.random.key(3), (length, batch, TASKS))
    return parts.learner(program, parts.usual(plain), length, batch, p, (), data)


# -- a mixture of experts: two of eight, of all of which the outputs are computed, and what is chosen too often costs

EXPERTS, CHOSEN = 8, 2


def experts_features(p, x):
    h = relu(c.linear(p["in"], x["obs"]))
    share = jax.nn.softmax(c.linear(p["gate"], h))
    top, which = jax.lax.top_k(share, CHOSEN)
    weight = (jax.nn.one_hot(which, EXPERTS) * (top / top.sum(-1, keepdims=True))[..., None]).sum(-2)
    made = jax.vmap(lambda expert: c.mlp(expert, h, relu), out_axes=-2)(p["experts"])
    balance = EXPERTS * (share * jax.nn.one_hot(which[..., 0], EXPERTS)).sum(-1)
    return h + jnp.einsum("...e,...ew->...w", weight, made), 0.01 * balance


def experts(length, batch, width):
    k = jax.random.split(jax.random.key(0), 4)
    nets = jax.vmap(lambda k: c.mlp_params(k, (width, 2 * width, width)))(jax.random.split(k[0], EXPERTS))
    p = {"in": c.dense(k[1], OBS, width), "gate": c.dense(k[2], width, EXPERTS), "experts": nets, **heads(k[3], width)}
    return at_points(experts_features, p, length, batch)


# -- FiLM: blocks whose features a task scales and moves


def film_features(p, x):
    h = c.linear(p["in"], x["obs"])
    told = relu(c.linear(p["told"], x["task"]))
    for block in p["blocks"]:
        scale, move = jnp.split(c.linear(block["film"], told), 2, -1)
        h = h + c.linear(block["out"], relu((1.0 + scale) * parts.layer_norm(block["norm"], c.linear(block["into"], h)) + move))
    return h, 0.0


def film(length, batch, width, blocks):
    k = jax.random.split(jax.random.key(0), 4)

    def block(key):
        k = jax.random.split(key, 3)
        return {
            "film": c.dense(k[0], width, 2 * width), "into": c.dense(k[1], width, width), "out": c.dense(k[2], width, width),
            "norm": parts.norm_params(width),
        }  # fmt: skip

    made = [block(key) for key in jax.random.split(k[0], blocks)]
    p = {"in": c.dense(k[1], OBS, width), "told": c.dense(k[2], TASKS, width), "blocks": made, **heads(k[3], width)}
    return at_points(film_features, p, length, batch)


# -- a hypernetwork: the weights of a small network for every point


def hyper_features(p, x):
    width = p["pi"]["w"].shape[0]
    made = c.mlp(p["hyper"], x["task"], relu)
    w, b = made[..., : OBS * width].reshape(*made.shape[:-1], OBS, width), made[..., OBS * width :]
    return relu(jnp.einsum("...o,...ow->...w", x["obs"], w) + b), 0.0


def hyper(length, batch, width, hidden):
    k = jax.random.split(jax.random.key(0))
    p = {"hyper": c.mlp_params(k[0], (TASKS, hidden, (OBS + 1) * width)), **heads(k[1], width)}
    return at_points(hyper_features, p, length, batch)


# -- S4D: two layers, in which every feature has a few complex numbers that decay and turn


def spaces_params(key, width, layers, states):
    k = jax.random.split(key, layers + 2)
    turn = jnp.pi * jnp.broadcast_to(jnp.arange(states, dtype=jnp.float32), (width, states))

    def layer(key):
        k = jax.random.split(key, 3)
        return {
            "log_step": jax.random.uniform(k[0], (width,), minval=-5.0, maxval=-2.0), "skip": jnp.ones(width),
            "log_decay": jnp.full((width, states), -0.7), "turn": turn, "read": 0.5 * jax.random.normal(k[1], (width, states, 2)),
            "out": c.dense(k[2], width, 2 * width),
        }  # fmt: skip

    return {"in": c.dense(k[0], OBS, width), "layers": [layer(x) for x in k[2:]], **heads(k[1], width)}


def space_of(layer):
    """How states decay in a timestep, and what an input adds: ``[width, states]``."""
    rate = -jnp.exp(layer["log_decay"]) + 1j * layer["turn"]
    decay = jnp.exp(rate * jnp.exp(layer["log_step"])[:, None])
    return decay, (decay - 1.0) / rate


def read_of(layer, h, state):
    read = jax.lax.complex(layer["read"][..., 0], layer["read"][..., 1])
    y = jax.nn.gelu(2.0 * (read * state).sum(-1).real + layer["skip"] * h)
    into, gate = jnp.split(c.linear(layer["out"], y), 2, -1)
    return h + into * jax.nn.sigmoid(gate)


def spaces_program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data)[t]
    h, after = c.linear(p["in"], x["obs"]), []
    for layer, state in zip(p["layers"], carry, strict=True):
        decay, adds = space_of(layer)
        state = decay * state + adds * h[:, None]
        h, after = read_of(layer, h, state), [*after, state]
    target = rlfx.discounted_sum(rlfx.series(x["reward"])[t:], GAMMA)
    return judged(p, h, x["action"], target), after


def spaces_plain(p, _, data):
    h = c.linear(p["in"], data["obs"])
    for layer in p["layers"]:
        decay, adds = space_of(layer)

        def body(state, h, decay=decay, adds=adds):
            state = decay * state + adds * h[..., None]
            return state, state

        start = jnp.zeros((*h.shape[1:], decay.shape[-1]), decay.dtype)
        h = read_of(layer, h, jax.lax.scan(body, start, h)[1])
    target = c.discounted(data["reward"], jnp.full_like(data["reward"], GAMMA))
    return judged(p, h, data["action"], target).mean()


def spaces(length, batch, width, layers, states):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    data = {name: data[name] for name in ("obs", "action", "reward")}
    start = [jnp.zeros((batch, width, states), jnp.complex64) for _ in range(layers)]
    p = spaces_params(jax.random.key(0), width, layers, states)
    return parts.learner(spaces_program, parts.usual(spaces_plain), length, batch, p, (), data, start)
