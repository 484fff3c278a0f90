"""Learners that read whole episodes: attention over all timesteps, before and after, and a task that all transitions tell."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import attending, parts
from benchmarks.untuned.ordinary.attending import ACTIONS, OBS, feed, judged, masked, projected, scale_of
from benchmarks.untuned.ordinary.parts import layer_norm, relu

# -- one layer of attention over the whole episode of a timestep, before a policy and a critic: judged with hindsight


def looked(q, keys, values, seen):
    """Of all timesteps: ``q[T, B, heads, width]``; ``seen[B, T, T]``."""
    scores = jnp.einsum("tbhw,sbhw->bhts", q, keys) * scale_of(q)
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e9), axis=-1)
    read = jnp.einsum("bhts,sbhw->tbhw", weights, values)
    return read.reshape(*read.shape[:2], -1)


def same(episode):
    """``[T, B]`` to ``[B, T, T]``: of one episode."""
    return episode.T[:, :, None] == episode.T[:, None, :]


def hindsight_plain(heads):
    def loss(p, _, data):
        h = jnp.tanh(c.linear(p["in"], data["obs"]))
        read = looked(*projected(p, h, heads), same(data["episode"]))
        target = c.discounted(data["reward"], jnp.full_like(data["reward"], attending.GAMMA))
        return judged(p, h, read, data["action"], target).mean()

    return parts.usual(loss)


def hindsight(length, batch, width, heads):
    program = attending.causal_program(heads, lambda x, t: x[:])
    data = attending.attending_data(length, batch)
    p = attending.attending_params(jax.random.key(0), width)
    return parts.learner(program, hindsight_plain(heads), length, batch, p, (), data)


# -- two layers that fill in actions that were hidden, from all timesteps of the episode



def tokens(p, x, place):
    """What is seen, what was done where that is not hidden, whether it is."""
    done = jnp.where(x["hidden"][..., None], 0.0, jax.nn.one_hot(x["action"], ACTIONS))
    hidden = x["hidden"].astype(jnp.float32)[..., None]
    return c.linear(p["token"], jnp.concatenate([x["obs"], done, hidden], -1)) + place


def filling_program(heads):
    def program(params, carry, t):
        (p, _), data = params
        data = rlfx.inputs(data)
        x = data[t]
        h = tokens(p, x, p["place"][t.now])
        for layer in p["layers"]:
            q, k, v = projected(layer, layer_norm(layer["first"], h), heads)
            keys, values = rlfx.series((k, v))[:]
            read = masked(q, keys, values, data[:]["episode"] == x["episode"])
            h = feed(layer, h + c.linear(layer["o"], read))
        log_p = jax.nn.log_softmax(c.linear(p["out"], h))
        return jnp.where(x["hidden"], -log_p[x["action"]], 0.0), carry

    return program


def filling_plain(heads):
    def loss(p, _, data):
        h = tokens(p, data, p["place"][:, None])
        for layer in p["layers"]:
            read = looked(*projected(layer, layer_norm(layer["first"], h), heads), same(data["episode"]))
            h = feed(layer, h + c.linear(layer["o"], read))
        log_p = jax.nn.log_softmax(c.linear(p["out"], h))
        return jnp.where(data["hidden"], -c.pick(log_p, data["action"]), 0.0).mean()

    return parts.usual(loss)


def filling(length, batch, width, layers, heads):
    data = attending.attending_data(length, batch)
    del data["reward"]
    data["hidden"] = jax.random.uniform(jax.random.key(3), (length, batch)) < 0.3
    p = attending.transformer_params(jax.random.key(0), width, layers, length)
    return parts.learner(filling_program(heads), filling_plain(heads), length, batch, p, (), data)


# -- what all transitions of an environment tell of its task, as a product of normals (PEARL), before a Q-network

TASK = 16


def task_params(key, hidden):
    k = jax.random.split(key)
    return {
        "told": c.mlp_params(k[0], (OBS + ACTIONS + 1, hidden, hidden, 2 * TASK)),
        "q": c.mlp_params(k[1], (OBS + TASK, hidden, hidden, ACTIONS)),
    }  # fmt: skip


def told(p, x):
    """The precision of what a transition tells, and its mean by that."""
    seen = jnp.concatenate([x["obs"], jax.nn.one_hot(x["action"], ACTIONS), x["reward"][..., None]], -1)
    mean, spread = jnp.split(c.mlp(p["told"], seen, relu), 2, -1)
    precision = 1.0 / jnp.maximum(jax.nn.softplus(spread), 1e-2)
    return precision, precision * mean


def task_of(precision, weighed, noise):
    """A sample ``[..., TASK]`` of what the sums tell, and how far it is from what was believed."""
    variance = 1.0 / precision
    mean = variance * weighed
    kl = 0.5 * (variance + mean**2 - 1.0 - jnp.log(variance)).sum(-1)
    return mean + jnp.sqrt(variance) * noise, kl


def task_losses(p, target, x, next_obs, task, kl):
    q = c.mlp(p["q"], jnp.concatenate([x["obs"], task], -1), relu)
    following = c.mlp(target, jnp.concatenate([next_obs, stop_gradient(task)], -1), relu).max(-1)
    aim = stop_gradient(x["reward"] + attending.GAMMA * (1.0 - x["done"]) * following)
    return (c.pick(q, x["action"]) - aim) ** 2 + 0.1 * kl


def task_program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    next_obs = rlfx.series(x["obs"], end=x["last"])[t + 1]
    precision, weighed = rlfx.series(told(p, x))[:]
    noise = rlfx.series(jax.random.normal(t.key_for("task"), (TASK,)))[0]
    return task_losses(p, target, x, next_obs, *task_of(precision.sum(0), weighed.sum(0), noise)), carry


def task_plain(batch):
    def loss(p, target, data, key):
        precision, weighed = told(p, data)
        (noise,) = c.normals(key, "task", 1, batch, (TASK,))
        task, kl = task_of(precision.sum(0), weighed.sum(0), noise)
        task = jnp.broadcast_to(task, (*data["reward"].shape, TASK))
        return task_losses(p, target, data, parts.with_last(data)[1:], task, kl).mean()

    return parts.usual(loss)


def task(length, batch, hidden):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    p, target = (task_params(jax.random.key(i), hidden) for i in range(2))
    return parts.learner(task_program, task_plain(batch), length, batch, p, target["q"], data, random=True)
