"""Learners that look at all timesteps of a sequence, those that follow included: rewards that are shared out, actions guessed
between what was and what will be seen, contrasts with all timesteps, goals that were reached later."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.attending import feed, projected, scale_of, transformer_params
from benchmarks.untuned.ordinary.parts import gru, gru_params, layer_norm, relu

OBS, ACTIONS, GAMMA = 16, 6, 0.99

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


# -- contrastive predictive coding: what is four timesteps ahead, told apart from all other timesteps of the sequence

AHEAD = 4


def contrast_params(key, hidden):
    k = jax.random.split(key, 3)
    return {
        "code": c.mlp_params(k[0], (OBS, hidden, hidden)), "gru": gru_params(k[1], hidden, hidden),
        "guess": c.mlp_params(k[2], (hidden, hidden, hidden)),
    }  # fmt: skip


def unit(x):
    return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-6)


def contrast_program(params, h, t):
    (p, _), data = params
    x = rlfx.inputs(data)[t]
    code = c.mlp(p["code"], x["obs"], relu)
    h = gru(p["gru"], h, relu(code))
    guess, codes = unit(c.mlp(p["guess"], h, relu)), rlfx.series(unit(code))
    ahead = codes[rlfx.minimum(t + AHEAD, t.length - 1)]
    loss = jax.nn.logsumexp(10.0 * (codes[:] @ guess)) - 10.0 * (ahead @ guess)
    return jnp.where(t + AHEAD < t.length, loss, 0.0), h


def contrast_plain(p, _, data):
    code = c.mlp(p["code"], data["obs"], relu)

    def body(h, x):
        h = gru(p["gru"], h, x)
        return h, h

    _, h = jax.lax.scan(body, jnp.zeros_like(code[0]), relu(code))
    guess, codes = unit(c.mlp(p["guess"], h[:-AHEAD], relu)), unit(code)
    scores = 10.0 * jnp.einsum("tbw,sbw->tbs", guess, codes)
    right = 10.0 * (codes[AHEAD:] * guess).sum(-1)
    return (jax.nn.logsumexp(scores, axis=-1) - right).sum() / data["obs"][..., 0].size


def contrast(length, batch, hidden):
    data = {"obs": parts.stored(1, length, batch, (OBS,), ACTIONS)["obs"]}
    p, start = contrast_params(jax.random.key(0), hidden), jnp.zeros((batch, hidden))
    return parts.learner(contrast_program, parts.usual(contrast_plain), length, batch, p, (), data, start)


# -- hindsight experience replay: a goal is what is reached at a later timestep, drawn at random; Q-learning of one step

GOAL = 3


def goal_losses(p, target, x, next_obs, goal):
    reached = jnp.linalg.norm(next_obs[..., :GOAL] - goal, axis=-1) < 1.0
    reward = jnp.where(reached, 0.0, -1.0)
    q = c.mlp(p, jnp.concatenate([x["obs"], goal], -1), relu)
    following = c.mlp(target, jnp.concatenate([next_obs, goal], -1), relu).max(-1)
    aim = reward + GAMMA * jnp.where(reached, 0.0, following)
    return (c.pick(q, x["action"]) - stop_gradient(jnp.clip(aim, -50.0, 0.0))) ** 2


def goal_program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    next_obs = rlfx.series(x["obs"], end=x["last"])[t + 1]
    first, last = rlfx.series(t.now)[0], rlfx.series(t.now)[t.length - 1]
    later = jax.random.randint(t.key_for("later"), (), t.now, last + 1)
    goal = rlfx.series(next_obs[:GOAL])[:][later - first]
    return goal_losses(p, target, x, next_obs, goal), carry


def goal_plain(length, batch):
    def loss(p, target, data, key):
        (keys,) = c.streams(key, batch, "later")
        draw = lambda t: jax.vmap(lambda k: jax.random.randint(k, (), t, length))(c.at(keys, t))  # noqa: E731
        later = jax.vmap(draw)(jnp.arange(length))
        next_obs = parts.with_last(data)[1:]
        goal = next_obs[later, jnp.arange(batch), :GOAL]
        return goal_losses(p, target, data, next_obs, goal).mean()

    return parts.usual(loss)


def goal(length, batch, hidden):
    p, target = (c.mlp_params(jax.random.key(i), (OBS + GOAL, hidden, hidden, ACTIONS)) for i in range(2))
    data = parts.stored(2, length, batch, (OBS,), ACTIONS)
    data = {name: data[name] for name in ("obs", "last", "action")}
    return parts.learner(goal_program, goal_plain(length, batch), length, batch, p, target, data, random=True)
