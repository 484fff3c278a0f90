"""A gated transformer (GTrXL, Parisotto et al. 2020) as an actor and critic, learnt from stored sequences by V-trace: layers
attend to the last timesteps of the episode with relative positions (Dai et al. 2019), and gates as those of a GRU stand in for
residual sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, HEADS, MEMORY, LAYERS, GAMMA = 12, 6, 4, 16, 2, 0.99
GATES = ("wr", "ur", "wz", "uz", "wg", "ug")
relu = jax.nn.relu


def params_of(key, width):
    k = jax.random.split(key, 3 + LAYERS)
    square = lambda key: jax.random.normal(key, (width, width)) / np.float32(np.sqrt(width))  # noqa: E731

    def gate(key):
        made = {name: square(k) for k, name in zip(jax.random.split(key, len(GATES)), GATES, strict=True)}
        return made | {"bias": jnp.full(width, 1.0)}

    def layer(key):
        k, each = jax.random.split(key, 11), (HEADS, width // HEADS)
        norm = lambda: {"scale": jnp.ones(width), "bias": jnp.zeros(width)}  # noqa: E731
        return {
            "norm": norm(), "then": norm(), "q": square(k[0]), "k": square(k[1]), "v": square(k[2]), "out": square(k[3]),
            "place": square(k[4]), "of_content": 0.1 * jax.random.normal(k[5], each),
            "of_place": 0.1 * jax.random.normal(k[6], each), "up": c.dense(k[7], width, 2 * width),
            "down": c.dense(k[8], 2 * width, width), "gate": gate(k[9]), "then_gate": gate(k[10]),
        }  # fmt: skip

    made = {"in": c.dense(k[0], OBS, width), "pi": c.dense(k[1], width, ACTIONS), "v": c.dense(k[2], width, 1)}
    return made | {"layers": [layer(key) for key in k[3:]]}


def sines(width):
    """Of ages ``MEMORY - 1, ..., 0``: ``[MEMORY, width]``."""
    age = np.arange(MEMORY - 1, -1, -1, dtype=np.float32)[:, None]
    angle = age * 100.0 ** (-np.arange(width // 2, dtype=np.float32) / np.float32(width // 2))
    return jnp.asarray(np.concatenate([np.sin(angle), np.cos(angle)], -1, dtype=np.float32))


def normed(p, x):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def gated(p, x, y):
    """``x`` is kept, or ``y`` taken."""
    reset = jax.nn.sigmoid(y @ p["wr"] + x @ p["ur"])
    update = jax.nn.sigmoid(y @ p["wz"] + x @ p["uz"] - p["bias"])
    return (1.0 - update) * x + update * jnp.tanh(y @ p["wg"] + (reset * x) @ p["ug"])


def perceptron(layer, x):
    return relu(c.linear(layer["down"], relu(c.linear(layer["up"], normed(layer["then"], x)))))


def attended(layer, x, begin):
    y, width = normed(layer["norm"], x), x.shape[-1]
    query, key, value = ((y @ layer[name]).reshape(HEADS, -1) for name in "qkv")
    memory = rlfx.series((key, value, begin)).window(1 - MEMORY, 1, fill=(0.0, 0.0, -1))
    keys, values, begins = memory
    places = (sines(width) @ layer["place"]).reshape(MEMORY, HEADS, -1)
    scores = jnp.einsum("mhw,hw->hm", keys, query + layer["of_content"])
    scores = (scores + jnp.einsum("mhw,hw->hm", places, query + layer["of_place"])) / (width / HEADS) ** 0.5
    weights = jax.nn.softmax(jnp.where(begins == begin, scores, -jnp.inf))  # what was before the episode is not seen
    return relu(jnp.einsum("hm,mhw->hw", weights, values).ravel() @ layer["out"])


def program(params, begin, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    begin = jnp.where(x["first"], t.now, begin)
    h = c.linear(p["in"], x["obs"])
    for layer in p["layers"]:
        h = gated(layer["gate"], h, attended(layer, h, begin))
        h = gated(layer["then_gate"], h, perceptron(layer, h))
    logits, value = c.linear(p["pi"], h), c.linear(p["v"], h)[0]

    log_prob = jax.nn.log_softmax(logits)[x["action"]]
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    following = rlfx.series(value, end=0.0)[t + 1]
    target, advantage = stop_gradient(rlfx.vtrace(step, value, following, log_prob - x["log_prob"], gamma=GAMMA))
    return c.actor_critic_loss(logits, value, log_prob, advantage, target), begin


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, data: jax.value_and_grad(lambda p: loss_fn((p, data), jnp.zeros(batch, jnp.int32))[0])(p)


# -- by hand, as usual


def episodes(data):
    """The number of the episode, of ``first[T, ...]``."""
    return jnp.cumsum(data["first"].astype(jnp.int32), 0)


def all_attended(layer, x, episode):
    """Of one environment: ``x[T, width]``, all pairs of timesteps."""
    y, (length, width) = normed(layer["norm"], x), x.shape
    query, key, value = ((y @ layer[name]).reshape(length, HEADS, -1) for name in "qkv")
    places = (sines(width) @ layer["place"]).reshape(MEMORY, HEADS, -1)
    age = jnp.arange(length)[:, None] - jnp.arange(length)
    by_place = jnp.einsum("mhw,thw->htm", places, query + layer["of_place"])
    where = jnp.broadcast_to(jnp.clip(MEMORY - 1 - age, 0, MEMORY - 1), (HEADS, length, length))
    scores = jnp.einsum("shw,thw->hts", key, query + layer["of_content"]) + jnp.take_along_axis(by_place, where, -1)
    seen = (age >= 0) & (age < MEMORY) & (episode[:, None] == episode)
    weights = jax.nn.softmax(jnp.where(seen, scores / (width / HEADS) ** 0.5, -jnp.inf))
    return relu(jnp.einsum("hts,shw->thw", weights, value).reshape(length, width) @ layer["out"])


def network(p, obs, episode):
    h = c.linear(p["in"], obs)
    for layer in p["layers"]:
        h = gated(layer["gate"], h, all_attended(layer, h, episode))
        h = gated(layer["then_gate"], h, perceptron(layer, h))
    return c.linear(p["pi"], h), c.linear(p["v"], h)[..., 0]


def loss_of(logits, value, data):
    """Of ``[T, B]``, summed."""
    log_prob = c.pick(jax.nn.log_softmax(logits), data["action"])
    target, advantage = stop_gradient(
        c.vtrace(value, jnp.zeros_like(value[0]), log_prob - data["log_prob"], data, GAMMA)
    )
    return c.actor_critic_loss(logits, value, log_prob, advantage, target).sum()


def plain(length, batch):
    def run(p, data):
        def loss(p):
            of_all = jax.vmap(network, (None, 1, 1), 1)
            return loss_of(*of_all(p, data["obs"], episodes(data)), data) / (length * batch)

        return jax.value_and_grad(loss)(p)

    return run
