"""Learners of images: DQN with Nature's network, A2C with a small one, PPO with IMPALA's residual network, RND."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.parts import conv, kernel, pixels, relu

GAMMA = 0.99

# -- DQN: double Q-learning of one step, Huber's loss

ACTIONS = 6


def nature_params(key, frames, features, hidden, outputs):
    k = jax.random.split(key, 5)
    return {
        "conv": [kernel(k[0], 8, frames, 32), kernel(k[1], 4, 32, 64), kernel(k[2], 3, 64, 64)],
        "hidden": c.dense(k[3], features, hidden), "out": c.dense(k[4], hidden, outputs),
    }  # fmt: skip


def nature(p, images):
    """Of ``[N, H, W, C]``."""
    x = pixels(images)
    for layer, stride in zip(p["conv"], (4, 2, 1), strict=True):
        x = relu(conv(layer, x, stride))
    return c.linear(p["out"], relu(c.linear(p["hidden"], x.reshape(len(x), -1))))


def huber(x):
    return jnp.where(jnp.abs(x) < 1.0, 0.5 * x**2, jnp.abs(x) - 0.5)


def dqn_program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    q = nature(p, x["obs"][None])[0]
    obs = rlfx.series(x["obs"], end=x["last"])[t + 1]
    best = jnp.argmax(nature(p, obs[None])[0])
    following = nature(target, obs[None])[0][best]
    aim = x["reward"] + GAMMA * (1.0 - x["done"]) * following
    return huber(q[x["action"]] - stop_gradient(aim)), carry


def dqn_plain(length, batch):
    def loss(p, target, data):
        size, obs = (length + 1, batch, ACTIONS), c.rows_of(parts.with_last(data))
        q = nature(p, obs).reshape(size)
        following = c.pick(nature(target, obs).reshape(size)[1:], jnp.argmax(q[1:], -1))
        aim = stop_gradient(data["reward"] + parts.going(data, GAMMA) * following)
        return huber(c.pick(q[:-1], data["action"]) - aim).mean()

    return parts.usual(loss)


def dqn(length, batch, side, hidden):
    features = 64 * ((((side - 8) // 4 + 1) - 4) // 2 + 1 - 2) ** 2
    p, target = (nature_params(jax.random.key(i), 4, features, hidden, ACTIONS) for i in range(2))
    data = parts.stored(2, length, batch, (side, side, 4), ACTIONS, dtype=jnp.uint8)
    return parts.learner(dqn_program, dqn_plain(length, batch), length, batch, p, target, data)


# -- A2C


def small_params(key, side, hidden):
    k = jax.random.split(key, 5)
    features = 32 * (((side - 4) // 2 + 1 - 4) // 2 + 1) ** 2
    return {
        "conv": [kernel(k[0], 4, 4, 16), kernel(k[1], 4, 16, 32)], "hidden": c.dense(k[2], features, hidden),
        "pi": c.dense(k[3], hidden, ACTIONS), "v": c.dense(k[4], hidden, 1),
    }  # fmt: skip


def small(p, images):
    x = parts.small(p, images)
    return c.linear(p["pi"], x), c.linear(p["v"], x)[..., 0]


def a2c_program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    one = lambda obs: jax.tree.map(lambda y: y[0], small(p, obs[None]))  # noqa: E731
    logits, value = one(x["obs"])
    following = rlfx.series(value, end=one(x["last"])[1])[t + 1]
    target = stop_gradient(rlfx.n_step_return(parts.step_of(x), following, gamma=GAMMA, n=5))
    log_p = jax.nn.log_softmax(logits)
    entropy = -(jnp.exp(log_p) * log_p).sum()
    policy = -log_p[x["action"]] * stop_gradient(target - value)
    return policy + 0.5 * (value - target) ** 2 - 0.01 * entropy, carry


def a2c_plain(length, batch):
    def loss(p, _, data):
        logits, value = small(p, c.rows_of(parts.with_last(data)))
        logits, value = logits.reshape(length + 1, batch, -1)[:-1], value.reshape(length + 1, batch)
        value, last = value[:-1], value[-1]
        target = c.shifted(value, last)
        target = data["reward"] + parts.going(data, GAMMA) * target
        for _ in range(4):
            target = data["reward"] + parts.going(data, GAMMA) * c.shifted(target, last)
        target = stop_gradient(target)
        log_p = jax.nn.log_softmax(logits)
        entropy = -(jnp.exp(log_p) * log_p).sum(-1)
        policy = -c.pick(log_p, data["action"]) * stop_gradient(target - value)
        return (policy + 0.5 * (value - target) ** 2 - 0.01 * entropy).mean()

    return parts.usual(loss)


def a2c(length, batch, side, hidden):
    p = small_params(jax.random.key(0), side, hidden)
    data = parts.stored(1, length, batch, (side, side, 4), ACTIONS, dtype=jnp.uint8)
    return parts.learner(a2c_program, a2c_plain(length, batch), length, batch, p, (), data)


# -- PPO, IMPALA's network of two stages


def impala_params(key, side, channels, hidden):
    k, rows, stages = iter(jax.random.split(key, 20)), 3, []
    for n in channels:
        blocks = [[kernel(next(k), 3, n, n), kernel(next(k), 3, n, n)] for _ in range(2)]
        stages.append({"in": kernel(next(k), 3, rows, n), "blocks": blocks})
        rows, side = n, (side + 1) // 2
    heads = {"pi": c.dense(next(k), hidden, ACTIONS), "v": c.dense(next(k), hidden, 1)}
    return {"stages": stages, "hidden": c.dense(next(k), rows * side**2, hidden), **heads}


def impala(p, images):
    x = pixels(images)
    for stage in p["stages"]:
        x = conv(stage["in"], x, 1, "SAME")
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for first, second in stage["blocks"]:
            x = x + conv(second, relu(conv(first, relu(x), 1, "SAME")), 1, "SAME")
    x = relu(c.linear(p["hidden"], relu(x).reshape(len(x), -1)))
    return c.linear(p["pi"], x), c.linear(p["v"], x)[..., 0]


def clipped(log_p, action_log_p, old_log_p, value, advantage, target):
    """PPO's loss of a point, or of all."""
    ratio = jnp.exp(action_log_p - old_log_p)
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return 0.5 * (value - target) ** 2 - surrogate + 0.01 * (jnp.exp(log_p) * log_p).sum(-1)


def ppo_program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    advantage, target = parts.advantage_and_target(x, t, GAMMA)
    logits, value = jax.tree.map(lambda y: y[0], impala(p, x["obs"][None]))
    log_p = jax.nn.log_softmax(logits)
    return clipped(log_p, log_p[x["action"]], x["log_prob"], value, advantage, target), carry


def ppo_plain(length, batch):
    def loss(p, _, data):
        advantage, target = parts.advantages_and_targets(data, GAMMA)
        rows = jax.tree.map(lambda y: y.reshape(length, batch, *y.shape[1:]), impala(p, c.rows_of(data["obs"])))
        logits, value = rows
        log_p = jax.nn.log_softmax(logits)
        return clipped(log_p, c.pick(log_p, data["action"]), data["log_prob"], value, advantage, target).mean()

    return parts.usual(loss)


def ppo(length, batch, side, channels, hidden):
    k = jax.random.split(jax.random.key(0), 4)
    p = impala_params(k[0], side, channels, hidden)
    data = parts.stored(1, length, batch, (side, side, 3), ACTIONS, dtype=jnp.uint8)
    value = jax.random.normal(k[1], (length + 1, batch))
    noise = 0.1 * jax.random.normal(k[2], (length, batch))
    data |= {"value": value[:-1], "last_value": value[-1], "log_prob": noise - 1.8}
    return parts.learner(ppo_program, ppo_plain(length, batch), length, batch, p, (), data)
