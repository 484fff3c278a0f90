"""Learners of continuous actions from stored data: SAC, TD3, DroQ, REDQ."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.parts import layer_norm, norm_params, relu

OBS, DIMS, GAMMA = 17, 6, 0.99


def twin_params(key, hidden, members=2):
    sizes = OBS + DIMS, hidden, hidden, 1
    return jax.vmap(lambda k: c.mlp_params(k, sizes))(jax.random.split(key, members))


def noises(key, names, length, batch, shape=(DIMS,)):
    return (c.normals(key, name, length, batch, shape) for name in names)


# -- SAC, with a temperature that learns


def sac_losses(p, target, x, next_obs, here, there):
    """Of a point, or of all: noise ``[..., DIMS]``."""
    alpha = stop_gradient(jnp.exp(p["log_alpha"]))
    next_action, next_log = c.squashed(p["actor"], next_obs, there)
    soft = c.mapped(target, next_obs, next_action).min(0) - alpha * next_log
    aim = stop_gradient(x["reward"] + GAMMA * (1.0 - x["done"]) * soft)
    critic = ((c.mapped(p["critics"], x["obs"], x["action"]) - aim) ** 2).sum(0)
    action, log_prob = c.squashed(p["actor"], x["obs"], here)
    actor = alpha * log_prob - c.mapped(stop_gradient(p["critics"]), x["obs"], action).min(0)
    return critic + actor - p["log_alpha"] * stop_gradient(log_prob - DIMS)


def with_noise(losses, length, batch):
    """Learners by ``losses`` of a point, or of all, with noise for what is done here and next: by rlfx, and the plain one."""

    def program(params, carry, t):
        (p, target), data = params
        x = rlfx.inputs(data, axes=parts.axes(data))[t]
        next_obs = rlfx.series(x["obs"], end=x["last"])[t + 1]
        here, there = (jax.random.normal(t.key_for(name), (DIMS,)) for name in ("here", "there"))
        return losses(p, target, x, next_obs, here, there), carry

    def plain(p, target, data, key):
        here, there = noises(key, ("here", "there"), length, batch)
        return losses(p, target, data, parts.with_last(data)[1:], here, there).mean()

    return program, parts.usual(plain)


def sac(length, batch, hidden):
    k = jax.random.split(jax.random.key(0), 3)
    actor = c.mlp_params(k[0], (OBS, hidden, hidden, 2 * DIMS))
    p = {"actor": actor, "critics": twin_params(k[1], hidden), "log_alpha": jnp.float32(-1.0)}
    data = parts.stored(1, length, batch, (OBS,), (DIMS,))
    target = twin_params(k[2], hidden)
    return parts.learner(*with_noise(sac_losses, length, batch), length, batch, p, target, data, random=True)


# -- TD3: noise on what the old actor would do; the actor learns by the first critic


def td3_losses(p, old, x, next_obs, noise):
    noise = jnp.clip(0.2 * noise, -0.5, 0.5)
    next_action = jnp.clip(jnp.tanh(c.mlp(old["actor"], next_obs, relu)) + noise, -1.0, 1.0)
    aim = x["reward"] + GAMMA * (1.0 - x["done"]) * c.mapped(old["critics"], next_obs, next_action).min(0)
    critic = ((c.mapped(p["critics"], x["obs"], x["action"]) - stop_gradient(aim)) ** 2).sum(0)
    first = stop_gradient(c.member(p["critics"], 0))
    action = jnp.tanh(c.mlp(p["actor"], x["obs"], relu))
    return critic - c.mlp(first, jnp.concatenate([x["obs"], action], -1), relu)[..., 0]


def td3_program(params, carry, t):
    (p, old), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    next_obs = rlfx.series(x["obs"], end=x["last"])[t + 1]
    return td3_losses(p, old, x, next_obs, jax.random.normal(t.key_for("noise"), (DIMS,))), carry


def td3_plain(length, batch):
    def loss(p, old, data, key):
        (noise,) = noises(key, ("noise",), length, batch)
        return td3_losses(p, old, data, parts.with_last(data)[1:], noise).mean()

    return parts.usual(loss)


def td3(length, batch, hidden):
    def params_of(key):
        k = jax.random.split(key)
        return {"actor": c.mlp_params(k[0], (OBS, hidden, hidden, DIMS)), "critics": twin_params(k[1], hidden)}

    p, old = params_of(jax.random.key(0)), params_of(jax.random.key(1))
    data = parts.stored(2, length, batch, (OBS,), (DIMS,))
    return parts.learner(td3_program, td3_plain(length, batch), length, batch, p, old, data, random=True)


# -- DroQ: critics with dropout and layer normalisation; REDQ: ten plain ones, two of which are asked for the target

DROPPED = 0.01


def droq_params(key, hidden, members):
    def one(key):
        k = jax.random.split(key, 3)
        return [
            c.dense(k[0], OBS + DIMS, hidden) | norm_params(hidden), c.dense(k[1], hidden, hidden) | norm_params(hidden),
            c.dense(k[2], hidden, 1),
        ]  # fmt: skip

    return jax.vmap(one)(jax.random.split(key, members))


def droq_q(p, key, x):
    """Of one critic and one point."""
    for layer, k in zip(p[:-1], jax.random.split(key), strict=True):
        x = c.linear(layer, x)
        x = jnp.where(jax.random.bernoulli(k, 1.0 - DROPPED, x.shape), x / (1.0 - DROPPED), 0.0)
        x = relu(layer_norm(layer, x))
    return c.linear(p[-1], x)[0]


def droq_critics(critics, key, obs, action):
    members = len(critics[0]["b"])
    x = jnp.concatenate([obs, action])
    return jax.vmap(droq_q, (0, 0, None))(critics, jax.random.split(key, members), x)


def droq_loss(p, target, x, next_obs, noises, keys):
    """Of one point."""
    next_action, next_log = c.squashed(p["actor"], next_obs, noises[0])
    soft = droq_critics(target, keys[0], next_obs, next_action).min() - 0.1 * next_log
    aim = stop_gradient(x["reward"] + GAMMA * (1.0 - x["done"]) * soft)
    critic = ((droq_critics(p["critics"], keys[1], x["obs"], x["action"]) - aim) ** 2).sum()
    action, log_prob = c.squashed(p["actor"], x["obs"], noises[1])
    return critic + 0.1 * log_prob - droq_critics(stop_gradient(p["critics"]), keys[2], x["obs"], action).mean()


def droq_program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    next_obs = rlfx.series(x["obs"], end=x["last"])[t + 1]
    noise = [jax.random.normal(t.key_for(name), (DIMS,)) for name in ("there", "here")]
    return droq_loss(p, target, x, next_obs, noise, jax.random.split(t.key_for("dropout"), 3)), carry


def keys_of(key, name, length, batch):
    (keys,) = c.streams(key, batch, name)
    return jax.vmap(lambda t: c.at(keys, t))(jnp.arange(length))


def droq_plain(length, batch):
    def loss(p, target, data, key):
        noise = list(noises(key, ("there", "here"), length, batch))
        keys = jax.vmap(jax.vmap(lambda k: jax.random.split(k, 3)))(keys_of(key, "dropout", length, batch))
        each = lambda *x: droq_loss(p, target, *x)  # noqa: E731
        data, obs = {name: data[name] for name in data if name != "last"}, parts.with_last(data)[1:]
        return jax.vmap(jax.vmap(each))(data, obs, noise, keys).mean()

    return parts.usual(loss)


def droq(length, batch, hidden, members):
    k = jax.random.split(jax.random.key(0), 3)
    p = {"actor": c.mlp_params(k[0], (OBS, hidden, hidden, 2 * DIMS)), "critics": droq_params(k[1], hidden, members)}
    data = parts.stored(1, length, batch, (OBS,), (DIMS,))
    target = droq_params(k[2], hidden, members)
    return parts.learner(droq_program, droq_plain(length, batch), length, batch, p, target, data, random=True)


def redq_losses(p, target, x, next_obs, here, there, pair):
    """``pair[..., 2]``: which two of the old critics are asked."""
    next_action, next_log = c.squashed(p["actor"], next_obs, there)
    q = jnp.take_along_axis(jnp.moveaxis(c.mapped(target, next_obs, next_action), 0, -1), pair, -1)
    aim = stop_gradient(x["reward"] + GAMMA * (1.0 - x["done"]) * (q.min(-1) - 0.1 * next_log))
    critic = ((c.mapped(p["critics"], x["obs"], x["action"]) - aim) ** 2).sum(0)
    action, log_prob = c.squashed(p["actor"], x["obs"], here)
    return critic + 0.1 * log_prob - c.mapped(stop_gradient(p["critics"]), x["obs"], action).mean(0)


def pair_of(key, members):
    return jax.random.choice(key, members, (2,), replace=False)


def redq_program(members):
    def program(params, carry, t):
        (p, target), data = params
        x = rlfx.inputs(data, axes=parts.axes(data))[t]
        next_obs = rlfx.series(x["obs"], end=x["last"])[t + 1]
        here, there = (jax.random.normal(t.key_for(name), (DIMS,)) for name in ("here", "there"))
        return redq_losses(p, target, x, next_obs, here, there, pair_of(t.key_for("pair"), members)), carry

    return program


def redq_plain(length, batch, members):
    def loss(p, target, data, key):
        here, there = noises(key, ("here", "there"), length, batch)
        pair = jax.vmap(jax.vmap(lambda k: pair_of(k, members)))(keys_of(key, "pair", length, batch))
        return redq_losses(p, target, data, parts.with_last(data)[1:], here, there, pair).mean()

    return parts.usual(loss)


def redq(length, batch, hidden, members):
    k = jax.random.split(jax.random.key(0), 3)
    actor = c.mlp_params(k[0], (OBS, hidden, hidden, 2 * DIMS))
    p = {"actor": actor, "critics": twin_params(k[1], hidden, members)}
    data = parts.stored(1, length, batch, (OBS,), (DIMS,))
    target = twin_params(k[2], hidden, members)
    program, plain = redq_program(members), redq_plain(length, batch, members)
    return parts.learner(program, plain, length, batch, p, target, data, random=True)
