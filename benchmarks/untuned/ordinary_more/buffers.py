"""Learners that act, remember, and begin to learn later: DRQN, of sequences of a replay buffer."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.ordinary.parts import gru, gru_params
from rlfx.training import draw_times

GAMMA, CAPACITY = 0.99, 1000


def drawn(key, now, samples, batch, length=1):
    """Times and environments of sequences."""
    k = jax.random.split(key)
    i = draw_times(k[0], (samples,), now, CAPACITY, length=length)
    return i, jax.random.randint(k[1], (samples,), 0, batch)


def empty(like, batch):
    return jax.tree.map(lambda x: jnp.zeros((CAPACITY, batch, *x.shape), x.dtype), like)


def write(memory, x, t):
    return jax.tree.map(lambda m, x: m.at[t % CAPACITY].set(x), memory, x)


def by_both(program, plain, length, batch, start, like, learned):
    """``start``: of all environments; ``learned``: what they have in common. Compared are the parameters and what was acted."""
    run = rlfx.unroll(program, length=length, batch=batch)
    key = jax.random.key(1)
    history = rlfx.History(capacity=CAPACITY, like=like, batch=batch)
    own = {"rlfx": (Carry(start, history, *map(rlfx.Shared, learned)), key)}
    forms = {"rlfx": lambda carry, key: run(None, carry, key), "plain": plain}
    return Workload(forms, (Carry(start, empty(like, batch), *learned), key), own, compared, tolerance=1e-3)


class Carry(NamedTuple):
    acting: Any
    memory: Any
    p: Any
    target: Any
    opt_state: Any


def compared(result):
    carry, found = result
    return (carry.p.value if isinstance(carry.p, rlfx.Shared) else carry.p), found


# -- DRQN: double Q-learning behind a GRU that sees no velocities, of sequences of sixteen; it begins after WARMUP timesteps

SEQUENCE, SEQUENCES, WARMUP, EVERY = 16, 16, 64, 4
optimizer = optax.adam(1e-3)


class Seen(NamedTuple):
    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    done: jax.Array


def q_of(p, h):
    return c.linear(p["q"], h)


def values(p, x):
    """Of sequences ``[SEQUENCE, SEQUENCES, ...]``, from no memory."""

    def body(h, x):
        h = gru(p["gru"], h, x.obs)
        return jnp.where(x.done[:, None], 0.0, h), q_of(p, h)

    start = jnp.zeros((x.obs.shape[1], p["q"]["w"].shape[0]))
    return jax.lax.scan(body, start, x)[1]


def drqn_loss(p, target, x):
    q, old = values(p, x), values(target, x)
    following = c.pick(old, jnp.argmax(q, -1))[1:]
    aim = stop_gradient(x.reward[:-1] + GAMMA * (1.0 - x.done[:-1]) * following)
    return ((c.pick(q, x.action)[:-1] - aim) ** 2).mean()


def drqn_step(carry, x):
    grads = jax.grad(drqn_loss)(carry.p, carry.target, x)
    updates, opt_state = optimizer.update(grads, carry.opt_state)
    return optax.apply_updates(carry.p, updates), opt_state


def seen_of(state):
    return state["x"][..., jnp.array([0, 2])]


def drqn_program(batch):
    def drqn(_, carry, t):
        state, h = carry.acting
        obs = seen_of(state)
        h = gru(carry.p["gru"], h, obs)
        explore = jax.random.bernoulli(t.key_for("explore"), 0.2)
        anything = jax.random.randint(t.key_for("anything"), (), 0, 2)
        action = jnp.where(explore, anything, jnp.argmax(q_of(carry.p, h))).astype(jnp.int32)
        state, step = c.cartpole_step(t.key_for("env"), state, action)
        memory = rlfx.series(Seen(obs, action, step.reward, step.terminated), history=carry.memory)
        i, b = drawn(t.shared_key, t.now, SEQUENCES, batch, SEQUENCE)
        x = memory[i + jnp.arange(SEQUENCE)[:, None], b]
        before = carry.p, carry.opt_state
        learned = rlfx.every(EVERY, lambda: drqn_step(carry, x), otherwise=before)
        p, opt_state = jax.tree.map(lambda new, old: jnp.where(t >= WARMUP, new, old), learned, before)
        target = rlfx.every(32, lambda: p, otherwise=carry.target)
        h = jnp.where(step.terminated, 0.0, h)
        return Carry((state, h), memory.history, p, target, opt_state), step.terminated

    return drqn


def drqn_plain(length, batch):
    def run(carry, key):
        keys = c.streams(key, batch, "explore", "anything", "env")
        shared = c.shared_stream(key)[None]

        def body(carry, t):
            state, h = carry.acting
            obs = seen_of(state)
            h = gru(carry.p["gru"], h, obs)
            explores, anythings, envs = (c.at(k, t) for k in keys)
            explore = jax.vmap(lambda k: jax.random.bernoulli(k, 0.2))(explores)
            anything = jax.vmap(lambda k: jax.random.randint(k, (), 0, 2))(anythings)
            action = jnp.where(explore, anything, jnp.argmax(q_of(carry.p, h), -1)).astype(jnp.int32)
            state, step = jax.vmap(c.cartpole_step)(envs, state, action)
            memory = write(carry.memory, Seen(obs, action, step.reward, step.terminated), t)

            def learn():
                i, b = drawn(c.at(shared, t)[0], t, SEQUENCES, batch, SEQUENCE)
                rows = (i + jnp.arange(SEQUENCE)[:, None]) % CAPACITY
                return drqn_step(carry, jax.tree.map(lambda m: m[rows, b], memory))

            learns = (t >= WARMUP) & (t % EVERY == 0)
            p, opt_state = jax.lax.cond(learns, learn, lambda: (carry.p, carry.opt_state))
            target = jax.lax.cond(t % 32 == 0, lambda: p, lambda: carry.target)
            h = jnp.where(step.terminated[:, None], 0.0, h)
            return Carry((state, h), memory, p, target, opt_state), step.terminated

        return jax.lax.scan(body, carry, jnp.arange(length))

    return run


def drqn(length, batch, hidden):
    k = jax.random.split(jax.random.key(0), 3)
    p = {"gru": gru_params(k[0], 2, hidden), "q": c.dense(k[1], hidden, 2)}
    state = jax.vmap(c.cartpole_reset)(jax.random.split(k[2], batch))
    like = Seen(jnp.zeros(2), jnp.int32(0), jnp.float32(0.0), jnp.bool_(False))
    start = state, jnp.zeros((batch, hidden))
    learned = p, p, optimizer.init(p)
    return by_both(drqn_program(batch), drqn_plain(length, batch), length, batch, start, like, learned)
