"""Learners of the distribution of returns: C51, QR-DQN, IQN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.parts import relu

OBS, ACTIONS, GAMMA = 17, 6, 0.99


# -- C51: the distribution of the target is projected onto the atoms

ATOMS = np.linspace(-10.0, 10.0, 51, dtype=np.float32)


def c51_logits(p, obs):
    out = c.mlp(p, obs, relu)
    return out.reshape(*out.shape[:-1], ACTIONS, len(ATOMS))


def best_of(logits):
    return jnp.argmax((jax.nn.softmax(logits) * ATOMS).sum(-1), -1)


def projected(probabilities, reward, discount):
    """Of one point: where its atoms come to lie, shared between two neighbours."""
    width = ATOMS[1] - ATOMS[0]
    place = (jnp.clip(reward + discount * ATOMS, ATOMS[0], ATOMS[-1]) - ATOMS[0]) / width
    share = jnp.clip(1.0 - jnp.abs(place[None, :] - jnp.arange(len(ATOMS))[:, None]), 0.0, 1.0)
    return share @ probabilities


def c51_loss(p, target, x, next_obs):
    """Of one point."""
    logits = c51_logits(target, next_obs)
    probabilities = jax.nn.softmax(logits[best_of(c51_logits(p, next_obs))])
    aim = stop_gradient(projected(probabilities, x["reward"], GAMMA * (1.0 - x["done"])))
    return -(aim * jax.nn.log_softmax(c51_logits(p, x["obs"])[x["action"]])).sum()


def at_points(loss):
    """A learner whose loss is of one point and what was seen next: by rlfx, and by `jax.vmap`, twice."""

    def program(params, carry, t):
        (p, target), data = params
        x = rlfx.inputs(data, axes=parts.axes(data))[t]
        return loss(p, target, x, rlfx.series(x["obs"], end=x["last"])[t + 1]), carry

    def plain(p, target, data):
        next_obs = parts.with_last(data)[1:]
        points = {name: x for name, x in data.items() if name != "last"}
        return jax.vmap(jax.vmap(lambda x, obs: loss(p, target, x, obs)))(points, next_obs).mean()

    return program, parts.usual(plain)


def c51(length, batch, hidden):
    sizes = OBS, hidden, hidden, ACTIONS * len(ATOMS)
    p, target = (c.mlp_params(jax.random.key(i), sizes) for i in range(2))
    data = parts.stored(2, length, batch, (OBS,), ACTIONS)
    return parts.learner(*at_points(c51_loss), length, batch, p, target, data)


# -- QR-DQN: every quantile against every one of the target

QUANTILES = 32
TAU = (np.arange(QUANTILES, dtype=np.float32) + 0.5) / QUANTILES


def huber(x):
    return jnp.where(jnp.abs(x) < 1.0, 0.5 * x**2, jnp.abs(x) - 0.5)


def quantile_loss(given, aims, tau):
    """``given[N]`` of places ``tau[N]``, ``aims[M]``."""
    error = aims[None, :] - given[:, None]
    return (jnp.abs(tau[:, None] - (error < 0.0)) * huber(error)).mean(1).sum()


def qr_loss(p, target, x, next_obs):
    of = lambda p, obs: c.mlp(p, obs, relu).reshape(ACTIONS, QUANTILES)  # noqa: E731
    following = of(target, next_obs)
    aims = x["reward"] + GAMMA * (1.0 - x["done"]) * following[jnp.argmax(following.mean(-1))]
    return quantile_loss(of(p, x["obs"])[x["action"]], stop_gradient(aims), TAU)


def qr_dqn(length, batch, hidden):
    sizes = OBS, hidden, hidden, ACTIONS * QUANTILES
    p, target = (c.mlp_params(jax.random.key(i), sizes) for i in range(2))
    data = parts.stored(2, length, batch, (OBS,), ACTIONS)
    return parts.learner(*at_points(qr_loss), length, batch, p, target, data)


# -- IQN: places drawn anew at every timestep, by cosines

PLACES, COSINES = 8, 64


def iqn_params(key, hidden):
    k = jax.random.split(key, 4)
    return {
        "obs": c.mlp_params(k[0], (OBS, hidden, hidden)), "tau": c.dense(k[1], COSINES, hidden),
        "out": c.mlp_params(k[2], (hidden, hidden, ACTIONS)),
    }  # fmt: skip


def iqn_values(p, obs, tau):
    """``[..., PLACES, ACTIONS]`` at the places ``tau[..., PLACES]``."""
    cosines = jnp.cos(np.pi * jnp.arange(1, COSINES + 1) * tau[..., None])
    features = relu(c.mlp(p["obs"], obs, relu))[..., None, :] * relu(c.linear(p["tau"], cosines))
    return c.mlp(p["out"], features, relu)


def iqn_program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    next_obs = rlfx.series(x["obs"], end=x["last"])[t + 1]
    here, there = (jax.random.uniform(t.key_for(name), (PLACES,)) for name in ("here", "there"))
    following = iqn_values(target, next_obs, there)
    aims = x["reward"] + GAMMA * (1.0 - x["done"]) * following[:, jnp.argmax(following.mean(0))]
    return quantile_loss(iqn_values(p, x["obs"], here)[:, x["action"]], stop_gradient(aims), here), carry


def uniforms(key, name, length, batch):
    (keys,) = c.streams(key, batch, name)
    return jax.vmap(lambda t: jax.vmap(lambda k: jax.random.uniform(k, (PLACES,)))(c.at(keys, t)))(jnp.arange(length))


def iqn_plain(length, batch):
    def loss(p, target, data, key):
        here, there = (uniforms(key, name, length, batch) for name in ("here", "there"))
        following = iqn_values(target, parts.with_last(data)[1:], there)
        best = jnp.argmax(following.mean(-2), -1)
        following = jnp.take_along_axis(following, best[..., None, None], -1)[..., 0]
        aims = stop_gradient(data["reward"][..., None] + parts.going(data, GAMMA)[..., None] * following)
        given = iqn_values(p, data["obs"], here)
        given = jnp.take_along_axis(given, data["action"][..., None, None], -1)[..., 0]
        return jax.vmap(jax.vmap(quantile_loss))(given, aims, here).mean()

    return parts.usual(loss)


def iqn(length, batch, hidden):
    p, target = (iqn_params(jax.random.key(i), hidden) for i in range(2))
    data = parts.stored(2, length, batch, (OBS,), ACTIONS)
    return parts.learner(iqn_program, iqn_plain(length, batch), length, batch, p, target, data, random=True)
