"""EDAC (An et al. 2021) on stored sequences: a soft actor, the least of many critics, and critics whose slopes by the action are
to point elsewhere than those of the others, so that a derivative is learnt from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, GAMMA, ENTROPY, DIVERSITY, SMALL = 17, 6, 0.99, -6.0, 1.0, 1e-6
relu = jax.nn.relu


def params_of(key, members, hidden):
    """What learns, and critics that do not; critics are stacked, ``[members, ...]``."""
    k = jax.random.split(key, 3)
    critics = jax.vmap(lambda key: c.mlp_params(key, (OBS + ACTIONS, hidden, hidden, 1)))
    actor = c.mlp_params(k[0], (OBS, hidden, hidden, 2 * ACTIONS))
    p = {"actor": actor, "critics": critics(jax.random.split(k[1], members)), "log_alpha": jnp.float32(-1.5)}
    return p, critics(jax.random.split(k[2], members))


def unit(x):
    return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + SMALL)


def alike(critics, obs, action):
    """How alike the slopes of a point's values by its action are: the mean over members of the others' cosines, summed."""

    def slope(critic):
        return jax.grad(lambda action: c.mlp(critic, jnp.concatenate([obs, action]), relu)[0])(action)

    slopes = unit(jax.vmap(slope)(critics))
    cosines = slopes @ slopes.T
    return (cosines.sum() - jnp.trace(cosines)) / (len(slopes) - 1)


def program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data)[t]
    obs, alpha = x["obs"], jnp.exp(p["log_alpha"])
    action, log_prob = c.squashed(p["actor"], obs, jax.random.normal(t.key_for("noise"), (ACTIONS,)))

    soft = c.mapped(target, obs, action).min(0) - alpha * log_prob
    following = rlfx.series(stop_gradient(soft), end=0.0)[t + 1]
    aim = x["reward"] + GAMMA * (1.0 - x["terminated"]) * following
    known = (t + 1 < t.length) & ~x["truncated"]  # else what came next is not in the sequence
    errors = 0.5 * ((c.mapped(p["critics"], obs, x["action"]) - aim) ** 2).sum(0)
    critics = jnp.where(known, errors, 0.0) + DIVERSITY * alike(p["critics"], obs, x["action"])

    actor = stop_gradient(alpha) * log_prob - c.mapped(stop_gradient(p["critics"]), obs, action).min(0)
    temperature = -p["log_alpha"] * stop_gradient(log_prob + ENTROPY)
    return critics + actor + temperature, carry


# -- by hand, as usual


def noises(key, length, batch):
    return c.normals(key, "noise", length, batch, (ACTIONS,))


def plain(length, batch):
    def run(p, target, data, key):
        noise, known = noises(key, length, batch), c.known_of(data)

        def loss(p):
            obs, alpha = data["obs"], jnp.exp(p["log_alpha"])
            action, log_prob = c.squashed(p["actor"], obs, noise)
            soft = stop_gradient(c.mapped(target, obs, action).min(0) - alpha * log_prob)
            following = c.shifted(soft, jnp.zeros_like(soft[0]))
            aim = data["reward"] + GAMMA * (1.0 - data["terminated"]) * following
            errors = 0.5 * ((c.mapped(p["critics"], obs, data["action"]) - aim[None]) ** 2).sum(0)
            of_points = jax.vmap(jax.vmap(alike, (None, 0, 0)), (None, 0, 0))
            critics = known * errors + DIVERSITY * of_points(p["critics"], obs, data["action"])
            actor = stop_gradient(alpha) * log_prob - c.mapped(stop_gradient(p["critics"]), obs, action).min(0)
            return (critics + actor - p["log_alpha"] * stop_gradient(log_prob + ENTROPY)).mean()

        return jax.value_and_grad(loss)(p)

    return run
