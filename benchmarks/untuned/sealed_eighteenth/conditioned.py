"""A decision transformer (Chen et al. 2021) on stored sequences: at every timestep the return that is to come, what is seen and
what was done are three tokens, which attend to all tokens before them; the action is told by what becomes of the second one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, KINDS, HEADS, LAYERS, LONGEST, SCALE = 12, 3, 3, 4, 2, 200, 10.0
AXES = {"obs": "tb", "action": "tb", "reward": "tb", "later": "b", "start": "b"}
LATER = np.arange(KINDS)[:, None] < np.arange(KINDS)  # [query, key] of one timestep


def params_of(key, width):
    k = jax.random.split(key, 5 + LAYERS)
    norm = lambda: {"scale": jnp.ones(width), "shift": jnp.zeros(width)}  # noqa: E731

    def layer(key):
        k = jax.random.split(key, 6)
        square = {name: c.dense(x, width, width)["w"] for name, x in zip("qkv", k[:3], strict=True)}
        wide = {"up": c.dense(k[4], width, 4 * width), "down": c.dense(k[5], 4 * width, width)}
        return {"first": norm(), "second": norm(), "out": c.dense(k[3], width, width), **square, **wide}

    return {
        "to_go": c.dense(k[0], 1, width), "obs": c.dense(k[1], OBS, width), "action": c.dense(k[2], ACTIONS, width),
        "time": 0.5 * jax.random.normal(k[3], (LONGEST, width)), "begin": norm(), "end": norm(),
        "layers": [layer(x) for x in k[5:]], "head": c.dense(k[4], width, ACTIONS),
    }  # fmt: skip


def normed(p, x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["shift"]


def by_head(x):
    return x.reshape(*x.shape[:-1], HEADS, -1)


def widened(layer, x):
    return x + c.linear(layer["down"], jax.nn.gelu(c.linear(layer["up"], normed(layer["second"], x))))


def attended(layer, x, t):
    """Of the tokens ``x[KINDS, width]`` of one timestep."""
    seen = normed(layer["first"], x)
    query, key, value = (by_head(seen @ layer[name]) for name in "qkv")
    keys, values = rlfx.series(key)[: t + 1], rlfx.series(value)[: t + 1]  # [t + 1, KINDS, HEADS, size]
    scores = jnp.einsum("qhd,skhd->hqsk", query, keys) / query.shape[-1] ** 0.5
    now = rlfx.series(t.now)[: t + 1] == t.now
    scores = jnp.where(now[:, None] & LATER[:, None], -jnp.inf, scores)
    share = jax.nn.softmax(scores, axis=(-2, -1))
    read = jnp.einsum("hqsk,skhd->qhd", share, values)
    return x + c.linear(layer["out"], read.reshape(KINDS, -1))


def program(params, carry, t):
    p, data = params
    x = rlfx.inputs(data, axes=AXES)[t]
    to_go = (rlfx.series(x["reward"])[t:].sum() + x["later"]) / SCALE
    told = c.linear(p["to_go"], to_go[None]), c.linear(p["obs"], x["obs"]), c.linear(p["action"], x["action"])
    tokens = normed(p["begin"], jnp.stack(told) + p["time"][x["start"] + t.now])
    for layer in p["layers"]:
        tokens = widened(layer, attended(layer, tokens, t))
    action = jnp.tanh(c.linear(p["head"], normed(p["end"], tokens[1])))
    return ((action - x["action"]) ** 2).mean(), carry


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, data: jax.value_and_grad(lambda p: loss_fn((p, data), jnp.zeros(batch))[0])(p)


# -- by hand, as usual


def to_go_of(data):
    """``[T, B]``."""
    return (jnp.cumsum(data["reward"][::-1], 0)[::-1] + data["later"]) / SCALE


def attention(layer, x, mask):
    """Of all tokens ``x[N, width]``."""
    seen = normed(layer["first"], x)
    query, key, value = (by_head(seen @ layer[name]) for name in "qkv")
    scores = jnp.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    share = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))
    return x + c.linear(layer["out"], jnp.einsum("hqk,khd->qhd", share, value).reshape(x.shape))


def plain(length, batch):
    mask = np.tril(np.ones((KINDS * length, KINDS * length), bool))

    def actions(p, to_go, obs, action, start):
        """Of one sequence."""
        told = c.linear(p["to_go"], to_go[:, None]), c.linear(p["obs"], obs), c.linear(p["action"], action)
        tokens = jnp.stack(told, 1) + p["time"][start + jnp.arange(length)][:, None]
        x = normed(p["begin"], tokens.reshape(KINDS * length, -1))
        for layer in p["layers"]:
            x = widened(layer, attention(layer, x, mask))
        x = normed(p["end"], x.reshape(length, KINDS, -1)[:, 1])
        return jnp.tanh(c.linear(p["head"], x))

    def run(p, data):
        def loss(p):
            of_all = jax.vmap(actions, (None, 1, 1, 1, 0), 1)
            made = of_all(p, to_go_of(data), data["obs"], data["action"], data["start"])
            return ((made - data["action"]) ** 2).mean()

        return jax.value_and_grad(loss)(p)

    return run
