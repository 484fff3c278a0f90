"""IMPALA with an LSTM (Espeholt et al. 2018): stored rollouts of another policy, whose LSTM sees what was done and gained before,
and forgets where an episode ends; V-trace, with the value of the observation behind the rollout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, GAMMA, ENTROPY = 24, 6, 0.99, 0.01
#: What the LSTM sees, at each timestep and behind the last one.
SEEN = "obs", "acted", "gained", "first"


def params_of(key, hidden):
    k = jax.random.split(key, 5)
    return {
        "torso": c.dense(k[0], OBS, hidden), "x": c.dense(k[1], hidden + ACTIONS + 1, 4 * hidden),
        "h": c.dense(k[2], hidden, 4 * hidden)["w"], "pi": c.dense(k[3], hidden, ACTIONS), "v": c.dense(k[4], hidden, 1),
    }  # fmt: skip


def core_of(p, x):
    """What goes into the LSTM, ``[..., hidden + ACTIONS + 1]``."""
    torso = jax.nn.relu(c.linear(p["torso"], x["obs"]))
    gained = jnp.clip(x["gained"], -1.0, 1.0)[..., None]
    return jnp.concatenate([torso, jax.nn.one_hot(x["acted"], ACTIONS), gained], -1)


def gates(z, cell):
    i, f, g, o = jnp.split(z, 4, -1)
    cell = jax.nn.sigmoid(f + 1.0) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(cell), cell


def remembered(p, memory, x):
    """What the LSTM of one environment knows after it has seen ``x``."""
    h, cell = jax.tree.map(lambda m: jnp.where(x["first"], 0.0, m), memory)
    return gates(c.linear(p["x"], core_of(p, x)) + h @ p["h"], cell)


def program(params, memory, t):
    p, data, last = params
    x, end = rlfx.inputs(data)[t], rlfx.inputs(last, axes="b")[t]
    memory = remembered(p, memory, x)
    behind = c.linear(p["v"], remembered(p, memory, end)[0])[0]
    logits, value = c.linear(p["pi"], memory[0]), rlfx.series(c.linear(p["v"], memory[0])[0], end=stop_gradient(behind))

    log_prob = jax.nn.log_softmax(logits)[x["action"]]
    step = c.Step(jnp.clip(x["reward"], -1.0, 1.0), x["done"], jnp.zeros_like(x["done"]))
    found = rlfx.vtrace(step, value[t], value[t + 1], log_prob - x["log_mu"], gamma=GAMMA)
    target, advantage = stop_gradient(found)
    return c.actor_critic_loss(logits, value[t], log_prob, advantage, target, ENTROPY), memory


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, memory, data, last: jax.value_and_grad(lambda p: loss_fn((p, data, last), memory)[0])(p)


# -- by hand, as usual


def with_last(data, last):
    """What is seen, ``[T + 1, B]``."""
    return {name: jnp.concatenate([data[name], last[name][None]]) for name in SEEN}


def plain(length, batch):
    def run(p, memory, data, last):
        seen = with_last(data, last)

        def loss(p):
            def step(memory, x):
                core, first = x
                h, cell = jax.tree.map(lambda m: jnp.where(first[:, None], 0.0, m), memory)
                memory = gates(c.linear(p["x"], core) + h @ p["h"], cell)
                return memory, memory[0]

            _, h = jax.lax.scan(step, memory, (core_of(p, seen), seen["first"]))
            logits, value = c.linear(p["pi"], h[:-1]), c.linear(p["v"], h)[..., 0]
            log_prob = c.pick(jax.nn.log_softmax(logits), data["action"])
            clipped = data | {"reward": jnp.clip(data["reward"], -1.0, 1.0)}
            target, advantage = stop_gradient(c.vtrace(value[:-1], value[-1], log_prob - data["log_mu"], clipped, GAMMA))
            return c.actor_critic_loss(logits, value[:-1], log_prob, advantage, target, ENTROPY).mean()

        return jax.value_and_grad(loss)(p)

    return run
