"""An actor-critic with an external memory (neural Turing machine, Graves et al. 2014; MERLIN, Wayne et al. 2018): a GRU reads
slots by likeness to a key, and erases and adds to those like another; it learns from what was recorded, and begins anew."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.gru import gates

OBS, ACTIONS, SLOTS, WIDTH, GAMMA, LAMBDA = 24, 5, 24, 16, 0.99, 0.95


def params_of(key, hidden):
    """``heads``: keys to read and to write, what is erased, what is added, and how sharp both keys are."""
    k = jax.random.split(key, 6)
    sizes = {
        "x": (OBS + WIDTH, 3 * hidden), "h": (hidden, 3 * hidden), "heads": (hidden, 4 * WIDTH + 2),
        "pi": (hidden + WIDTH, ACTIONS), "v": (hidden + WIDTH, 1),
    }  # fmt: skip
    nets = {name: c.dense(key, *size) for key, (name, size) in zip(k, sizes.items(), strict=False)}
    return nets | {"slots": 0.3 * jax.random.normal(k[5], (SLOTS, WIDTH))}


def begins(p, batch, hidden):
    """Hidden state, what was read, memory."""
    return jnp.zeros((batch, hidden)), jnp.zeros((batch, WIDTH)), jnp.broadcast_to(p["slots"], (batch, SLOTS, WIDTH))


def like(memory, key, sharp):
    """Weights of slots: softmax of cosines."""
    norms = jnp.sqrt((memory**2).sum(-1) + 1e-4) * jnp.sqrt((key**2).sum() + 1e-4)
    return jax.nn.softmax(jax.nn.softplus(sharp) * (memory @ key) / norms)


def cell(p, carry, obs):
    """One timestep of one environment."""
    h, read, memory = carry
    h = gates(c.linear(p["x"], jnp.concatenate([obs, read])), c.linear(p["h"], h), h)
    reads, writes, erase, add, sharp = jnp.split(c.linear(p["heads"], h), [WIDTH, 2 * WIDTH, 3 * WIDTH, 4 * WIDTH])
    written = like(memory, writes, sharp[0])[:, None]
    memory = memory * (1.0 - written * jax.nn.sigmoid(erase)) + written * jnp.tanh(add)
    return h, like(memory, reads, sharp[1]) @ memory, memory


def anew(first, carry, start):
    """Where an episode begins there is nothing yet."""
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), start, carry)


def outputs(p, h, read):
    both = jnp.concatenate([h, read], -1)
    return c.linear(p["pi"], both), c.linear(p["v"], both)[..., 0]


def program(params, carry, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    h, read, memory = carry
    start = jnp.zeros_like(h), jnp.zeros_like(read), p["slots"]
    h, read, memory = cell(p, anew(x["first"], (h, read, memory), start), x["obs"])
    logits, v = outputs(p, h, read)
    value = rlfx.series(stop_gradient(v), end=0.0)
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    advantage = rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=LAMBDA)
    log_prob = jax.nn.log_softmax(logits)[x["action"]]
    loss = c.actor_critic_loss(logits, v, log_prob, advantage, advantage + stop_gradient(v))
    return loss, (h, read, memory)


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, carry, data: jax.value_and_grad(lambda p: loss_fn((p, data), carry)[0])(p)


# -- by hand, as usual


def learnt(logits, v, data):
    """Summed over ``[T, B]``."""
    fixed = stop_gradient(v)
    advantage = c.gae(fixed, jnp.zeros_like(v[0]), data["reward"], data["done"], GAMMA, LAMBDA)
    log_prob = c.pick(jax.nn.log_softmax(logits), data["action"])
    return c.actor_critic_loss(logits, v, log_prob, advantage, advantage + fixed).sum()


def plain(length, batch):
    def run(p, carry, data):
        def loss(p):
            def one(carry, x):
                start = jnp.zeros_like(carry[0]), jnp.zeros_like(carry[1]), p["slots"]
                carry = cell(p, anew(x["first"], carry, start), x["obs"])
                return carry, outputs(p, *carry[:2])

            logits, v = jax.lax.scan(jax.vmap(one), carry, data)[1]
            return learnt(logits, v, data) / (length * batch)

        return jax.value_and_grad(loss)(p)

    return run
