"""Temporal cycle consistency (Dwibedi et al. 2019; for rewards across embodiments, XIRL, Zakka et al. 2021) of pairs of
demonstrations: a code of a frame softly finds its nearest neighbour among all frames of another video of the task, which should
softly find the frame again, among all of its own. Where it comes back to has a mean and a variance, and that is the loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.untuned import common as c

CHANNELS, FIRST, SECOND, CODE, TEMPERATURE, SPREAD, LEAST = 3, 16, 32, 32, 0.2, 0.5, 1e-3
LAYOUT = ("NHWC", "HWIO", "NHWC")
relu = jax.nn.relu


def params_of(key, side, hidden):
    k = jax.random.split(key, 4)
    kernel = lambda key, a, b: {"w": jax.random.normal(key, (3, 3, a, b)) / (9 * a) ** 0.5, "b": jnp.zeros(b)}  # noqa: E731
    flat = (side // 4) ** 2 * SECOND
    # Codes are compared with one another alone, so that a bias of theirs would do nothing.
    told = {"hidden": c.dense(k[2], flat, hidden), "code": c.dense(k[3], hidden, CODE)["w"]}
    return {"a": kernel(k[0], CHANNELS, FIRST), "b": kernel(k[1], FIRST, SECOND), **told}


def conv(p, x):
    """Half as many pixels of a side."""
    return jax.lax.conv_general_dilated(x, p["w"], (2, 2), "SAME", dimension_numbers=LAYOUT) + p["b"]


def seen(p, frame):
    """The code of one frame ``[side, side, CHANNELS]``."""
    x = relu(conv(p["b"], relu(conv(p["a"], frame[None]))))
    return relu(c.linear(p["hidden"], x.reshape(-1))) @ p["code"]


def nearest(code, codes):
    """How much each of ``codes[T, CODE]`` is the nearest one."""
    return jax.nn.softmax(-((codes - code) ** 2).mean(-1) / TEMPERATURE)


def missed(share, times, now):
    """How far from now the frame is that was found, in its own deviations."""
    where = (share * times).sum(-1)
    spread = (share * (times - where[..., None]) ** 2).sum(-1) + LEAST
    return (where - now) ** 2 / spread + SPREAD * jnp.log(spread)


def cycled(mine, theirs, t):
    """Of this timestep's code: to the other video and back."""
    others, own = rlfx.series(theirs)[:], rlfx.series(mine)[:]
    found = nearest(mine, others) @ others
    times = rlfx.series(t.now)[:] / t.length
    return missed(nearest(found, own), times, t.now / t.length)


def program(params, carry, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    one, other = seen(p, x["one"]), seen(p, x["other"])
    return 0.5 * (cycled(one, other, t) + cycled(other, one, t)), carry


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, data: jax.value_and_grad(lambda p: loss_fn((p, data), jnp.zeros(batch))[0])(p)


# -- by hand, as usual


def plain(length, batch):
    times = jnp.arange(length) / length

    def one_way(mine, theirs):
        """Of one pair of videos ``[T, CODE]``."""

        def of_frame(code, now):
            found = nearest(code, theirs) @ theirs
            return missed(nearest(found, mine), times, now)

        return jax.vmap(of_frame)(mine, times).mean()

    def of_pair(p, one, other):
        one, other = (jax.vmap(seen, (None, 0))(p, x) for x in (one, other))
        return 0.5 * (one_way(one, other) + one_way(other, one))

    def run(p, data):
        loss = lambda p: jax.vmap(of_pair, (None, 1, 1))(p, data["one"], data["other"]).mean()  # noqa: E731
        return jax.value_and_grad(loss)(p)

    return run
