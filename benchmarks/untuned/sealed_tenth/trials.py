"""RL^2 (Duan et al. 2016): a GRU that is told states, its last action and what came of it learns within a trial, of many
episodes in one unknown world of few states; it acts, and what it maximises is the whole trial's reward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.gru import gates

STATES, ACTIONS, EPISODE, GAMMA, LAMBDA = 10, 5, 10, 0.99, 0.95
INPUTS = STATES + ACTIONS + 2


def params_of(key, hidden):
    k = jax.random.split(key, 4)
    sizes = {"x": (INPUTS, 3 * hidden), "h": (hidden, 3 * hidden), "pi": (hidden, ACTIONS), "v": (hidden, 1)}
    return {name: c.dense(key, *size) for key, (name, size) in zip(k, sizes.items(), strict=True)}


def tasks_of(key, batch):
    """Worlds: mean rewards, and logarithms of where a state and an action lead."""
    k = jax.random.split(key)
    chances = jax.random.exponential(k[1], (batch, STATES, ACTIONS, STATES))
    log_next = jnp.log(chances / chances.sum(-1, keepdims=True))
    return {"mean": 1.0 + jax.random.normal(k[0], (batch, STATES, ACTIONS)), "log_next": log_next}


def told_first(batch):
    """State, last action, its reward, whether an episode has just ended, and timesteps of this one."""
    zero = jnp.zeros(batch, jnp.int32)
    return {"state": zero, "action": zero, "reward": jnp.zeros(batch), "done": jnp.zeros(batch), "count": zero}


def seen(told):
    """``[..., INPUTS]``."""
    rest = jnp.stack([told["reward"], told["done"]], -1)
    hot = jax.nn.one_hot(told["state"], STATES), jax.nn.one_hot(told["action"], ACTIONS)
    return jnp.concatenate([*hot, rest], -1)


def gru(p, h, x):
    return gates(c.linear(p["x"], x), c.linear(p["h"], h), h)


def heads(p, h):
    return c.linear(p["pi"], h), c.linear(p["v"], h)[..., 0]


def world(task, told, action, gumbel, noise):
    """What is told next, of one environment."""
    after = jnp.argmax(task["log_next"][told["state"], action] + gumbel)
    reward = task["mean"][told["state"], action] + noise
    done = told["count"] == EPISODE - 1
    return {
        "state": jnp.where(done, 0, after), "action": action, "reward": reward, "done": done.astype(jnp.float32),
        "count": jnp.where(done, 0, told["count"] + 1),
    }  # fmt: skip


def program(params, carry, t):
    p, tasks = params
    task = rlfx.inputs(tasks, axes="b")[t]
    told, h = carry
    h = gru(p, h, seen(told))
    logits, v = heads(p, h)
    action = jax.random.categorical(t.key_for("action"), stop_gradient(logits))
    gumbel, noise = jax.random.gumbel(t.key_for("state"), (STATES,)), jax.random.normal(t.key_for("reward"))
    told = world(task, told, action, gumbel, noise)
    over, never = t + 1 == t.length, jnp.bool_(False)
    value = rlfx.series(stop_gradient(v))
    advantage = rlfx.gae(c.Step(told["reward"], over, never), value, value[t + 1], gamma=GAMMA, lam=LAMBDA)
    log_prob = jax.nn.log_softmax(logits)[action]
    return c.actor_critic_loss(logits, v, log_prob, advantage, advantage + stop_gradient(v)), (told, h)


# -- by hand, as usual


def learnt(logits, v, action, advantage, target):
    """Summed."""
    log_prob = c.pick(jax.nn.log_softmax(logits), action)
    return c.actor_critic_loss(logits, v, log_prob, advantage, target).sum()


def advantages(v, reward, unroll=1):
    """A trial ends with the last timestep, and nowhere else."""
    delta = reward + GAMMA * c.shifted(v, jnp.zeros_like(v[0])) - v
    return c.discounted(delta, jnp.full_like(delta, GAMMA * LAMBDA), unroll)


def plain(length, batch):
    def run(p, tasks, carry, key):
        keys = c.streams(key, batch, "action", "state", "reward")

        def body(carry, t):
            told, h = carry
            h = gru(p, h, seen(told))
            logits, v = heads(p, h)
            action_keys, state_keys, reward_keys = (c.at(k, t) for k in keys)
            action = c.categorical(action_keys, logits)
            gumbel = jax.vmap(lambda k: jax.random.gumbel(k, (STATES,)))(state_keys)
            after = jax.vmap(world)(tasks, told, action, gumbel, jax.vmap(jax.random.normal)(reward_keys))
            return (after, h), (seen(told), action, v, after["reward"])

        end, (x, action, v, reward) = jax.lax.scan(body, carry, jnp.arange(length))
        advantage = advantages(v, reward)

        def loss(p):
            def step(h, x):
                h = gru(p, h, x)
                return h, h

            hs = jax.lax.scan(step, carry[1], x)[1]
            return learnt(*heads(p, hs), action, advantage, advantage + v) / (length * batch)

        return *jax.value_and_grad(loss)(p), end

    return run
