"""Value iteration networks (Tamar et al. 2016): a policy plans by convolutions over the map of its environment's maze, and acts
by what it finds where it stands; actor-critic of n steps, from what was recorded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

KINDS, ACTIONS, MOVES, STEPS, GAMMA = 2, 8, 8, 5, 0.99
relu = jax.nn.relu


def params_of(key, hidden):
    """``q``: how the reward (the first) and the value of neighbours count, for each of the moves."""
    k = jax.random.split(key, 6)
    return {
        "first": jax.random.normal(k[0], (hidden, KINDS, 3, 3)) / 4.0, "bias": 0.1 * jax.random.normal(k[1], (hidden, 1, 1)),
        "reward": jax.random.normal(k[2], (1, hidden, 1, 1)) / hidden**0.5,
        "q": jnp.array([0.0, 0.1])[:, None, None] + 0.06 * jax.random.normal(k[3], (MOVES, 2, 3, 3)),
        "pi": c.dense(k[4], MOVES, ACTIONS), "v": c.dense(k[5], MOVES, 1),
    }  # fmt: skip


def convolved(x, w):
    """``x[channels, side, side]``."""
    return jax.lax.conv_general_dilated(x[None], w, (1, 1), "SAME")[0]


def planned(p, maze, iterations):
    """Of every place what each move is worth: ``[MOVES, side, side]``, of one maze ``[KINDS, side, side]``."""
    reward = convolved(relu(convolved(maze, p["first"]) + p["bias"]), p["reward"])

    def iteration(value, _):
        q = convolved(jnp.concatenate([reward, value]), p["q"])
        return q.max(0, keepdims=True), None

    value = jax.lax.scan(iteration, jnp.zeros_like(reward), None, length=iterations)[0]
    return convolved(jnp.concatenate([reward, value]), p["q"])


def heads(p, q):
    return c.linear(p["pi"], q), c.linear(p["v"], q)[..., 0]


def program_of(iterations):
    def program(params, carry, t):
        (p, mazes), data = params
        x = rlfx.inputs(data)[t]
        maze = rlfx.inputs(mazes, axes="b")[t]
        q = planned(p, maze, iterations)[:, x["row"], x["column"]]
        logits, v = heads(p, q)
        value = rlfx.series(stop_gradient(v), end=0.0)
        step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
        target = rlfx.n_step_return(step, value[t + 1], gamma=GAMMA, n=STEPS)
        log_prob = jax.nn.log_softmax(logits)[x["action"]]
        return c.actor_critic_loss(logits, v, log_prob, target - stop_gradient(v), target), carry

    return program


# -- by hand, as usual


def learnt(logits, v, data):
    """The mean over ``[T, B]``."""
    fixed, going = stop_gradient(v), GAMMA * (1.0 - data["done"].astype(jnp.float32))
    target = fixed
    for _ in range(STEPS):
        target = data["reward"] + going * c.shifted(target, jnp.zeros_like(v[0]))
    log_prob = c.pick(jax.nn.log_softmax(logits), data["action"])
    return c.actor_critic_loss(logits, v, log_prob, target - fixed, target).mean()


def plain(length, batch, iterations):
    """The map is seen at every timestep, as an observation is."""

    def of_point(p, maze, row, column):
        return heads(p, planned(p, maze, iterations)[:, row, column])

    def run(p, mazes, data, key=None):
        over = jax.vmap(jax.vmap(of_point, (None, 0, 0, 0)), (None, None, 0, 0))
        loss = lambda p: learnt(*over(p, mazes, data["row"], data["column"]), data)  # noqa: E731
        return jax.value_and_grad(loss)(p)

    return run
