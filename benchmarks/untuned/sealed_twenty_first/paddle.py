"""A2C (Mnih et al. 2016) from four stacked frames: a small convolutional network plays a world of pixels, in which a ball falls
and bounces from walls, and a paddle catches it; returns of some steps, and the policy's entropy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

FRAMES, ACTIONS, REACH, GAMMA, STEPS, ENTROPY = 4, 3, 2, 0.99, 5, 0.01
LAYOUT = ("NCHW", "OIHW", "NCHW")
relu = jax.nn.relu


def sides(side):
    """Of what the convolutions make."""
    first = (side - 4) // 2 + 1
    return first, (first - 3) // 2 + 1


def params_of(key, side, channels, hidden):
    k, (first, second) = jax.random.split(key, 5), channels
    kernel = lambda key, shape: jax.random.normal(key, shape) / np.float32(np.sqrt(np.prod(shape[1:])))  # noqa: E731
    return {
        "first": {"w": kernel(k[0], (first, FRAMES, 4, 4)), "b": jnp.zeros(first)},
        "second": {"w": kernel(k[1], (second, first, 3, 3)), "b": jnp.zeros(second)},
        "dense": c.dense(k[2], second * sides(side)[1] ** 2, hidden),
        "pi": c.dense(k[3], hidden, ACTIONS), "v": c.dense(k[4], hidden, 1),
    }  # fmt: skip


def convolved(p, x):
    x = jax.lax.conv_general_dilated(x, p["w"], (2, 2), "VALID", dimension_numbers=LAYOUT)
    return relu(x + p["b"][:, None, None])


def net(p, frames):
    """Logits and values of ``frames[N, FRAMES, side, side]``."""
    x = convolved(p["second"], convolved(p["first"], frames))
    x = relu(c.linear(p["dense"], x.reshape(len(x), -1)))
    return c.linear(p["pi"], x), c.linear(p["v"], x)[..., 0]


def drawn(ball, paddle, side):
    """A frame."""
    down, across = jnp.arange(side)[:, None], jnp.arange(side)
    there = (down == ball[0]) & (across == ball[1])
    return (there | ((down == side - 1) & (jnp.abs(across - paddle) <= REACH))).astype(jnp.float32)


def reset(side):
    def new(key):
        column, way = jax.random.split(key)
        ball = jnp.stack([jnp.int32(0), jax.random.randint(column, (), 0, side)])
        frames = jnp.zeros((FRAMES, side, side)).at[-1].set(drawn(ball, side // 2, side))
        return {"frames": frames, "ball": ball, "way": 2 * jax.random.randint(way, (), 0, 2) - 1, "paddle": jnp.int32(side // 2)}

    return new


def step_of(side, key, state, action):
    paddle = jnp.clip(state["paddle"] + action - 1, REACH, side - 1 - REACH)
    row, column = state["ball"] + jnp.stack([jnp.int32(1), state["way"]])
    way = jnp.where((column <= 0) | (column >= side - 1), -state["way"], state["way"])
    ball = jnp.stack([row, jnp.clip(column, 0, side - 1)])
    done = row == side - 1
    caught = jnp.where(jnp.abs(ball[1] - paddle) <= REACH, 1.0, -1.0)
    frames = jnp.concatenate([state["frames"][1:], drawn(ball, paddle, side)[None]])
    after = {"frames": frames, "ball": ball, "way": way, "paddle": paddle}
    after = jax.tree.map(lambda new, old: jnp.where(done, new, old), reset(side)(key), after)
    return stop_gradient(after), c.Step(jnp.where(done, caught, 0.0), done, jnp.zeros_like(done))


def by_rlfx(length, batch, side):
    def program(p, state, t):
        logits, v = jax.tree.map(lambda x: x[0], net(p, state["frames"][None]))
        action = jax.random.categorical(t.key_for("action"), stop_gradient(logits))
        state, step = step_of(side, t.key_for("env"), state, action)
        value = rlfx.series(v)
        returns = stop_gradient(rlfx.n_step_return(step, value[t + 1], gamma=GAMMA, n=STEPS))
        log_prob = jax.nn.log_softmax(logits)[action]
        return c.actor_critic_loss(logits, v, log_prob, returns - stop_gradient(v), returns, ENTROPY), state

    return c.by_rlfx(program, length, batch)


# -- by hand, as usual


def returns_of(value, last, reward, done):
    """Of some steps, ``[T, B]``."""
    going, returns = 1.0 - done.astype(jnp.float32), value
    for _ in range(STEPS):
        returns = reward + GAMMA * going * c.shifted(returns, last)
    return returns


def plain(length, batch, side):
    def run(p, state, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")

        def body(state, t):
            logits, v = net(p, state["frames"])
            action = c.categorical(c.at(action_keys, t), logits)
            after, step = jax.vmap(step_of, (None, 0, 0, 0))(side, c.at(env_keys, t), state, action)
            return after, (state["frames"], action, v, step.reward, step.terminated)

        state, (frames, action, v, reward, done) = jax.lax.scan(body, state, jnp.arange(length))
        returns = returns_of(v, net(p, state["frames"])[1], reward, done)

        def loss(p, frames, action, advantage, returns):
            logits, v = net(p, frames)
            log_prob = c.pick(jax.nn.log_softmax(logits), action)
            return c.actor_critic_loss(logits, v, log_prob, advantage, returns, ENTROPY).mean()

        return *jax.value_and_grad(loss)(p, *c.rows_of((frames, action, returns - v, returns))), state

    return run
