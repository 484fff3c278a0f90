"""TreeQN by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_fifteenth import trees
from benchmarks.untuned.sealed_fifteenth.trees import (
    ACTIONS,
    DEEPER,
    GAMMA,
    OBS,
    aims_of,
    backed_up,
    encoded,
    params_of,
    relu,
    unit,
)  # fmt: skip

# -- sums ``[N, ACTIONS, code]`` that move codes ``z[N, code]``


def as_given(p, z):
    return jnp.einsum("ni,aij->naj", z, p["move"]["w"]) + p["move"]["b"]


def joined(p, z):
    """The matrices of all actions are one product."""
    w = jnp.moveaxis(p["move"]["w"], 0, 1).reshape(z.shape[1], -1)
    return (z @ w + p["move"]["b"].reshape(-1)).reshape(len(z), ACTIONS, -1)


def one_by_one(p, z):
    return jnp.stack([z @ p["move"]["w"][i] + p["move"]["b"][i] for i in range(ACTIONS)], 1)


# -- trees


def leaves(p, z, push):
    """Values ``[N, ACTIONS]`` of the codes after each action, which are not made: a value is linear, so its sum is scaled."""
    after = z[:, None] + jnp.tanh(push(p, z))
    size = jax.lax.rsqrt((after**2).sum(-1) + 1e-6)
    return size * (after @ p["value"]["w"][:, 0]) + p["value"]["b"]


def lower(p, z, push, made=False):
    """Values ``[N, ACTIONS]`` of trees of one move."""
    reward = c.mlp(p["reward"], z, relu)
    if made:
        after = unit(z[:, None] + jnp.tanh(push(p, z)))
        return reward + GAMMA * c.linear(p["value"], after)[..., 0]
    return reward + GAMMA * leaves(p, z, push)


def backed(p, after, below):
    """The values of codes ``after[N, code]``."""
    return (1.0 - DEEPER) * c.linear(p["value"], after)[:, 0] + DEEPER * backed_up(below(p, after))


def whole(p, z, push, below):
    reward = c.mlp(p["reward"], z, relu)
    after = unit(z[:, None] + jnp.tanh(push(p, z)))
    value = backed(p, after.reshape(-1, after.shape[-1]), below).reshape(-1, ACTIONS)
    return reward + GAMMA * value, reward


def of_chosen(p, z, action, push, below):
    """Only the subtree below what was done, of which the loss is."""
    reward = c.pick(c.mlp(p["reward"], z, relu), action)
    pushed = (jax.nn.one_hot(action, ACTIONS)[..., None] * push(p, z)).sum(1)
    return reward + GAMMA * backed(p, unit(z + jnp.tanh(pushed)), below), reward


# -- features first: codes ``[code, N]``, and values ``[ACTIONS, N]``


def pushed_columns(p, z):
    """``[ACTIONS, code, N]``."""
    w = p["move"]["w"].mT.reshape(-1, len(z))
    return (w @ z).reshape(ACTIONS, len(z), -1) + p["move"]["b"][..., None]


def unit_columns(x):
    return x * jax.lax.rsqrt((x**2).sum(-2, keepdims=True) + 1e-6)


def encoded_columns(p, obs):
    return unit_columns(jnp.tanh(c.columns(p["encoder"], obs.T, relu)))


def lower_columns(p, z):
    after = z + jnp.tanh(pushed_columns(p, z))
    size = jax.lax.rsqrt((after**2).sum(1) + 1e-6)
    value = size * jnp.einsum("j,ajn->an", p["value"]["w"][:, 0], after) + p["value"]["b"]
    return c.columns(p["reward"], z, relu) + GAMMA * value


def backed_columns(p, after, below):
    q = below(p, after)
    return (1.0 - DEEPER) * (p["value"]["w"][:, 0] @ after + p["value"]["b"]) + DEEPER * (jax.nn.softmax(q, 0) * q).sum(
        0
    )


def whole_columns(p, z, below):
    """Greatest values ``[N]`` of trees."""
    after = jnp.moveaxis(unit_columns(z + jnp.tanh(pushed_columns(p, z))), 0, 1)
    value = backed_columns(p, after.reshape(len(z), -1), below).reshape(ACTIONS, -1)
    return c.columns(p["reward"], z, relu) + GAMMA * value


def chosen_columns(p, z, action, below):
    ones = jax.nn.one_hot(action, ACTIONS, axis=0)
    reward = (ones * c.columns(p["reward"], z, relu)).sum(0)
    after = unit_columns(z + jnp.tanh((ones[:, None] * pushed_columns(p, z)).sum(0)))
    return reward + GAMMA * backed_columns(p, after, below), reward


# -- what is learnt


def by_hand(length, batch, push=joined, chosen=True, made=False, columns=False, again=False, chunk=None, split=False):
    """``again``: leaves are made again for the gradient; ``chunk``: timesteps of a block, ``split``: of the target's, too."""
    scale = 1.0 / (length * batch)
    below = lower_columns if columns else functools.partial(lower, push=push, made=made)
    below = jax.checkpoint(below) if again else below

    def greatest(target, obs):
        if columns:
            return whole_columns(target, encoded_columns(target, obs), lower_columns).max(0)
        return whole(target, encoded(target, obs), push, functools.partial(lower, push=push, made=made))[0].max(-1)

    def of_done(p, obs, action):
        if columns:
            z = encoded_columns(p, obs)
            if chosen:
                return chosen_columns(p, z, action, below)
            ones = jax.nn.one_hot(action, ACTIONS, axis=0)
            return (ones * whole_columns(p, z, below)).sum(0), (ones * c.columns(p["reward"], z, relu)).sum(0)
        z = encoded(p, obs)
        if chosen:
            return of_chosen(p, z, action, push, below)
        return tuple(c.pick(x, action) for x in whole(p, z, push, below))

    def loss(p, x):
        data, aim = x
        q, reward = of_done(p, data["obs"], data["action"])
        return 0.5 * scale * ((q - aim) ** 2 + (reward - data["reward"]) ** 2).sum()

    def run(p, target, data):
        rows = c.rows_of(data)
        if split:
            old = jax.lax.map(lambda obs: greatest(target, obs), c.in_chunks(rows["obs"], chunk * batch))
        else:
            old = greatest(target, rows["obs"])
        x = rows, stop_gradient(aims_of(old.reshape(length, batch), data)).reshape(-1)
        if chunk is None:
            return jax.value_and_grad(loss)(p, x)
        return c.summed_gradient(loss, p, c.in_chunks(x, chunk * batch))

    return run


def workload(length, batch, code, hidden, chunk=4):
    make = functools.partial(by_hand, length, batch)
    all_of, column, again = {"chosen": False}, {"columns": True}, {"again": True}
    forms = {
        "rlfx": c.learner_by_rlfx(trees.program, length, batch), "plain": trees.plain(length, batch),
        "trees": make(push=as_given, made=True, **all_of), "trees, joined": make(**all_of),
        "chosen": make(push=as_given),
        "chosen, one by one": make(push=one_by_one), "chosen, joined": make(), "chosen, joined, again": make(**again),
        "chosen, features first": make(**column), "chosen, features first, again": make(**column, **again),
        f"chosen, joined, blocks of {chunk}": make(chunk=chunk, split=True),
        f"chosen, joined, blocks of {chunk // 2}": make(chunk=chunk // 2, split=True),
        f"chosen, joined, blocks of {2 * chunk}": make(chunk=2 * chunk, split=True),
        f"chosen, features first, blocks of {chunk}": make(**column, chunk=chunk, split=True),
        f"trees, joined, blocks of {chunk}": make(**all_of, chunk=chunk, split=True),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jax.random.randint(k[1], size, 0, ACTIONS),
        "reward": jax.random.normal(k[2], size), "done": (jax.random.uniform(k[3], size) < 0.03).at[-1].set(True),
    }  # fmt: skip
    return Workload(forms, (params_of(k[4], code, hidden), params_of(k[5], code, hidden), data), tolerance=2e-5)
