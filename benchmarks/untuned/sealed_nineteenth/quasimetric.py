"""Quasimetric reinforcement learning (Wang et al. 2023) on stored sequences: an interval quasimetric embedding (Wang and Isola
2022), in which one state is as far from another as the unions of some intervals are long, is spread as far as it can be, while a
timestep stays a step long, by a multiplier that is learnt; a model moves codes, and a policy goes to where goals are near."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, LATENT, PARTS, INTERVALS = 10, 2, 32, 16, 8
FARTHEST, SOFT, LOOSE, STEP, MIXED = 15.0, 0.1, 0.0625, 1.0, 0.3
relu, elu = jax.nn.relu, jax.nn.elu


def params_of(key, hidden):
    k = jax.random.split(key, 4)
    return {
        "see": c.mlp_params(k[0], (OBS, hidden, LATENT)), "project": c.mlp_params(k[1], (LATENT, hidden, PARTS * INTERVALS)),
        "move": c.mlp_params(k[2], (LATENT + ACTIONS, hidden, LATENT)), "act": c.mlp_params(k[3], (2 * OBS, hidden, ACTIONS)),
        "multiplier": jnp.float32(0.1), "most": jnp.float32(0.2),
    }  # fmt: skip


def union(x, y):
    """How long the union of the intervals from ``x[..., INTERVALS]`` to y is, of those that go up."""
    ends = jnp.concatenate([x, jnp.maximum(x, y)], -1)
    order = jnp.argsort(ends, -1)
    ends = jnp.take_along_axis(ends, order, -1)
    inside = jnp.cumsum(jnp.where(order < x.shape[-1], 1, -1), -1)[..., :-1] > 0
    return jnp.where(inside, jnp.diff(ends), 0.0).sum(-1)


def distance(most, x, y):
    """From ``x[..., PARTS * INTERVALS]`` to y."""
    parts = union(*(v.reshape(*v.shape[:-1], PARTS, INTERVALS) for v in (x, y)))
    most = jax.nn.sigmoid(most)
    return most * parts.max(-1) + (1.0 - most) * parts.mean(-1)


def see(p, obs):
    return c.mlp(p["see"], obs, elu)


def project(p, z):
    return c.mlp(p["project"], z, elu)


def move(p, z, action):
    return z + c.mlp(p["move"], jnp.concatenate([z, action], -1), elu)


def act(p, obs, goal):
    return jnp.tanh(c.mlp(p["act"], jnp.concatenate([obs, goal], -1), elu))


def losses(p, x, goal, here, there, aim):
    """Of points: ``x`` is what is stored; codes ``here``, and projected ones of what follows (``there``) and of the goal."""
    fixed, most = stop_gradient(p), p["most"]
    spread = jax.nn.softplus(SOFT * (FARTHEST - distance(most, project(p, here), aim))) / SOFT
    local = relu(distance(most, project(p, here), there) - STEP) ** 2 - LOOSE
    weight = jax.nn.softplus(p["multiplier"])
    held = stop_gradient(weight) * local - weight * stop_gradient(local)
    foreseen = project(p, move(p, here, x["action"]))
    known = 0.5 * (distance(most, foreseen, there) ** 2 + distance(most, there, foreseen) ** 2)
    action = act(p, x["obs"], goal)
    reached = project(fixed, move(fixed, stop_gradient(here), action))
    cost = distance(fixed["most"], reached, stop_gradient(aim)) + MIXED * ((action - x["action"]) ** 2).sum(-1)
    return spread + cost + jnp.where(x["done"], 0.0, held + 0.1 * known)


def program(params, carry, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    here = see(p, x["obs"])
    code = project(p, here)
    there = rlfx.series(code, end=code)[t + 1]  # after the last one is the end of an episode
    aim = rlfx.series(code)[t, x["other"]]
    goal = rlfx.series(x["obs"])[t, x["other"]]
    return losses(p, x, goal, here, there, aim), carry


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, data: jax.value_and_grad(lambda p: loss_fn((p, data), jnp.zeros(batch))[0])(p)


# -- by hand, as usual


def plain(length, batch):
    every = jax.vmap(jax.vmap(losses, (None, 0, 0, 0, 0, 0)), (None, 0, 0, 0, 0, 0))

    def run(p, data):
        def loss(p):
            here = see(p, data["obs"])
            code = project(p, here)
            there = c.shifted(code, code[-1])
            of_others = lambda x: jnp.take_along_axis(x, data["other"][..., None], 1)  # noqa: E731
            return every(p, data, of_others(data["obs"]), here, there, of_others(code)).mean()

        return jax.value_and_grad(loss)(p)

    return run
