"""Rainbow (Hessel et al. 2018) on prioritised sequences: distributions over 51 returns of duelling heads whose layers have noise,
targets of three steps by double Q-learning, weighted by importance; it also tells the new priorities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.noisy_layers import noise_of, noisy, noisy_layer

OBS, ACTIONS, ATOMS, LARGEST, GAMMA, STEPS = 16, 6, 51, 10.0, 0.99, 3
ATOM = np.linspace(-LARGEST, LARGEST, ATOMS, dtype=np.float32)
APART = np.float32(2 * LARGEST / (ATOMS - 1))
EVEN = np.full(ATOMS, 1.0 / ATOMS, np.float32)
OUTPUTS = {"value": ATOMS, "advantage": ACTIONS * ATOMS}
relu = jax.nn.relu


def params_of(key, hidden):
    k = jax.random.split(key, 5)
    heads = {
        name: [noisy(k[2 * i], hidden, hidden), noisy(k[2 * i + 1], hidden, n)] for i, (name, n) in enumerate(OUTPUTS.items())
    }
    return heads | {"trunk": c.dense(k[4], OBS, hidden)}


def logits_of(p, noise, obs):
    """``[..., ACTIONS, ATOMS]``."""
    x = relu(c.linear(p["trunk"], obs))
    head = lambda n: noisy_layer(p[n][1], noise[n][1], relu(noisy_layer(p[n][0], noise[n][0], x)))  # noqa: E731
    value, advantage = head("value")[..., None, :], head("advantage").reshape(*obs.shape[:-1], ACTIONS, ATOMS)
    return value + advantage - advantage.mean(-2, keepdims=True)


def expected(logits):
    return (jax.nn.softmax(logits) * ATOM).sum(-1)


def projected(probs, gained, left):
    """The distribution ``probs[ATOMS]`` of ``gained + left * ATOM``, shared by neighbours among the atoms."""
    place = (jnp.clip(gained + left * ATOM, -LARGEST, LARGEST) + LARGEST) / APART
    low = jnp.clip(jnp.floor(place).astype(jnp.int32), 0, ATOMS - 2)
    upper = place - low
    return jnp.zeros(ATOMS).at[low].add(probs * (1.0 - upper)).at[low + 1].add(probs * upper)


def program(params, carry, t):
    (p, (target, noise, target_noise)), data = params
    x = rlfx.inputs(data)[t]
    logits = logits_of(p, noise, x["obs"])
    best = jnp.argmax(expected(logits))
    later = rlfx.series(jax.nn.softmax(logits_of(target, target_noise, x["obs"])[best]), end=EVEN)
    going = rlfx.series(GAMMA * (1.0 - x["done"]))[t : t + STEPS]
    gained = rlfx.discounted_sum(rlfx.series(x["reward"])[t : t + STEPS], going)
    aim = stop_gradient(projected(later[t + STEPS], gained, jnp.prod(going)))
    lost = -(aim * jax.nn.log_softmax(logits[x["action"]])).sum()
    return x["weight"] * lost, carry, lost


def by_rlfx(length, batch, hidden):
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, target, data, key):
        noises = (noise_of(k, hidden, OUTPUTS) for k in jax.random.split(key))
        others = target, *noises

        def loss(p):
            found, (_, lost) = loss_fn(((p, others), data), jnp.zeros(batch))
            return found, lost

        (found, lost), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, lost

    return run


# -- by hand, as usual


def nearest(data):
    """What is gained in three steps, and what is left then, ``[T, B]``."""
    going = GAMMA * (1.0 - data["done"].astype(jnp.float32))
    gained, left = jnp.zeros_like(going), jnp.ones_like(going)
    for i in range(STEPS):
        later = lambda x, i=i: jnp.pad(x[i:], ((0, i), (0, 0)))  # noqa: E731
        gained, left = gained + left * later(data["reward"]), left * later(going)
    return gained, left


def plain(length, batch, hidden):
    def run(p, target, data, key):
        noise, target_noise = (noise_of(k, hidden, OUTPUTS) for k in jax.random.split(key))
        gained, left = nearest(data)
        far = logits_of(target, target_noise, data["obs"])

        def loss(p):
            logits = logits_of(p, noise, data["obs"])
            taken = lambda x, action: jnp.take_along_axis(x, action[..., None, None], -2)[..., 0, :]  # noqa: E731
            later = jax.nn.softmax(taken(far, jnp.argmax(expected(logits), -1)))[STEPS:]
            later = jnp.concatenate([later, jnp.broadcast_to(EVEN, (STEPS, batch, ATOMS))])
            aim = stop_gradient(jax.vmap(jax.vmap(projected))(later, gained, left))
            lost = -(aim * jax.nn.log_softmax(taken(logits, data["action"]))).sum(-1)
            return (data["weight"] * lost).mean(), lost

        (found, lost), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, lost

    return run
