"""Models of the world: codes from a book, what an ensemble does not agree on (Plan2Explore), plans by the best of many (CEM)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.parts import gru, gru_params, relu

OBS, DIMS, GAMMA = 17, 6, 0.99

# -- a world model of discrete latents: the nearest of a book of vectors, straight through; a GRU predicts the next code

CODES, WIDTH = 64, 32


def book_params(key, hidden):
    k = jax.random.split(key, 5)
    return {
        "encoder": c.mlp_params(k[0], (OBS, hidden, WIDTH)), "book": jax.random.normal(k[1], (CODES, WIDTH)),
        "decoder": c.mlp_params(k[2], (WIDTH, hidden, OBS)), "gru": gru_params(k[3], WIDTH + DIMS, hidden),
        "ahead": c.dense(k[4], hidden, CODES),
    }  # fmt: skip


def coded(p, obs):
    """The number of the code, the code straight through, and what it costs to be far from it."""
    z = c.mlp(p["encoder"], obs)
    far = ((z[..., None, :] - p["book"]) ** 2).sum(-1)
    number = jnp.argmin(far, axis=-1)
    code = p["book"][number]
    apart = ((code - stop_gradient(z)) ** 2).sum(-1) + 0.25 * ((stop_gradient(code) - z) ** 2).sum(-1)
    decoded = c.mlp(p["decoder"], z + stop_gradient(code - z))
    return number, code, apart + ((decoded - obs) ** 2).sum(-1)


def book_program(params, h, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    number, code, seen = coded(p, x["obs"])
    h = gru(p["gru"], h, jnp.concatenate([code, x["action"]]))
    following = rlfx.series(number, end=coded(p, x["last"])[0])[t + 1]
    return seen - jax.nn.log_softmax(c.linear(p["ahead"], h))[following], h


def book_plain(start):
    def loss(p, _, data):
        number, code, seen = coded(p, data["obs"])

        def body(h, x):
            h = gru(p["gru"], h, x)
            return h, h

        _, h = jax.lax.scan(body, start, jnp.concatenate([code, data["action"]], -1))
        following = c.shifted(number, coded(p, data["last"])[0])
        return (seen - c.pick(jax.nn.log_softmax(c.linear(p["ahead"], h)), following)).mean()

    return parts.usual(loss)


def book(length, batch, hidden):
    data = parts.stored(1, length, batch, (OBS,), (DIMS,))
    data = {name: data[name] for name in ("obs", "last", "action")}
    p, start = book_params(jax.random.key(0), hidden), jnp.zeros((batch, hidden))
    return parts.learner(book_program, book_plain(start), length, batch, p, (), data, start)


# -- Plan2Explore: a GRU's state, heads of an ensemble that predict what is encoded next; where they differ is worth a visit


def explore_params(key, hidden, members):
    k = jax.random.split(key, 5)
    return {
        "encoder": c.mlp_params(k[0], (OBS, hidden, WIDTH)), "gru": gru_params(k[1], WIDTH + DIMS, hidden),
        "decoder": c.mlp_params(k[2], (hidden, hidden, OBS)), "v": c.mlp_params(k[3], (hidden, hidden, 1)),
        "heads": jax.vmap(lambda k: c.mlp_params(k, (hidden, hidden, WIDTH)))(jax.random.split(k[4], members)),
    }  # fmt: skip


def guessed(p, h):
    """``[members, ..., WIDTH]``: what comes next, and how much the members differ."""
    guess = jax.vmap(lambda head: c.mlp(head, stop_gradient(h), relu))(p["heads"])
    return guess, guess.var(0).mean(-1)


def explore_losses(p, h, guess, obs, next_code, value, target):
    heads = ((guess - stop_gradient(next_code)) ** 2).mean(-1).sum(0)
    return heads + ((c.mlp(p["decoder"], h, relu) - obs) ** 2).mean(-1) + 0.5 * (value - stop_gradient(target)) ** 2


def explore_program(params, h, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    code = rlfx.series(c.mlp(p["encoder"], x["obs"], relu), end=c.mlp(p["encoder"], x["last"], relu))
    h = gru(p["gru"], h, jnp.concatenate([code[t], x["action"]]))
    guess, differ = guessed(p, h)
    value = c.mlp(p["v"], stop_gradient(h), relu)[0]
    following = rlfx.series(stop_gradient(value), end=0.0)[t + 1]
    step = parts.step_of(x | {"reward": stop_gradient(differ)})
    target = rlfx.lambda_return(step, following, gamma=GAMMA, lam=0.95)
    return explore_losses(p, h, guess, x["obs"], code[t + 1], value, target), jnp.where(x["done"], 0.0, h)


def explore_plain(start):
    def loss(p, _, data):
        obs = parts.with_last(data)
        code = c.mlp(p["encoder"], obs, relu)

        def body(h, x):
            h = gru(p["gru"], h, x[0])
            return jnp.where(x[1][:, None], 0.0, h), h

        _, h = jax.lax.scan(body, start, (jnp.concatenate([code[:-1], data["action"]], -1), data["done"]))
        guess, differ = guessed(p, h)
        value = c.mlp(p["v"], stop_gradient(h), relu)[..., 0]
        discount, following = parts.going(data, GAMMA), c.shifted(value, jnp.zeros_like(value[0]))
        target = c.discounted(stop_gradient(differ + 0.05 * discount * following), 0.95 * discount)
        return explore_losses(p, h, guess, obs[:-1], code[1:], value, target).mean()

    return parts.usual(loss)


def explore(length, batch, hidden, members):
    data = parts.stored(1, length, batch, (OBS,), (DIMS,))
    p, start = explore_params(jax.random.key(0), hidden, members), jnp.zeros((batch, hidden))
    return parts.learner(explore_program, explore_plain(start), length, batch, p, (), data, start)


# -- CEM (of PlaNet): in every state plans through a model, three times around the best tenth of them; nothing is learned

ROUNDS, FEW = 3, 8


def model_params(key, hidden):
    k = jax.random.split(key)
    return {"moves": c.mlp_params(k[0], (OBS + DIMS, hidden, OBS)), "reward": c.mlp_params(k[1], (OBS, hidden, 1))}


def moved(p, state, action):
    return state + 0.1 * c.mlp(p["moves"], jnp.concatenate([state, action], -1))


def planned(p, obs, noise):
    """Of one environment: the first action of a plan, by ``noise[ROUNDS, samples, horizon, DIMS]``."""
    mean, deviation = jnp.zeros(noise.shape[2:]), jnp.ones(noise.shape[2:])
    for drawn in noise:
        plans = jnp.clip(mean + deviation * drawn, -1.0, 1.0)

        def body(state, action):
            state = moved(p, state, action)
            return state, c.mlp(p["reward"], state)[..., 0]

        states = jnp.broadcast_to(obs, (plans.shape[0], OBS))
        _, rewards = jax.lax.scan(body, states, jnp.swapaxes(plans, 0, 1))
        best = plans[jax.lax.top_k(rewards.sum(0), FEW)[1]]
        mean, deviation = best.mean(0), best.std(0)
    return mean[0]


def cem_program(samples, horizon):
    def program(p, state, t):
        noise = jax.random.normal(t.key_for("plans"), (ROUNDS, samples, horizon, DIMS))
        action = planned(p, state, noise)
        pushed = jax.random.normal(t.key_for("pushed"), (OBS,))
        state = jnp.tanh(moved(p, state, action) + 0.05 * pushed)
        return state, (action, c.mlp(p["reward"], state)[0])

    return program


def cem_plain(length, batch, samples, horizon):
    def run(p, state, key):
        plans, pushes = c.streams(key, batch, "plans", "pushed")

        def body(state, t):
            draw = lambda k: jax.random.normal(k, (ROUNDS, samples, horizon, DIMS))  # noqa: E731
            action = jax.vmap(lambda obs, k: planned(p, obs, draw(k)))(state, c.at(plans, t))
            pushed = jax.vmap(lambda k: jax.random.normal(k, (OBS,)))(c.at(pushes, t))
            state = jnp.tanh(moved(p, state, action) + 0.05 * pushed)
            return state, (action, c.mlp(p["reward"], state)[..., 0])

        return jax.lax.scan(body, state, jnp.arange(length))

    return run


def cem(length, batch, hidden, samples, horizon):
    p, state = model_params(jax.random.key(0), hidden), jax.random.normal(jax.random.key(1), (batch, OBS))
    run = rlfx.unroll(cem_program(samples, horizon), length=length, batch=batch)
    return drawing({"rlfx": run, "plain": cem_plain(length, batch, samples, horizon)}, (p, state))
