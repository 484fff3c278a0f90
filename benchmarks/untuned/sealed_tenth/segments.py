"""Rewards from preferences (Christiano et al. 2017; PEBBLE, Lee et al. 2021): an ensemble of reward networks, of which each tells
which of two segments was preferred by the sum of what it gives to their timesteps."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, MEMBERS = 18, 6, 3
INPUTS = OBS + ACTIONS


def leaky(x):
    return jnp.where(x > 0, x, 0.01 * x)


def params_of(key, hidden):
    return jax.vmap(lambda k: c.mlp_params(k, (INPUTS, hidden, hidden, 1)))(jax.random.split(key, MEMBERS))


def rewards(members, obs, action):
    """``[MEMBERS, ...]`` of points ``[...]``."""
    x = jnp.concatenate([obs, action], -1)
    return jax.vmap(lambda p: jnp.tanh(c.mlp(p, x, leaky)[..., 0]))(members)


def program(params, carry, t):
    (p, _), (data, preferred) = params
    x = rlfx.inputs(data)[t]  # both segments of a pair: [2, ...]
    first = rlfx.inputs(preferred, axes="b")[t]  # how likely it is that the first is preferred
    gained = rewards(p, x["obs"], x["action"]) * x["going"]
    log_probs = jax.nn.log_softmax(rlfx.sum(gained, over="t"))
    return -(first * log_probs[:, 0] + (1.0 - first) * log_probs[:, 1]).sum(), carry


# -- by hand: rewards of rows ``x[N, INPUTS]``, ``[MEMBERS, N]``; as usual


def mapped(members, x):
    return jax.vmap(lambda p: jnp.tanh(c.mlp(p, x, leaky)[..., 0]))(members)


def of_member(members, i):
    return jax.tree.map(lambda w: w[i], members)


def one_by_one(members, x):
    return jnp.stack([jnp.tanh(c.mlp(of_member(members, i), x, leaky)[..., 0]) for i in range(MEMBERS)])


def firsts_joined(members, x):
    """The first layers are one product."""
    first, second, third = members
    h = leaky(x @ jnp.concatenate(list(first["w"]), -1) + first["b"].reshape(-1))
    parts = jnp.split(h, MEMBERS, -1)
    return jnp.stack(
        [jnp.tanh(c.mlp(of_member([second, third], i), part, leaky)[..., 0]) for i, part in enumerate(parts)]
    )


def stacked(members, x):
    """The first layers are one product, and the others products of a batch."""
    first, second, third = members
    h = leaky(x @ jnp.concatenate(list(first["w"]), -1) + first["b"].reshape(-1))
    h = jnp.einsum("nmh,mhk->mnk", h.reshape(len(x), MEMBERS, -1), second["w"]) + second["b"][:, None]
    return jnp.tanh((leaky(h) * third["w"][..., 0][:, None]).sum(-1) + third["b"])


def in_columns(members, x):
    """Features first, rows innermost."""
    x = x.T
    return jnp.concatenate([jnp.tanh(c.columns(of_member(members, i), x, leaky)) for i in range(MEMBERS)])


def columns_joined(members, x):
    first, *rest = members
    w = jnp.concatenate(list(first["w"]), -1)
    parts = jnp.split(leaky(w.T @ x.T + first["b"].reshape(-1)[:, None]), MEMBERS)
    return jnp.concatenate([jnp.tanh(c.columns(of_member(rest, i), part, leaky)) for i, part in enumerate(parts)])


@jax.custom_vjp
def member(p, x):
    """One member's rewards, whose way back is written out."""
    return member_forwards(p, x)[0]


def member_forwards(p, x):
    first = leaky(c.linear(p[0], x))
    second = leaky(c.linear(p[1], first))
    reward = jnp.tanh(second @ p[2]["w"][:, 0] + p[2]["b"][0])
    return reward, (p, x, first, second, reward)


def member_backwards(kept, by):
    p, x, first, second, reward = kept
    by, last = by * (1.0 - reward**2), p[2]["w"][:, 0]
    on = by[:, None] * jnp.where(second > 0, last, 0.01 * last)
    before = on @ p[1]["w"].T
    before = jnp.where(first > 0, before, 0.01 * before)
    layers = [
        {"w": x.T @ before, "b": before.sum(0)}, {"w": first.T @ on, "b": on.sum(0)},
        {"w": (by @ second)[:, None], "b": by.sum()[None]},
    ]  # fmt: skip
    return layers, jnp.zeros_like(x)  # of data


member.defvjp(member_forwards, member_backwards)


def written_out(members, x):
    return jnp.stack([member(of_member(members, i), x) for i in range(MEMBERS)])


def plain(length, batch):
    def run(p, _, data, key=None):
        data, preferred = data

        def loss(p):
            gained = (rewards(p, data["obs"], data["action"]) * data["going"]).sum(1)
            log_probs = jax.nn.log_softmax(gained)
            return -(preferred * log_probs[..., 0] + (1.0 - preferred) * log_probs[..., 1]).sum() / batch

        return jax.value_and_grad(loss)(p)

    return run


# -- by hand, better than usual


def cross_entropy(gained, preferred):
    """Summed, of sums ``[MEMBERS, B, 2]``; only their difference matters."""
    apart = gained[..., 0] - gained[..., 1]
    return (jax.nn.softplus(apart) - preferred * apart).sum()


def slopes_of(gained, preferred):
    """Those of it."""
    slope = jax.nn.sigmoid(gained[..., 0] - gained[..., 1]) - preferred
    return jnp.stack([slope, -slope], -1)


def joined_inputs(data):
    return jnp.concatenate([data["obs"], data["action"]], -1)


def sums(net, p, x, going):
    """Of rows of all timesteps ``[T, B, 2]``."""
    return (net(p, x.reshape(-1, INPUTS)).reshape(MEMBERS, *going.shape) * going).sum(1)


def by_hand(length, batch, net=mapped, again=False):
    def run(p, _, data):
        data, preferred = data
        some = jax.checkpoint(net) if again else net
        x = joined_inputs(data)
        loss = lambda p: cross_entropy(sums(some, p, x, data["going"]), preferred) / batch  # noqa: E731
        return jax.value_and_grad(loss)(p)

    return run


def by_pairs(length, batch, chunk, net=mapped):
    """Some pairs after the others, all of their timesteps: a pair is done for itself."""

    def run(p, _, data):
        data, preferred = data
        cut = lambda y: jnp.moveaxis(y.reshape(length, -1, chunk, *y.shape[2:]), 1, 0)  # noqa: E731

        def loss(p, part):
            data, preferred = part
            return cross_entropy(sums(net, p, joined_inputs(data), data["going"]), preferred) / batch

        return c.summed_gradient(loss, p, (jax.tree.map(cut, data), preferred.reshape(-1, chunk)))

    return run


def two_passes(length, batch, chunk, net=mapped):
    """Sums of all timesteps first, in blocks of them, and then their gradient, block by block."""

    def run(p, _, data):
        data, preferred = data
        blocks = c.in_chunks(data, chunk)
        add = lambda total, part: (total + sums(net, p, joined_inputs(part), part["going"]), None)  # noqa: E731
        gained = jax.lax.scan(add, jnp.zeros((MEMBERS, batch, 2)), blocks)[0]
        slopes = slopes_of(gained, preferred) / batch
        loss = lambda p, part: (sums(net, p, joined_inputs(part), part["going"]) * slopes).sum()  # noqa: E731
        return cross_entropy(gained, preferred) / batch, c.summed_gradient(loss, p, blocks)[1]

    return run


def member_by_member(length, batch, chunk=None, net=member):
    """A loop over the members; within, all timesteps, or ``chunk`` pairs at a time."""

    def run(p, _, data):
        data, preferred = data
        cut = lambda y: jnp.moveaxis(y.reshape(length, -1, chunk or batch, *y.shape[2:]), 1, 0)  # noqa: E731
        parts = cut(joined_inputs(data)), cut(data["going"]), preferred.reshape(-1, chunk or batch)

        def loss(p, part):
            x, going, preferred = part
            gained = (net(p, x.reshape(-1, INPUTS)).reshape(going.shape) * going).sum(0)
            return cross_entropy(gained, preferred) / batch

        found, grads = jax.lax.map(lambda p: c.summed_gradient(loss, p, parts), p)
        return found.sum(), grads

    return run


def one_network(p, x):
    return jnp.tanh(c.mlp(p, x, leaky)[..., 0])


def workload(length, batch, hidden, chunk=4):
    rows, pairs = functools.partial(by_hand, length, batch), functools.partial(by_pairs, length, batch)
    twice, loop = functools.partial(two_passes, length, batch), functools.partial(member_by_member, length, batch)
    more, less = 2 * chunk, chunk // 2
    forms = {
        "rlfx": c.learner_by_rlfx(program, length, batch),
        "plain": plain(length, batch), "rows": rows(), "one by one": rows(one_by_one), "firsts joined": rows(firsts_joined),
        "stacked": rows(stacked), "features first": rows(in_columns), "features first, firsts joined": rows(columns_joined),
        "written out": rows(written_out), "again": rows(again=True), "one by one, again": rows(one_by_one, again=True),
        f"{chunk} pairs": pairs(chunk), f"one by one, {less} pairs": pairs(less, one_by_one),
        f"one by one, {chunk} pairs": pairs(chunk, one_by_one), f"one by one, {more} pairs": pairs(more, one_by_one),
        f"firsts joined, {chunk} pairs": pairs(chunk, firsts_joined), f"stacked, {chunk} pairs": pairs(chunk, stacked),
        f"features first, {less} pairs": pairs(less, in_columns), f"features first, {chunk} pairs": pairs(chunk, in_columns),
        f"features first, firsts joined, {chunk} pairs": pairs(chunk, columns_joined),
        f"written out, {less} pairs": pairs(less, written_out), f"written out, {chunk} pairs": pairs(chunk, written_out),
        f"written out, {more} pairs": pairs(more, written_out), f"two passes, blocks of {chunk}": twice(chunk, one_by_one),
        f"written out, two passes, blocks of {chunk}": twice(chunk, written_out), "member by member": loop(),
        f"member by member, {chunk} pairs": loop(chunk), f"member by member, {more} pairs": loop(more),
        f"member by member, differentiated, {chunk} pairs": loop(chunk, one_network),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 5)
    size = length, batch, 2
    ends = jax.random.randint(k[0], size[1:], length // 2, 2 * length)  # some segments end early
    data = {
        "obs": jax.random.normal(k[1], (*size, OBS)), "action": jnp.tanh(jax.random.normal(k[2], (*size, ACTIONS))),
        "going": (jnp.arange(length)[:, None, None] < ends).astype(jnp.float32),
    }  # fmt: skip
    preferred = jax.random.randint(k[3], (batch,), 0, 3) / 2.0  # or neither
    return Workload(forms, (params_of(k[4], hidden), None, (data, preferred)), tolerance=2e-5)
