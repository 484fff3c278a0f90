"""Truncated quantile critics (TQC, Kuznetsov et al. 2020) on replayed sequences: the quantiles of five critics are pooled and
sorted, the largest are dropped, and every quantile of every critic learns from all that are left; a soft actor, and a temperature
that is learnt."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, GAMMA, ENTROPY, CRITICS, QUANTILES, DROPPED = 17, 6, 0.99, -6.0, 5, 25, 2
KEPT = CRITICS * (QUANTILES - DROPPED)
FRACTIONS = (np.arange(QUANTILES, dtype=np.float32) + np.float32(0.5)) / np.float32(QUANTILES)
relu = jax.nn.relu


def params_of(key, hidden):
    """What learns, and critics that do not; critics are stacked, ``[CRITICS, ...]``."""
    k = jax.random.split(key, 3)
    critics = jax.vmap(lambda key: c.mlp_params(key, (OBS + ACTIONS, hidden, hidden, QUANTILES)))
    actor = c.mlp_params(k[0], (OBS, hidden, hidden, 2 * ACTIONS))
    p = {"actor": actor, "critics": critics(jax.random.split(k[1], CRITICS)), "log_alpha": jnp.float32(-1.5)}
    return p, critics(jax.random.split(k[2], CRITICS))


def quantiles(critics, obs, action):
    """``[CRITICS, ..., QUANTILES]``."""
    x = jnp.concatenate([obs, action], -1)
    return jax.vmap(lambda p: c.mlp(p, x, relu))(critics)


def quantile_huber(z, aims):
    """Of quantiles ``z[..., QUANTILES]`` and ``aims[..., KEPT]``: the mean over all pairs."""
    away = aims[..., None, :] - z[..., :, None]
    huber = jnp.where(jnp.abs(away) <= 1.0, 0.5 * away**2, jnp.abs(away) - 0.5)
    return (jnp.abs(FRACTIONS[:, None] - (away < 0.0)) * huber).mean((-1, -2))


def program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data)[t]
    obs, alpha = x["obs"], jnp.exp(p["log_alpha"])
    action, log_prob = c.squashed(p["actor"], obs, jax.random.normal(t.key_for("noise"), (ACTIONS,)))

    pooled = jnp.sort(quantiles(target, obs, action).reshape(-1))[:KEPT]
    following = rlfx.series(stop_gradient(pooled - alpha * log_prob), end=0.0)
    aims = x["reward"] + GAMMA * (1.0 - x["terminated"]) * following[t + 1]
    errors = jax.vmap(lambda z: quantile_huber(z, aims))(quantiles(p["critics"], obs, x["action"])).mean()
    known = (t + 1 < t.length) & ~x["truncated"]  # else what came next is not in the sequence

    actor = stop_gradient(alpha) * log_prob - quantiles(stop_gradient(p["critics"]), obs, action).mean()
    temperature = -p["log_alpha"] * stop_gradient(log_prob + ENTROPY)
    return jnp.where(known, errors, 0.0) + actor + temperature, carry


# -- by hand, as usual


def noises(key, length, batch):
    return c.normals(key, "noise", length, batch, (ACTIONS,))


def plain(length, batch):
    def run(p, target, data, key):
        noise, known = noises(key, length, batch), c.known_of(data)

        def loss(p):
            obs, alpha = data["obs"], jnp.exp(p["log_alpha"])
            action, log_prob = c.squashed(p["actor"], obs, noise)
            pooled = jnp.moveaxis(quantiles(target, obs, action), 0, -2).reshape(length, batch, -1)
            soft = stop_gradient(jnp.sort(pooled)[..., :KEPT] - alpha * log_prob[..., None])
            following = c.shifted(soft, jnp.zeros_like(soft[0]))
            aims = data["reward"][..., None] + GAMMA * (1.0 - data["terminated"][..., None]) * following
            errors = quantile_huber(quantiles(p["critics"], obs, data["action"]), aims[None]).mean(0)
            actor = stop_gradient(alpha) * log_prob - quantiles(stop_gradient(p["critics"]), obs, action).mean((0, -1))
            temperature = -p["log_alpha"] * stop_gradient(log_prob + ENTROPY)
            return (known * errors + actor + temperature).mean()

        return jax.value_and_grad(loss)(p)

    return run
