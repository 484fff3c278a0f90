"""Recurrent independent mechanisms (Goyal et al. 2021) as an actor and critic, learnt from stored sequences with generalised
advantages: of several GRUs those few go on at a timestep that attend the most to what is seen, and then read from all by
attention; the others stay as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, KEY, READ, ACTIVE, GAMMA, LAMBDA = 16, 5, 16, 24, 3, 0.99, 0.95


def params_of(key, modules, width):
    k = jax.random.split(key, 11)

    def each(key, rows, columns):
        return jax.random.normal(key, (modules, rows, columns)) / np.float32(np.sqrt(rows))

    return {
        "look": {
            "q": each(k[0], width, KEY), "k": jax.random.normal(k[1], (OBS, KEY)) / OBS**0.5,
            "v": jax.random.normal(k[2], (OBS, READ)) / OBS**0.5,
        },
        "x": {"w": each(k[3], READ, 3 * width), "b": jnp.zeros((modules, 3 * width))}, "h": each(k[4], width, 3 * width),
        "talk": {"q": each(k[5], width, KEY), "k": each(k[6], width, KEY), "v": each(k[7], width, width)},
        "start": jax.random.normal(k[10], (modules, width)),  # where an episode begins
        "pi": c.dense(k[8], modules * width, ACTIONS), "v": c.dense(k[9], modules * width, 1),
    }  # fmt: skip


def gated(of_x, of_h, h):
    """A GRU's next state, of the products with its input and its state."""
    (reset, update, new), (h_reset, h_update, h_new) = jnp.split(of_x, 3, -1), jnp.split(of_h, 3, -1)
    update = jax.nn.sigmoid(update + h_update)
    return update * h + (1.0 - update) * jnp.tanh(new + jax.nn.sigmoid(reset + h_reset) * h_new)


def by_module(x, w):
    return jnp.einsum("mi,mij->mj", x, w)


def gone_on(p, h, obs):
    """The next ``h[modules, width]``."""
    look, talk = p["look"], p["talk"]
    score = by_module(h, look["q"]) @ (obs @ look["k"]) / KEY**0.5
    share = jax.nn.softmax(jnp.stack([score, jnp.zeros_like(score)]), axis=0)[0]  # or nothing is looked at
    _, first = jax.lax.top_k(score, ACTIVE)
    active = jax.nn.one_hot(first, len(h)).sum(0)[:, None]

    read = share[:, None] * (obs @ look["v"])
    new = gated(by_module(read, p["x"]["w"]) + p["x"]["b"], by_module(h, p["h"]), h)
    h = active * new + (1.0 - active) * h
    query, key, value = (by_module(h, talk[name]) for name in "qkv")
    return h + active * (jax.nn.softmax(query @ key.T / KEY**0.5) @ value)


def program(params, h, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    h = gone_on(p, jnp.where(x["first"], p["start"], h), x["obs"])
    logits, value = c.linear(p["pi"], h.ravel()), c.linear(p["v"], h.ravel())[0]
    log_p = jax.nn.log_softmax(logits)
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    following = rlfx.series(value, end=0.0)[t + 1]
    advantage = stop_gradient(rlfx.gae(step, value, following, gamma=GAMMA, lam=LAMBDA))
    target = stop_gradient(advantage + value)
    return c.actor_critic_loss(log_p, value, log_p[x["action"]], advantage, target), h


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, data, h: jax.value_and_grad(lambda p: loss_fn((p, data), h)[0])(p)


# -- by hand, as usual


def loss_of(logits, value, data):
    """Of ``[T, B]``, summed."""
    log_p, log_prob = jax.nn.log_softmax(logits), c.pick(jax.nn.log_softmax(logits), data["action"])
    advantage = stop_gradient(c.gae(value, jnp.zeros_like(value[0]), data["reward"], data["done"], GAMMA, LAMBDA))
    return c.actor_critic_loss(log_p, value, log_prob, advantage, stop_gradient(advantage + value)).sum()


def plain(length, batch):
    def run(p, data, h):
        def loss(p):
            def step(h, x):
                h = jnp.where(x["first"][:, None, None], p["start"], h)
                h = jax.vmap(gone_on, (None, 0, 0))(p, h, x["obs"])
                flat = h.reshape(batch, -1)
                return h, (c.linear(p["pi"], flat), c.linear(p["v"], flat)[:, 0])

            _, (logits, value) = jax.lax.scan(step, h, data)
            return loss_of(logits, value, data) / (length * batch)

        return jax.value_and_grad(loss)(p)

    return run
