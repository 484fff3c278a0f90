"""Learners that another network rewards, or that tell things apart: GAIL with a penalty on slopes, DIAYN, contrastive
predictions over time, and over the environments of a batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.parts import gru, gru_params, relu

OBS, ACTIONS, GAMMA = 17, 6, 0.99


def rewarded_program(reward_of, extra, seen):
    """An actor-critic by GAE of ``reward_of(p, x, next_obs)``, beside the loss ``extra(p, x, next_obs)``."""

    def program(params, carry, t):
        (p, _), data = params
        x = rlfx.inputs(data, axes=parts.axes(data))[t]
        next_obs = rlfx.series(x["obs"], end=x["last"])[t + 1]
        value = c.mlp(p["v"], seen(x, x["obs"]))[0]
        following = rlfx.series(value, end=c.mlp(p["v"], seen(x, x["last"]))[0])[t + 1]
        step = parts.step_of(x | {"reward": stop_gradient(reward_of(p, x, next_obs))})
        advantage = stop_gradient(rlfx.gae(step, value, following, gamma=GAMMA, lam=0.95))
        log_p = jax.nn.log_softmax(c.mlp(p["pi"], seen(x, x["obs"])))
        actor_critic = 0.5 * (value - stop_gradient(value) - advantage) ** 2 - log_p[x["action"]] * advantage
        return actor_critic + extra(p, x, next_obs), carry

    return program


def rewarded_plain(reward_of, extra, seen):
    def loss(p, _, data):
        obs = parts.with_last(data)
        value, last = c.mlp(p["v"], seen(data, obs[:-1]))[..., 0], c.mlp(p["v"], seen(of_last(data), obs[-1]))[..., 0]
        reward = stop_gradient(reward_of(p, data, obs[1:]))
        advantage = stop_gradient(c.gae(value, last, reward, data["done"], GAMMA, 0.95))
        log_p = jax.nn.log_softmax(c.mlp(p["pi"], seen(data, obs[:-1])))
        actor_critic = 0.5 * (value - stop_gradient(value) - advantage) ** 2 - c.pick(log_p, data["action"]) * advantage
        return (actor_critic + extra(p, data, obs[1:])).mean()

    return parts.usual(loss)


def of_last(data):
    """What the last timestep has of what does not change."""
    return {name: x[-1] for name, x in data.items() if not name.startswith("last")}


def rewarded(reward_of, extra, seen, length, batch, p, data):
    program, plain = (make(reward_of, extra, seen) for make in (rewarded_program, rewarded_plain))
    return parts.learner(program, plain, length, batch, p, (), data)


# -- GAIL: an actor-critic that a discriminator rewards, whose slope between expert and policy is drawn to one


def pair(obs, action):
    return jnp.concatenate([obs, jax.nn.one_hot(action, ACTIONS)], -1)


def gail_reward(p, x, _):
    return jax.nn.softplus(c.mlp(p["judge"], pair(x["obs"], x["action"]))[..., 0])


def gail_loss(p, x, _):
    ours, theirs = pair(x["obs"], x["action"]), pair(x["expert_obs"], x["expert_action"])
    judge = lambda given: c.mlp(p["judge"], given)[..., 0]  # noqa: E731
    between = x["mix"][..., None] * ours + (1.0 - x["mix"][..., None]) * theirs
    slope = jax.grad(lambda given: judge(given).sum())(between)
    penalty = (jnp.sqrt((slope**2).sum(-1) + 1e-8) - 1.0) ** 2
    return jax.nn.softplus(judge(ours)) + jax.nn.softplus(-judge(theirs)) + 10.0 * penalty


def gail(length, batch, hidden):
    k = jax.random.split(jax.random.key(0))
    p = parts.nets(k[0], OBS, hidden, ACTIONS) | {"judge": c.mlp_params(k[1], (OBS + ACTIONS, hidden, hidden, 1))}
    p["judge"][-1]["b"] = jnp.full(1, 0.5)  # else its slope is a difference of numbers that are almost equal
    data, other = (parts.stored(i, length, batch, (OBS,), ACTIONS) for i in range(1, 3))
    data |= {"expert_obs": other["obs"], "expert_action": other["action"]}
    data["mix"] = jax.random.uniform(jax.random.key(3), (length, batch))
    return rewarded(gail_reward, gail_loss, lambda x, obs: obs, length, batch, p, data)


# -- DIAYN: a skill for each environment; what is seen next is to tell it

SKILLS = 16


def skilled(x, obs):
    return jnp.concatenate([obs, x["skill"]], -1)


def told(p, x, next_obs):
    return (jax.nn.log_softmax(c.mlp(p["judge"], next_obs, relu)) * x["skill"]).sum(-1)


def diayn(length, batch, hidden):
    k = jax.random.split(jax.random.key(0))
    p = parts.nets(k[0], OBS + SKILLS, hidden, ACTIONS) | {"judge": c.mlp_params(k[1], (OBS, hidden, hidden, SKILLS))}
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    skill = jax.nn.one_hot(jax.random.randint(jax.random.key(2), (batch,), 0, SKILLS), SKILLS)
    data["skill"] = jnp.broadcast_to(skill, (length, batch, SKILLS))
    reward = lambda p, x, next_obs: told(p, x, next_obs) + np.float32(np.log(SKILLS))  # noqa: E731
    return rewarded(reward, lambda *given: -told(*given), skilled, length, batch, p, data)


# -- contrastive predictive coding: what a GRU knows is to tell the next observation from all others of the episode


def coding_params(key, hidden):
    k = jax.random.split(key, 3)
    return {
        "encoder": c.mlp_params(k[0], (OBS, hidden, hidden)), "gru": gru_params(k[1], hidden + ACTIONS, hidden),
        "ahead": c.dense(k[2], hidden, hidden)["w"],
    }  # fmt: skip


def coding_program(params, h, t):
    (p, _), data = params
    x = rlfx.inputs(data)[t]
    code = c.mlp(p["encoder"], x["obs"], relu)
    h = gru(p["gru"], h, jnp.concatenate([code, jax.nn.one_hot(x["action"], ACTIONS)]))
    codes = rlfx.series(code)
    guess = h @ p["ahead"]
    right = codes[rlfx.minimum(t + 1, t.length - 1)] @ guess
    return jnp.where(t + 1 < t.length, jax.nn.logsumexp(codes[:] @ guess) - right, 0.0), h


def coding_plain(start):
    def loss(p, _, data):
        code = c.mlp(p["encoder"], data["obs"], relu)

        def body(h, x):
            h = gru(p["gru"], h, x)
            return h, h

        _, h = jax.lax.scan(body, start, jnp.concatenate([code, jax.nn.one_hot(data["action"], ACTIONS)], -1))
        scores = jnp.einsum("tbw,sbw->bts", h @ p["ahead"], code)[:, :-1]
        right = jnp.diagonal(scores[:, :, 1:], axis1=1, axis2=2)
        return (jax.nn.logsumexp(scores, axis=-1) - right).sum() / data["action"].size

    return parts.usual(loss)


def coding(length, batch, hidden):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    data = {name: data[name] for name in ("obs", "action")}
    p, start = coding_params(jax.random.key(0), hidden), jnp.zeros((batch, hidden))
    return parts.learner(coding_program, coding_plain(start), length, batch, p, (), data, start)


# -- CURL: two noisy views of an observation, told from those of the other environments, and Q-learning by one of them


def curl_params(key, hidden):
    k = jax.random.split(key, 3)
    return {
        "encoder": c.mlp_params(k[0], (OBS, hidden, hidden)), "meets": c.dense(k[1], hidden, hidden)["w"],
        "q": c.mlp_params(k[2], (hidden, hidden, ACTIONS)),
    }  # fmt: skip


def contrast(meets, here, there):
    """``here[B, hidden]`` against ``there[B, hidden]``: the loss of each."""
    scores = here @ meets @ there.T
    return jax.nn.logsumexp(scores, axis=-1) - jnp.diagonal(scores)


def q_loss(p, target, x, code, next_obs):
    following = c.mlp(target["q"], c.mlp(target["encoder"], next_obs, relu), relu).max(-1)
    aim = stop_gradient(x["reward"] + GAMMA * (1.0 - x["done"]) * following)
    return (c.pick(c.mlp(p["q"], code, relu), x["action"]) - aim) ** 2


def curl_program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    here, there = (x["obs"] + 0.1 * jax.random.normal(t.key_for(name), (OBS,)) for name in ("here", "there"))
    code, old = c.mlp(p["encoder"], here, relu), stop_gradient(c.mlp(target["encoder"], there, relu))
    told = rlfx.shared(lambda a, b: contrast(p["meets"], a, b).mean(), code, old)
    return told + q_loss(p, target, x, code, rlfx.series(x["obs"], end=x["last"])[t + 1]), carry


def curl_plain(length, batch):
    def loss(p, target, data, key):
        here, there = (data["obs"] + 0.1 * c.normals(key, name, length, batch, (OBS,)) for name in ("here", "there"))
        code, old = c.mlp(p["encoder"], here, relu), stop_gradient(c.mlp(target["encoder"], there, relu))
        told = jax.vmap(contrast, (None, 0, 0))(p["meets"], code, old)
        return (told + q_loss(p, target, data, code, parts.with_last(data)[1:])).mean()

    return parts.usual(loss)


def curl(length, batch, hidden):
    p, target = (curl_params(jax.random.key(i), hidden) for i in range(2))
    data = parts.stored(2, length, batch, (OBS,), ACTIONS)
    return parts.learner(curl_program, curl_plain(length, batch), length, batch, p, target, data, random=True)
