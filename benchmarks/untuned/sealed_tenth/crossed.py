"""CrossQ (Bhatt et al. 2024) on replayed transitions: soft critics without target networks, whose layers are normalised over the
batch, and what was done and what would be done next is one batch. The actor is told by the running moments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, GAMMA, ALPHA, RATE, EPS = 17, 6, 0.99, 0.1, 0.01, 1e-3
INPUTS = OBS + ACTIONS
relu = jax.nn.relu


def critics_of(key, hidden):
    """Twins; each layer has a norm before it."""

    def one(key):
        layers = c.mlp_params(key, (INPUTS, hidden, hidden, 1))
        norms = [{"scale": jnp.ones(len(layer["w"])), "shift": jnp.zeros(len(layer["w"]))} for layer in layers]
        return [layer | norm for layer, norm in zip(layers, norms, strict=True)]

    return jax.vmap(one)(jax.random.split(key))


def params_of(key, hidden):
    k = jax.random.split(key)
    return {"actor": c.mlp_params(k[0], (OBS, hidden, hidden, 2 * ACTIONS)), "critics": critics_of(k[1], hidden)}


def moments_of(key, hidden):
    """Running means and variances of both critics' layers, as learning would have left them."""
    k = jax.random.split(key, 3)
    sizes = INPUTS, hidden, hidden
    mean = lambda key, size: 0.4 + 0.1 * jax.random.normal(key, (2, size))  # noqa: E731
    return [{"mean": mean(key, size), "variance": jnp.full((2, size), 0.4)} for key, size in zip(k, sizes, strict=True)]


def scaled(layer, x, moments):
    rate = jax.lax.rsqrt(moments["variance"] + EPS)
    return layer["scale"] * (x - moments["mean"]) * rate + layer["shift"]


def critic(layers, x, norm):
    """One critic's values ``[...]`` of ``x[..., INPUTS]``, and moments; ``norm(layer, x)``: what is normalised, and moments."""
    told = []
    for i, layer in enumerate(layers):
        x, moments = norm(layer, x if i == 0 else relu(x))
        x = c.linear(layer, x)
        told.append(moments)
    return x[..., 0], told


def by_running(critics, moments, x):
    """Both critics' values ``[2, ...]`` by what was told of their layers."""

    def one(layers, moments):
        told = iter(moments)
        return critic(layers, x, lambda layer, x: (scaled(layer, x, next(told)), None))[0]

    return jax.vmap(one)(critics, moments)


def total_of(q, reward, done, later_log_prob, log_prob, judged):
    """Of points: ``q[2, 2, ...]``, critics of what was done, and of what would be done next."""
    aim = reward + GAMMA * (1.0 - done) * (q[:, 1].min(0) - ALPHA * later_log_prob)
    return ((q[:, 0] - stop_gradient(aim)) ** 2).sum(0) + ALPHA * log_prob - judged


def over_all(layer, x):
    """The norm over all timesteps and environments, of both kinds: ``x[2, features]``."""
    mean = rlfx.mean(x.mean(0))
    moments = {"mean": mean, "variance": rlfx.mean(((x - mean) ** 2).mean(0))}
    return scaled(layer, x, moments), moments


def program(params, carry, t):
    p, running, data = params
    x = rlfx.inputs(data)[t]
    later, later_log_prob = c.squashed(p["actor"], x["after"], jax.random.normal(t.key_for("later"), (ACTIONS,)))
    done = jnp.concatenate([x["obs"], x["action"]])
    following = stop_gradient(jnp.concatenate([x["after"], later]))
    q, moments = jax.vmap(lambda layers: critic(layers, jnp.stack([done, following]), over_all))(p["critics"])
    own, log_prob = c.squashed(p["actor"], x["obs"], jax.random.normal(t.key_for("own"), (ACTIONS,)))
    judged = by_running(stop_gradient(p["critics"]), running, jnp.concatenate([x["obs"], own])).min(0)
    moved = jax.tree.map(lambda old, new: old + RATE * (stop_gradient(new) - old), running, moments)
    return total_of(q, x["reward"], x["done"], stop_gradient(later_log_prob), log_prob, judged), carry, moved


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, running, data, key):
        of = lambda p: loss_fn((p, running, data), jnp.zeros(batch), key)  # noqa: E731
        (loss, (_, moved)), grads = jax.value_and_grad(of, has_aux=True)(p)
        return loss, grads, moved

    return run


# -- by hand, as usual


def drawn(key, length, batch):
    """Noise of actions at the next observation, and at this one."""
    times = jnp.arange(length)
    draw = lambda keys: jax.vmap(jax.vmap(lambda k: jax.random.normal(k, (ACTIONS,))))(keys)  # noqa: E731
    return tuple(draw(jax.vmap(lambda t: c.at(keys, t))(times)) for keys in c.streams(key, batch, "later", "own"))


def two_passes(layer, x):
    """``x[..., features]``, of all rows."""
    axes = tuple(range(x.ndim - 1))
    mean = x.mean(axes)
    moments = {"mean": mean, "variance": ((x - mean) ** 2).mean(axes)}
    return scaled(layer, x, moments), moments


def toward(running, moments):
    return jax.tree.map(lambda old, new: old + RATE * (new - old), running, moments)


def plain(length, batch):
    def run(p, running, data, key):
        later_noise, noise = drawn(key, length, batch)

        def loss(p):
            later, later_log_prob = stop_gradient(c.squashed(p["actor"], data["after"], later_noise))
            done = jnp.concatenate([data["obs"], data["action"]], -1)
            both = jnp.stack([done, jnp.concatenate([data["after"], later], -1)])
            q, moments = jax.vmap(lambda layers: critic(layers, both, two_passes))(p["critics"])
            own, log_prob = c.squashed(p["actor"], data["obs"], noise)
            seen = jnp.concatenate([data["obs"], own], -1)
            judged = by_running(stop_gradient(p["critics"]), running, seen).min(0)
            found = total_of(q, data["reward"], data["done"], later_log_prob, log_prob, judged)
            return found.mean(), toward(running, moments)

        (found, moved), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, moved

    return run
