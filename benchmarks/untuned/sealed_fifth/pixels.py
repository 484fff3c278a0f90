"""DrQ-v2 (Yarats et al. 2021) on stored frames: images of three frames, shifted at random, an encoder that learns from the twin
critics alone, targets of three steps, and an actor of deterministic actions with clipped noise."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing

ACTIONS, FRAMES, PAD, GAMMA, STEPS, STD, CLIP = 4, 3, 3, 0.99, 3, 0.2, 0.3
relu = jax.nn.relu
DIMENSIONS = "NHWC", "HWIO", "NHWC"


def params_of(key, side, channels, code, hidden):
    k = jax.random.split(key, 6)
    kernel = lambda k, n: jax.random.normal(k, (3, 3, n, channels)) / np.float32(np.sqrt(9 * n))  # noqa: E731
    last = (side - 3) // 2 + 1 - 2

    def trunk(key):
        return c.dense(key, channels * last**2, code) | {"scale": jnp.ones(code), "bias": jnp.zeros(code)}

    def critics(key):
        t, q = jax.random.split(key)
        sizes = code + ACTIONS, hidden, 1
        return {"trunk": trunk(t), "q": jax.vmap(lambda k: c.mlp_params(k, sizes))(jax.random.split(q))}

    p = {
        "encoder": [kernel(k[0], FRAMES), kernel(k[1], channels)], "critics": critics(k[2]),
        "actor": {"trunk": trunk(k[3]), "pi": c.mlp_params(k[4], (code, hidden, ACTIONS))},
    }  # fmt: skip
    return p, critics(k[5])


def shifted(image, by):
    """``image[S, S, FRAMES]``, whose edges are repeated, moved by ``by[2]``."""
    wide = jnp.pad(image, ((PAD, PAD), (PAD, PAD), (0, 0)), mode="edge")
    return jax.lax.dynamic_slice(wide, (*by, 0), image.shape)


def encoded(kernels, images):
    """Of images ``[N, S, S, FRAMES]``, rows of features."""
    x = images.astype(jnp.float32) / 255.0 - 0.5
    for kernel, stride in zip(kernels, (2, 1), strict=True):
        x = relu(jax.lax.conv_general_dilated(x, kernel, (stride, stride), "VALID", dimension_numbers=DIMENSIONS))
    return x.reshape(len(x), -1)


def trunk(p, x):
    x = c.linear(p, x)
    x = x - x.mean(-1, keepdims=True)
    return jnp.tanh(x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"])


def acted(actor, features, noise):
    mean = jnp.tanh(c.mlp(actor["pi"], trunk(actor["trunk"], features), relu))
    return jnp.clip(mean + jnp.clip(STD * noise, -CLIP, CLIP), -1.0, 1.0)


def judged(critics, features, action):
    """``[2, ...]``."""
    return c.mapped(critics["q"], trunk(critics["trunk"], features), action)


def program(params, carry, t):
    (p, target), data = params
    data = rlfx.inputs(data)
    x = data[t]
    frames = rlfx.series(x["frame"]).window(1 - FRAMES, 1, fill=0)
    image = jnp.moveaxis(frames, 0, -1)

    def seen(name):
        by = jax.random.randint(t.key_for(name), (2,), 0, 2 * PAD + 1)
        return encoded(p["encoder"], shifted(image, by)[None])[0]

    features, then = seen("now"), stop_gradient(seen("then"))
    action = acted(p["actor"], then, jax.random.normal(t.key_for("next action"), (ACTIONS,)))
    value = rlfx.series(stop_gradient(judged(target, then, action).min(0)), end=0.0)
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    aim = rlfx.n_step_return(step, value[t + 1], gamma=GAMMA, n=STEPS)
    critic = ((judged(p["critics"], features, x["action"]) - aim) ** 2).sum()

    given = stop_gradient(features)
    action = acted(p["actor"], given, jax.random.normal(t.key_for("action"), (ACTIONS,)))
    actor = -judged(stop_gradient(p["critics"]), given, action).min(0)
    return jnp.where(t + STEPS < t.length, critic + actor, 0.0), carry


# -- by hand: encoders of images ``[N, S, S, FRAMES]``


def channels_first(kernels, images):
    x = jnp.moveaxis(images, -1, 1).astype(jnp.float32) / 255.0 - 0.5
    dimensions = "NCHW", "HWIO", "NCHW"
    for kernel, stride in zip(kernels, (2, 1), strict=True):
        x = relu(jax.lax.conv_general_dilated(x, kernel, (stride, stride), "VALID", dimension_numbers=dimensions))
    return jnp.moveaxis(x, 1, -1).reshape(len(x), -1)


def patches(x, stride):
    """``[N, OUT, OUT, 9 * C]``."""
    out = (x.shape[1] - 3) // stride + 1
    ends = stride * (out - 1) + 1
    return jnp.concatenate([x[:, i : i + ends : stride, j : j + ends : stride] for i in range(3) for j in range(3)], -1)


def first_by_patches(kernels, images, both=False):
    """The first layer is a product of patches, as its kernel's derivative is then, too; ``both``: the second as well."""
    x = patches(images, 2).astype(jnp.float32) / 255.0 - 0.5
    x = relu(x @ kernels[0].reshape(-1, kernels[0].shape[-1]))
    if both:
        x = relu(patches(x, 1) @ kernels[1].reshape(-1, kernels[1].shape[-1]))
    else:
        x = relu(jax.lax.conv_general_dilated(x, kernels[1], (1, 1), "VALID", dimension_numbers=DIMENSIONS))
    return x.reshape(len(x), -1)


by_patches = functools.partial(first_by_patches, both=True)


def one_by_one(critics, features, action):
    return c.one_by_one(critics["q"], trunk(critics["trunk"], features), action)


# -- by hand: images ``[N, S, S, FRAMES]`` of those without shifts, and shifts ``[N, 2]``


def sliced(images, by):
    return jax.vmap(shifted)(images, by)


def places(by, side):
    return jnp.clip(by[..., None] + np.arange(side) - PAD, 0, side - 1)


def gathered(images, by):
    """No image is padded: rows and then columns are taken, and edges are those nearest."""
    rows, columns = jnp.moveaxis(places(by, images.shape[1]), 1, 0)
    images = jnp.take_along_axis(images, rows[:, :, None, None], 1)
    return jnp.take_along_axis(images, columns[:, None, :, None], 2)


def at_once(images, by):
    rows, columns = jnp.moveaxis(places(by, images.shape[1]), 1, 0)
    return images[jnp.arange(len(images))[:, None, None], rows[:, :, None], columns[:, None, :]]


def by_products(images, by):
    """Rows and columns are chosen by products with zeros and ones, which are exact."""
    side = images.shape[1]
    rows, columns = jnp.moveaxis(jax.nn.one_hot(places(by, side), side), 1, 0)
    images = jnp.einsum("nij,njkf->nikf", rows, images.astype(jnp.float32))
    return jnp.einsum("nlk,nikf->nilf", columns, images)


def by_hand(length, batch, encoder=encoded, shift=sliced, judged=judged, together=False, chunk=None, cut=False, again=False):
    """``together``: both shifts of an image are rows of one call, without a gradient for one; ``chunk``: timesteps of a block;
    ``cut``: timesteps that are not counted are not learnt from."""

    def run(p, target, data, key):
        names = "now", "then", "next action", "action"
        keys = dict(zip(names, c.streams(key, batch, *names), strict=True))
        draw = lambda name, how: jax.vmap(lambda t: jax.vmap(how)(c.at(keys[name], t)))(jnp.arange(length))  # noqa: E731
        ways = lambda k: jax.random.randint(k, (2,), 0, 2 * PAD + 1)  # noqa: E731
        normal = lambda k: jax.random.normal(k, (ACTIONS,))  # noqa: E731
        before = jnp.zeros((FRAMES - 1, *data["frame"].shape[1:]), data["frame"].dtype)
        longer = jnp.concatenate([before, data["frame"]])
        images = jnp.stack([longer[i : i + length] for i in range(FRAMES)], -1)
        then = {"images": images, "by": draw("then", ways), "noise": draw("next action", normal)}

        def valued(x):
            x = c.rows_of(x)
            features = encoder(p["encoder"], shift(x["images"], x["by"]))
            return judged(target, features, acted(p["actor"], features, x["noise"])).min(0)

        def learnt(p, x, features):
            critic = ((judged(p["critics"], features, x["action"]) - x["aim"]) ** 2).sum(0)
            given = stop_gradient(features)
            actor = -judged(stop_gradient(p["critics"]), given, acted(p["actor"], given, x["noise"])).min(0)
            return jnp.where(x["counted"], critic + actor, 0.0).sum() / (length * batch)

        def aims(value):
            going, ends = GAMMA * (1.0 - data["done"].astype(jnp.float32)), jnp.zeros(batch)
            aim = data["reward"] + going * c.shifted(value, ends)
            for _ in range(STEPS - 1):
                aim = data["reward"] + going * c.shifted(aim, ends)
            return aim

        counted = jnp.broadcast_to((jnp.arange(length) + STEPS < length)[:, None], (length, batch))
        part = {"images": images, "by": draw("now", ways), "noise": draw("action", normal)}
        part |= {"action": data["action"], "counted": counted}
        if together:
            both = jnp.concatenate([c.rows_of(images)] * 2), jnp.concatenate(c.rows_of([part["by"], then["by"]]))

            def loss(p):
                features, seen = jnp.split(encoder(p["encoder"], shift(*both)), 2)
                seen = stop_gradient(seen)
                value = judged(target, seen, acted(stop_gradient(p["actor"]), seen, c.rows_of(then["noise"]))).min(0)
                return learnt(p, c.rows_of(part | {"aim": aims(value.reshape(length, batch))}), features)

            return jax.value_and_grad(loss)(p)

        # Values of the first timesteps serve no aim.
        then = jax.tree.map(lambda x: x[STEPS:], then) if cut else then
        value = valued(then) if chunk is None else jax.lax.map(valued, c.in_chunks(then, 1 if cut else chunk))
        value = jnp.concatenate([jnp.zeros((STEPS if cut else 0, batch)), value.reshape(-1, batch)])
        part |= {"aim": aims(value)}
        part = jax.tree.map(lambda x: x[: length - STEPS], part) if cut else part
        some = jax.checkpoint(encoder) if again else encoder

        def loss(p, part):
            x = c.rows_of(part)
            return learnt(p, x, some(p["encoder"], shift(x["images"], x["by"])))

        if chunk is None:
            return jax.value_and_grad(loss)(p, part)
        return c.summed_gradient(loss, p, c.in_chunks(part, 1 if cut else chunk))

    return run


def workload(length, batch, side, channels, code, hidden, chunk=2):
    make = lambda encoder=encoded, shift=sliced, **how: by_hand(length, batch, encoder, shift, **how)  # noqa: E731
    one, some, first = {"judged": one_by_one}, {"chunk": chunk}, first_by_patches
    forms = {
        "rlfx": c.learner_by_rlfx(program, length, batch), "plain": make(), "both shifts together": make(together=True),
        "critics one by one": make(**one), "shifts gathered": make(shift=gathered),
        "shifts gathered at once": make(shift=at_once), "shifts by products": make(shift=by_products),
        "channels first": make(channels_first), "encoded again": make(again=True), "first by patches": make(first),
        "by patches": make(by_patches), "cut": make(cut=True, **one),
        "cut, first by patches": make(first, cut=True, **one), "cut, by patches": make(by_patches, cut=True, **one),
        f"first by patches, blocks of {chunk}": make(first, **some),
        "cut, by patches, blocks of 1": make(by_patches, chunk=1, cut=True, **one),
        "cut, threefry unrolled": make(cut=True), "cut, gathered, threefry unrolled": make(shift=gathered, cut=True),
        "cut, first by patches, threefry unrolled": make(first, cut=True),
        "cut, first by patches, gathered, threefry unrolled": make(first, gathered, cut=True),
        "cut, by patches, blocks of 1, threefry unrolled": make(by_patches, chunk=1, cut=True, **one),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 5)
    size = length, batch
    data = {
        "frame": jax.random.randint(k[0], (*size, side, side), 0, 256).astype(jnp.uint8),
        "action": jnp.tanh(jax.random.normal(k[1], (*size, ACTIONS))), "reward": jax.random.normal(k[2], size),
        "done": jax.random.uniform(k[3], size) < 0.05,
    }  # fmt: skip
    given = *params_of(k[4], side, channels, code, hidden), data
    return drawing(forms, given, tolerance=2e-5)
