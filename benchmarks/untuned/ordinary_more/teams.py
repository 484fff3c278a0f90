"""Learners that share out what is decided: COMA's agents, a manager and a worker (FeUdal networks)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.parts import gru, gru_params, relu, unit
from benchmarks.untuned.ordinary.recurrent import restarted
from benchmarks.untuned.ordinary.several import ACTIONS, AGENTS, GAMMA, OBS, STATE, named

# -- COMA: what an agent did, against what else it could have done while the others did what they did

LAMBDA = 0.8


def coma_params(key, hidden):
    k = jax.random.split(key, 4)
    return {
        "in": c.dense(k[0], OBS + AGENTS, hidden), "gru": gru_params(k[1], hidden, hidden), "pi": c.dense(k[2], hidden, ACTIONS),
        "q": c.mlp_params(k[3], (STATE + AGENTS * ACTIONS + AGENTS, hidden, hidden, ACTIONS)),
    }  # fmt: skip


def values(p, state, action):
    """``[..., AGENTS, ACTIONS]``: of each agent's actions, from what all see and the others do."""
    others = (1.0 - jnp.eye(AGENTS))[..., None] * jax.nn.one_hot(action, ACTIONS)[..., None, :, :]
    state = jnp.broadcast_to(state[..., None, :], (*others.shape[:-2], STATE))
    return c.mlp(p["q"], named(jnp.concatenate([state, others.reshape(*others.shape[:-2], -1)], -1)), relu)


def coma_losses(p, h, q, action, target):
    log_p = jax.nn.log_softmax(c.linear(p["pi"], h))
    taken, fixed = c.pick(q, action), stop_gradient(q)
    advantage = c.pick(fixed, action) - stop_gradient((jnp.exp(log_p) * fixed).sum(-1))
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    return ((taken - target) ** 2 - c.pick(log_p, action) * advantage - 0.01 * entropy).sum(-1)


def coma_program(params, h, t):
    (p, old), data = params
    x = rlfx.inputs(data)[t]
    h = gru(p["gru"], h, relu(c.linear(p["in"], named(x["obs"]))))
    nothing = jnp.zeros(AGENTS)
    following = rlfx.series(c.pick(values(old, x["state"], x["action"]), x["action"]), end=nothing)[t + 1]
    discount = jnp.where(x["done"], 0.0, GAMMA)
    target = rlfx.solve(
        lambda g: x["reward"] + discount * ((1.0 - LAMBDA) * following + LAMBDA * g[t + 1]), end=nothing
    )
    return coma_losses(p, h, values(p, x["state"], x["action"]), x["action"], target), restarted(x["done"], h)


def coma_plain(start):
    def loss(p, old, data):
        def body(h, x):
            h = gru(p["gru"], h, x[0])
            return restarted(x[1], h), h

        _, h = jax.lax.scan(body, start, (relu(c.linear(p["in"], named(data["obs"]))), data["done"]))
        taken = c.pick(values(old, data["state"], data["action"]), data["action"])
        following, discount = c.shifted(taken, jnp.zeros_like(taken[0])), parts.going(data, GAMMA)[..., None]
        target = c.discounted(data["reward"][..., None] + discount * (1.0 - LAMBDA) * following, discount * LAMBDA)
        return coma_losses(p, h, values(p, data["state"], data["action"]), data["action"], target).mean()

    return parts.usual(loss)


def coma(length, batch, hidden):
    p, old = (coma_params(jax.random.key(i), hidden) for i in range(2))
    data = parts.stored(2, length, batch, (AGENTS, OBS), ACTIONS)
    del data["last"]
    k = jax.random.split(jax.random.key(3))
    data["action"] = jax.random.randint(k[0], (length, batch, AGENTS), 0, ACTIONS)
    data["state"], start = jax.random.normal(k[1], (length, batch, STATE)), jnp.zeros((batch, AGENTS, hidden))
    return parts.learner(coma_program, coma_plain(start), length, batch, p, old, data, start)


# -- FeUdal networks (Vezhnevets et al. 2017): a manager sets directions for eight timesteps, a worker is rewarded for going there

AHEAD, EMBEDDED = 8, 16


def feudal_params(key, hidden):
    k = jax.random.split(key, 8)
    return {
        "in": c.mlp_params(k[0], (OBS, hidden, hidden)), "manager": gru_params(k[1], hidden, hidden),
        "worker": gru_params(k[2], hidden, hidden), "goal": c.dense(k[3], hidden, hidden),
        "embed": c.dense(k[4], hidden, EMBEDDED)["w"], "pi": c.dense(k[5], hidden, ACTIONS * EMBEDDED),
        "v_manager": c.dense(k[6], hidden, 1), "v_worker": c.dense(k[7], hidden, 1),
    }  # fmt: skip


def cosine(a, b):
    return (a * b).sum(-1) * jax.lax.rsqrt((a**2).sum(-1) * (b**2).sum(-1) + 1e-6)


def directed(p, h):
    return unit(c.linear(p["goal"], h))


def feudal_losses(p, x, worker, goals, value, inner_value, returns, inner_returns, towards):
    """``goals``: the sum of the latest; ``towards``: how much of the manager's direction was gone."""
    logits = jnp.einsum("...ae,...e->...a", heads(c.linear(p["pi"], worker)), stop_gradient(goals) @ p["embed"])
    log_p = jax.nn.log_softmax(logits)
    advantage = stop_gradient(inner_returns - inner_value)
    manager = 0.5 * (value - returns) ** 2 - stop_gradient(returns - value) * towards
    return manager + 0.5 * (inner_value - inner_returns) ** 2 - c.pick(log_p, x["action"]) * advantage


def heads(x):
    return x.reshape(*x.shape[:-1], ACTIONS, EMBEDDED)


def feudal_program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data)[t]
    seen = relu(c.mlp(p["in"], x["obs"], relu))
    manager, worker = (gru(p[name], h, seen) for name, h in zip(("manager", "worker"), carry, strict=True))
    goal = directed(p, manager)
    places, goals = rlfx.series(stop_gradient(seen)), rlfx.series(goal)
    bonus = cosine(places[t] - places[t - AHEAD : t], stop_gradient(goals[t - AHEAD : t])).sum() / AHEAD
    later = places[rlfx.minimum(t + AHEAD, t.length - 1)]
    returns = rlfx.discounted_sum(rlfx.series(x["reward"])[t:], GAMMA)
    inner_returns = rlfx.discounted_sum(rlfx.series(x["reward"] + 0.5 * bonus)[t:], GAMMA)
    value, inner_value = c.linear(p["v_manager"], manager)[0], c.linear(p["v_worker"], worker)[0]
    latest, towards = goals[t - AHEAD + 1 : t + 1].sum(0), cosine(later - places[t], goal)
    return feudal_losses(p, x, worker, latest, value, inner_value, returns, inner_returns, towards), (manager, worker)


def feudal_plain(length, start):
    def past(x, first, last):
        """What was ``first``, ..., ``last`` timesteps ago, zero before the first one."""
        padded = jnp.concatenate([jnp.zeros((last, *x.shape[1:])), x])
        return jnp.stack([padded[last - k : last - k + length] for k in range(first, last + 1)])

    def loss(p, _, data):
        seen = relu(c.mlp(p["in"], data["obs"], relu))

        def body(h, x):
            h = tuple(gru(p[name], h, x) for name, h in zip(("manager", "worker"), h, strict=True))
            return h, h

        _, (manager, worker) = jax.lax.scan(body, start, seen)
        goal, places = directed(p, manager), stop_gradient(seen)
        there = jnp.arange(length) >= jnp.arange(1, AHEAD + 1)[:, None]
        gone = cosine(places - past(places, 1, AHEAD), stop_gradient(past(goal, 1, AHEAD)))
        bonus = jnp.where(there[..., None], gone, 0.0).sum(0) / AHEAD
        later = places[jnp.minimum(jnp.arange(length) + AHEAD, length - 1)]
        decay = jnp.full_like(bonus, GAMMA)
        returns, inner_returns = (c.discounted(r, decay) for r in (data["reward"], data["reward"] + 0.5 * bonus))
        value, inner_value = c.linear(p["v_manager"], manager)[..., 0], c.linear(p["v_worker"], worker)[..., 0]
        latest, towards = past(goal, 0, AHEAD - 1).sum(0), cosine(later - places, goal)
        return feudal_losses(p, data, worker, latest, value, inner_value, returns, inner_returns, towards).mean()

    return parts.usual(loss)


def feudal(length, batch, hidden):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    data = {name: data[name] for name in ("obs", "action", "reward")}
    p, start = feudal_params(jax.random.key(0), hidden), (jnp.zeros((batch, hidden)),) * 2
    return parts.learner(feudal_program, feudal_plain(length, start), length, batch, p, (), data, start)
