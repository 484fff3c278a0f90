"""Learners whose state begins anew from stored data at every eighth timestep: a GRU from states that were stored, a neural
ODE and linear dynamics from what was observed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.parts import gru
from benchmarks.untuned.ordinary.pixels import clipped
from benchmarks.untuned.ordinary.recurrent import ACTIONS, GAMMA, OBS, policy_params, restarted

EVERY, DIMS, SUBSTEPS = 8, 4, 4


def windows(x):
    """``[T, B, ...]`` as sequences ``[EVERY, T // EVERY * B, ...]``."""
    x = x.reshape(-1, EVERY, *x.shape[1:])
    return jnp.moveaxis(x, 1, 0).reshape(EVERY, -1, *x.shape[3:])


def whole(x, batch):
    """And back."""
    x = x.reshape(EVERY, -1, batch, *x.shape[2:])
    return jnp.moveaxis(x, 0, 1).reshape(-1, batch, *x.shape[3:])


# -- PPO with a GRU, of sequences of eight timesteps that begin with the state of when they were acted


def stored_program(params, h, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    advantage, target = parts.advantage_and_target(x, t, GAMMA)
    h = jnp.where(t % EVERY == 0, x["state"], h)
    h = gru(p["gru"], h, jnp.tanh(c.linear(p["in"], x["obs"])))
    log_p, value = jax.nn.log_softmax(c.linear(p["pi"], h)), c.linear(p["v"], h)[0]
    loss = clipped(log_p, log_p[x["action"]], x["log_prob"], value, advantage, target)
    return loss, restarted(x["done"], h)


def stored_plain(batch):
    def loss(p, _, data):
        advantage, target = parts.advantages_and_targets(data, GAMMA)

        def body(h, x):
            h = gru(p["gru"], h, x[0])
            return restarted(x[1], h), h

        inputs = jnp.tanh(c.linear(p["in"], data["obs"]))
        _, h = jax.lax.scan(body, windows(data["state"])[0], (windows(inputs), windows(data["done"])))
        h = whole(h, batch)
        log_p, value = jax.nn.log_softmax(c.linear(p["pi"], h)), c.linear(p["v"], h)[..., 0]
        return clipped(log_p, c.pick(log_p, data["action"]), data["log_prob"], value, advantage, target).mean()

    return parts.usual(loss)


def stored(length, batch, hidden):
    k = jax.random.split(jax.random.key(2), 3)
    data = parts.stored(1, length, batch, (OBS,), ACTIONS, ends=0.03)
    value = jax.random.normal(k[0], (length + 1, batch))
    data |= {
        "value": value[:-1], "last_value": value[-1], "log_prob": -1.8 + 0.1 * jax.random.normal(k[1], (length, batch)),
        "state": 0.3 * jax.random.normal(k[2], (length, batch, hidden)),
    }  # fmt: skip
    p, start = policy_params(jax.random.key(0), hidden), jnp.zeros((batch, hidden))
    return parts.learner(stored_program, stored_plain(batch), length, batch, p, (), data, start)


# -- models of what is observed, that predict up to eight timesteps ahead


def model(program, loss, length, batch, p, width):
    data = parts.stored(1, length, batch, (OBS,), (DIMS,), dtype=float)
    data = {name: data[name] for name in ("obs", "last", "action")}
    return parts.learner(program, parts.usual(loss), length, batch, p, (), data, jnp.zeros((batch, width)))


def ode(p, state, action):
    """A timestep by Runge-Kutta."""
    slope = lambda s: c.mlp(p, jnp.concatenate([s, action], -1))  # noqa: E731
    size = 1.0 / SUBSTEPS
    for _ in range(SUBSTEPS):
        a = slope(state)
        b = slope(state + 0.5 * size * a)
        d = slope(state + 0.5 * size * b)
        e = slope(state + size * d)
        state = state + size / 6.0 * (a + 2.0 * b + 2.0 * d + e)
    return state


def ode_program(params, state, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    next_obs = rlfx.series(x["obs"], end=x["last"])[t + 1]
    state = ode(p, jnp.where(t % EVERY == 0, x["obs"], state), x["action"])
    return ((state - next_obs) ** 2).mean(), state


def ode_plain(p, _, data):
    def body(state, x):
        state = ode(p, state, x[0])
        return state, ((state - x[1]) ** 2).mean(-1)

    obs = parts.with_last(data)
    return jax.lax.scan(body, windows(obs[:-1])[0], (windows(data["action"]), windows(obs[1:])))[1].mean()


def neural(length, batch, hidden):
    p = c.mlp_params(jax.random.key(0), (OBS + DIMS, hidden, OBS))
    return model(ode_program, ode_plain, length, batch, p, OBS)


def linear_params(key, hidden, width):
    k = jax.random.split(key, 4)
    return {
        "encoder": c.mlp_params(k[0], (OBS, hidden, width)), "decoder": c.mlp_params(k[1], (width, hidden, OBS)),
        "moves": c.dense(k[2], width, width)["w"], "pushes": c.dense(k[3], DIMS, width),
    }  # fmt: skip


def linear_program(params, state, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    code = rlfx.series(c.mlp(p["encoder"], x["obs"]), end=c.mlp(p["encoder"], x["last"]))
    state = jnp.where(t % EVERY == 0, code[t], state) @ p["moves"] + c.linear(p["pushes"], x["action"])
    next_obs = rlfx.series(x["obs"], end=x["last"])[t + 1]
    seen = ((c.mlp(p["decoder"], state) - next_obs) ** 2).mean()
    return seen + ((state - code[t + 1]) ** 2).mean(), state


def linear_plain(p, _, data):
    obs = parts.with_last(data)
    code, pushed = c.mlp(p["encoder"], obs), c.linear(p["pushes"], data["action"])

    def body(state, pushed):
        state = state @ p["moves"] + pushed
        return state, state

    _, state = jax.lax.scan(body, windows(code[:-1])[0], windows(pushed))
    state = whole(state, data["last"].shape[0])
    seen = ((c.mlp(p["decoder"], state) - obs[1:]) ** 2).mean(-1)
    return (seen + ((state - code[1:]) ** 2).mean(-1)).mean()


def linear(length, batch, hidden, width):
    p = linear_params(jax.random.key(0), hidden, width)
    return model(linear_program, linear_plain, length, batch, p, width)
