"""DQN on CartPole that learns at every step, or every fourth: a replay buffer inside the program, one gradient a timestep."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import rlfx

from . import common as c
from .measure import Workload

GAMMA, ENVS, CAPACITY, SAMPLES, COPY, EXPLORE = (
    0.99,
    8,
    1250,
    16,
    500,
    4000,
)  # timesteps kept, and read, of each environment
optimizer = optax.adam(2.5e-4)


class Transition(NamedTuple):
    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    done: jax.Array
    next_obs: jax.Array


class Carry(NamedTuple):
    state: Any
    memory: Any
    p: Any
    target: Any
    opt_state: Any


def q(p, obs):
    return c.mlp(p, obs, jax.nn.relu)


def loss(p, target, x):
    aim = x.reward + (1 - x.done) * GAMMA * jnp.max(q(target, x.next_obs), -1)
    return jnp.mean((c.pick(q(p, x.obs), x.action) - aim) ** 2)


def gradient_step(p, target, opt_state, x):
    updates, opt_state = optimizer.update(jax.grad(loss)(p, target, x), opt_state, p)
    return optax.apply_updates(p, updates), opt_state


def program(every):
    def dqn(_, carry, t):
        obs = carry.state["x"]
        explore = jax.random.bernoulli(t.key_for("explore"), jnp.maximum(0.05, 1.0 - t / EXPLORE))
        anything = jax.random.randint(t.key_for("action"), (), 0, 2)
        action = jnp.where(explore, anything, jnp.argmax(q(carry.p, obs)).astype(jnp.int32))
        state, step = c.cartpole_step(t.key_for("env"), carry.state, action)
        seen = Transition(obs, action, step.reward, step.terminated.astype(jnp.float32), state["x"])
        memory = rlfx.series(seen, history=carry.memory)
        i = jax.random.randint(t.key_for("replay"), (SAMPLES,), jnp.maximum(t.now - CAPACITY + 1, 0), t.now + 1)

        def learn(x):
            update = lambda: gradient_step(carry.p, carry.target, carry.opt_state, x)  # noqa: E731
            return update() if every == 1 else rlfx.every(every, update, otherwise=(carry.p, carry.opt_state))

        p, opt_state = rlfx.shared(learn, memory[i])
        target = rlfx.every(COPY, lambda: p, otherwise=carry.target)
        return Carry(state, memory.history, p, target, opt_state), step.terminated

    return dqn


def start(capacity_of):
    p_key, env_key = jax.random.split(jax.random.key(0))
    p = c.mlp_params(p_key, (4, 120, 84, 2))
    state = jax.vmap(c.cartpole_reset)(jax.random.split(env_key, ENVS))
    nothing, obs = jnp.float32(0.0), jnp.zeros(4)
    return capacity_of(state, Transition(obs, jnp.int32(0), nothing, nothing, obs), (p, p, optimizer.init(p)))


def start_rlfx(state, like, learnt):
    return Carry(state, rlfx.History(capacity=CAPACITY, like=like, batch=ENVS), *map(rlfx.Shared, learnt))


def start_buffers(state, like, learnt):
    return Carry(state, jax.tree.map(lambda x: jnp.zeros((CAPACITY, ENVS, *x.shape), x.dtype), like), *learnt)


def start_table(state, like, learnt):
    """A transition is one row of numbers."""
    width = sum(x.size for x in jax.tree.leaves(like))
    return Carry(state, jnp.zeros((CAPACITY * ENVS, width)), *learnt)


def pack(x):
    return jnp.concatenate([x.obs, x.action[:, None], x.reward[:, None], x.done[:, None], x.next_obs], -1)


def unpack(rows):
    obs, action, reward, done, next_obs = jnp.split(rows, (4, 5, 6, 7), -1)
    return Transition(obs, action[:, 0].astype(jnp.int32), reward[:, 0], done[:, 0], next_obs)


def draws(keys, t):
    """Whether to explore, with what, and what is read from memory: ``[B]``, ``[B]``, ``[B, SAMPLES]``."""
    explore, action, replay = (c.at(k, t) for k in keys)
    epsilon = jnp.maximum(0.05, 1.0 - t / EXPLORE)
    low = jnp.maximum(t - CAPACITY + 1, 0)
    return (
        jax.vmap(lambda k: jax.random.bernoulli(k, epsilon))(explore),
        jax.vmap(lambda k: jax.random.randint(k, (), 0, 2))(action),
        jax.vmap(lambda k: jax.random.randint(k, (SAMPLES,), low, t + 1))(replay) % CAPACITY,
    )


def by_hand(length, every, table=False, ahead=False):
    """``table``: memory as rows of numbers; ``ahead``: all random numbers drawn before the loop."""

    def write(memory, x, t):
        if table:
            return jax.lax.dynamic_update_slice_in_dim(memory, pack(x), t % CAPACITY * ENVS, 0)
        return jax.tree.map(lambda m, x: jax.lax.dynamic_update_slice_in_dim(m, x[None], t % CAPACITY, 0), memory, x)

    def read(memory, rows):
        if table:
            return unpack(memory[(rows * ENVS + jnp.arange(ENVS)[:, None]).ravel()])
        return jax.tree.map(lambda m: m[rows, jnp.arange(ENVS)[:, None]], memory)

    def run(carry, key):
        env_keys, *keys = c.streams(key, ENVS, "env", "explore", "action", "replay")

        def body(carry, x):
            t, (explore, anything, rows) = x if ahead else (x, draws(keys, x))
            obs = carry.state["x"]
            action = jnp.where(explore, anything, jnp.argmax(q(carry.p, obs), -1).astype(jnp.int32))
            state, step = jax.vmap(c.cartpole_step)(c.at(env_keys, t), carry.state, action)
            seen = Transition(obs, action, step.reward, step.terminated.astype(jnp.float32), state["x"])
            memory = write(carry.memory, seen, t)
            update = lambda: gradient_step(carry.p, carry.target, carry.opt_state, read(memory, rows))  # noqa: E731
            same = lambda: (carry.p, carry.opt_state)  # noqa: E731
            p, opt_state = update() if every == 1 else jax.lax.cond(t % every == 0, update, same)
            target = jax.lax.cond(t % COPY == 0, lambda: p, lambda: carry.target)
            return Carry(state, memory, p, target, opt_state), step.terminated

        times = jnp.arange(length)
        return jax.lax.scan(body, carry, (times, jax.vmap(lambda t: draws(keys, t))(times)) if ahead else times)

    return run


def compared(result):
    carry, done = result
    p = carry.p.value if isinstance(carry.p, rlfx.Shared) else carry.p
    return p, done


def workload(length, every):
    key, run = jax.random.key(1), rlfx.unroll(program(every), length=length, batch=ENVS)
    forms = {
        "rlfx": lambda carry, key: run(None, carry, key),
        "plain": by_hand(length, every),
        "drawn ahead": by_hand(length, every, ahead=True),
        "rows": by_hand(length, every, table=True),
        "rows, drawn ahead": by_hand(length, every, table=True, ahead=True),
    }
    starts = {"rlfx": start_rlfx, "rows": start_table, "rows, drawn ahead": start_table}
    own = {form: (start(how), key) for form, how in starts.items()}
    return Workload(forms, (start(start_buffers), key), own, compared, tolerance=1e-3)
