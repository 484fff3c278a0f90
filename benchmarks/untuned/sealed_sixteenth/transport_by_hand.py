"""Sinkhorn imitation by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_sixteenth import transport
from benchmarks.untuned.sealed_sixteenth.transport import (
    ACTIONS,
    CRITIC,
    OBS,
    ROUNDS,
    SMOOTH,
    acted,
    codes,
    params_of,
)

# -- what timesteps cost, of likenesses of codes ``like[B, T, E]``, which are 1 less costs: ``[B, T]``


def logarithms(like, looped=False):
    """Potentials, as usual; ``looped``: iterations are a scan."""
    like, ratio = (like - 1.0) / SMOOTH, np.float32(np.log(like.shape[1] / like.shape[2]))

    def go(price, _=None):
        mine = -jax.nn.logsumexp(price[:, None] + like, axis=2)
        return ratio - jax.nn.logsumexp(mine[..., None] + like, axis=1), None

    price = jnp.zeros((like.shape[0], like.shape[2]))
    if looped:
        price = jax.lax.scan(go, price, None, length=ROUNDS)[0]
    else:
        for _ in range(ROUNDS):
            price = go(price)[0]
    return -SMOOTH * (jax.nn.softmax(price[:, None] + like) * like).sum(2)


def iterated(kernel):
    """Scales of timesteps and of the expert's, ``(first[B, T], second[B, E])`` of each iteration, and at last."""
    ratio, second, kept = kernel.shape[1] / kernel.shape[2], jnp.ones((kernel.shape[0], kernel.shape[2])), []
    for _ in range(ROUNDS):
        first = 1.0 / jnp.einsum("bte,be->bt", kernel, second)
        kept.append((first, second))
        second = ratio / jnp.einsum("bte,bt->be", kernel, first)
    return [*kept, (1.0 / jnp.einsum("bte,be->bt", kernel, second), second)]


def kernels(like):
    """Exponentials are taken once, and iterations are products with vectors."""
    kernel = jnp.exp((like - 1.0) / SMOOTH)
    first, second = iterated(kernel)[-1]
    return first * jnp.einsum("bte,be->bt", kernel * (1.0 - like), second)


def summed(like):
    """The same, where products are sums of elements."""
    kernel = jnp.exp((like - 1.0) / SMOOTH)
    second = jnp.ones((kernel.shape[0], kernel.shape[2]))
    for _ in range(ROUNDS):
        first = 1.0 / (kernel * second[:, None]).sum(2)
        second = kernel.shape[1] / kernel.shape[2] / (kernel * first[..., None]).sum(1)
    plan = kernel * second[:, None]
    return (plan * (1.0 - like)).sum(2) / plan.sum(2)


@jax.custom_vjp
def way_back(like):
    """The same; for the gradient only the scales are kept, and what they make of the kernel's is one product of all of them."""
    return forwards(like)[0]


def forwards(like):
    kernel = jnp.exp((like - 1.0) / SMOOTH)
    kept = iterated(kernel)
    first, second = kept[-1]
    distance = first * jnp.einsum("bte,be->bt", kernel * (1.0 - like), second)
    return distance, (like, kernel, kept, distance)


def backwards(kept, by):
    like, kernel, scales, distance = kept
    ratio = kernel.shape[1] / kernel.shape[2]
    (first, second), rows, columns = scales[-1], [], []
    # the distance is first * (kernel * cost) @ second, with first = 1 / (kernel @ second): of the plan it is the mean
    weighed = by * first
    by_second = jnp.einsum("bte,bt->be", kernel * ((1.0 - like) - distance[..., None]), weighed)
    for i in range(ROUNDS - 1, -1, -1):
        one, before = scales[i]
        by_sum = -by_second * scales[i + 1][1] ** 2 / ratio  # of kernel.T @ one
        rows.append(one)
        columns.append(by_sum)
        by_sums = -jnp.einsum("bte,be->bt", kernel, by_sum) * one**2  # of kernel @ before
        rows.append(by_sums)
        columns.append(before)
        by_second = jnp.einsum("bte,bt->be", kernel, by_sums)
    every = jnp.einsum("bkt,bke->bte", jnp.stack(rows, 1), jnp.stack(columns, 1))
    plan = weighed[..., None] * second[:, None]
    by_kernel = every + plan * ((1.0 - like) - distance[..., None])
    return (kernel * (by_kernel / SMOOTH - plan),)


way_back.defvjp(forwards, backwards)


def of_batch_last(like):
    """Environments innermost: ``like[T, E, B]`` to ``[T, B]``."""
    kernel = jnp.exp((like - 1.0) / SMOOTH)
    second = jnp.ones(kernel.shape[1:])
    for _ in range(ROUNDS):
        first = 1.0 / (kernel * second).sum(1)
        second = kernel.shape[0] / kernel.shape[1] / (kernel * first[:, None]).sum(0)
    plan = kernel * second
    return (plan * (1.0 - like)).sum(1) / plan.sum(1)


# -- what is learnt


def critic_distance(layers, data, expert, measured, last=False):
    """``[T, B]``."""
    size = data["action"].shape
    own = codes(layers, data["obs"].reshape(-1, OBS), data["action"].reshape(-1))
    goals = codes(layers, expert["obs"], expert["action"])
    if last:
        own = own.reshape(*size, -1)
        return measured(jnp.einsum("tbc,ec->teb", own, goals))
    like = (own @ goals.T).reshape(*size, -1)
    return measured(jnp.moveaxis(like, 1, 0)).T


def both_joined(nets, obs):
    logits, value = c.first_joined(nets, obs.reshape(-1, OBS))
    return logits.reshape(*obs.shape[:-1], -1), value.reshape(obs.shape[:-1])


def one_matrix(nets, obs):
    """Both first layers are one product, and so are the second ones, with zeros between them."""
    pi, v = nets["pi"], nets["v"]
    w = jnp.concatenate([pi[0]["w"], v[0]["w"]], -1)
    x = jnp.tanh(obs.reshape(-1, OBS) @ w + jnp.concatenate([pi[0]["b"], v[0]["b"]]))
    x = jnp.tanh(x @ apart(pi[1]["w"], v[1]["w"]) + jnp.concatenate([pi[1]["b"], v[1]["b"]]))
    made = x @ apart(pi[2]["w"], v[2]["w"]) + jnp.concatenate([pi[2]["b"], v[2]["b"]])
    size = obs.shape[:-1]
    return made[:, :ACTIONS].reshape(*size, -1), made[:, ACTIONS].reshape(size)


def apart(a, b):
    return jnp.concatenate([jnp.pad(a, ((0, 0), (0, b.shape[1]))), jnp.pad(b, ((0, 0), (a.shape[1], 0)))])


def by_hand(length, batch, measured, networks=both_joined, last=False, again=False, chunk=None):
    """``last``: environments innermost; ``again``: what is measured is made again; ``chunk``: environments after the others."""
    scale, made = 1.0 / (length * batch), jax.checkpoint(measured) if again else measured

    def loss(p, x):
        (data, expert), nets = x[:2], {"pi": p["pi"], "v": p["v"]}
        distance = critic_distance(p["code"], data, expert, made, last)
        logits, value = networks(nets, data["obs"])
        return scale * (acted(logits, value, distance, data) - CRITIC * distance.sum())

    def run(p, data, expert):
        if chunk is None:
            return jax.value_and_grad(loss)(p, (data, expert))
        learn = c.gradient_by_environments(lambda p, x: loss(p, (x[0], expert)), chunk)
        return learn(p, data, jnp.zeros(batch))

    return run


def goals_once(length, batch, measured, networks, chunk):
    """Some environments after the others, for whom the expert's codes are made once, and their gradient goes back once."""
    scale = 1.0 / (length * batch)

    def loss(nets, data):
        p, goals = nets
        own = codes(p["code"], data["obs"].reshape(-1, OBS), data["action"].reshape(-1))
        like = (own @ goals.T).reshape(*data["action"].shape, -1)
        distance = measured(jnp.moveaxis(like, 1, 0)).T
        logits, value = networks(p, data["obs"])
        return scale * (acted(logits, value, distance, data) - CRITIC * distance.sum())

    def run(p, data, expert):
        goals, pull = jax.vjp(lambda layers: codes(layers, expert["obs"], expert["action"]), p["code"])
        learn = c.gradient_by_environments(lambda nets, x: loss(nets, x[0]), chunk)
        value, (grads, by_goals) = learn((p, goals), data, jnp.zeros(batch))
        return value, {**grads, "code": jax.tree.map(jnp.add, grads["code"], pull(by_goals)[0])}

    return run


def ordered(length, batch, chunk):
    """The critic first, and its gradient, so that nothing of it is kept; then the actor. Each in parts of some environments."""
    scale = 1.0 / (length * batch)

    def critic(layers, x):
        data, expert = x
        distance = critic_distance(layers, data, expert, way_back)
        return -scale * CRITIC * distance.sum(), stop_gradient(distance)

    def some(p, data, expert):
        (first, distance), by_code = jax.value_and_grad(critic, has_aux=True)(p["code"], (data, expert))
        nets = {"pi": p["pi"], "v": p["v"]}
        second, by_nets = jax.value_and_grad(
            lambda nets: scale * acted(*both_joined(nets, data["obs"]), distance, data)
        )(nets)
        return first + second, {"code": by_code, **by_nets}

    def run(p, data, expert):
        parts = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(length, -1, chunk, *x.shape[2:]), 1, 0), data)
        add = lambda total, x: (jax.tree.map(jnp.add, total, some(p, x, expert)), None)  # noqa: E731
        return jax.lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)), parts)[0]

    return run


def workload(length, batch, experts, hidden, code, chunk=8):
    make = functools.partial(by_hand, length, batch)
    once = functools.partial(goals_once, length, batch, way_back)
    forms = {
        "rlfx": transport.by_rlfx(length, batch), "plain": transport.plain(length, batch),
        "logarithms": make(logarithms), "logarithms, looped": make(functools.partial(logarithms, looped=True)),
        "kernels": make(kernels), "kernels, again": make(kernels, again=True), "sums": make(summed),
        "environments innermost": make(of_batch_last, last=True), "own way back": make(way_back),
        "own way back, one matrix": make(way_back, one_matrix), f"kernels, {chunk} environments": make(kernels, chunk=chunk),
        f"sums, {chunk} environments": make(summed, chunk=chunk),
        f"environments innermost, {chunk} environments": make(of_batch_last, last=True, chunk=chunk),
        f"own way back, {chunk} environments": once(both_joined, chunk),
        f"own way back, one matrix, {chunk} environments": once(one_matrix, chunk),
        f"critic first, {chunk} environments": ordered(length, batch, chunk),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jax.random.randint(k[1], size, 0, ACTIONS),
        "done": jnp.zeros(size, bool).at[-1].set(True),
    }  # fmt: skip
    expert = {
        "obs": 0.5 + jax.random.normal(k[2], (experts, OBS)), "action": jax.random.randint(k[3], (experts,), 0, ACTIONS)
    }  # fmt: skip
    return Workload(forms, (params_of(k[4], hidden, code), data, expert), tolerance=5e-6)
