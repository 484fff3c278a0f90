"""Learners of rewards: by telling an expert from a policy (AIRL), and by preferences between segments."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.parts import relu
from benchmarks.untuned.ordinary_more.judges import pair

OBS, ACTIONS, GAMMA = 17, 6, 0.99


def with_experts(length, batch):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    expert = parts.stored(2, length, batch, (OBS,), ACTIONS)
    return data | {"expert_obs": expert["obs"], "expert_action": expert["action"], "last_expert": expert["last"]}


# -- AIRL: a reward and a shape of it, told apart by the policy's own probabilities


def rewarded(p, obs, next_obs, action, done):
    shape, following = c.mlp(p["shape"], obs, relu)[..., 0], c.mlp(p["shape"], next_obs, relu)[..., 0]
    return c.mlp(p["reward"], pair(obs, action), relu)[..., 0] + GAMMA * (1.0 - done) * following - shape


def airl_losses(p, policy, x, next_obs, next_expert):
    log_pi = lambda obs, action: c.pick(jax.nn.log_softmax(c.mlp(policy, obs)), action)  # noqa: E731
    agent = rewarded(p, x["obs"], next_obs, x["action"], x["done"]) - log_pi(x["obs"], x["action"])
    expert = rewarded(p, x["expert_obs"], next_expert, x["expert_action"], 0.0) - log_pi(x["expert_obs"], x["expert_action"])
    return jax.nn.softplus(agent) + jax.nn.softplus(-expert)


def airl_program(params, carry, t):
    (p, policy), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    next_obs = rlfx.series(x["obs"], end=x["last"])[t + 1]
    next_expert = rlfx.series(x["expert_obs"], end=x["last_expert"])[t + 1]
    return airl_losses(p, policy, x, next_obs, next_expert), carry


def airl_plain(p, policy, data):
    next_expert = c.shifted(data["expert_obs"], data["last_expert"])
    return airl_losses(p, policy, data, parts.with_last(data)[1:], next_expert).mean()


def airl(length, batch, hidden):
    k = jax.random.split(jax.random.key(0), 3)
    p = {
        "reward": c.mlp_params(k[0], (OBS + ACTIONS, hidden, hidden, 1)), "shape": c.mlp_params(k[1], (OBS, hidden, hidden, 1)),
    }  # fmt: skip
    policy = c.mlp_params(k[2], (OBS, hidden, hidden, ACTIONS))
    return parts.learner(airl_program, parts.usual(airl_plain), length, batch, p, policy, with_experts(length, batch))


# -- preferences: an ensemble of rewards, whose sums over segments of sixteen timesteps say which one is liked

SEGMENT = 16


def pleasing(p, obs, action):
    """``[members, ...]``."""
    x = pair(obs, action)
    return jax.vmap(lambda p: jnp.tanh(c.mlp(p, x, relu)[..., 0]))(p)


def preferred_program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    more = rlfx.series(pleasing(p, x["obs"], x["action"]) - pleasing(p, x["expert_obs"], x["expert_action"]))
    begin = t - t % SEGMENT
    more = more[begin : begin + SEGMENT].sum(0)
    loss = jax.nn.softplus(jnp.where(x["liked"], -more, more)).sum()
    return jnp.where(t % SEGMENT == 0, loss, 0.0), carry


def preferred_plain(p, _, data):
    more = pleasing(p, data["obs"], data["action"]) - pleasing(p, data["expert_obs"], data["expert_action"])
    members, length, batch = more.shape
    more = more.reshape(members, -1, SEGMENT, batch).sum(2)
    return jax.nn.softplus(jnp.where(data["liked"][::SEGMENT], -more, more)).sum() / (length * batch)


def preferred(length, batch, hidden, members):
    sizes = OBS + ACTIONS, hidden, hidden, 1
    p = jax.vmap(lambda k: c.mlp_params(k, sizes))(jax.random.split(jax.random.key(0), members))
    data = with_experts(length, batch)
    data = {name: data[name] for name in ("obs", "action", "expert_obs", "expert_action")}
    data["liked"] = jax.random.bernoulli(jax.random.key(3), 0.5, (length, batch))
    return parts.learner(preferred_program, parts.usual(preferred_plain), length, batch, p, (), data)
