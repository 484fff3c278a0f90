"""Latent actions from frames without actions (LAPO, Schmidt and Jiang 2024; as Genie's, Bruce et al. 2024): what must have been
done between frames is told by those before and after it, as a few codes of a book; by the codes another network tells the frame
that follows, and a policy learns to tell the codes from what there is before."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

CHANNELS, FIRST, SECOND, GROUPS, CODES, CODE, COMMIT = 3, 16, 32, 4, 24, 8, 0.25
LAYOUT = ("NHWC", "HWIO", "NHWC")
relu = jax.nn.relu


def params_of(key, side, hidden):
    k = jax.random.split(key, 12)
    kernel = lambda key, a, b: {"w": jax.random.normal(key, (3, 3, a, b)) / (9 * a) ** 0.5, "b": jnp.zeros(b)}  # noqa: E731
    flat = (side // 4) ** 2 * SECOND

    def seeing(k, frames):
        return {"a": kernel(k[0], frames * CHANNELS, FIRST), "b": kernel(k[1], FIRST, SECOND)}

    def telling(k):
        return c.mlp_params(k, (flat, hidden, GROUPS * CODE))

    return {
        "inverse": {"see": seeing(k[:2], 3), "tell": telling(k[2])}, "policy": {"see": seeing(k[3:5], 2), "tell": telling(k[5])},
        "forward": {
            "see": seeing(k[6:8], 2), "code": c.dense(k[8], GROUPS * CODE, flat), "up": kernel(k[9], SECOND, FIRST),
            "out": kernel(k[10], FIRST, CHANNELS),
        },
        "book": jax.random.normal(k[11], (CODES, CODE)),
    }  # fmt: skip


def conv(p, x):
    """Half as many pixels of a side."""
    return jax.lax.conv_general_dilated(x, p["w"], (2, 2), "SAME", dimension_numbers=LAYOUT) + p["b"]


def grown(p, x):
    """Twice as many."""
    return jax.lax.conv_transpose(x, p["w"], (2, 2), "SAME", dimension_numbers=LAYOUT) + p["b"]


def seen(p, frames):
    """Of frames ``[..., side, side, channels]``, stacked as channels."""
    x = frames.reshape(-1, *frames.shape[-3:])
    x = relu(conv(p["b"], relu(conv(p["a"], x))))
    return x.reshape(*frames.shape[:-3], *x.shape[1:])


def told(p, frames):
    x = seen(p["see"], frames)
    return c.mlp(p["tell"], x.reshape(*x.shape[:-3], -1), relu)


def quantised(book, z):
    """The nearest code of every group, and what this costs."""
    z = z.reshape(*z.shape[:-1], GROUPS, CODE)
    far = ((z[..., None, :] - book) ** 2).sum(-1)
    code = book[jnp.argmin(far, -1)]
    cost = ((stop_gradient(z) - code) ** 2).mean((-2, -1)) + COMMIT * ((z - stop_gradient(code)) ** 2).mean((-2, -1))
    code = z + stop_gradient(code - z)  # derivatives as if it were z
    return code.reshape(*code.shape[:-2], -1), cost


def predicted(p, frames, code):
    """How the frame changes."""
    x = seen(p["see"], frames)
    x = relu(x + c.linear(p["code"], code).reshape(x.shape))
    x = x.reshape(-1, *x.shape[-3:])
    return grown(p["out"], relu(grown(p["up"], x))).reshape(*frames.shape[:-1], CHANNELS)


def losses(p, before, now, after, done):
    """Of points ``[...]``."""
    pair = jnp.concatenate([before, now], -1)
    code, cost = quantised(p["book"], told(p["inverse"], jnp.concatenate([pair, after], -1)))
    error = ((now + predicted(p["forward"], pair, code) - after) ** 2).mean((-3, -2, -1))
    cloned = ((told(p["policy"], pair) - stop_gradient(code)) ** 2).mean(-1)
    return jnp.where(done, 0.0, error + cost + cloned)


def program(params, carry, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    frame = rlfx.series(x["frame"], start=x["frame"], end=x["frame"])
    before = jnp.where(x["first"], x["frame"], frame[t - 1])
    return losses(p, before, x["frame"], frame[t + 1], x["done"]), carry


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, data: jax.value_and_grad(lambda p: loss_fn((p, data), jnp.zeros(batch))[0])(p)


# -- by hand, as usual


def around(data):
    """The frames before and after each, of ``[T, B]``."""
    frame, first = data["frame"], data["first"][..., None, None, None]
    return jnp.where(first, frame, jnp.roll(frame, 1, 0)), c.shifted(frame, frame[-1])


def plain(length, batch):
    def run(p, data):
        def loss(p):
            before, after = around(data)
            return losses(p, before, data["frame"], after, data["done"]).mean()

        return jax.value_and_grad(loss)(p)

    return run
