"""The inverse dynamics model by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_twelfth import inverse
from benchmarks.untuned.sealed_twelfth.inverse import (
    ACTIONS,
    AROUND,
    CHANNELS,
    FRAMES,
    params_of,
    relu,
    windows,
)  # fmt: skip


def at_ends(side):
    """Zeros before and behind, as "SAME" has them, of three places and strides of two."""
    total = max((-(-side // 2) - 1) * 2 + 3 - side, 0)
    return total // 2, total - total // 2


def shifted_sum(parts):
    """``parts[size][T, ...]`` summed, each from its own timestep of those around."""
    size, half = len(parts), len(parts) // 2
    ends = ((half, half),) + ((0, 0),) * (parts[0].ndim - 1)
    return sum(jnp.pad(x, ends)[i : i + len(x)] for i, x in zip(range(size), parts, strict=True))


# -- the first layer of frames ``[T, B, CHANNELS, side, side]``: ``[T * B, places, places, channels]``, before the nonlinearity


def convolved(x, w, strides=(2, 2), layout=("NHWC", "HWIO", "NHWC"), padding="SAME"):
    return jax.lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=layout)


def rows_of(w):
    """``[columns, rows, 3, 3]`` as ``[9 * rows, columns]``, places first."""
    return w.transpose(2, 3, 1, 0).reshape(-1, len(w))


def channels_last(frames):
    return jnp.moveaxis(frames, 2, -1)


def stacked(p, frames):
    """Frames around side by side, as channels."""
    x = windows(channels_last(frames), FRAMES)  # [T, FRAMES, B, side, side, CHANNELS]
    x = jnp.moveaxis(x, 1, -2).reshape(-1, *frames.shape[3:], FRAMES * CHANNELS)
    return convolved(x, p["w"].transpose(2, 3, 1, 0)) + p["b"]


def of_three_axes(p, frames):
    """One convolution over time and space."""
    w = p["w"].reshape(-1, FRAMES, CHANNELS, 3, 3).transpose(1, 3, 4, 2, 0)
    ends = (FRAMES // 2, FRAMES // 2), at_ends(frames.shape[3]), at_ends(frames.shape[4])
    x = frames.transpose(1, 0, 3, 4, 2)
    made = convolved(x, w, (1, 2, 2), ("NDHWC", "DHWIO", "NDHWC"), ends).swapaxes(0, 1)
    return made.reshape(-1, *made.shape[2:]) + p["b"]


def shifted(p, frames):
    """Of each frame what it is for all around; then shifted, and summed."""
    w = p["w"].reshape(-1, FRAMES, CHANNELS, 3, 3).transpose(3, 4, 2, 1, 0)
    x = channels_last(frames).reshape(-1, *frames.shape[3:], CHANNELS)
    made = convolved(x, w.reshape(3, 3, CHANNELS, -1))
    made = made.reshape(*frames.shape[:2], *made.shape[1:3], FRAMES, -1)
    made = shifted_sum([made[..., i, :] for i in range(FRAMES)])
    return made.reshape(-1, *made.shape[2:]) + p["b"]


def patches(x):
    """``[..., side, side, channels]`` as ``[..., places, places, 9 * channels]``."""
    places = -(-x.shape[-2] // 2)
    ends = at_ends(x.shape[-2])
    x = jnp.pad(x, ((0, 0),) * (x.ndim - 3) + (ends, ends, (0, 0)))
    cut = lambda i: slice(i, i + 2 * places - 1, 2)  # noqa: E731
    return jnp.concatenate([x[..., cut(i), cut(j), :] for i in range(3) for j in range(3)], -1)


def by_patches(p, frames):
    """Patches of each frame once, those around side by side, and a product."""
    x = windows(patches(channels_last(frames)), FRAMES)
    w = p["w"].reshape(-1, FRAMES, CHANNELS, 3, 3).transpose(1, 3, 4, 2, 0)
    made = jnp.moveaxis(x, 1, -2).reshape(-1, *x.shape[3:5], FRAMES * x.shape[-1]) @ w.reshape(-1, len(p["b"]))
    return made + p["b"]


def by_patches_shifted(p, frames):
    """Patches of each frame, a product for all around, and a sum."""
    x = patches(channels_last(frames))
    w = p["w"].reshape(-1, FRAMES, CHANNELS, 3, 3).transpose(3, 4, 2, 1, 0).reshape(x.shape[-1], -1)
    made = jnp.split(x @ w, FRAMES, -1)
    made = shifted_sum(made)
    return made.reshape(-1, *made.shape[2:]) + p["b"]


def by_patches_apart(p, frames):
    """A product of the patches of each frame around."""
    x = windows(patches(channels_last(frames)), FRAMES)
    w = p["w"].reshape(-1, FRAMES, CHANNELS, 3, 3).transpose(1, 3, 4, 2, 0).reshape(FRAMES, x.shape[-1], -1)
    made = sum(x[:, i] @ w[i] for i in range(FRAMES))
    return made.reshape(-1, *made.shape[2:]) + p["b"]


# -- the second layer


def second_convolved(p, x):
    return convolved(x, p["w"].transpose(2, 3, 1, 0)) + p["b"]


def second_by_patches(p, x):
    return patches(x) @ rows_of(p["w"]) + p["b"]


def second_by_parts(p, x):
    """A product of each place of a patch."""
    places, ends = -(-x.shape[-2] // 2), at_ends(x.shape[-2])
    x = jnp.pad(x, ((0, 0), ends, ends, (0, 0)))
    cut = lambda i: slice(i, i + 2 * places - 1, 2)  # noqa: E731
    w = p["w"].transpose(2, 3, 1, 0)
    return sum(x[:, cut(i), cut(j)] @ w[i, j] for i in range(3) for j in range(3)) + p["b"]


# -- the end: codes ``[T, B, hidden]`` to logits


def near_stacked(p, codes):
    x = jnp.moveaxis(windows(codes, AROUND), 1, 2)
    return c.linear(p, x.reshape(*codes.shape[:2], -1))


def near_shifted(p, codes):
    """One product for all around, and a sum."""
    w = p["w"].reshape(AROUND, codes.shape[-1], -1).swapaxes(0, 1).reshape(codes.shape[-1], -1)
    return shifted_sum(jnp.split(codes @ w, AROUND, -1)) + p["b"]


def logits_of(p, frames, first, second, near):
    x = relu(second(p["second"], relu(first(p["first"], frames))))
    channels = x.shape[-1]
    w = p["code"]["w"].reshape(channels, -1, len(p["code"]["b"])).swapaxes(0, 1)
    codes = relu(x.reshape(len(x), -1) @ w.reshape(-1, w.shape[-1]) + p["code"]["b"])
    return c.linear(p["action"], relu(near(p["near"], codes.reshape(*frames.shape[:2], -1))))


# -- channels first, as frames are


def logits_channels_first(p, frames, first, second, near):
    layout = ("NCHW", "OIHW", "NCHW")
    x = jnp.moveaxis(windows(frames, FRAMES), 1, 2).reshape(-1, FRAMES * CHANNELS, *frames.shape[3:])
    for layer in (p["first"], p["second"]):
        x = relu(convolved(x, layer["w"], layout=layout) + layer["b"][:, None, None])
    codes = relu(c.linear(p["code"], x.reshape(len(x), -1)))
    return c.linear(p["action"], relu(near(p["near"], codes.reshape(*frames.shape[:2], -1))))


# -- features first: ``[channels, N, places, places]``


def columns_of_patches(x):
    places, ends = -(-x.shape[-1] // 2), at_ends(x.shape[-1])
    x = jnp.pad(x, ((0, 0),) * (x.ndim - 2) + (ends, ends))
    cut = lambda i: slice(i, i + 2 * places - 1, 2)  # noqa: E731
    return jnp.stack([x[..., cut(i), cut(j)] for i in range(3) for j in range(3)], 1)  # [channels, 9, ...]


def logits_in_columns(p, frames, first, second, near):
    def layer(p, x):
        rows = x.reshape(p["w"][0].size, -1)
        made = relu(p["w"].reshape(len(p["w"]), -1) @ rows + p["b"][:, None])
        return made.reshape(len(p["w"]), -1, *x.shape[-2:])

    x = columns_of_patches(jnp.moveaxis(frames, 2, 0))  # [CHANNELS, 9, T, B, places, places]
    x = jnp.moveaxis(windows(jnp.moveaxis(x, 2, 0), FRAMES), 1, 0)  # [FRAMES, T, CHANNELS, 9, B, ...]
    x = layer(p["first"], jnp.moveaxis(x, 1, 3))
    x = layer(p["second"], columns_of_patches(x))
    codes = relu(c.linear(p["code"], jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)))
    return c.linear(p["action"], relu(near(p["near"], codes.reshape(*frames.shape[:2], -1))))


def by_hand(
    length, batch, first=stacked, second=second_convolved, near=near_shifted, of=logits_of, chunk=None, again=False
):
    """``chunk``: so many environments after the others; ``again``: all but products are computed again."""

    def run(p, _, data):
        def loss(p, data):
            found = of(p, data["frame"], first, second, near)
            return -c.pick(jax.nn.log_softmax(found), data["action"]).sum() / (length * batch)

        kept = jax.checkpoint_policies.dots_saveable
        loss = jax.checkpoint(loss, policy=kept) if again else loss
        if chunk is None:
            return jax.value_and_grad(loss)(p, data)
        parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(length, -1, chunk, *x.shape[2:]), 1, 0), data)
        return c.summed_gradient(loss, p, parts)

    return run


def workload(length, batch, side, channels, hidden, chunk=4):
    make, half = functools.partial(by_hand, length, batch), chunk // 2
    second, parts, first = {"second": second_by_patches}, {"second": second_by_parts}, {"of": logits_channels_first}
    column, both = {"of": logits_in_columns}, {"first": by_patches, "second": second_by_patches}
    moved, apart = {**both, "first": by_patches_shifted}, {**both, "first": by_patches_apart}
    forms = {
        "rlfx": c.learner_by_rlfx(inverse.program, length, batch), "plain": inverse.plain(length, batch),
        "channels first": make(**first), "channels first, near stacked": make(near=near_stacked, **first),
        f"channels first, {chunk} environments": make(chunk=chunk, **first), "channels last": make(),
        "channels last, near stacked": make(near=near_stacked), f"channels last, {chunk} environments": make(chunk=chunk),
        "three axes": make(of_three_axes), "three axes, patches": make(of_three_axes, **second), "shifted": make(shifted),
        "shifted, patches": make(shifted, **second), "channels last, patches": make(**second), "patches": make(**both),
        "patches, near stacked": make(near=near_stacked, **both), "patches, then convolved": make(by_patches),
        "patches, parts": make(by_patches, **parts), "patches shifted": make(**moved), "patches apart": make(**apart),
        "patches, again": make(again=True, **both), "patches apart, again": make(again=True, **apart),
        "patches shifted, parts": make(by_patches_shifted, **parts), "features first": make(**column),
        f"features first, {half} environments": make(chunk=half, **column), "features first, again": make(again=True, **column),
        f"features first, {chunk} environments": make(chunk=chunk, **column),
        f"features first, again, {half} environments": make(chunk=half, again=True, **column),
        f"features first, again, {chunk} environments": make(chunk=chunk, again=True, **column),
        f"patches, {half} environments": make(chunk=half, **both), f"patches, {chunk} environments": make(chunk=chunk, **both),
        f"patches shifted, {half} environments": make(chunk=half, **moved),
        f"patches shifted, {chunk} environments": make(chunk=chunk, **moved),
        f"patches apart, {half} environments": make(chunk=half, **apart),
        f"patches apart, {chunk} environments": make(chunk=chunk, **apart),
        f"patches, parts, {chunk} environments": make(by_patches, chunk=chunk, **parts),
        f"patches, again, {chunk} environments": make(again=True, chunk=chunk, **both),
    }  # fmt: skip
    k, size = jax.random.split(jax.random.key(0), 3), (length, batch)
    data = {
        "frame": jax.random.uniform(k[0], (*size, CHANNELS, side, side)), "action": jax.random.randint(k[1], size, 0, ACTIONS),
    }  # fmt: skip
    return Workload(forms, (params_of(k[2], side, channels, hidden), None, data), tolerance=5e-5)
