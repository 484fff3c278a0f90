"""Phasic policy gradient (PPG, Cobbe et al. 2021), as CleanRL's: for some iterations policy and value learn from a rollout as
PPO's do; then both learn values from all that these iterations saw, while the policy is held where it was."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, GAMMA, LAMBDA, CLIP, MINIBATCHES, ITERATIONS, AUXILIARY, CLONED = 4, 2, 0.99, 0.95, 0.2, 4, 2, 3, 1.0
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(5e-4, eps=1e-5))


class PhasicActor(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.tanh(nn.Dense(self.hidden)(x))
        return nn.Dense(ACTIONS)(x), nn.Dense(1)(x)[..., 0]  # logits, and an auxiliary value


class PhasicCritic(nn.Module):
    hidden: int

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.tanh(nn.Dense(self.hidden)(x))
        return nn.Dense(1)(x)[..., 0]


class Rollout(NamedTuple):
    obs: Any
    action: Any
    log_prob: Any
    value: Any
    advantage: Any


def params_of(key, hidden):
    actor, critic = jax.random.split(key)
    return {"actor": PhasicActor(hidden).init(actor, jnp.zeros(OBS)), "critic": PhasicCritic(hidden).init(critic, jnp.zeros(OBS))}


def networks(hidden):
    """Logits and the auxiliary value; the value."""
    actor, critic = PhasicActor(hidden), PhasicCritic(hidden)
    return lambda p, obs: actor.apply(p["actor"], obs), lambda p, obs: critic.apply(p["critic"], obs)


def policy_loss(actor, critic, p, x):
    log_p, value = jax.nn.log_softmax(actor(p, x.obs)[0]), critic(p, x.obs)
    ratio = jnp.exp(c.pick(log_p, x.action) - x.log_prob)
    advantage = (x.advantage - x.advantage.mean()) / (x.advantage.std() + 1e-8)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1.0 - CLIP, 1.0 + CLIP) * advantage)
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    error = 0.5 * (value - (x.advantage + x.value)) ** 2
    return (0.5 * error - gain - 0.01 * entropy).mean()


def auxiliary_loss(actor, critic, p, x):
    obs, target, old = x
    logits, auxiliary = actor(p, obs)
    log_p = jax.nn.log_softmax(logits)
    held = (jnp.exp(old) * (old - log_p)).sum(-1)
    return (0.5 * (auxiliary - target) ** 2 + CLONED * held + 0.5 * (critic(p, obs) - target) ** 2).mean()


def descended(loss, learner, minibatch):
    p, opt_state = learner
    found, grads = jax.value_and_grad(loss)(p, minibatch)
    updates, opt_state = optimizer.update(grads, opt_state, p)
    return (optax.apply_updates(p, updates), opt_state), found


def act(actor, critic, p, state, t):
    obs = state["x"]
    logits = actor(p, obs)[0]
    action = jax.random.categorical(t.key_for("action"), logits)
    state, step = c.cartpole_step(t.key_for("env"), state, action)
    value = rlfx.series(critic(p, obs))
    advantage = rlfx.gae(step, value[t], value[t + 1], gamma=GAMMA, lam=LAMBDA)
    return state, Rollout(obs, action, jax.nn.log_softmax(logits)[action], value[t], advantage)


def by_rlfx(length, batch, hidden):
    actor, critic = networks(hidden)
    rollout = rlfx.unroll(functools.partial(act, actor, critic), length=length, batch=batch)
    policy_step = functools.partial(descended, functools.partial(policy_loss, actor, critic))
    auxiliary_step = functools.partial(descended, functools.partial(auxiliary_loss, actor, critic))

    def iteration(given, key):
        learner, state = given
        act_key, shuffle_key = jax.random.split(key)
        state, x = rollout(learner[0], state, act_key)
        learner, losses = rlfx.minibatch_epochs(policy_step, learner, x, epochs=1, minibatches=MINIBATCHES, key=shuffle_key)
        return (learner, state), (x.obs, x.advantage + x.value, losses)

    def update(learner, state, key):
        *keys, last = jax.random.split(key, ITERATIONS + 1)
        (learner, state), (obs, target, losses) = jax.lax.scan(iteration, (learner, state), jnp.stack(keys))
        obs, target = jax.tree.map(lambda x: x.reshape(ITERATIONS * length, *x.shape[2:]), (obs, target))
        data = obs, target, jax.nn.log_softmax(actor(learner[0], obs)[0])
        how = {"epochs": AUXILIARY, "minibatches": MINIBATCHES, "key": last}
        learner, auxiliary = rlfx.minibatch_epochs(auxiliary_step, learner, data, **how)
        return learner, state, losses, auxiliary

    return update


# -- by hand, as usual


def acted(actor, critic, length, batch, p, state, key):
    action_keys, env_keys = c.streams(key, batch, "action", "env")

    def body(state, t):
        obs = state["x"]
        logits, value = actor(p, obs)[0], critic(p, obs)
        action = c.categorical(c.at(action_keys, t), logits)
        state, step = jax.vmap(c.cartpole_step)(c.at(env_keys, t), state, action)
        log_prob = c.pick(jax.nn.log_softmax(logits), action)
        return state, (Rollout(obs, action, log_prob, value, step.reward), step.terminated)

    state, (x, done) = jax.lax.scan(body, state, jnp.arange(length))
    advantage = c.gae(x.value, critic(p, state["x"]), x.advantage, done, GAMMA, LAMBDA)
    return state, x._replace(advantage=advantage)


def shuffled(step, learner, data, order):
    """The whole data in a new order, then minibatch by minibatch."""
    parts = jax.tree.map(lambda x: x[order].reshape(MINIBATCHES, -1, *x.shape[1:]), data)
    return jax.lax.scan(step, learner, parts)


def plain(length, batch, hidden):
    actor, critic = networks(hidden)
    policy_step = functools.partial(descended, functools.partial(policy_loss, actor, critic))
    auxiliary_step = functools.partial(descended, functools.partial(auxiliary_loss, actor, critic))

    def iteration(given, key):
        learner, state = given
        act_key, shuffle_key = jax.random.split(key)
        state, x = acted(actor, critic, length, batch, learner[0], state, act_key)
        x = c.rows_of(x)
        order = rlfx.shuffle(jax.random.split(shuffle_key, 1)[0], length * batch)
        learner, losses = shuffled(policy_step, learner, x, order)
        return (learner, state), (x.obs, x.advantage + x.value, losses[None])

    def update(learner, state, key):
        *keys, last = jax.random.split(key, ITERATIONS + 1)
        (learner, state), (obs, target, losses) = jax.lax.scan(iteration, (learner, state), jnp.stack(keys))
        obs, target = c.rows_of((obs, target))
        data = obs, target, jax.nn.log_softmax(actor(learner[0], obs)[0])

        def epoch(learner, key):
            return shuffled(auxiliary_step, learner, data, rlfx.shuffle(key, len(obs)))

        learner, auxiliary = jax.lax.scan(epoch, learner, jax.random.split(last, AUXILIARY))
        return learner, state, losses, auxiliary

    return update
