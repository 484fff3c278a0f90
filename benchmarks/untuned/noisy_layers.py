"""Layers with factored noise (Fortunato et al. 2018), in streams of two by name: ``outputs`` says how wide each ends."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.untuned import common as c


def noisy(key, rows, columns):
    """The parameters of a layer."""
    size = np.float32(0.5 / np.sqrt(rows))
    return c.dense(key, rows, columns) | {"w noise": jnp.full((rows, columns), size), "b noise": jnp.full(columns, size)}


def factored(key, size):
    x = jax.random.normal(key, (size,))
    return jnp.sign(x) * jnp.sqrt(jnp.abs(x))


def noise_of(key, hidden, outputs):
    """Of every noisy layer: what its inputs and its outputs have."""
    keys = iter(jax.random.split(key, 8))
    sizes = {name: [(hidden, hidden), (hidden, size)] for name, size in outputs.items()}
    return {n: [tuple(factored(next(keys), s) for s in layer) for layer in layers] for n, layers in sizes.items()}


def noisy_layer(p, noise, x):
    inputs, outputs = noise
    w = p["w"] + p["w noise"] * (inputs[:, None] * outputs)
    return x @ w + (p["b"] + p["b noise"] * outputs)
