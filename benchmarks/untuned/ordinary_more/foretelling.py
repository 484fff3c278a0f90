"""Learners that foretell: their own codes some timesteps ahead (SPR), and the liked one of two texts (DPO)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.parts import gru, gru_params, relu, unit

OBS, ACTIONS, GAMMA = 24, 6, 0.99

# -- SPR (Schwarzer et al. 2021): codes foretold five timesteps ahead, those of an old encoder; Q-learning by the same code

AHEAD = 5


def self_params(key, hidden):
    k = jax.random.split(key, 4)
    return {
        "encoder": c.mlp_params(k[0], (OBS, hidden, hidden)), "moves": c.mlp_params(k[1], (hidden + ACTIONS, hidden, hidden)),
        "guess": c.dense(k[2], hidden, hidden), "q": c.mlp_params(k[3], (hidden, hidden, ACTIONS)),
    }  # fmt: skip


def self_losses(p, x, aim, actions, codes, there):
    """Windows lead: ``actions[AHEAD, ...]``, ``codes[AHEAD, ..., hidden]`` of what follows, ``there`` where it is."""
    h = relu(c.mlp(p["encoder"], x["obs"], relu))
    loss = (c.pick(c.mlp(p["q"], h, relu), x["action"]) - aim) ** 2
    for k in range(AHEAD):
        h = relu(c.mlp(p["moves"], jnp.concatenate([h, jax.nn.one_hot(actions[k], ACTIONS)], -1), relu))
        alike = (unit(c.linear(p["guess"], h)) * codes[k]).sum(-1)
        loss = loss - jnp.where(there[k], alike, 0.0)
    return loss


def self_program(params, carry, t):
    (p, old), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    code = lambda obs: relu(c.mlp(old["encoder"], obs, relu))  # noqa: E731
    here, behind = code(x["obs"]), code(x["last"])
    best = rlfx.series(c.mlp(old["q"], here, relu).max(), end=c.mlp(old["q"], behind, relu).max())[t + 1]
    aim = x["reward"] + GAMMA * (1.0 - x["done"]) * best
    codes, there = rlfx.series((unit(here), jnp.bool_(True))).window(1, AHEAD + 1, fill=(0.0, False))
    return self_losses(p, x, aim, rlfx.series(x["action"]).window(0, AHEAD), codes, there), carry


def self_plain(length):
    def windows(x, first):
        padded = jnp.concatenate([x, jnp.zeros((AHEAD + first, *x.shape[1:]), x.dtype)])
        return jnp.stack([padded[first + k : first + k + length] for k in range(AHEAD)])

    def loss(p, old, data):
        code = relu(c.mlp(old["encoder"], parts.with_last(data), relu))
        aim = data["reward"] + parts.going(data, GAMMA) * c.mlp(old["q"], code[1:], relu).max(-1)
        there = jnp.ones_like(data["done"])
        ahead = windows(data["action"], 0), windows(unit(code[:-1]), 1), windows(there, 1)
        return self_losses(p, data, aim, *ahead).mean()

    return parts.usual(loss)


def self_predicted(length, batch, hidden):
    p, old = (self_params(jax.random.key(i), hidden) for i in range(2))
    data = parts.stored(2, length, batch, (OBS,), ACTIONS)
    return parts.learner(self_program, self_plain(length), length, batch, p, old, data)


# -- DPO (Rafailov et al. 2023): of two texts, one is liked; a GRU learns against what an old one says

TOKENS, BETA = 128, 0.1


def text_params(key, hidden):
    k = jax.random.split(key, 3)
    embedded = 0.5 * jax.random.normal(k[0], (TOKENS, hidden))
    return {"token": embedded, "gru": gru_params(k[1], hidden, hidden), "out": c.dense(k[2], hidden, TOKENS)}


def text_program(params, h, t):
    (p, _), data = params
    x = rlfx.inputs(data)[t]
    h = gru(p["gru"], h, p["token"][x["token"]])
    log_p = c.pick(jax.nn.log_softmax(c.linear(p["out"], h)), x["next"])
    more = rlfx.series(jnp.where(x["there"], log_p - x["old_log_p"], 0.0))[:].sum(0)
    return jax.nn.softplus(-BETA * (more[0] - more[1])), h


def text_plain(batch, hidden):
    def loss(p, _, data):
        def body(h, x):
            h = gru(p["gru"], h, x)
            return h, h

        _, h = jax.lax.scan(body, jnp.zeros((batch, 2, hidden)), p["token"][data["token"]])
        log_p = c.pick(jax.nn.log_softmax(c.linear(p["out"], h)), data["next"])
        more = jnp.where(data["there"], log_p - data["old_log_p"], 0.0).sum(0)
        return jax.nn.softplus(-BETA * (more[..., 0] - more[..., 1])).mean()

    return parts.usual(loss)


def text(length, batch, hidden):
    k = jax.random.split(jax.random.key(1), 3)
    token = jax.random.randint(k[0], (length + 1, batch, 2), 0, TOKENS)
    ends = jax.random.randint(k[1], (batch, 2), length // 2, length + 1)
    data = {
        "token": token[:-1], "next": token[1:], "there": jnp.arange(length)[:, None, None] < ends,
        "old_log_p": -5.0 + 0.3 * jax.random.normal(k[2], (length, batch, 2)),
    }  # fmt: skip
    p, start = text_params(jax.random.key(0), hidden), jnp.zeros((batch, 2, hidden))
    return parts.learner(text_program, text_plain(batch, hidden), length, batch, p, (), data, start)
