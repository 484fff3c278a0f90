"""Implicit behavioural cloning (Florence et al. 2021) of stored demonstrations: what was done should have less energy than
actions that Langevin's steps have led down the energy's slopes, given the last two observations; slopes that are too steep are
penalised, so that a derivative is learnt from."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, FRAMES, SAMPLES, STEPS = 12, 3, 2, 16, 3
RATE, SPREAD, STEEP, PENALTY = 0.3, 0.1, 0.25, 1.0
relu = jax.nn.relu


def params_of(key, hidden):
    *layers, last = c.mlp_params(key, (FRAMES * OBS + ACTIONS, hidden, hidden, 1))
    return [*layers, {"w": last["w"][:, 0]}]  # what is added to all energies has no meaning


def energy(layers, seen, action):
    x = jnp.concatenate([seen, action], -1)
    for layer in layers[:-1]:
        x = jnp.tanh(c.linear(layer, x))
    return x @ layers[-1]["w"]


def contrast(layers, seen, action, tried, noise):
    """Of one point: samples ``tried[SAMPLES, ACTIONS]`` go down, and then what was done is told from them."""
    of = functools.partial(energy, layers, seen)
    slopes = jax.vmap(jax.grad(of))
    for each in noise:
        tried = jnp.clip(tried - RATE * slopes(tried) + SPREAD * each, -1.0, 1.0)
    every = jnp.concatenate([action[None], stop_gradient(tried)])
    energies, steep = jax.vmap(of)(every), jnp.abs(slopes(every)).max(-1)
    too_steep = relu(steep - STEEP) ** 2
    return energies[0] + jax.nn.logsumexp(-energies) + PENALTY * too_steep.mean()


def program(params, carry, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    seen = rlfx.series(x["obs"]).window(1 - FRAMES, 1, fill=0.0).ravel()
    tried = jax.random.uniform(t.key_for("samples"), (SAMPLES, ACTIONS), minval=-1.0, maxval=1.0)
    noise = jax.random.normal(t.key_for("noise"), (STEPS, SAMPLES, ACTIONS))
    return contrast(p, seen, x["action"], tried, noise), carry


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, data, key: jax.value_and_grad(lambda p: loss_fn((p, data), jnp.zeros(batch), key)[0])(p)


# -- by hand, as usual


def drawn(keys, t):
    """Samples and noise of a timestep, by keys ``[B]`` of both streams."""
    of_samples, of_noise = (c.at(k, t) for k in keys)
    uniform = lambda k: jax.random.uniform(k, (SAMPLES, ACTIONS), minval=-1.0, maxval=1.0)  # noqa: E731
    normal = lambda k: jax.random.normal(k, (STEPS, SAMPLES, ACTIONS))  # noqa: E731
    return jax.vmap(uniform)(of_samples), jax.vmap(normal)(of_noise)


def seen_of(obs):
    """The last two observations ``[T, B, FRAMES * OBS]``, the older one first."""
    return jnp.concatenate([jnp.concatenate([jnp.zeros_like(obs[:1]), obs[:-1]]), obs], -1)


def plain(length, batch):
    def run(p, data, key):
        keys = c.streams(key, batch, "samples", "noise")
        tried, noise = jax.vmap(lambda t: drawn(keys, t))(jnp.arange(length))

        def loss(p):
            of_points = jax.vmap(jax.vmap(contrast, (None, 0, 0, 0, 0)), (None, 0, 0, 0, 0))
            return of_points(p, seen_of(data["obs"]), data["action"], tried, noise).mean()

        return jax.value_and_grad(loss)(p)

    return run
