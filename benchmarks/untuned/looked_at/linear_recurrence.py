"""A policy of linear recurrent units (complex and diagonal) that forget where an episode ends; PPO's loss on stored data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, CLIP = 12, 5, 0.2


def params_of(key, width, state, layers):
    k = jax.random.split(key, layers + 3)

    def layer(key):
        k = jax.random.split(key, 7)
        radius, scale = jax.random.uniform(k[0], (state,), minval=0.9, maxval=0.99), np.float32(1 / np.sqrt(2 * width))
        return {
            "rate": jnp.log(-jnp.log(radius)), "turn": jax.random.uniform(k[1], (state,), maxval=3.0),
            "in": tuple(scale * jax.random.normal(x, (width, state)) for x in k[2:4]),
            "out": tuple(jax.random.normal(x, (state, width)) / np.float32(np.sqrt(state)) for x in k[4:6]),
            "skip": jnp.ones(width), "gate": c.dense(k[6], width, width),
        }  # fmt: skip

    ends = {"embed": (OBS, width), "pi": (width, ACTIONS), "v": (width, 1)}
    return {n: c.dense(x, *size) for x, (n, size) in zip(k, ends.items(), strict=False)} | {"layers": [layer(x) for x in k[3:]]}


def decay(p):
    """The recurrence's factors, and what the inputs are scaled by."""
    size = jnp.exp(-jnp.exp(p["rate"]))
    return jax.lax.complex(size * jnp.cos(p["turn"]), size * jnp.sin(p["turn"])), jnp.sqrt(1.0 - size**2)


def driven(p, x):
    return decay(p)[1] * (x @ jax.lax.complex(*p["in"]))


def read(p, h, x):
    """The layer's output of its state ``h[..., N]``."""
    y = jax.nn.gelu((h @ jax.lax.complex(*p["out"])).real + p["skip"] * x)
    return x + y * jax.nn.sigmoid(c.linear(p["gate"], y))


def ppo_loss(p, y, x):
    log_p = jax.nn.log_softmax(c.linear(p["pi"], y))
    v = c.linear(p["v"], y)[..., 0]
    ratio = jnp.exp(c.pick(log_p, x["action"]) - x["log_mu"])
    surrogate = jnp.minimum(ratio * x["advantage"], jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * x["advantage"])
    entropy = -(jnp.exp(log_p) * log_p).sum(-1)
    return 0.5 * (v - x["target"]) ** 2 - surrogate - 0.01 * entropy


def timestep(p, hs, x):
    """All layers at one timestep, of one environment or of rows of them."""
    y, after = c.linear(p["embed"], x["obs"]), []
    for layer, h in zip(p["layers"], hs, strict=True):
        h = decay(layer)[0] * h + driven(layer, y)
        y = read(layer, h, y)
        after.append(jnp.where(x["done"][..., None], 0.0, h))
    return ppo_loss(p, y, x), after


def program(params, hs, t):
    p, data = params
    return timestep(p, hs, rlfx.inputs(data)[t])


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, data, hs: jax.value_and_grad(lambda p: loss_fn((p, data), hs)[0])(p)


# -- by hand: the states ``[T, B, N]`` of a layer, from what drives it and where episodes begin -------------------------


def associative(p, x, begun, h):
    a = jnp.where(begun[..., None], 0.0, decay(p)[0])
    u = driven(p, x)
    u = u.at[0].add(a[0] * h)
    joined = lambda first, then: (first[0] * then[0], then[0] * first[1] + then[1])  # noqa: E731
    return jax.lax.associative_scan(joined, (a, u))[1]


def one_by_one(p, x, begun, h, unroll=1):
    a = decay(p)[0]

    def body(h, x):
        u, begun = x
        h = a * jnp.where(begun[:, None], 0.0, h) + u
        return h, h

    return jax.lax.scan(body, h, (driven(p, x), begun), unroll=unroll)[1]


def in_reals(p, x, begun, h, unroll=1):
    """Real and imaginary parts as arrays of their own; one real product before the loop."""
    (re, im), scale = (decay(p)[0].real, decay(p)[0].imag), decay(p)[1]
    u, w = jnp.split(x @ (jnp.concatenate(p["in"], -1) * jnp.tile(scale, 2)), 2, -1)

    def body(h, x):
        u, w, goes_on = x
        r, i = h[0] * goes_on, h[1] * goes_on
        h = re * r - im * i + u, re * i + im * r + w
        return h, h

    goes_on = 1.0 - begun[..., None].astype(jnp.float32)
    return jax.lax.scan(body, (h.real, h.imag), (u, w, goes_on), unroll=unroll)[1]


def read_reals(p, h, x):
    y = jnp.concatenate(h, -1) @ jnp.concatenate([p["out"][0], -p["out"][1]])
    y = jax.nn.gelu(y + p["skip"] * x)
    return x + y * jax.nn.sigmoid(c.linear(p["gate"], y))


def by_layers(length, batch, states, read=read, again=False):
    """Layer by layer, each at all timesteps; ``again``: the gradient computes a layer anew."""

    def run(p, data, hs):
        begun = jnp.concatenate([jnp.zeros((1, batch), bool), data["done"][:-1]])

        def layer_of(p, x, h):
            return read(p, states(p, x, begun, h), x)

        def loss(p):
            y = c.linear(p["embed"], data["obs"])
            for layer, h in zip(p["layers"], hs, strict=True):
                y = (jax.checkpoint(layer_of) if again else layer_of)(layer, y, h)
            return ppo_loss(p, y, data).mean()

        return jax.value_and_grad(loss)(p)

    return run


def by_time(length, batch, chunk=None):
    """All layers in one loop over t; ``chunk``: the gradient runs that many timesteps again."""

    def run(p, data, hs):
        def loss(p):
            loop = lambda hs, x: jax.lax.scan(lambda hs, x: timestep(p, hs, x)[::-1], hs, x)  # noqa: E731
            if chunk is None:
                return loop(hs, data)[1].mean()
            return jax.lax.scan(jax.checkpoint(loop, prevent_cse=False), hs, c.in_chunks(data, chunk))[1].mean()

        return jax.value_and_grad(loss)(p)

    return run


def workload(length, batch, width, state, layers=2, chunk=16):
    k = jax.random.split(jax.random.key(0), 7)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jax.random.randint(k[1], size, 0, ACTIONS),
        "log_mu": -1.6 + 0.2 * jax.random.normal(k[2], size), "advantage": jax.random.normal(k[3], size),
        "target": jax.random.normal(k[4], size), "done": jax.random.uniform(k[5], size) < 0.03,
    }  # fmt: skip
    hs = [jnp.zeros((batch, state), jnp.complex64) for _ in range(layers)]
    unrolled = lambda *args: in_reals(*args, unroll=8)  # noqa: E731
    make = lambda *how, **more: by_layers(length, batch, *how, **more)  # noqa: E731
    forms = {
        "rlfx": by_rlfx(length, batch), "plain": make(associative), "loop of each layer": make(one_by_one),
        "in reals": make(in_reals, read_reals), "in reals, unrolled by 8": make(unrolled, read_reals),
        "in reals, layers again": make(in_reals, read_reals, again=True),
        "one loop": by_time(length, batch), f"one loop, again by {chunk}": by_time(length, batch, chunk),
    }  # fmt: skip
    return Workload(forms, (params_of(k[6], width, state, layers), data, hs))
