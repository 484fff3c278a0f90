"""Learners of stored data by ensembles: IQL, SAC-N, EDAC, Q-networks with priors that are random."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.critics import DIMS, GAMMA, OBS, sac_losses, twin_params, with_noise
from benchmarks.untuned.ordinary.distributions import at_points
from benchmarks.untuned.ordinary.more import density, log_prob
from benchmarks.untuned.ordinary.parts import relu

# -- IQL: a value of the upper expectile, critics that are drawn to it, a policy that imitates by advantage


def iql_losses(p, target, x, next_obs):
    value, following = (c.mlp(p["v"], obs, relu)[..., 0] for obs in (x["obs"], next_obs))
    above = c.mapped(target, x["obs"], x["action"]).min(0) - value
    expectile = jnp.where(above > 0.0, 0.7, 0.3) * above**2
    aim = stop_gradient(x["reward"] + GAMMA * (1.0 - x["done"]) * following)
    critic = ((c.mapped(p["critics"], x["obs"], x["action"]) - aim) ** 2).sum(0)
    weight = stop_gradient(jnp.minimum(jnp.exp(3.0 * above), 100.0))
    return expectile + critic - weight * log_prob(*density(p["actor"], x["obs"]), x["action"])


def iql(length, batch, hidden):
    k = jax.random.split(jax.random.key(0), 4)
    p = {
        "actor": c.mlp_params(k[0], (OBS, hidden, hidden, 2 * DIMS)), "critics": twin_params(k[1], hidden),
        "v": c.mlp_params(k[2], (OBS, hidden, hidden, 1)),
    }  # fmt: skip
    data = parts.stored(1, length, batch, (OBS,), (DIMS,))
    return parts.learner(*at_points(iql_losses), length, batch, p, twin_params(k[3], hidden), data)


# -- SAC-N: the least of many critics; EDAC: whose slopes by the action are to differ


def many(losses, length, batch, hidden, members):
    """Critics that learn by ``losses`` of a point, or of all, with noise for what is done here and next."""
    k = jax.random.split(jax.random.key(0), 3)
    actor = c.mlp_params(k[0], (OBS, hidden, hidden, 2 * DIMS))
    p = {"actor": actor, "critics": twin_params(k[1], hidden, members), "log_alpha": jnp.float32(-1.0)}
    data = parts.stored(1, length, batch, (OBS,), (DIMS,))
    target = twin_params(k[2], hidden, members)
    return parts.learner(*with_noise(losses, length, batch), length, batch, p, target, data, random=True)


def sac_n(length, batch, hidden, members):
    return many(sac_losses, length, batch, hidden, members)


def alike(nets, obs, action):
    """The mean cosine between the slopes of two critics; of a point, or of all."""
    members = len(nets[0]["b"])
    slopes = jax.vmap(lambda p: jax.grad(lambda a: c.mlp(p, jnp.concatenate([obs, a], -1), relu).sum())(action))(nets)
    slopes = slopes / jnp.sqrt((slopes**2).sum(-1, keepdims=True) + 1e-10)
    return ((slopes.sum(0) ** 2).sum(-1) - members) / (members - 1)


def edac_losses(p, target, x, next_obs, here, there):
    return sac_losses(p, target, x, next_obs, here, there) + alike(p["critics"], x["obs"], x["action"])


def edac(length, batch, hidden, members):
    return many(edac_losses, length, batch, hidden, members)


# -- Q-networks, each with a prior that stays as it was drawn, its own target, and its own half of the transitions

ACTIONS, SCALE = 6, 3.0


def q_params(key, hidden, members):
    return jax.vmap(lambda k: c.mlp_params(k, (OBS, hidden, hidden, ACTIONS)))(jax.random.split(key, members))


def believed(nets, priors, obs):
    """``[members, ..., ACTIONS]``."""
    of = lambda p, prior: c.mlp(p, obs, relu) + SCALE * c.mlp(prior, obs, relu)  # noqa: E731
    return jax.vmap(of)(nets, priors)


def prior_losses(p, others, x, next_obs):
    target, priors = others
    q, following = believed(p, priors, x["obs"]), believed(target, priors, next_obs).max(-1)
    aim = stop_gradient(x["reward"] + GAMMA * (1.0 - x["done"]) * following)
    chosen = jnp.take_along_axis(q, jnp.broadcast_to(x["action"], aim.shape)[..., None], -1)[..., 0]
    return (jnp.moveaxis(x["counts"], -1, 0) * (chosen - aim) ** 2).sum(0)


def priors(length, batch, hidden, members):
    p, *others = (q_params(jax.random.key(i), hidden, members) for i in range(3))
    data = parts.stored(3, length, batch, (OBS,), ACTIONS)
    data["counts"] = jax.random.bernoulli(jax.random.key(4), 0.5, (length, batch, members)).astype(jnp.float32)
    return parts.learner(*at_points(prior_losses), length, batch, p, tuple(others), data)
