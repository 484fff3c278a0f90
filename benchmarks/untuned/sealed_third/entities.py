"""One-epoch PPO among entities: attention among those that are alive at a timestep; an action's kind, and then whom it is for,
by a pointer to one of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

ENTITIES, FEATURES, KINDS, HEADS, GAMMA, LAMBDA, LIMIT = 10, 6, 4, 2, 0.98, 0.95, 40
NEVER = np.float32(-1e9)


# -- a world: places, speeds, health and sides of entities; the first is the agent


def reset(key):
    place, speed, health = (
        jax.random.normal(k, (ENTITIES, n)) for k, n in zip(jax.random.split(key, 3), (2, 2, 1), strict=True)
    )
    side = jnp.where(jnp.arange(ENTITIES) < ENTITIES // 2, 1.0, -1.0)[:, None]
    return {"x": jnp.concatenate([place, 0.1 * speed, 0.5 + 0.5 * jnp.abs(health), side], -1), "count": jnp.int32(0)}


def step_of(key, state, kind, target):
    """Go to the target, or away, hit it, or help it."""
    x = state["x"]
    place, speed, health, side = x[:, :2], x[:, 2:4], x[:, 4], x[:, 5]
    aimed = jax.nn.one_hot(target, ENTITIES)
    apart = aimed @ place - place[0]
    near = jnp.exp(-0.5 * (apart**2).sum())
    push = 0.1 * jnp.where(kind == 0, apart, jnp.where(kind == 1, -apart, 0.0))
    pulled = 0.9 * speed - 0.02 * (place - place[0]) + jnp.where(jnp.arange(ENTITIES)[:, None] == 0, push, 0.0)
    change = near * jnp.where(kind == 2, -0.5, jnp.where(kind == 3, 0.2, 0.0))
    alive = health > 0.0
    hurt = jnp.where(alive, health + change * aimed, 0.0)
    count = state["count"] + 1
    done = ~((hurt > 0.0) & (side < 0.0)).any() | (count >= LIMIT)
    new = jnp.concatenate([place + 0.2 * pulled, pulled, hurt[:, None], side[:, None]], -1)
    start = reset(key)
    after = {"x": jnp.where(done, start["x"], new), "count": jnp.where(done, 0, count)}
    return stop_gradient(after), c.Step(-(change * aimed * side).sum() - 0.01, done, jnp.zeros_like(done))


# -- networks


def params_of(hidden, layers):
    keys = iter(jax.random.split(jax.random.key(0), 7 + 6 * layers))

    def block():
        made = {name: c.dense(next(keys), hidden, hidden)["w"] for name in "qkv"}
        made |= {"first": c.dense(next(keys), hidden, 2 * hidden), "second": c.dense(next(keys), 2 * hidden, hidden)}
        norms = {name: {"scale": jnp.ones(hidden), "bias": jnp.zeros(hidden)} for name in ("norm", "norm2")}
        return made | norms | {"out": c.dense(next(keys), hidden, hidden)}

    heads = {
        "in": (FEATURES, hidden), "pool": (2 * hidden, hidden), "kind": (hidden, KINDS), "value": (hidden, 1),
        "query": (hidden, hidden),
    }  # fmt: skip
    made = {name: c.dense(next(keys), *size) for name, size in heads.items()} | {
        "blocks": [block() for _ in range(layers)]
    }
    key, embedded = (jax.random.normal(next(keys), (n, hidden)) for n in (hidden, KINDS))
    return made | {"key": key / np.float32(np.sqrt(hidden)), "embedded": embedded}


def normed(p, x, axis=-1):
    x = x - x.mean(axis, keepdims=True)
    x = x * jax.lax.rsqrt((x**2).mean(axis, keepdims=True) + 1e-5)
    return x * p["scale"] + p["bias"] if axis == -1 else x * p["scale"][:, None] + p["bias"][:, None]


def attention(p, h, alive):
    """Of entities ``h[..., ENTITIES, H]`` with those that are alive."""
    in_heads = lambda x: jnp.swapaxes(x.reshape(*x.shape[:-1], HEADS, -1), -2, -3)  # noqa: E731
    q, k, v = (in_heads(h @ p[name]) for name in "qkv")
    scores = q @ jnp.swapaxes(k, -1, -2) / np.float32(np.sqrt(q.shape[-1]))
    mixed = jax.nn.softmax(jnp.where(alive[..., None, None, :], scores, NEVER)) @ v
    return c.linear(p["out"], jnp.swapaxes(mixed, -2, -3).reshape(h.shape))


def net(p, x, attend=attention):
    """The logits of kinds, the value, and what a pointer needs."""
    alive = x[..., 4] > 0.0
    h = c.linear(p["in"], x)
    for b in p["blocks"]:
        h += attend(b, normed(b["norm"], h), alive)
        h += c.linear(b["second"], jax.nn.relu(c.linear(b["first"], normed(b["norm2"], h))))
    living = alive.astype(jnp.float32)[..., None]
    mean = (living * h).sum(-2) / living.sum(-2)
    z = jax.nn.relu(c.linear(p["pool"], jnp.concatenate([h[..., 0, :], mean], -1)))
    pointer = h @ p["key"], c.linear(p["query"], z), alive
    return c.linear(p["kind"], z), c.linear(p["value"], z)[..., 0], pointer


def pointed(p, pointer, kind):
    """The logits of targets, never oneself nor the dead."""
    keys, query, alive = pointer
    scores = (keys @ (query + p["embedded"][kind])[..., None])[..., 0] / np.float32(np.sqrt(query.shape[-1]))
    return jnp.where(alive & (jnp.arange(ENTITIES) > 0), scores, NEVER)


def program(p, state, t):
    kinds, v, pointer = net(p, state["x"])
    kind = jax.random.categorical(t.key_for("kind"), stop_gradient(kinds))
    targets = pointed(p, pointer, kind)
    target = jax.random.categorical(t.key_for("target"), stop_gradient(targets))
    state, step = step_of(t.key_for("env"), state, kind, target)
    value = rlfx.series(v)
    advantage = stop_gradient(rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=LAMBDA))
    normalised = (advantage - rlfx.mean(advantage)) / (rlfx.std(advantage) + 1e-8)
    log_prob = jax.nn.log_softmax(kinds)[kind] + jax.nn.log_softmax(targets)[target]
    ratio = jnp.exp(log_prob - stop_gradient(log_prob))
    gain = jnp.minimum(ratio * normalised, jnp.clip(ratio, 0.8, 1.2) * normalised)
    return c.actor_critic_loss(kinds, v, 0.0, 0.0, advantage + stop_gradient(v)) - gain, state
