"""V-trace on data of another policy, through `rlfx.inputs`: two MLPs, no environment."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx

from . import common as c
from .measure import Workload

OBS, ACTIONS, GAMMA = 32, 6, 0.99
relu = jax.nn.relu


def program(params, after_end, t):
    """The carry is the value of what follows the data."""
    p, data = params
    x = rlfx.inputs(data)[t]
    logits, v = c.mlp(p["pi"], x["obs"], relu), c.mlp(p["v"], x["obs"], relu)[0]
    log_prob = jax.nn.log_softmax(logits)[x["action"]]
    value = rlfx.series(v, end=after_end)
    step = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    found = rlfx.vtrace(step, value, value[t + 1], log_prob - x["log_mu"], gamma=GAMMA)
    target, advantage = stop_gradient(found)
    return c.actor_critic_loss(logits, v, log_prob, advantage, target), after_end


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, data, last):
        after_end = stop_gradient(c.mlp(p["v"], last, relu)[:, 0])
        return jax.value_and_grad(lambda p: loss_fn((p, data), after_end)[0])(p)

    return run


def separate(p, obs):
    return c.mlp(p["pi"], obs, relu), c.mlp(p["v"], obs, relu)[..., 0]


def by_hand(length, batch, net=separate, flat=True, chunk=None):
    def evaluated(p, obs):
        if not flat:
            return net(p, obs)
        out = net(p, obs.reshape(-1, OBS))
        return jax.tree.map(lambda x: x.reshape(*obs.shape[:2], *x.shape[1:]), out)

    def loss_of(logits, v, log_prob, target, advantage):
        return c.actor_critic_loss(logits, v, log_prob, advantage, target).sum() / (length * batch)

    def at_once(p, data, last):
        after_end = net(p, last)[1]

        def loss(p):
            logits, v = evaluated(p, data["obs"])
            log_prob = c.pick(jax.nn.log_softmax(logits), data["action"])
            found = c.vtrace(stop_gradient(v), after_end, stop_gradient(log_prob) - data["log_mu"], data, GAMMA)
            return loss_of(logits, v, log_prob, *found)

        return jax.value_and_grad(loss)(p)

    def in_blocks(p, data, last):
        def values(_, x):
            logits, v = evaluated(p, x["obs"])
            return None, (v, c.pick(jax.nn.log_softmax(logits), x["action"]))

        blocks = c.in_chunks(data, chunk)
        v, log_prob = jax.tree.map(lambda x: x.reshape(length, batch), jax.lax.scan(values, None, blocks)[1])
        found = c.vtrace(v, net(p, last)[1], log_prob - data["log_mu"], data, GAMMA)

        def loss(p, part):
            data, found = part
            logits, v = evaluated(p, data["obs"])
            return loss_of(logits, v, c.pick(jax.nn.log_softmax(logits), data["action"]), *found)

        return c.summed_gradient(loss, p, (blocks, c.in_chunks(found, chunk)))

    return at_once if chunk is None else in_blocks


def workload(length, batch, hidden):
    k = jax.random.split(jax.random.key(0), 8)
    p = {"pi": c.mlp_params(k[0], (OBS, hidden, hidden, ACTIONS)), "v": c.mlp_params(k[1], (OBS, hidden, hidden, 1))}
    size = length, batch
    data = {
        "obs": jax.random.normal(k[2], (*size, OBS)),
        "action": jax.random.randint(k[3], size, 0, ACTIONS),
        "log_mu": -1.5 + 0.2 * jax.random.normal(k[4], size),
        "reward": jax.random.normal(k[5], size),
        "done": jax.random.uniform(k[6], size) < 0.02,
    }
    forms = {
        "rlfx": by_rlfx(length, batch),
        "plain": by_hand(length, batch),
        "not flattened": by_hand(length, batch, flat=False),
        "joined": by_hand(length, batch, functools.partial(c.first_joined, activation=relu)),
        "blocks": by_hand(length, batch, chunk=16 if length % 16 == 0 else 1),
    }
    return Workload(forms, (p, data, jax.random.normal(k[7], (batch, OBS))))
