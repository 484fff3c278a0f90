"""RDPG (Heess et al. 2015): deterministic policy gradients of replayed histories, by LSTMs of the actor, of the critic, and of
their targets, each with a memory of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, GAMMA = 20, 4, 0.99
SEEN = OBS + ACTIONS + 1
NETS = "actor", "critic"


def params_of(key, hidden):
    k = jax.random.split(key, 6)
    lstm = lambda a, b: {"x": c.dense(a, SEEN, 4 * hidden), "h": c.dense(b, hidden, 4 * hidden)}  # noqa: E731
    return {
        "actor": {"lstm": lstm(k[0], k[1]), "head": c.mlp_params(k[2], (hidden, hidden, ACTIONS))},
        "critic": {"lstm": lstm(k[3], k[4]), "head": c.mlp_params(k[5], (hidden + ACTIONS, hidden, 1))},
    }


def lstm(p, memory, x):
    h, cell = memory
    i, f, g, o = jnp.split(c.linear(p["x"], x) + c.linear(p["h"], h), 4, -1)
    cell = jax.nn.sigmoid(f + 1.0) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(cell), cell


def mu(head, h):
    return jnp.tanh(c.mlp(head, h))


def q_of(head, h, action):
    return c.mlp(head, jnp.concatenate([h, action], -1))[..., 0]


def program(params, carry, t):
    (p, old), data = params
    x = rlfx.inputs(data)[t]
    carry = jax.tree.map(lambda m: jnp.where(x["first"], 0.0, m), carry)
    seen = jnp.concatenate([x["obs"], x["acted"], x["gained"][None]])
    now, then = ({n: lstm(nets[n]["lstm"], m[n], seen) for n in NETS} for nets, m in zip((p, old), carry, strict=True))
    action = mu(p["actor"]["head"], now["actor"][0])
    value = rlfx.series(q_of(old["critic"]["head"], then["critic"][0], mu(old["actor"]["head"], then["actor"][0])), end=0.0)
    target = x["reward"] + GAMMA * (1.0 - x["done"]) * stop_gradient(value[t + 1])
    h, head = now["critic"][0], p["critic"]["head"]
    error = q_of(head, h, x["action"]) - target
    return 0.5 * error**2 - q_of(stop_gradient(head), stop_gradient(h), action), (now, then)


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, old, carry, data: jax.value_and_grad(lambda p: loss_fn(((p, old), data), carry)[0])(p)


# -- by hand, as usual


def seen_of(data):
    return jnp.concatenate([data["obs"], data["acted"], data["gained"][..., None]], -1)


def target_of(old, h, old_h, data):
    """Of histories ``[T, B, hidden]`` of the targets' actor and critic."""
    value = q_of(old["critic"]["head"], old_h, mu(old["actor"]["head"], h))
    return data["reward"] + GAMMA * (1.0 - data["done"]) * c.shifted(value, jnp.zeros_like(value[0]))


def learnt(p, actor_h, critic_h, target, data):
    """Summed over ``[T, B]``."""
    head = p["critic"]["head"]
    error = q_of(head, critic_h, data["action"]) - target
    gained = q_of(stop_gradient(head), stop_gradient(critic_h), mu(p["actor"]["head"], actor_h))
    return (0.5 * error**2 - gained).sum()


def plain(length, batch):
    def run(p, old, carry, data):
        def histories(net, memory):
            def step(memory, x):
                seen, first = x
                memory = jax.tree.map(lambda m: jnp.where(first[:, None], 0.0, m), memory)
                memory = lstm(net["lstm"], memory, seen)
                return memory, memory[0]

            return jax.lax.scan(step, memory, (seen_of(data), data["first"]))[1]

        def loss(p):
            now, then = ({n: histories(nets[n], m[n]) for n in NETS} for nets, m in zip((p, old), carry, strict=True))
            target = target_of(old, then["actor"], then["critic"], data)
            return learnt(p, now["actor"], now["critic"], target, data) / (length * batch)

        return jax.value_and_grad(loss)(p)

    return run
