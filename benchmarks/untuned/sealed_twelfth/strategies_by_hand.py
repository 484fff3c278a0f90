"""Evolution strategies by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_twelfth import strategies
from benchmarks.untuned.sealed_twelfth.strategies import (
    SIGMA,
    estimate,
    observed,
    params_of,
    perturbed,
    swung,
)  # fmt: skip

# -- torques ``[M, B]`` of many members, weights ``[M, rows, columns]``, from states ``[M, B, 2]``


def by_products(members, state):
    x = observed(state)
    for layer in members[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"][:, None])
    last = members[-1]
    return 2.0 * jnp.tanh((x @ last["w"] + last["b"][:, None])[..., 0])


def by_sums_at_ends(members, state):
    """Layers of few inputs or of one output by sums."""
    first, second, last = members
    w = first["w"][:, :, None]
    angle, speed = state[..., 0, None], state[..., 1, None]
    x = jnp.tanh(jnp.cos(angle) * w[:, 0] + jnp.sin(angle) * w[:, 1] + speed * w[:, 2] + first["b"][:, None])
    x = jnp.tanh(x @ second["w"] + second["b"][:, None])
    return 2.0 * jnp.tanh((x * last["w"][:, None, :, 0]).sum(-1) + last["b"])


def last_by_sum(members, state):
    x = observed(state)
    for layer in members[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"][:, None])
    last = members[-1]
    return 2.0 * jnp.tanh((x * last["w"][:, None, :, 0]).sum(-1) + last["b"])


def biases_within(members, state):
    """A bias is the row of a one."""
    x = observed(state)
    for layer in members:
        w = jnp.concatenate([layer["w"], layer["b"][:, None]], 1)
        x = jnp.tanh(jnp.concatenate([x, jnp.ones_like(x[..., :1])], -1) @ w)
    return 2.0 * x[..., 0]


def in_columns(members, state):
    """Features first, environments innermost: ``[M, features, B]``."""
    first, second, last = members
    w = first["w"][:, :, :, None]
    angle, speed = state[..., 0][:, None], state[..., 1][:, None]
    x = jnp.tanh(jnp.cos(angle) * w[:, 0] + jnp.sin(angle) * w[:, 1] + speed * w[:, 2] + first["b"][..., None])
    x = jnp.tanh(second["w"].mT @ x + second["b"][..., None])
    return 2.0 * jnp.tanh((x * last["w"]).sum(1) + last["b"])


def one_by_one(members, state):
    """A product of each member."""
    size = len(state)
    made = [by_sums_at_ends(jax.tree.map(lambda w, i=i: w[i : i + 1], members), state[i : i + 1]) for i in range(size)]
    return jnp.concatenate(made)


def inner_sums(members, state):
    """The middle layer by sums too."""
    first, second, last = members
    x = observed(state)
    x = jnp.tanh((x[..., None] * first["w"][:, None]).sum(-2) + first["b"][:, None])
    x = jnp.tanh((x[..., None] * second["w"][:, None]).sum(-2) + second["b"][:, None])
    return 2.0 * jnp.tanh((x * last["w"][:, None, :, 0]).sum(-1) + last["b"])


# -- losses of many members


def losses_of(members, state, length, torque_of, unroll=1, added=True):
    """``added``: rewards are added up in the loop."""
    size = len(members[0]["w"])
    begin = jnp.broadcast_to(state, (size, *state.shape))

    def step(carry, _):
        state, total = carry
        state, reward = swung(state, torque_of(members, state))
        return (state, total + reward.mean(1) if added else total), None if added else reward

    (_, total), rewards = jax.lax.scan(step, (begin, jnp.zeros(size)), None, length=length, unroll=unroll)
    return -total / length if added else -rewards.mean((0, 2))


def by_hand(length, batch, pairs, torque_of=by_sums_at_ends, chunk=None, end=estimate, **how):
    """``chunk``: so many members after the others."""

    def run(p, state, key):
        noise, members = perturbed(p, key, pairs)
        if chunk is None:
            losses = losses_of(members, state, length, torque_of, **how)
        else:
            some = lambda members: losses_of(members, state, length, torque_of, **how)  # noqa: E731
            losses = jax.lax.map(some, c.in_chunks(members, chunk)).reshape(-1)
        return losses.mean(), end(noise, losses)

    return run


def by_pairs(length, batch, pairs, chunk, torque_of=by_sums_at_ends, end=estimate, **how):
    """Perturbed weights are made where they are used: of ``chunk`` pairs after the others."""

    def run(p, state, key):
        leaves, structure = jax.tree.flatten(p)
        keys = jax.random.split(key, len(leaves))
        noise = [jax.random.normal(k, (pairs, *w.shape)) for k, w in zip(keys, leaves, strict=True)]
        noise = jax.tree.unflatten(structure, noise)

        def some(noise):
            both = jax.tree.map(lambda w, e: jnp.concatenate([w + SIGMA * e, w - SIGMA * e]), p, noise)
            return losses_of(both, state, length, torque_of, **how).reshape(2, -1)

        losses = jax.lax.map(some, c.in_chunks(noise, chunk)).swapaxes(0, 1).reshape(-1)
        return losses.mean(), end(noise, losses)

    return run


# -- the estimate


def ranks_counted(losses):
    """How many are less."""
    return (losses[:, None] > losses).sum(1) / (len(losses) - 1) - 0.5


def counted(noise, losses):
    """By counts, and noise of all weights as rows of matrices."""
    first, second = jnp.split(ranks_counted(losses) / (len(losses) * SIGMA), 2)
    return jax.tree.map(lambda e: ((first - second) @ e.reshape(len(e), -1)).reshape(e.shape[1:]), noise)


def summed(noise, losses):
    """By counts, and sums."""
    first, second = jnp.split(ranks_counted(losses) / (len(losses) * SIGMA), 2)
    weight = first - second
    return jax.tree.map(lambda e: (weight.reshape(-1, *(1,) * (e.ndim - 1)) * e).sum(0), noise)


def workload(length, batch, pairs, hidden, chunk=8):
    make, two = (functools.partial(f, length, batch, pairs) for f in (by_hand, by_pairs))
    column, fast = {"torque_of": in_columns}, {"end": counted}
    forms = {
        "rlfx": strategies.by_rlfx(length, batch, pairs), "plain": strategies.plain(length, batch, pairs),
        "members together": make(by_products, added=False), "added": make(by_products), "sums at ends": make(),
        "sums at ends, counted": make(**fast), "sums at ends, summed": make(end=summed),
        "sums at ends, unrolled by 2": make(unroll=2, **fast), "sums at ends, unrolled by 4": make(unroll=4, **fast),
        "features first": make(**column, **fast),
        "features first, unrolled by 2": make(unroll=2, **column, **fast), "one by one": make(one_by_one, **fast),
        "sums": make(inner_sums, **fast),
        "products": make(by_products, **fast), "products, summed": make(by_products, end=summed),
        "products, unrolled by 2": make(by_products, unroll=2, **fast),
        "products, unrolled by 4": make(by_products, unroll=4, **fast),
        "last by a sum": make(last_by_sum, **fast), "biases within": make(biases_within, **fast),
        f"{2 * chunk} members, products": make(by_products, 2 * chunk, **fast),
        f"{chunk} pairs, products": two(chunk, by_products, **fast), "2 pairs, products": two(2, by_products, **fast),
        "a member": make(chunk=1, **fast),
        "a member, products": make(by_products, 1, **fast), "a member, unrolled by 4": make(chunk=1, unroll=4, **fast),
        "2 members": make(chunk=2, **fast), f"{chunk} members": make(chunk=chunk, **fast),
        f"{chunk} members, products": make(by_products, chunk, **fast),
        f"{chunk} members, features first": make(chunk=chunk, **column, **fast),
        f"{chunk} members, one by one": make(one_by_one, chunk, **fast),
        f"{chunk} members, unrolled by 2": make(chunk=chunk, unroll=2, **fast),
        f"{2 * chunk} members": make(chunk=2 * chunk, **fast),
        "a pair": two(1, **fast), "a pair, features first": two(1, **column, **fast), "a pair, summed": two(1, end=summed),
        "a pair, unrolled by 2": two(1, unroll=2, **fast), "a pair, one by one": two(1, one_by_one, **fast),
        "2 pairs": two(2, **fast), f"{chunk // 2} pairs": two(chunk // 2, **fast),
        f"{chunk} pairs": two(chunk, **fast), f"{chunk} pairs, features first": two(chunk, **column, **fast),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 3)
    angle = jax.random.uniform(k[0], (batch,), minval=-jnp.pi, maxval=jnp.pi)
    state = jnp.stack([angle, jax.random.uniform(k[1], (batch,), minval=-1.0)], -1)
    return Workload(forms, (params_of(k[2], hidden), state, jax.random.key(2)), tolerance=5e-5)
