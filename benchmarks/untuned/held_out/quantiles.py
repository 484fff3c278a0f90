"""Distributional Q-learning over long data: quantile regression of all pairs of quantiles, targets of n steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, GAMMA = 16, 4, 0.99
relu = jax.nn.relu


def quantiles(p, obs, count):
    return c.mlp(p, obs, relu).reshape(*obs.shape[:-1], ACTIONS, count)


def greedy(values):
    """The quantiles of the action of the greatest mean."""
    best = jnp.argmax(values.mean(-1), -1)
    return jnp.take_along_axis(values, best[..., None, None], -2)[..., 0, :]


def huber(found, aim):
    """Quantile Huber loss of every pair: ``found[..., N]``, ``aim[..., N]``."""
    count = found.shape[-1]
    middle = (np.arange(count, dtype=np.float32) + 0.5) / count
    error = aim[..., None, :] - found[..., :, None]
    size = jnp.abs(error)
    loss = jnp.where(size <= 1.0, 0.5 * error**2, size - 0.5)
    return (jnp.abs(middle[:, None] - (error < 0)) * loss).mean(-1).sum(-1)


def huber_by_target(found, aim):
    """The same, one target at a time: no pairs are kept."""
    count = found.shape[-1]
    middle = (np.arange(count, dtype=np.float32) + 0.5) / count

    @jax.checkpoint
    def one(found, target):
        error = target[..., None] - found
        size = jnp.abs(error)
        loss = jnp.where(size <= 1.0, 0.5 * error**2, size - 0.5)
        return (jnp.abs(middle - (error < 0)) * loss).sum(-1)

    add = lambda total, target: (total + one(found, target), None)  # noqa: E731
    return jax.lax.scan(add, jnp.zeros(found.shape[:-1]), jnp.moveaxis(aim, -1, 0))[0] / count


def program(steps, count):
    def learner(params, carry, t):
        (p, target), data = params
        x = rlfx.inputs(data)[t]
        found = quantiles(p, x["obs"], count)[x["action"]]
        following = rlfx.series(stop_gradient(greedy(quantiles(target, x["obs"], count))), end=0.0)
        reward, going = rlfx.series(x["reward"], end=0.0), rlfx.series(1.0 - x["done"], end=0.0)
        aim, weight = 0.0, 1.0
        for i in range(steps):
            aim = aim + weight * reward[t + i]
            weight = weight * GAMMA * going[t + i]
        aim = aim + weight * following[t + steps]
        return huber(found, stop_gradient(aim)), carry

    return learner


def aims(target, data, steps, count, chunk=None):
    """``[T, B, count]``."""
    best = lambda obs: greedy(quantiles(target, obs, count))  # noqa: E731
    following = best(data["obs"]) if chunk is None else jax.lax.map(best, c.in_chunks(data["obs"], chunk))
    following = following.reshape(*data["done"].shape, count)
    later = lambda x, n: jnp.concatenate([x[n:], jnp.zeros_like(x[:n])])  # noqa: E731
    going, aim, weight = 1.0 - data["done"].astype(jnp.float32), 0.0, 1.0
    for i in range(steps):
        aim = aim + weight * later(data["reward"], i)
        weight = weight * GAMMA * later(going, i)
    return aim[..., None] + weight[..., None] * later(following, steps)


def by_hand(length, batch, steps, count, pairs=huber, flat=True, chunk=None):
    def run(p, target, data):
        def loss(p, part):
            obs, action, aim = part
            found = jnp.take_along_axis(quantiles(p, obs, count), action[..., None, None], -2)[..., 0, :]
            return pairs(found, aim).sum() / (length * batch)

        part = data["obs"], data["action"], aims(target, data, steps, count, chunk)
        if not flat:
            return jax.value_and_grad(loss)(p, part)
        if chunk is None:
            return jax.value_and_grad(loss)(p, c.rows_of(part))
        return c.summed_gradient(loss, p, c.in_chunks(c.rows_of(part), chunk * batch))

    return run


def workload(length, batch, hidden, count, steps=3, chunk=16):
    k = jax.random.split(jax.random.key(0), 6)
    size, widths = (length, batch), (OBS, hidden, hidden, ACTIONS * count)
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jax.random.randint(k[1], size, 0, ACTIONS),
        "reward": jax.random.normal(k[2], size), "done": jax.random.uniform(k[3], size) < 0.02,
    }  # fmt: skip
    make = lambda **how: by_hand(length, batch, steps, count, **how)  # noqa: E731
    forms = {
        "rlfx": c.learner_by_rlfx(program(steps, count), length, batch), "plain": make(), "not flattened": make(flat=False),
        f"blocks of {chunk}": make(chunk=chunk), "blocks of 1": make(chunk=1), "by target": make(pairs=huber_by_target),
    }  # fmt: skip
    return Workload(forms, (c.mlp_params(k[4], widths), c.mlp_params(k[5], widths), data))
