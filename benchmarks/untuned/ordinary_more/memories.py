"""Learners that remember: fast weights by the delta rule, and a bonus for what is unlike all that was seen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.attending import ACTIONS, GAMMA, OBS, heads_of
from benchmarks.untuned.ordinary.parts import layer_norm, norm_params, relu, unit
from benchmarks.untuned.ordinary_more.beliefs import begins

# -- fast weights: a matrix for each head, that forgets, and is corrected by the delta rule (Schlag et al. 2021)


def fast_params(key, width, layers, heads):
    k = iter(jax.random.split(key, 5 * layers + 3))

    def layer():
        return {
            **{name: c.dense(next(k), width, width) for name in ("q", "k", "v", "out")}, "rate": c.dense(next(k), width, heads),
            "norm": norm_params(width),
        }  # fmt: skip

    ends = {"in": c.dense(next(k), OBS, width), "pi": c.dense(next(k), width, ACTIONS), "v": c.dense(next(k), width, 1)}
    return ends | {"layers": [layer() for _ in range(layers)]}


def written(layer, h, heads):
    """Queries, keys of length one, values, and rates of learning."""
    x = layer_norm(layer["norm"], h)
    q, k, v = (heads_of(c.linear(layer[name], x), heads) for name in "qkv")
    return unit(q), unit(k), v, jax.nn.sigmoid(c.linear(layer["rate"], x))


def corrected(memory, k, v, rate):
    """``memory[..., heads, keys, values]``."""
    error = v - jnp.einsum("...hkv,...hk->...hv", memory, k)
    return memory + rate[..., None, None] * k[..., None] * error[..., None, :]


def fast_losses(p, h, action, target):
    log_p, value = jax.nn.log_softmax(c.linear(p["pi"], h)), c.linear(p["v"], h)[..., 0]
    return 0.5 * (value - target) ** 2 - c.pick(log_p, action) * stop_gradient(target - value)


def fast_program(heads):
    def program(params, carry, t):
        (p, _), data = params
        x = rlfx.inputs(data)[t]
        h, after = c.linear(p["in"], x["obs"]), []
        for layer, memory in zip(p["layers"], carry, strict=True):
            q, k, v, rate = written(layer, h, heads)
            memory = corrected(jnp.where(x["first"], 0.0, memory), k, v, rate)
            h = h + c.linear(layer["out"], jnp.einsum("hkv,hk->hv", memory, q).reshape(-1))
            after.append(memory)
        target = rlfx.discounted_sum(rlfx.series(x["reward"])[t:], GAMMA)
        return fast_losses(p, h, x["action"], target), after

    return program


def fast_plain(heads):
    def loss(p, _, data):
        h = c.linear(p["in"], data["obs"])
        for layer in p["layers"]:

            def body(memory, x):
                q, k, v, rate, first = x
                memory = corrected(jnp.where(first[:, None, None, None], 0.0, memory), k, v, rate)
                return memory, jnp.einsum("bhkv,bhk->bhv", memory, q)

            x = *written(layer, h, heads), data["first"]
            wide = x[0].shape[-1]
            _, read = jax.lax.scan(body, jnp.zeros((h.shape[1], heads, wide, wide)), x)
            h = h + c.linear(layer["out"], read.reshape(h.shape))
        target = c.discounted(data["reward"], jnp.full_like(data["reward"], GAMMA))
        return fast_losses(p, h, data["action"], target).mean()

    return parts.usual(loss)


def fast(length, batch, width, layers, heads):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS, ends=0.02)
    data["first"] = begins(data)
    data = {name: data[name] for name in ("obs", "action", "reward", "first")}
    start = [jnp.zeros((batch, heads, width // heads, width // heads)) for _ in range(layers)]
    p = fast_params(jax.random.key(0), width, layers, heads)
    return parts.learner(fast_program(heads), fast_plain(heads), length, batch, p, (), data, start)


# -- never give up: a bonus for what is far from all that was seen before, of codes that tell what was done

TOLERANCE = 1.0


def novel_params(key, hidden):
    k = jax.random.split(key, 4)
    return {
        "code": c.mlp_params(k[0], (OBS, hidden, 16)), "done": c.mlp_params(k[1], (32, hidden, ACTIONS)),
        "pi": c.mlp_params(k[2], (OBS, hidden, hidden, ACTIONS)), "v": c.mlp_params(k[3], (OBS, hidden, hidden, 1)),
    }  # fmt: skip


def novel_losses(p, x, value, advantage, codes, following):
    log_done = jax.nn.log_softmax(c.mlp(p["done"], jnp.concatenate([codes, following], -1), relu))
    log_p = jax.nn.log_softmax(c.mlp(p["pi"], x["obs"], relu))
    target = stop_gradient(value) + advantage
    return 0.5 * (value - target) ** 2 - c.pick(log_p, x["action"]) * advantage - c.pick(log_done, x["action"])


def novel_program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    codes = rlfx.series(c.mlp(p["code"], x["obs"], relu), end=c.mlp(p["code"], x["last"], relu))
    far = ((codes[: t + 1] - codes[t]) ** 2).sum(-1)
    bonus = stop_gradient(jax.lax.rsqrt((TOLERANCE / (far + TOLERANCE)).sum()))
    value = c.mlp(p["v"], x["obs"], relu)[0]
    next_value = rlfx.series(value, end=c.mlp(p["v"], x["last"], relu)[0])[t + 1]
    step = parts.step_of(x | {"reward": x["reward"] + bonus})
    advantage = stop_gradient(rlfx.gae(step, value, next_value, gamma=GAMMA, lam=0.95))
    return novel_losses(p, x, value, advantage, codes[t], codes[t + 1]), carry


def novel_plain(p, _, data):
    obs = parts.with_last(data)
    codes, value = c.mlp(p["code"], obs, relu), c.mlp(p["v"], obs, relu)[..., 0]
    past = stop_gradient(codes[:-1])
    far = ((past[:, None] - past[None]) ** 2).sum(-1)
    near = jnp.where(jnp.tril(jnp.ones(far.shape[:2], bool))[..., None], TOLERANCE / (far + TOLERANCE), 0.0)
    reward = data["reward"] + jax.lax.rsqrt(near.sum(1))
    advantage = stop_gradient(c.gae(value[:-1], value[-1], reward, data["done"], GAMMA, 0.95))
    return novel_losses(p, data, value[:-1], advantage, codes[:-1], codes[1:]).mean()


def novel(length, batch, hidden):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    p = novel_params(jax.random.key(0), hidden)
    return parts.learner(novel_program, parts.usual(novel_plain), length, batch, p, (), data)
