"""A2C from images: a small convolutional network, channels first as the user has it, and a world that draws three blobs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx

from . import common as c
from .measure import Workload

ACTIONS, GAMMA, LAMBDA, EPISODE, BLOBS = 4, 0.99, 0.95, 40, 3


def params_of(side):
    k = jax.random.split(jax.random.key(0), 5)
    kernel = lambda key, shape: jax.random.normal(key, shape) / np.float32(np.sqrt(np.prod(shape[1:])))  # noqa: E731
    last = ((side - 8) // 4 + 1 - 4) // 2 + 1
    return {
        "first": kernel(k[0], (16, BLOBS, 8, 8)), "second": kernel(k[1], (32, 16, 4, 4)),
        "dense": c.dense(k[2], 32 * last**2, 256), "pi": c.dense(k[3], 256, ACTIONS), "v": c.dense(k[4], 256, 1),
    }  # fmt: skip


def convolved(x, kernel, stride, channels_last=False):
    if not channels_last:
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW")
        )
    kernel = kernel.transpose(2, 3, 1, 0)
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def net(p, x, channels_last=False):
    """``x[N, 3, S, S]``, or ``[N, S, S, 3]``."""
    x = jax.nn.relu(convolved(x, p["first"], 4, channels_last))
    x = jax.nn.relu(convolved(x, p["second"], 2, channels_last))
    if channels_last:  # the dense layer's weights are of channels first
        x = x.transpose(0, 3, 1, 2)
    x = jax.nn.relu(c.linear(p["dense"], x.reshape(x.shape[0], -1)))
    return c.linear(p["pi"], x), c.linear(p["v"], x)[..., 0]


def reset(key):
    return {"at": jax.random.uniform(key, (BLOBS, 2), minval=-0.5, maxval=0.5), "count": jnp.int32(0)}


def observe(state, side, channels_last=False):
    grid, at = np.linspace(-1, 1, side, dtype=np.float32), state["at"]
    if channels_last:
        return jnp.exp(-8.0 * ((grid[:, None, None] - at[:, 0]) ** 2 + (grid[None, :, None] - at[:, 1]) ** 2))
    down, across = grid[None, :, None] - at[:, 0, None, None], grid[None, None, :] - at[:, 1, None, None]
    return jnp.exp(-8.0 * (down**2 + across**2))


def step_of(key, state, action):
    angle = np.float32(np.pi / 2) * action
    move = 0.1 * jnp.stack([jnp.cos(angle), jnp.sin(angle)])
    at = state["at"] + jnp.array([1.0, -0.5, 0.25])[:, None] * move
    count = state["count"] + 1
    done = (jnp.abs(at[0]).max() > 1) | (count >= EPISODE)
    new = {"at": jnp.where(done, reset(key)["at"], at), "count": jnp.where(done, 0, count)}
    return stop_gradient(new), c.Step(-jnp.sum(at[0] ** 2), done, jnp.zeros_like(done))


def by_rlfx(length, batch, side):
    def program(p, state, t):
        logits, v = jax.tree.map(lambda x: x[0], net(p, observe(state, side)[None]))
        action = jax.random.categorical(t.key_for("action"), stop_gradient(logits))
        state, step = step_of(t.key_for("env"), state, action)
        value = rlfx.series(v)
        advantage = stop_gradient(rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=LAMBDA))
        log_prob = jax.nn.log_softmax(logits)[action]
        return c.actor_critic_loss(logits, v, log_prob, advantage, advantage + stop_gradient(v)), state

    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, state, key):
        (loss, (state, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(p, state, key)
        return loss, grads, state

    return run


def by_hand(length, batch, side, channels_last=False, chunk=None, drawn_again=False):
    """``chunk`` timesteps are learnt from at a time; ``drawn_again``: states are kept, not images."""
    look = jax.vmap(lambda state: observe(state, side, channels_last))

    def run(p, state, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")

        def body(state, t):
            obs = look(state)
            logits, v = net(p, obs, channels_last)
            action = c.categorical(c.at(action_keys, t), logits)
            after, step = jax.vmap(step_of)(c.at(env_keys, t), state, action)
            return after, (state if drawn_again else obs, action, v, step.reward, step.terminated)

        after, (seen, action, v, reward, done) = jax.lax.scan(body, state, jnp.arange(length))
        advantage = c.gae(v, net(p, look(after), channels_last)[1], reward, done, GAMMA, LAMBDA)

        def loss(p, data):
            seen, action, advantage, target = data
            logits, v = net(p, look(seen) if drawn_again else seen, channels_last)
            log_prob = c.pick(jax.nn.log_softmax(logits), action)
            return c.actor_critic_loss(logits, v, log_prob, advantage, target).sum() / (length * batch)

        data = c.rows_of((seen, action, advantage, advantage + v))
        if chunk is None:
            return *jax.value_and_grad(loss)(p, data), after
        return *c.summed_gradient(loss, p, c.in_chunks(data, chunk * batch)), after

    return run


def workload(length, batch, side):
    make = lambda **how: by_hand(length, batch, side, **how)  # noqa: E731
    forms = {
        "rlfx": by_rlfx(length, batch, side),
        "plain": make(),
        "NHWC": make(channels_last=True),
        "NHWC, blocks of 4": make(channels_last=True, chunk=min(4, length)),
        "NHWC, blocks of 4, drawn again": make(channels_last=True, chunk=min(4, length), drawn_again=True),
        "NHWC, blocks of 1, drawn again": make(channels_last=True, chunk=1, drawn_again=True),
    }
    return Workload(forms, (params_of(side), c.batch_of(reset, batch), jax.random.key(2)))
