"""IMPALA's learner: a residual network on small images of another policy's data, V-trace."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.vtrace import GAMMA

ACTIONS, COLOURS = 6, 3
relu = jax.nn.relu


def params_of(key, side, channels, hidden):
    keys = iter(jax.random.split(key, 5 * len(channels) + 3))

    def kernel(before, after):
        return jax.random.normal(next(keys), (3, 3, before, after)) / np.float32(np.sqrt(9 * before))

    sections = [
        {"in": kernel(before, after), "residual": [(kernel(after, after), kernel(after, after)) for _ in range(2)]}
        for before, after in zip((COLOURS, *channels[:-1]), channels, strict=True)
    ]
    last = channels[-1] * (side // 2 ** len(channels)) ** 2
    heads = {"dense": (last, hidden), "pi": (hidden, ACTIONS), "v": (hidden, 1)}
    return {"sections": sections, **{name: c.dense(next(keys), *size) for name, size in heads.items()}}


def section(p, x, channels_last):
    names = ("NHWC", "HWIO", "NHWC") if channels_last else ("NCHW", "HWIO", "NCHW")
    conv = lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=names)  # noqa: E731
    window, strides = ((1, 3, 3, 1), (1, 2, 2, 1)) if channels_last else ((1, 1, 3, 3), (1, 1, 2, 2))
    x = jax.lax.reduce_window(conv(x, p["in"]), -np.inf, jax.lax.max, window, strides, "SAME")
    for first, second in p["residual"]:
        x = x + conv(relu(conv(relu(x), first)), second)
    return x


def net(p, images, channels_last=True, again=False):
    """``uint8[N, S, S, 3]``; ``again``: the sections' activations are computed anew for the gradient."""
    x = images.astype(jnp.float32) / 255.0
    x = x if channels_last else x.transpose(0, 3, 1, 2)
    run = jax.checkpoint(section, static_argnums=2) if again else section
    for layer in p["sections"]:
        x = run(layer, x, channels_last)
    x = x if channels_last else x.transpose(0, 2, 3, 1)
    x = relu(c.linear(p["dense"], relu(x).reshape(x.shape[0], -1)))
    return c.linear(p["pi"], x), c.linear(p["v"], x)[..., 0]


def program(params, after_end, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    logits, v = jax.tree.map(lambda y: y[0], net(p, x["obs"][None]))
    log_prob = jax.nn.log_softmax(logits)[x["action"]]
    value = rlfx.series(v, end=after_end)
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    found = rlfx.vtrace(step, value, value[t + 1], log_prob - x["log_mu"], gamma=GAMMA)
    target, advantage = stop_gradient(found)
    return c.actor_critic_loss(logits, v, log_prob, advantage, target), after_end


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, data, last):
        after_end = stop_gradient(net(p, last)[1])
        return jax.value_and_grad(lambda p: loss_fn((p, data), after_end)[0])(p)

    return run


def by_hand(length, batch, chunk=None, **how):
    def evaluated(p, images):
        out = net(p, images.reshape(-1, *images.shape[2:]), **how)
        return jax.tree.map(lambda x: x.reshape(*images.shape[:2], *x.shape[1:]), out)

    def loss_of(logits, v, log_prob, target, advantage):
        return c.actor_critic_loss(logits, v, log_prob, advantage, target).sum() / (length * batch)

    def at_once(p, data, last):
        after_end = net(p, last, **how)[1]

        def loss(p):
            logits, v = evaluated(p, data["obs"])
            log_prob = c.pick(jax.nn.log_softmax(logits), data["action"])
            found = c.vtrace(stop_gradient(v), after_end, stop_gradient(log_prob) - data["log_mu"], data, GAMMA)
            return loss_of(logits, v, log_prob, *found)

        return jax.value_and_grad(loss)(p)

    def in_blocks(p, data, last):
        def values(_, x):
            logits, v = evaluated(p, x["obs"])
            return None, (v, c.pick(jax.nn.log_softmax(logits), x["action"]))

        blocks = c.in_chunks(data, chunk)
        v, log_prob = jax.tree.map(lambda x: x.reshape(length, batch), jax.lax.scan(values, None, blocks)[1])
        found = c.vtrace(v, net(p, last, **how)[1], log_prob - data["log_mu"], data, GAMMA)

        def loss(p, part):
            data, found = part
            logits, v = evaluated(p, data["obs"])
            return loss_of(logits, v, c.pick(jax.nn.log_softmax(logits), data["action"]), *found)

        return c.summed_gradient(loss, p, (blocks, c.in_chunks(found, chunk)))

    return at_once if chunk is None else in_blocks


def workload(length, batch, side, channels, hidden, chunk=2):
    k = jax.random.split(jax.random.key(0), 7)
    size = length, batch
    images = lambda k, lead: jax.random.randint(k, (*lead, side, side, COLOURS), 0, 256).astype(jnp.uint8)  # noqa: E731
    data = {
        "obs": images(k[0], size), "action": jax.random.randint(k[1], size, 0, ACTIONS),
        "log_mu": -1.8 + 0.2 * jax.random.normal(k[2], size), "reward": jax.random.normal(k[3], size),
        "done": jax.random.uniform(k[4], size) < 0.02,
    }  # fmt: skip
    make = lambda **how: by_hand(length, batch, **how)  # noqa: E731
    forms = {
        "rlfx": by_rlfx(length, batch), "plain": make(), "NCHW": make(channels_last=False), "checkpointed": make(again=True),
        f"blocks of {chunk}": make(chunk=chunk), "blocks of 1": make(chunk=1),
    }  # fmt: skip
    return Workload(forms, (params_of(k[5], side, channels, hidden), data, images(k[6], (batch,))), tolerance=2e-4)
