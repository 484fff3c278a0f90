"""Learners with larger networks or longer looks: MuZero's unrolled model, IMPALA with a convolutional LSTM, a gated
transformer over a window."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.attending import heads_of, scale_of
from benchmarks.untuned.ordinary.parts import (
    gru,
    gru_params,
    kernel,
    layer_norm,
    lstm,
    lstm_params,
    norm_params,
    relu,
)

OBS, ACTIONS, GAMMA = 24, 6, 0.99

# -- MuZero: five steps of the model from every timestep, rewards, values (of five-step returns) and what the search said

AHEAD = 5


def muzero_params(key, hidden):
    k = jax.random.split(key, 5)
    return {
        "represent": c.mlp_params(k[0], (OBS, hidden, hidden)),
        "dynamics": c.mlp_params(k[1], (hidden + ACTIONS, hidden, hidden)),
        "reward": c.mlp_params(k[2], (hidden, hidden, 1)), "value": c.mlp_params(k[3], (hidden, hidden, 1)),
        "pi": c.mlp_params(k[4], (hidden, hidden, ACTIONS)),
    }  # fmt: skip


def unrolled(p, obs, actions, rewards, values, searched, counted):
    """Of rows, or of one; windows lead: ``actions[AHEAD, ...]``, ``values[AHEAD + 1, ...]``, ``counted`` where a timestep is."""
    h, loss = jnp.tanh(c.mlp(p["represent"], obs, relu)), 0.0
    for k in range(AHEAD + 1):
        log_p = jax.nn.log_softmax(c.mlp(p["pi"], h, relu))
        here = (c.mlp(p["value"], h, relu)[..., 0] - values[k]) ** 2 - (searched[k] * log_p).sum(-1)
        loss = loss + jnp.where(counted[k], here, 0.0)
        if k < AHEAD:
            h = jnp.concatenate([h, jax.nn.one_hot(actions[k], ACTIONS)], -1)
            h = jnp.tanh(c.mlp(p["dynamics"], h, relu))
            h = 0.5 * h + 0.5 * stop_gradient(h)
            error = (c.mlp(p["reward"], h, relu)[..., 0] - rewards[k]) ** 2
            loss = loss + jnp.where(counted[k], error, 0.0)
    return loss


def muzero_program(params, carry, t):
    (p, _), data = params
    data = rlfx.inputs(data, axes=parts.axes(data))
    x = data[t]
    following = rlfx.series(x["value"], end=x["last_value"])[t + 1]
    value = rlfx.n_step_return(parts.step_of(x), following, gamma=GAMMA, n=5)
    ahead = rlfx.series((x["action"], x["reward"])).window(0, AHEAD)
    aims = rlfx.series((value, x["searched"], jnp.bool_(True))).window(0, AHEAD + 1, fill=(0.0, 0.0, False))
    return unrolled(p, x["obs"], *ahead, *aims), carry


def muzero_plain(length):
    def windows(x, n):
        padded = jnp.concatenate([x, jnp.zeros((n, *x.shape[1:]), x.dtype)])
        return jnp.stack([padded[k : k + length] for k in range(n)])

    def loss(p, _, data):
        discount, last = parts.going(data, GAMMA), data["last_value"]
        value = data["reward"] + discount * c.shifted(data["value"], last)
        for _ in range(4):
            value = data["reward"] + discount * c.shifted(value, last)
        ahead = (windows(data[name], AHEAD) for name in ("action", "reward"))
        there = jnp.ones_like(data["done"])
        aims = (windows(x, AHEAD + 1) for x in (value, data["searched"], there))
        return unrolled(p, data["obs"], *ahead, *aims).mean()

    return parts.usual(loss)


def muzero(length, batch, hidden):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    del data["last"]
    value = jax.random.normal(jax.random.key(2), (length + 1, batch))
    searched = jax.nn.softmax(jax.random.normal(jax.random.key(3), (length, batch, ACTIONS)))
    data |= {"value": value[:-1], "last_value": value[-1], "searched": searched}
    p = muzero_params(jax.random.key(0), hidden)
    return parts.learner(muzero_program, muzero_plain(length), length, batch, p, (), data)


# -- IMPALA: a convolutional network, and an LSTM of what it saw, the last action and the last reward


def watching_params(key, side, hidden):
    k = jax.random.split(key, 6)
    features = 32 * (((side - 4) // 2 + 1 - 4) // 2 + 1) ** 2
    return {
        "conv": [kernel(k[0], 4, 3, 16), kernel(k[1], 4, 16, 32)], "hidden": c.dense(k[2], features, hidden),
        "lstm": lstm_params(k[3], hidden + ACTIONS + 1, hidden),
        "pi": c.dense(k[4], hidden, ACTIONS), "v": c.dense(k[5], hidden, 1),
    }  # fmt: skip


def told(action, reward):
    return jnp.concatenate([jax.nn.one_hot(action, ACTIONS), reward[..., None]], -1)


def watching_program(params, state, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    action, reward = rlfx.series((x["action"], x["reward"]), start=(0, 0.0))[t - 1]
    features = jnp.concatenate([parts.small(p, x["obs"][None])[0], told(action, reward)])
    state = jax.tree.map(lambda s: jnp.where(x["first"], 0.0, s), state)
    state = lstm(p["lstm"], state, features)
    log_p, value = jax.nn.log_softmax(c.linear(p["pi"], state[1])), c.linear(p["v"], state[1])[0]
    log_prob = log_p[x["action"]]
    following = rlfx.series(value, end=x["last_value"])[t + 1]
    target, advantage = rlfx.vtrace(parts.step_of(x), value, following, log_prob - x["log_prob"], gamma=GAMMA)
    entropy = -(jnp.exp(log_p) * log_p).sum()
    loss = 0.5 * (value - stop_gradient(target)) ** 2 - log_prob * stop_gradient(advantage) - 0.01 * entropy
    return loss, state


def watching_plain(start):
    def loss(p, _, data):
        size = data["done"].shape
        action, reward = (jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]]) for x in (data["action"], data["reward"]))
        features = parts.small(p, c.rows_of(data["obs"])).reshape(*size, -1)
        features = jnp.concatenate([features, told(action, reward)], -1)

        def body(state, x):
            state = jax.tree.map(lambda s: jnp.where(x[1][:, None], 0.0, s), state)
            state = lstm(p["lstm"], state, x[0])
            return state, state[1]

        _, h = jax.lax.scan(body, start, (features, data["first"]))
        logits, value = c.linear(p["pi"], h), c.linear(p["v"], h)[..., 0]
        log_prob = c.pick(jax.nn.log_softmax(logits), data["action"])
        target, advantage = stop_gradient(c.vtrace(value, data["last_value"], log_prob - data["log_prob"], data, GAMMA))
        return c.actor_critic_loss(logits, value, log_prob, advantage, target).mean()

    return parts.usual(loss)


def watching(length, batch, side, hidden):
    data = parts.stored(1, length, batch, (side, side, 3), ACTIONS, dtype=jnp.uint8)
    del data["last"]
    k = jax.random.split(jax.random.key(3))
    data["first"] = jnp.concatenate([jnp.ones_like(data["done"][:1]), data["done"][:-1]])
    data["log_prob"] = 0.3 * jax.random.normal(k[0], (length, batch)) - 1.8
    data["last_value"] = jax.random.normal(k[1], (batch,))
    start = (jnp.zeros((batch, hidden)),) * 2
    p = watching_params(jax.random.key(0), side, hidden)
    return parts.learner(watching_program, watching_plain(start), length, batch, p, (), data, start)


# -- two layers of a transformer with gates (Parisotto et al. 2020), over a window


def gated_params(key, width, layers):
    k = iter(jax.random.split(key, 7 * layers + 2))

    def layer():
        return {
            **{name: c.dense(next(k), width, width)["w"] for name in "qkv"}, "o": c.dense(next(k), width, width),
            "up": c.dense(next(k), width, 2 * width), "down": c.dense(next(k), 2 * width, width),
            "gate": gru_params(next(k), width, width), "first": norm_params(width), "second": norm_params(width),
        }  # fmt: skip

    token = c.dense(next(k), OBS, width)
    return {"token": token, "layers": [layer() for _ in range(layers)], "out": c.dense(next(k), width, ACTIONS)}


def gated_feed(layer, h, read):
    h = gru(layer["gate"], h, relu(c.linear(layer["o"], read)))
    y = layer_norm(layer["second"], h)
    return h + c.linear(layer["down"], relu(c.linear(layer["up"], y)))


def gated_program(heads, window):
    def program(params, carry, t):
        (p, _), data = params
        x = rlfx.inputs(data)[t]
        h = c.linear(p["token"], x["obs"])
        for layer in p["layers"]:
            q, k, v = (heads_of(layer_norm(layer["first"], h) @ layer[name], heads) for name in "qkv")
            keys, values = rlfx.series((k, v))[t - window + 1 : t + 1]
            weights = jax.nn.softmax(jnp.einsum("hw,nhw->hn", q, keys) * scale_of(q), axis=-1)
            h = gated_feed(layer, h, jnp.einsum("hn,nhw->hw", weights, values).reshape(-1))
        return -jax.nn.log_softmax(c.linear(p["out"], h))[x["action"]], carry

    return program


def gated_plain(heads, window):
    def loss(p, _, data):
        h = jnp.moveaxis(c.linear(p["token"], data["obs"]), 0, 1)
        ago = jnp.arange(h.shape[1])[:, None] - jnp.arange(h.shape[1])
        mask = (ago >= 0) & (ago < window)
        for layer in p["layers"]:
            q, k, v = (heads_of(layer_norm(layer["first"], h) @ layer[name], heads) for name in "qkv")
            scores = jnp.einsum("bthw,bshw->bhts", q, k) * scale_of(q)
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
            h = gated_feed(layer, h, jnp.einsum("bhts,bshw->bthw", weights, v).reshape(h.shape))
        return -c.pick(jax.nn.log_softmax(c.linear(p["out"], h)), data["action"].T).mean()

    return parts.usual(loss)


def gated(length, batch, width, layers, heads, window):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    data = {name: data[name] for name in ("obs", "action")}
    p = gated_params(jax.random.key(0), width, layers)
    return parts.learner(gated_program(heads, window), gated_plain(heads, window), length, batch, p, (), data)
