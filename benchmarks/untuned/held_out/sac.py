"""SAC that learns at every step: acting, a replay buffer, twin critics, a learned temperature."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, GAMMA, POLYAK, EPISODE = 8, 2, 0.99, 0.005, 100
optimizer = optax.adam(3e-4)
drift = c.drift_step(OBS, EPISODE)


class Transition(NamedTuple):
    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    done: jax.Array
    next_obs: jax.Array


class Learner(NamedTuple):
    p: Any
    target: Any  # of the critics
    opt_state: Any


class Carry(NamedTuple):
    state: Any
    memory: Any
    learner: Learner


def loss(p, target, x, noise, critics=c.mapped):
    """Of ``[N]`` transitions; noise ``[2, N, ACTIONS]``."""
    alpha = jnp.exp(p["log_alpha"])
    action, log_prob = c.squashed(stop_gradient(p["actor"]), x.next_obs, noise[0])
    soft = critics(target, x.next_obs, action).min(0) - stop_gradient(alpha) * log_prob
    aim = stop_gradient(x.reward + GAMMA * (1 - x.done) * soft)
    critic_loss = ((critics(p["critics"], x.obs, x.action) - aim) ** 2).sum(0)
    action, log_prob = c.squashed(p["actor"], x.obs, noise[1])
    actor_loss = stop_gradient(alpha) * log_prob - critics(stop_gradient(p["critics"]), x.obs, action).min(0)
    return (critic_loss + actor_loss - p["log_alpha"] * stop_gradient(log_prob - ACTIONS)).mean()


def learn(learner, x, noise, critics=c.mapped):
    """``x[B, SAMPLES]``, ``noise[B, 2, SAMPLES, ACTIONS]``."""
    x = c.rows_of(x)
    noise = jnp.moveaxis(noise, 1, 0).reshape(2, -1, ACTIONS)
    grads = jax.grad(loss)(learner.p, learner.target, x, noise, critics)
    updates, opt_state = optimizer.update(grads, learner.opt_state, learner.p)
    p = optax.apply_updates(learner.p, updates)
    return Learner(p, optax.incremental_update(p["critics"], learner.target, POLYAK), opt_state)


def program(capacity, samples):
    def sac(_, carry, t):
        obs = carry.state["x"]
        action, _ = c.squashed(carry.learner.p["actor"], obs, jax.random.normal(t.key_for("action"), (ACTIONS,)))
        state, step = drift(t.key_for("env"), carry.state, action)
        seen = Transition(obs, action, step.reward, step.terminated.astype(jnp.float32), state["x"])
        memory = rlfx.series(seen, history=carry.memory)
        i = jax.random.randint(t.key_for("replay"), (samples,), jnp.maximum(t.now - capacity + 1, 0), t.now + 1)
        noise = jax.random.normal(t.key_for("noise"), (2, samples, ACTIONS))
        learner = rlfx.shared(lambda x, noise: learn(carry.learner, x, noise), memory[i], noise)
        return Carry(state, memory.history, learner), step.reward

    return sac


def pack(x):
    return jnp.concatenate([x.obs, x.action, x.reward[:, None], x.done[:, None], x.next_obs], -1)


def unpack(rows):
    ends = OBS, OBS + ACTIONS, OBS + ACTIONS + 1, OBS + ACTIONS + 2
    obs, action, reward, done, next_obs = jnp.split(rows, ends, -1)
    return Transition(obs, action, reward[..., 0], done[..., 0], next_obs)


def by_hand(length, batch, capacity, samples, critics=c.mapped, table=False, ahead=False):
    """``table``: memory as rows of numbers; ``ahead``: all random numbers drawn before the loop."""

    def draws(keys, t):
        action, replay, noise = (c.at(k, t) for k in keys)
        low = jnp.maximum(t - capacity + 1, 0)
        return (
            jax.vmap(lambda k: jax.random.normal(k, (ACTIONS,)))(action),
            jax.vmap(lambda k: jax.random.randint(k, (samples,), low, t + 1))(replay) % capacity,
            jax.vmap(lambda k: jax.random.normal(k, (2, samples, ACTIONS)))(noise),
        )

    def run(carry, key):
        env_keys, *keys = c.streams(key, batch, "env", "action", "replay", "noise")
        environments = jnp.arange(batch)[:, None]

        def body(carry, x):
            t, (act_noise, i, noise) = x if ahead else (x, draws(keys, x))
            obs = carry.state["x"]
            action, _ = c.squashed(carry.learner.p["actor"], obs, act_noise)
            state, step = jax.vmap(drift)(c.at(env_keys, t), carry.state, action)
            seen = Transition(obs, action, step.reward, step.terminated.astype(jnp.float32), state["x"])
            seen = pack(seen) if table else seen
            write = lambda m, x: jax.lax.dynamic_update_slice_in_dim(m, x[None], t % capacity, 0)  # noqa: E731
            memory = jax.tree.map(write, carry.memory, seen)
            x = unpack(memory[i, environments]) if table else jax.tree.map(lambda m: m[i, environments], memory)
            return Carry(state, memory, learn(carry.learner, x, noise, critics)), step.reward

        times = jnp.arange(length)
        return jax.lax.scan(body, carry, (times, jax.vmap(lambda t: draws(keys, t))(times)) if ahead else times)

    return run


def compared(result):
    carry, reward = result
    learner = carry.learner.value if isinstance(carry.learner, rlfx.Shared) else carry.learner
    return learner.p, learner.target, reward


def workload(length, batch, hidden, samples, capacity=1000):
    k = jax.random.split(jax.random.key(0), 3)
    critics = jax.vmap(lambda key: c.mlp_params(key, (OBS + ACTIONS, hidden, hidden, 1)))(jax.random.split(k[0]))
    p = {
        "actor": c.mlp_params(k[1], (OBS, hidden, hidden, 2 * ACTIONS)),
        "critics": critics,
        "log_alpha": jnp.zeros(()),
    }
    learner, state = Learner(p, critics, optimizer.init(p)), c.batch_of(c.drift_reset(OBS), batch)
    like = Transition(jnp.zeros(OBS), jnp.zeros(ACTIONS), jnp.zeros(()), jnp.zeros(()), jnp.zeros(OBS))
    key, run = jax.random.key(1), rlfx.unroll(program(capacity, samples), length=length, batch=batch)
    buffers = jax.tree.map(lambda x: jnp.zeros((capacity, batch, *x.shape)), like)
    table = jnp.zeros((capacity, batch, 2 * OBS + ACTIONS + 2))
    ours = Carry(state, rlfx.History(capacity=capacity, like=like, batch=batch), rlfx.Shared(learner))
    make = lambda **how: by_hand(length, batch, capacity, samples, **how)  # noqa: E731
    forms = {
        "rlfx": lambda carry, key: run(None, carry, key),
        "plain": make(),
        "one by one": make(critics=c.one_by_one),
        "one by one, drawn ahead": make(critics=c.one_by_one, ahead=True),
        "one by one, rows": make(critics=c.one_by_one, table=True),
        "one by one, rows, drawn ahead": make(critics=c.one_by_one, table=True, ahead=True),
    }
    own = {form: (Carry(state, table, learner), key) for form in forms if "rows" in form} | {"rlfx": (ours, key)}
    return Workload(forms, (Carry(state, buffers, learner), key), own, compared, tolerance=2e-3)
