"""Action values of stored data: NAF, hindsight."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.distributions import at_points
from benchmarks.untuned.ordinary.parts import relu

OBS, ACTIONS, DIMS, GAMMA = 17, 6, 6, 0.99

# -- NAF: action values that are a parabola around the best action


def naf_loss(p, target, x, next_obs):
    h = c.mlp(p["features"], x["obs"], relu)
    best, entries = jnp.tanh(c.linear(p["best"], h)), c.linear(p["root"], h)
    root = jnp.zeros((*h.shape[:-1], DIMS, DIMS)).at[..., *jnp.tril_indices(DIMS)].set(entries)
    root = jnp.where(jnp.eye(DIMS, dtype=bool), jnp.exp(jnp.clip(root, -5.0, 2.0)), root)
    off = jnp.einsum("...ij,...i->...j", root, x["action"] - best)
    q = c.linear(p["v"], h)[..., 0] - 0.5 * (off**2).sum(-1)
    following = c.linear(target["v"], c.mlp(target["features"], next_obs, relu))[..., 0]
    return (q - stop_gradient(x["reward"] + GAMMA * (1.0 - x["done"]) * following)) ** 2


def naf_params(key, hidden):
    k = jax.random.split(key, 4)
    return {
        "features": c.mlp_params(k[0], (OBS, hidden, hidden)), "best": c.dense(k[1], hidden, DIMS),
        "root": c.dense(k[2], hidden, DIMS * (DIMS + 1) // 2), "v": c.dense(k[3], hidden, 1),
    }  # fmt: skip


def naf(length, batch, hidden):
    p, target = (naf_params(jax.random.key(i), hidden) for i in range(2))
    data = parts.stored(2, length, batch, (OBS,), (DIMS,))
    return parts.learner(*at_points(naf_loss), length, batch, p, target, data)


# -- hindsight (HER): the goal is what was reached later in the episode, at a time that is drawn

GOAL = 3


def reached(obs):
    return obs[..., :GOAL]


def hindsight_loss(p, target, x, next_obs, goal):
    success = ((reached(next_obs) - goal) ** 2).sum(-1) < 0.5
    q = c.mlp(p, jnp.concatenate([x["obs"], goal], -1), relu)
    following = c.mlp(target, jnp.concatenate([next_obs, goal], -1), relu).max(-1)
    aim = stop_gradient(jnp.where(success, 0.0, -1.0 + GAMMA * following))
    return (c.pick(q, x["action"]) - aim) ** 2


def hindsight_program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    seen = rlfx.series(x["obs"], end=x["last"])
    later = jax.random.randint(t.key_for("later"), (), t.now, t.length)
    relabelled = jax.random.bernoulli(t.key_for("relabelled"), 0.8)
    goal = jnp.where(relabelled, rlfx.series(reached(seen[t + 1]))[:][later], x["goal"])
    return hindsight_loss(p, target, x, seen[t + 1], goal), carry


def hindsight_plain(length, batch):
    def loss(p, target, data, key):
        laters, relabels = c.streams(key, batch, "later", "relabelled")

        def draw(t):
            later = jax.vmap(lambda k: jax.random.randint(k, (), t, length))(c.at(laters, t))
            return later, jax.vmap(lambda k: jax.random.bernoulli(k, 0.8))(c.at(relabels, t))

        later, relabelled = jax.vmap(draw)(jnp.arange(length))
        obs = parts.with_last(data)[1:]
        goal = jnp.where(relabelled[..., None], reached(obs)[later, jnp.arange(batch)], data["goal"])
        return hindsight_loss(p, target, data, obs, goal).mean()

    return parts.usual(loss)


def hindsight(length, batch, hidden):
    p, target = (c.mlp_params(jax.random.key(i), (OBS + GOAL, hidden, hidden, ACTIONS)) for i in range(2))
    data = parts.stored(2, length, batch, (OBS,), ACTIONS)
    data["goal"] = jax.random.normal(jax.random.key(3), (length, batch, GOAL))
    return parts.learner(hindsight_program, hindsight_plain(length, batch), length, batch, p, target, data, random=True)
