"""Learners that look at all timesteps of a sequence, those that follow included: a return that is shared out, and actions
guessed between what was and what will be seen."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.attending import feed, projected, scale_of, transformer_params
from benchmarks.untuned.ordinary.parts import gru, gru_params, layer_norm, relu

OBS, ACTIONS = 16, 6

# -- the return of a sequence shared out over its timesteps, by two layers of attention in both directions


def shared_token(p, x, place):
    done = x["done"].astype(jnp.float32)[..., None]
    return c.linear(p["token"], jnp.concatenate([x["obs"], jax.nn.one_hot(x["action"], ACTIONS), done], -1)) + place


def shared_program(heads):
    def program(params, carry, t):
        (p, _), data = params
        x = rlfx.inputs(data)[t]
        h = shared_token(p, x, p["place"][t.now])
        for layer in p["layers"]:
            q, k, v = projected(layer, layer_norm(layer["first"], h), heads)
            keys, values = rlfx.series((k, v))[:]
            weights = jax.nn.softmax(jnp.einsum("hw,nhw->hn", q, keys) * scale_of(q), axis=-1)
            h = feed(layer, h + c.linear(layer["o"], jnp.einsum("hn,nhw->hw", weights, values).reshape(-1)))
        share = c.linear(p["out"], h)[0]
        whole = rlfx.series(x["reward"])[:].sum() - rlfx.series(share)[:].sum()
        return 0.1 * whole**2 + (share - x["reward"]) ** 2, carry

    return program


def shared_plain(heads):
    def loss(p, _, data):
        h = jnp.moveaxis(shared_token(p, data, p["place"][:, None]), 0, 1)
        for layer in p["layers"]:
            q, k, v = projected(layer, layer_norm(layer["first"], h), heads)
            weights = jax.nn.softmax(jnp.einsum("bthw,bshw->bhts", q, k) * scale_of(q), axis=-1)
            h = feed(layer, h + c.linear(layer["o"], jnp.einsum("bhts,bshw->bthw", weights, v).reshape(h.shape)))
        share = c.linear(p["out"], h)[..., 0].T
        whole = data["reward"].sum(0) - share.sum(0)
        return (0.1 * whole**2 + (share - data["reward"]) ** 2).mean()

    return parts.usual(loss)


def shared(length, batch, width, layers, heads):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    del data["last"]
    p = transformer_params(jax.random.key(0), width, layers, length)
    return parts.learner(shared_program(heads), shared_plain(heads), length, batch, p, (), data)


# -- what was done, guessed by a GRU that goes forwards and one that goes backwards (VPT's inverse dynamics)


def guessed_params(key, hidden):
    k = jax.random.split(key, 4)
    return {
        "in": c.mlp_params(k[0], (OBS, hidden, hidden)), "before": gru_params(k[1], hidden, hidden),
        "after": gru_params(k[2], hidden, hidden), "out": c.mlp_params(k[3], (2 * hidden, hidden, ACTIONS)),
    }  # fmt: skip


def guessed_program(params, h, t):
    (p, _), data = params
    x = rlfx.inputs(data)[t]
    seen = relu(c.mlp(p["in"], x["obs"], relu))
    h = gru(p["before"], h, seen)
    later = rlfx.solve(lambda g: gru(p["after"], g[t + 1], seen), end=jnp.zeros_like(h))
    log_p = jax.nn.log_softmax(c.mlp(p["out"], jnp.concatenate([h, later]), relu))
    return -log_p[x["action"]], h


def guessed_plain(p, _, data):
    seen = relu(c.mlp(p["in"], data["obs"], relu))

    def passed(p, reverse):
        def body(h, x):
            h = gru(p, h, x)
            return h, h

        return jax.lax.scan(body, jnp.zeros_like(seen[0]), seen, reverse=reverse)[1]

    both = jnp.concatenate([passed(p["before"], False), passed(p["after"], True)], -1)
    return -c.pick(jax.nn.log_softmax(c.mlp(p["out"], both, relu)), data["action"]).mean()


def guessed(length, batch, hidden):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    data = {name: data[name] for name in ("obs", "action")}
    p, start = guessed_params(jax.random.key(0), hidden), jnp.zeros((batch, hidden))
    return parts.learner(guessed_program, parts.usual(guessed_plain), length, batch, p, (), data, start)
