"""Fast weights: a memory matrix written by the delta rule at every timestep, reset where an episode ends; A2C on stored data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS = 12, 5


def params_of(key, width, memory):
    k = jax.random.split(key, 7)
    sizes = {
        "embed": (OBS, width), "key": (width, memory), "value": (width, memory), "query": (width, memory), "rate": (width, 1),
        "pi": (width + memory, ACTIONS), "v": (width + memory, 1),
    }  # fmt: skip
    return {name: c.dense(key, *size) for key, (name, size) in zip(k, sizes.items(), strict=True)}


def unit(x):
    x = jax.nn.elu(x) + 1.0
    return x / x.sum(-1, keepdims=True)


def asked(p, obs):
    """The embedding, and what is written and read with it."""
    x = jnp.tanh(c.linear(p["embed"], obs))
    rate = jax.nn.sigmoid(c.linear(p["rate"], x))
    return x, (unit(c.linear(p["key"], x)), c.linear(p["value"], x), unit(c.linear(p["query"], x)), rate)


def asked_at_once(p, obs):
    """The four products as one."""
    x, names = jnp.tanh(c.linear(p["embed"], obs)), ("key", "value", "query", "rate")
    ends = np.cumsum([p[name]["b"].shape[0] for name in names])[:-1]
    both = jax.tree.map(lambda *w: jnp.concatenate(w, -1), *(p[name] for name in names))
    key, value, query, rate = jnp.split(c.linear(both, x), ends, -1)
    return x, (unit(key), value, unit(query), jax.nn.sigmoid(rate))


def written(memory, key, value, query, rate):
    """Of one environment: the memory after the write, and what is read of it."""
    memory = memory + rate * jnp.outer(key, value - key @ memory)
    return memory, query @ memory


def written_rows(memory, key, value, query, rate):
    """The same of rows of environments, with sums in place of small products."""
    found = (key[..., None] * memory).sum(-2)
    memory = memory + (rate * key)[..., None] * (value - found)[..., None, :]
    return memory, (query[..., None] * memory).sum(-2)


def point_loss(p, x, read, data):
    y = jnp.concatenate([x, read], -1)
    logits, v = c.linear(p["pi"], y), c.linear(p["v"], y)[..., 0]
    log_prob = c.pick(jax.nn.log_softmax(logits), data["action"])
    return c.actor_critic_loss(logits, v, log_prob, data["advantage"], data["target"])


def program(params, memory, t):
    p, data = params
    now = rlfx.inputs(data)[t]
    x, asks = asked(p, now["obs"])
    memory, read = written(memory, *asks)
    return point_loss(p, x, read, now), jnp.where(now["done"], 0.0, memory)


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, data, memory: jax.value_and_grad(lambda p: loss_fn((p, data), memory)[0])(p)


def by_hand(ask=asked, write=jax.vmap(written), inside=False, unroll=1, chunk=None):
    """``inside``: all of a timestep in the loop; ``chunk``: the gradient runs so many timesteps again."""

    def step(memory, asks, done):
        memory, read = write(memory, *asks)
        return jnp.where(done[:, None, None], 0.0, memory), read

    def run(p, data, memory):
        def loop(body):
            some = lambda memory, xs: jax.lax.scan(body, memory, xs, unroll=unroll)  # noqa: E731
            if chunk is None:
                return some
            part = jax.checkpoint(some, prevent_cse=False)
            flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
            return lambda memory, xs: (None, jax.tree.map(flat, jax.lax.scan(part, memory, c.in_chunks(xs, chunk))[1]))

        def loss(p):
            if inside:

                def body(memory, now):
                    x, asks = ask(p, now["obs"])
                    memory, read = step(memory, asks, now["done"])
                    return memory, point_loss(p, x, read, now)

                return loop(body)(memory, data)[1].mean()
            x, asks = ask(p, data["obs"])
            reads = loop(lambda memory, now: step(memory, *now))(memory, (asks, data["done"]))[1]
            return point_loss(p, x, reads, data).mean()

        return jax.value_and_grad(loss)(p)

    return run


def workload(length, batch, width, memory, chunk=16):
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jax.random.randint(k[1], size, 0, ACTIONS),
        "advantage": jax.random.normal(k[2], size), "target": jax.random.normal(k[3], size),
        "done": jax.random.uniform(k[4], size) < 0.02,
    }  # fmt: skip
    forms = {
        "rlfx": by_rlfx(length, batch), "plain": by_hand(inside=True), "memory alone in the loop": by_hand(),
        "joined": by_hand(asked_at_once), "joined, sums": by_hand(asked_at_once, written_rows),
        "joined, sums, unrolled by 4": by_hand(asked_at_once, written_rows, unroll=4),
        f"joined, again by {chunk}": by_hand(asked_at_once, chunk=chunk),
        f"joined, sums, again by {chunk}": by_hand(asked_at_once, written_rows, chunk=chunk),
        f"one loop, again by {chunk}": by_hand(inside=True, chunk=chunk),
    }  # fmt: skip
    return Workload(forms, (params_of(k[5], width, memory), data, jnp.zeros((batch, memory, memory))))
