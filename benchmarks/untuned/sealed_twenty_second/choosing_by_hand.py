"""Discrete SAC by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_twenty_second import choosing as given
from benchmarks.untuned.sealed_twenty_second.choosing import (
    ACTIONS,
    ENTROPY,
    GAMMA,
    OBS,
    STEPS,
    all_of,
    params_of,
    relu,
    returns,
    soft_value,
)  # fmt: skip

# -- networks of one shape, ``nets``, of rows ``obs[N, OBS]``: logits and values of each


def each(nets, obs):
    return [c.mlp(p, obs, relu) for p in nets]


def stacked(nets, obs):
    made = jax.vmap(lambda p: c.mlp(p, obs, relu))(jax.tree.map(lambda *w: jnp.stack(w), *nets))
    return list(made)


def joined(nets, obs):
    """First layers as one product."""
    first = jax.tree.map(lambda *w: jnp.concatenate(w, -1), *(p[0] for p in nets))
    h = jnp.split(relu(c.linear(first, obs)), len(nets), -1)
    return [c.mlp(p[1:], x, relu) for p, x in zip(nets, h, strict=True)]


def columns(nets, obs):
    """Features first: ``obs[OBS, N]``."""
    return [c.columns(p, obs, relu) for p in nets]


def columns_joined(nets, obs):
    first = jax.tree.map(lambda *w: jnp.concatenate(w, -1), *(p[0] for p in nets))
    h = jnp.split(relu(first["w"].T @ obs + first["b"][:, None]), len(nets))
    return [c.columns(p[1:], x, relu) for p, x in zip(nets, h, strict=True)]


class Way(NamedTuple):
    nets: Any = each
    turned: bool = False  # features first
    again: bool = False  # hidden layers are computed a second time
    chunk: int | None = None  # timesteps after the others, the last ones first


def nets_of(p):
    return p["policy"], c.member(p["critics"], 0), c.member(p["critics"], 1)


def twice(length, batch):
    """As usual, but flat: the policy is asked again to learn."""

    def run(p, old, data):
        obs, alpha = c.rows_of(jnp.concatenate([data["obs"], data["last"][None]])), jnp.exp(p["log_alpha"])
        log_pi = jax.nn.log_softmax(c.mlp(p["policy"], obs, relu))
        target = returns(data, soft_value(log_pi, all_of(old, obs), alpha).reshape(-1, batch)).reshape(-1)
        obs, action = c.rows_of((data["obs"], data["action"]))

        def loss(p):
            q, log_pi = all_of(p["critics"], obs), jax.nn.log_softmax(c.mlp(p["policy"], obs, relu))
            entropy = -(jnp.exp(log_pi) * log_pi).sum(-1)
            critic_loss = ((c.pick(q, jnp.stack([action, action])) - target) ** 2).sum(0)
            actor_loss = p["log_alpha"] * stop_gradient(entropy - ENTROPY) - soft_value(log_pi, stop_gradient(q), alpha)
            return (critic_loss + actor_loss).mean()

        return jax.value_and_grad(loss)(p)

    return run


def by_hand(length, batch, way):
    """Every network is asked once; actions are chosen by masks, along ``axis``."""
    count, axis = length * batch, 0 if way.turned else -1
    turn = (lambda x: x.T) if way.turned else (lambda x: x)

    def value_of(log_pi, q, alpha):
        return (jnp.exp(log_pi) * (q - alpha * log_pi)).sum(axis)

    def learn(p, old, part, after):
        """Of timesteps ``[t, B]``; ``after``: what the STEPS timesteps behind them gain and are worth."""
        alpha = stop_gradient(jnp.exp(p["log_alpha"]))
        obs, action = turn(c.rows_of(part["obs"])), part["action"].reshape(-1)
        far = value_by(old, obs)
        here = jnp.expand_dims(action, axis) == jnp.expand_dims(jnp.arange(ACTIONS), axis + 1 if way.turned else 0)

        def loss(p):
            nets = jax.checkpoint(way.nets) if way.again else way.nets
            logits, one, two = nets(nets_of(p), obs)
            log_pi = jax.nn.log_softmax(logits, axis)
            fixed = stop_gradient(log_pi)
            following = value_of(fixed, far, alpha).reshape(-1, batch)
            target, on = aims(part, following, after)
            taken = [jnp.where(here, q, 0.0).sum(axis) for q in (one, two)]
            critic_loss = sum((q - target) ** 2 for q in taken)
            actor_loss = value_of(log_pi, stop_gradient(jnp.minimum(one, two)), alpha)
            entropy = -(jnp.exp(fixed) * fixed).sum(axis)
            return (critic_loss - actor_loss + p["log_alpha"] * (entropy - ENTROPY)).sum() / count, on

        return jax.value_and_grad(loss, has_aux=True)(p)

    def value_by(old, obs):
        return functools.reduce(jnp.minimum, way.nets((c.member(old, 0), c.member(old, 1)), obs))

    def aims(part, following, after):
        """Rows of targets; and what the block before needs: rewards, discounts and values of the next STEPS timesteps."""
        mine = {"reward": part["reward"], "going": part["going"], "value": following}
        x = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), mine, after)
        size = len(following)
        aim = x["value"][1:]
        for i in range(STEPS):
            aim = x["reward"][: len(aim)] + x["going"][: len(aim)] * aim
            if i < STEPS - 1:
                aim = aim[1:]
        return aim[:size].reshape(-1), jax.tree.map(lambda x: x[:STEPS], x)

    def run(p, old, data):
        alpha = jnp.exp(p["log_alpha"])
        last = turn(data["last"])
        log_pi = jax.nn.log_softmax(way.nets((p["policy"],), last)[0], axis)
        ends = value_of(log_pi, value_by(old, last), alpha)
        # behind the end nothing is gained, and values stay
        none, one = jnp.zeros((STEPS, batch)), jnp.ones((STEPS, batch))
        after = {"reward": none, "going": one, "value": ends * one}
        x = {"obs": data["obs"], "action": data["action"], "reward": data["reward"]}
        x["going"] = GAMMA * (1.0 - data["done"].astype(jnp.float32))
        if way.chunk is None:
            (loss, _), grads = learn(p, old, x, after)
            return loss, grads

        def body(carry, part):
            total, after = carry
            (loss, after), grads = learn(p, old, part, after)
            return (jax.tree.map(jnp.add, total, (loss, grads)), after), None

        start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)), after
        return jax.lax.scan(body, start, c.in_chunks(x, way.chunk), reverse=True)[0][0]

    return run


def workload(length, batch, hidden, chunk=16):
    make = functools.partial(by_hand, length, batch)
    turned, both = Way(columns, turned=True), Way(columns_joined, turned=True)
    forms = {
        "rlfx": c.learner_by_rlfx(given.program, length, batch), "plain": given.plain(length, batch),
        "rows": twice(length, batch), "once": make(Way()), "stacked": make(Way(stacked)), "joined": make(Way(joined)),
        "features first": make(turned), "features first, joined": make(both), "again": make(Way(again=True)),
        f"once, blocks of {chunk}": make(Way(chunk=chunk)),
        f"features first, blocks of {chunk}": make(turned._replace(chunk=chunk)),
        f"features first, joined, blocks of {chunk}": make(both._replace(chunk=chunk)),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 8)
    data = c.episodes(k, (length, batch), OBS, ACTIONS)
    data |= {"done": data["done"].at[-1].set(False), "last": jax.random.normal(k[4], (batch, OBS))}
    del data["first"]
    given_ = params_of(k[5], hidden), params_of(k[6], hidden)["critics"], data
    return Workload(forms, given_, tolerance=2e-5)
