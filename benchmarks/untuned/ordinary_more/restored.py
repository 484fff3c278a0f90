"""Learners of windows of eight timesteps that begin from what was stored: R2D2 from states of when it acted, TD-MPC from what
was observed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.parts import lstm, relu
from benchmarks.untuned.ordinary.recurrent import ACTIONS, GAMMA, OBS, dueling, r2d2_params, restarted
from benchmarks.untuned.ordinary_more.restarts import EVERY, whole, windows

# -- R2D2 without a burn-in: both networks begin from stored states


def replayed_program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data)[t]
    carry = jax.tree.map(lambda new, old: jnp.where(t % EVERY == 0, new, old), (x["state"], x["state"]), carry)
    here, there = (
        lstm(w["lstm"], s, relu(c.linear(w["in"], x["obs"]))) for w, s in zip((p, target), carry, strict=True)
    )
    q = dueling(p, here[1])
    following = rlfx.series(stop_gradient(dueling(target, there[1])[jnp.argmax(q)]), end=0.0)[t + 1]
    aim = x["reward"] + GAMMA * (1.0 - x["done"]) * following
    loss = jnp.where(t + 1 < t.length, 0.5 * (q[x["action"]] - aim) ** 2, 0.0)
    return loss, restarted(x["done"], (here, there))


def replayed_plain(batch):
    def states(p, data):
        def body(state, x):
            state = lstm(p["lstm"], state, x[0])
            return restarted(x[1], state), state[1]

        start = jax.tree.map(lambda s: windows(s)[0], data["state"])
        inputs = windows(relu(c.linear(p["in"], data["obs"]))), windows(data["done"])
        return whole(jax.lax.scan(body, start, inputs)[1], batch)

    def loss(p, target, data):
        q, aside = dueling(p, states(p, data)), dueling(target, states(target, data))
        following = c.pick(aside, jnp.argmax(q, -1))[1:]
        aim = stop_gradient(data["reward"][:-1] + parts.going(data, GAMMA)[:-1] * following)
        return (0.5 * (c.pick(q, data["action"])[:-1] - aim) ** 2).sum() / data["reward"].size

    return parts.usual(loss)


def replayed(length, batch, hidden):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS, ends=0.02)
    del data["last"]
    data["state"] = tuple(0.3 * jax.random.normal(jax.random.key(2), (2, length, batch, hidden)))
    p, target = (r2d2_params(jax.random.key(i), hidden) for i in range(2))
    start = (tuple(jnp.zeros((2, batch, hidden))),) * 2
    return parts.learner(replayed_program, replayed_plain(batch), length, batch, p, target, data, start)


# -- TD-MPC: a latent model that is to agree with an old encoder, and to tell rewards and values, up to eight timesteps ahead

DIMS, CODE, DECAY = 4, 64, 0.7


def latent_params(key, hidden):
    k = jax.random.split(key, 5)
    return {
        "code": c.mlp_params(k[0], (OBS, hidden, CODE)), "moves": c.mlp_params(k[1], (CODE + DIMS, hidden, hidden, CODE)),
        "reward": c.mlp_params(k[2], (CODE + DIMS, hidden, 1)), "q": c.mlp_params(k[3], (CODE + DIMS, hidden, hidden, 1)),
        "pi": c.mlp_params(k[4], (CODE, hidden, DIMS)),
    }  # fmt: skip


def simplices(x):
    """Groups of eight numbers that are positive, and one in sum."""
    return jax.nn.softmax(x.reshape(*x.shape[:-1], -1, 8)).reshape(x.shape)


def aims(old, x, next_obs):
    """The old code of what comes next, and what the action was worth."""
    code = simplices(c.mlp(old["code"], next_obs, relu))
    action = jnp.tanh(c.mlp(old["pi"], code, relu))
    value = c.mlp(old["q"], jnp.concatenate([code, action], -1), relu)[..., 0]
    return code, x["reward"] + GAMMA * (1.0 - x["done"]) * value


def told(p, code, action):
    """The reward, the value, and the next code."""
    given = jnp.concatenate([code, action], -1)
    reward, q = (c.mlp(p[name], given, relu)[..., 0] for name in ("reward", "q"))
    return reward, q, simplices(c.mlp(p["moves"], given, relu))


def latent_losses(x, aims, told):
    (code, value), (reward, q, guess) = aims, told
    return 20.0 * ((guess - code) ** 2).sum(-1) + 0.5 * (reward - x["reward"]) ** 2 + 0.1 * (q - value) ** 2


def latent_program(params, code, t):
    (p, old), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    next_obs = rlfx.series(x["obs"], end=x["last"])[t + 1]
    code = jnp.where(t % EVERY == 0, simplices(c.mlp(p["code"], x["obs"], relu)), code)
    found = told(p, code, x["action"])
    return DECAY ** (t % EVERY) * latent_losses(x, aims(old, x, next_obs), found), found[-1]


def latent_plain(batch):
    def loss(p, old, data):
        obs = parts.with_last(data)
        later = aims(old, data, obs[1:])

        def body(code, action):
            found = told(p, code, action)
            return found[-1], found

        start = simplices(c.mlp(p["code"], windows(obs[:-1])[0], relu))
        _, found = jax.lax.scan(body, start, windows(data["action"]))
        found = jax.tree.map(lambda x: whole(x, batch), found)
        weight = DECAY ** (jnp.arange(len(obs) - 1) % EVERY)
        return (weight[:, None] * latent_losses(data, later, found)).mean()

    return parts.usual(loss)


def latent(length, batch, hidden):
    p, old = (latent_params(jax.random.key(i), hidden) for i in range(2))
    data = parts.stored(2, length, batch, (OBS,), (DIMS,))
    return parts.learner(latent_program, latent_plain(batch), length, batch, p, old, data, jnp.zeros((batch, CODE)))
