"""Learners that look back: attention over all that was, over windows (as slices and as arrays of one length), temporal
convolutions by windows, frames that are stacked, a decision transformer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.parts import layer_norm, norm_params, relu

OBS, ACTIONS, GAMMA = 16, 6, 0.99

# -- one layer of attention, several heads, before a policy and a critic; what was before the episode is masked


def attending_params(key, width):
    k = jax.random.split(key, 8)
    one = lambda k: c.dense(k, width, width)["w"]  # noqa: E731
    return {
        "in": c.dense(k[0], OBS, width), "q": one(k[1]), "k": one(k[2]), "v": one(k[3]), "o": c.dense(k[4], width, width),
        "pi": c.mlp_params(k[5], (width, width, ACTIONS)), "value": c.mlp_params(k[6], (width, width, 1)),
    }  # fmt: skip


def heads_of(x, heads):
    return x.reshape(*x.shape[:-1], heads, -1)


def projected(p, x, heads):
    """Without biases: the derivative by that of the keys is 0."""
    return (heads_of(x @ p[name], heads) for name in "qkv")


def scale_of(q):
    return np.float32(1.0 / np.sqrt(q.shape[-1]))


def judged(p, x, read, action, target):
    x = x + c.linear(p["o"], read)
    log_p, value = jax.nn.log_softmax(c.mlp(p["pi"], x, relu)), c.mlp(p["value"], x, relu)[..., 0]
    chosen = log_p[action] if x.ndim == 1 else c.pick(log_p, action)
    return 0.5 * (value - target) ** 2 - chosen * stop_gradient(target - value)


def masked(q, keys, values, seen):
    """Of one timestep: ``q[heads, width]``, ``keys[n, heads, width]``; ``seen[n]``."""
    scores = jnp.einsum("hw,nhw->hn", q, keys) * scale_of(q)
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
    return jnp.einsum("hn,nhw->hw", weights, values).reshape(-1)


def causal_program(heads, read):
    def program(params, carry, t):
        (p, _), data = params
        x = rlfx.inputs(data)[t]
        h = jnp.tanh(c.linear(p["in"], x["obs"]))
        q, k, v = projected(p, h, heads)
        keys, values, episodes = read(rlfx.series((k, v, x["episode"])), t)
        target = rlfx.discounted_sum(rlfx.series(x["reward"])[t:], GAMMA)
        return judged(p, h, masked(q, keys, values, episodes == x["episode"]), x["action"], target), carry

    return program


def causal_plain(heads, window=None):
    """``[T, T]`` scores of each environment."""

    def loss(p, _, data):
        length = len(data["obs"])
        h = jnp.tanh(c.linear(p["in"], data["obs"]))
        q, k, v = projected(p, h, heads)
        scores = jnp.einsum("tbhw,sbhw->bhts", q, k) * scale_of(q)
        ago = jnp.arange(length)[:, None] - jnp.arange(length)
        seen = (ago >= 0) if window is None else (ago >= 0) & (ago < window)
        same = data["episode"].T[:, :, None] == data["episode"].T[:, None, :]
        weights = jax.nn.softmax(jnp.where((seen & same)[:, None], scores, -1e9), axis=-1)
        read = jnp.einsum("bhts,sbhw->tbhw", weights, v).reshape(h.shape)
        target = c.discounted(data["reward"], jnp.full_like(data["reward"], GAMMA))
        return judged(p, h, read, data["action"], target).mean()

    return parts.usual(loss)


def attending_data(length, batch):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS, ends=0.03)
    ended = jnp.concatenate([jnp.zeros_like(data["done"][:1]), data["done"][:-1]])
    data["episode"] = jnp.cumsum(ended, axis=0)
    return {name: data[name] for name in ("obs", "action", "reward", "episode")}


def attending(length, batch, width, heads, window=None, fixed=False):
    if window is None:
        read = lambda x, t: x[: t + 1]  # noqa: E731
    elif fixed:
        read = lambda x, t: x.window(1 - window, 1, fill=(0.0, 0.0, -1))  # noqa: E731
    else:
        read = lambda x, t: x[t - window + 1 : t + 1]  # noqa: E731
    p = attending_params(jax.random.key(0), width)
    program, plain = causal_program(heads, read), causal_plain(heads, window)
    return parts.learner(program, plain, length, batch, p, (), attending_data(length, batch))


# -- temporal convolutions: kernels of three timesteps, 1, 2 and 4 apart, with residuals


def tcn_params(key, width):
    k = jax.random.split(key, 5)
    scale = np.float32(0.5 / np.sqrt(width))
    layer = lambda k: {"w": scale * jax.random.normal(k, (3, width, width)), "b": jnp.zeros(width)}  # noqa: E731
    return {"in": c.dense(k[0], OBS, width), "layers": [layer(x) for x in k[1:4]], "out": c.dense(k[4], width, ACTIONS)}


def tcn_program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data)[t]
    h = c.linear(p["in"], x["obs"])
    for i, layer in enumerate(p["layers"]):
        past = rlfx.series(h).window(-2 * 2**i, 1)[:: 2**i]
        h = h + relu(jnp.einsum("kw,kwo->o", past, layer["w"]) + layer["b"])
    return -jax.nn.log_softmax(c.linear(p["out"], h))[x["action"]], carry


def tcn_plain(p, _, data):
    h = jnp.moveaxis(c.linear(p["in"], data["obs"]), 0, 1)
    for i, layer in enumerate(p["layers"]):
        padded = jnp.pad(h, ((0, 0), (2 * 2**i, 0), (0, 0)))
        made = jax.lax.conv_general_dilated(
            padded, layer["w"], (1,), "VALID", rhs_dilation=(2**i,), dimension_numbers=("NWC", "WIO", "NWC")
        )
        h = h + relu(made + layer["b"])
    return -c.pick(jax.nn.log_softmax(c.linear(p["out"], h)), data["action"].T).mean()


def tcn(length, batch, width):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    data = {name: data[name] for name in ("obs", "action")}
    p = tcn_params(jax.random.key(0), width)
    return parts.learner(tcn_program, parts.usual(tcn_plain), length, batch, p, (), data)


# -- four frames as one observation (what was before the first is zero), and Q-learning of one step


def frames_program(params, carry, t):
    (p, target), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    stacked = rlfx.series(x["obs"]).window(-3, 1).reshape(-1)
    q = c.mlp(p, stacked, relu)
    latest = jnp.concatenate([stacked.reshape(4, OBS)[1:], x["last"][None]]).reshape(-1)
    best = lambda obs: jnp.max(c.mlp(target, obs, relu))  # noqa: E731
    following = rlfx.series(best(stacked), end=best(latest))[t + 1]
    aim = stop_gradient(x["reward"] + GAMMA * (1.0 - x["done"]) * following)
    return 0.5 * (q[x["action"]] - aim) ** 2, carry


def frames_plain(p, target, data):
    obs = parts.with_last(data)
    padded = jnp.pad(obs, ((3, 0), (0, 0), (0, 0)))
    stacked = jnp.concatenate([padded[i : i + len(obs)] for i in range(4)], -1)
    q = c.mlp(p, stacked[:-1], relu)
    following = jnp.max(c.mlp(target, stacked[1:], relu), -1)
    aim = stop_gradient(data["reward"] + parts.going(data, GAMMA) * following)
    return (0.5 * (c.pick(q, data["action"]) - aim) ** 2).mean()


def frames(length, batch, hidden):
    sizes = 4 * OBS, hidden, hidden, ACTIONS
    p, target = (c.mlp_params(jax.random.key(i), sizes) for i in range(2))
    data = parts.stored(2, length, batch, (OBS,), ACTIONS)
    return parts.learner(frames_program, parts.usual(frames_plain), length, batch, p, target, data)


# -- a decision transformer: a token of each timestep (what it is to gain, what is seen, what was done before)


def transformer_params(key, width, layers, length):
    k = iter(jax.random.split(key, 6 * layers + 3))
    one = lambda rows, columns: c.dense(next(k), rows, columns)  # noqa: E731

    def layer():
        return {
            **{name: one(width, width)["w"] for name in "qkv"}, "o": one(width, width),
            "up": one(width, 4 * width), "down": one(4 * width, width), "first": norm_params(width), "second": norm_params(width),
        }  # fmt: skip

    place = 0.1 * jax.random.normal(next(k), (length, width))
    token = one(OBS + ACTIONS + 1, width)
    return {"token": token, "place": place, "layers": [layer() for _ in range(layers)], "out": one(width, ACTIONS)}


def feed(layer, x):
    return x + c.linear(layer["down"], jax.nn.gelu(c.linear(layer["up"], layer_norm(layer["second"], x))))


def transformer_program(heads):
    def program(params, carry, t):
        (p, _), data = params
        data = rlfx.inputs(data)
        x = data[t]
        before = rlfx.series(jax.nn.one_hot(x["action"], ACTIONS), start=jnp.zeros(ACTIONS))[t - 1]
        to_go = rlfx.series(x["reward"])[t:].sum()
        h = c.linear(p["token"], jnp.concatenate([x["obs"], before, to_go[None]])) + p["place"][t.now]
        for layer in p["layers"]:
            q, k, v = projected(layer, layer_norm(layer["first"], h), heads)
            keys, values = rlfx.series((k, v))[: t + 1]
            weights = jax.nn.softmax(jnp.einsum("hw,nhw->hn", q, keys) * scale_of(q), axis=-1)
            h = feed(layer, h + c.linear(layer["o"], jnp.einsum("hn,nhw->hw", weights, values).reshape(-1)))
        return -jax.nn.log_softmax(c.linear(p["out"], h))[x["action"]], carry

    return program


def transformer_plain(heads):
    def loss(p, _, data):
        length = len(data["obs"])
        done = jax.nn.one_hot(data["action"], ACTIONS)
        before = jnp.concatenate([jnp.zeros_like(done[:1]), done[:-1]])
        to_go = jnp.cumsum(data["reward"][::-1], 0)[::-1]
        h = c.linear(p["token"], jnp.concatenate([data["obs"], before, to_go[..., None]], -1)) + p["place"][:, None]
        h = jnp.moveaxis(h, 0, 1)
        mask = jnp.tril(jnp.ones((length, length), bool))
        for layer in p["layers"]:
            q, k, v = projected(layer, layer_norm(layer["first"], h), heads)
            scores = jnp.einsum("bthw,bshw->bhts", q, k) * scale_of(q)
            weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
            h = feed(layer, h + c.linear(layer["o"], jnp.einsum("bhts,bshw->bthw", weights, v).reshape(h.shape)))
        return -c.pick(jax.nn.log_softmax(c.linear(p["out"], h)), data["action"].T).mean()

    return parts.usual(loss)


def transformer(length, batch, width, layers, heads):
    data = parts.stored(1, length, batch, (OBS,), ACTIONS)
    data = {name: data[name] for name in ("obs", "action", "reward")} | {"reward": 0.2 * data["reward"]}
    p = transformer_params(jax.random.key(0), width, layers, length)
    return parts.learner(transformer_program(heads), transformer_plain(heads), length, batch, p, (), data)
