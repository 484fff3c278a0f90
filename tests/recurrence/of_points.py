"""Losses of points, compiled, and by plain loops over timesteps and environments: for the tests of rewrites of sums."""

import jax
import numpy as np

import rlfx


def gradient(sums, target, carry, length, wrt=(0, 1), **how):
    """Of ``sums(p, x, scale)`` at every point of ``p["x"][T, B]``, with a scale that falls; of the first alone: not of data."""

    def loss(p, scale, t):
        x = p["x"] if wrt == (0, 1) else jax.lax.stop_gradient(p["x"])
        return sums(p, rlfx.inputs(x)[t], scale), 0.9 * scale

    fn = rlfx.compile(loss, length=length, batch=len(carry), target=target, **how)
    return jax.jit(jax.value_and_grad(lambda p, c: fn(p, c)[0], argnums=wrt))


def traced(sums, params, carry, length):
    """The program of ``sums`` at every point, with a scale that falls."""
    loss = lambda p, s, t: (sums(p, rlfx.inputs(p["x"])[t], s), 0.9 * s)  # noqa: E731
    return rlfx.trace(loss, params, carry, length=length, batch=len(carry))


def by_hand(sums, carry, length, wrt):
    batch = len(carry)

    def loss(p, scale):
        p = p if wrt == (0, 1) else {**p, "x": jax.lax.stop_gradient(p["x"])}
        points = ((t, b) for t in range(length) for b in range(batch))
        return sum(sums(p, p["x"][t, b], 0.9**t * scale[b]) for t, b in points) / (length * batch)

    return jax.value_and_grad(loss, argnums=wrt)


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, expected)
