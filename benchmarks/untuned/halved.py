"""Convolutions of images ``[N, side, side, channels]`` by three by three that have half as many pixels of a side, padded at the
end alone, written otherwise: ``p`` has weights ``w[3, 3, channels, features]`` and biases ``b[features]``."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def unfolded(x):
    """Patches ``[N, side // 2, side // 2, 9 * channels]``."""
    x = jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)))
    half = x.shape[1] // 2
    cut = lambda i, j: x[:, i : i + 2 * half - 1 : 2, j : j + 2 * half - 1 : 2]  # noqa: E731
    return jnp.concatenate([cut(i, j) for i in range(3) for j in range(3)], -1)


def multiplied(p, x):
    """As a product of patches."""
    return unfolded(x) @ p["w"].reshape(-1, p["w"].shape[-1]) + p["b"]


def deep(p, x):
    """Two by two pixels are features of one, and of those a convolution without a stride, four weights of sixteen zero."""
    n, side, _, channels = x.shape
    x = jnp.moveaxis(x.reshape(n, side // 2, 2, side // 2, 2, channels), 2, 3).reshape(n, side // 2, side // 2, -1)
    w = jnp.pad(p["w"], ((0, 1), (0, 1), (0, 0), (0, 0)))
    w = jnp.moveaxis(w.reshape(2, 2, 2, 2, channels, -1), 1, 2).reshape(2, 2, 4 * channels, -1)
    padding, layout = ((0, 1), (0, 1)), ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=layout) + p["b"]
