"""PEARL by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_seventeenth import contexts
from benchmarks.untuned.sealed_seventeenth.contexts import (
    ACTIONS,
    ALPHA,
    CODE,
    GAMMA,
    OBS,
    PRIOR,
    critics_of,
    drawn,
    from_prior,
    params_of,
    relu,
    squashed,
)  # fmt: skip


class Way(NamedTuple):
    """How first layers take tasks, and how both critics are multiplied, of ``[T, B, features]``."""

    first: Any
    critics: Any
    shared: bool = False  # what critics' first layers make of observations serves the actor, too


# -- first layers, of what is known of timesteps ``x[T, B, inputs]``, and of tasks ``z[B, CODE]``


def repeated(w, b, x, z):
    return jnp.concatenate([x, jnp.broadcast_to(z, (*x.shape[:-1], CODE))], -1) @ w.T + b


def task_once(w, b, x, z):
    """What a task adds is multiplied once."""
    return x @ w[:, :-CODE].T + (z @ w[:, -CODE:].T + b)


# -- critics behind their first layers ``[T, B, 2, hidden]``: ``[T, B, 2]``


def together(critics, before):
    _, second, last = critics
    g = relu(jnp.einsum("tbmh,mgh->tbmg", relu(before), second["w"]) + second["b"])
    return jnp.einsum("tbmg,mg->tbm", g, last["w"][:, 0]) + last["b"][:, 0]


def one_by_one(critics, before):
    _, second, last = critics
    h = relu(before)
    g = [relu(h[:, :, m] @ second["w"][m].T + second["b"][m]) for m in range(2)]
    return jnp.stack([g[m] @ last["w"][m, 0] + last["b"][m, 0] for m in range(2)], -1)


def first_of(way, critics, obs, action, z):
    """Both first layers as one product."""
    w, b = critics[0]["w"], critics[0]["b"]
    made = way.first(w.reshape(-1, w.shape[2]), b.reshape(-1), jnp.concatenate([obs, action], -1), z)
    return made.reshape(*made.shape[:-1], *b.shape)


def exchanged(critics, before, old, new):
    """Had another action been done."""
    return before + jnp.einsum("tba,mha->tbmh", new - old, critics[0]["w"][:, :, OBS : OBS + ACTIONS])


def acted(way, layers, obs, z, noise):
    x = relu(way.first(layers[0]["w"], layers[0]["b"], obs, z))
    x = relu(x @ layers[1]["w"].T + layers[1]["b"])
    return squashed(*jnp.split(x @ layers[2]["w"].T + layers[2]["b"], 2, -1), noise)


def posterior(layers, data, noise):
    """Samples ``[B, CODE]``, and how far posteriors are from the prior, summed."""
    x = jnp.concatenate([data["obs"], data["action"], data["reward"][..., None], data["after"]], -1)
    for layer in layers[:-1]:
        x = relu(x @ layer["w"].T + layer["b"])
    mean, spread = jnp.split(x @ layers[-1]["w"].T + layers[-1]["b"], 2, -1)
    precision = 1.0 / (jax.nn.softplus(spread) + 0.1)
    variance = 1.0 / precision.sum(0)
    mean = variance * (precision * mean).sum(0)
    return mean + jnp.sqrt(variance) * noise, from_prior(mean, variance)


def rows(way, again=False):
    """A loss of some tasks, summed. ``again``: what networks make is made again for the gradient."""
    keep = jax.checkpoint if again else lambda f: f

    def critic(p, z, aim, x):
        before = first_of(way, p["critics"], x["obs"], x["action"], z)
        return 0.5 * ((way.critics(p["critics"], before) - aim[..., None]) ** 2).sum(), stop_gradient(before)

    def actor(layers, critics, z, before, x, here):
        action, log_prob = acted(way, layers, x["obs"], z, here)
        if way.shared:
            before = exchanged(critics, before, x["action"], action)
        else:
            before = first_of(way, critics, x["obs"], action, z)
        return (ALPHA * log_prob - way.critics(critics, before).min(-1)).sum()

    def loss(p, target, x, noise, here, there):
        z, far = keep(posterior)(p["encoder"], x, noise)
        task, fixed = stop_gradient(z), stop_gradient(p)
        action, log_prob = acted(way, fixed["actor"], x["after"], task, there)
        following = way.critics(target, first_of(way, target, x["after"], action, task)).min(-1) - ALPHA * log_prob
        aim = stop_gradient(x["reward"] + GAMMA * (1.0 - x["done"]) * following)
        errors, before = keep(critic)(p, z, aim, x)
        return errors + keep(actor)(p["actor"], fixed["critics"], task, before, x, here) + PRIOR * len(aim) * far

    return loss


# -- features first: ``[features, T, B]``, of tasks ``[features, B]``


def columns(shared):
    def product(w, x):
        return (w @ x.reshape(len(x), -1)).reshape(-1, *x.shape[1:])

    def first(w, b, x, z):
        return product(w[:, :-CODE], x) + (w[:, -CODE:] @ z + b[:, None])[:, None]

    def further(layers, x):
        x = relu(product(layers[1]["w"], relu(x)) + layers[1]["b"][:, None, None])
        return product(layers[2]["w"], x) + layers[2]["b"][:, None, None]

    def both(critics, before):
        each = [further(jax.tree.map(lambda w: w[m], critics), x) for m, x in enumerate(jnp.split(before, 2))]
        return jnp.concatenate(each)

    def first_both(critics, obs, action, z):
        w, b = critics[0]["w"], critics[0]["b"]
        return first(w.reshape(-1, w.shape[2]), b.reshape(-1), jnp.concatenate([obs, action]), z)

    def acted(layers, obs, z, noise):
        mean, log_std = jnp.split(further(layers, first(layers[0]["w"], layers[0]["b"], obs, z)), 2)
        return tuple(
            jnp.moveaxis(x, -1, 0) if x.ndim == 3 else x
            for x in squashed(jnp.moveaxis(mean, 0, -1), jnp.moveaxis(log_std, 0, -1), noise)
        )

    def loss(p, target, x, noise, here, there):
        obs, action, after = (jnp.moveaxis(x[name], -1, 0) for name in ("obs", "action", "after"))
        layers, fixed = p["encoder"], stop_gradient(p)
        seen = jnp.concatenate([obs, action, x["reward"][None], after])
        made = further(layers, product(layers[0]["w"], seen) + layers[0]["b"][:, None, None])
        mean, precision = made[:CODE], 1.0 / (jax.nn.softplus(made[CODE:]) + 0.1)
        variance = 1.0 / precision.sum(1)
        mean = variance * (precision * mean).sum(1)
        z = mean + jnp.sqrt(variance) * noise.T
        task = stop_gradient(z)
        new, log_prob = acted(fixed["actor"], after, task, there)
        following = both(target, first_both(target, after, new, task)).min(0) - ALPHA * log_prob
        aim = stop_gradient(x["reward"] + GAMMA * (1.0 - x["done"]) * following)
        before = first_both(p["critics"], obs, action, z)
        errors = 0.5 * ((both(p["critics"], before) - aim) ** 2).sum()
        new, log_prob = acted(p["actor"], obs, task, here)
        critics = fixed["critics"]
        if shared:
            w = critics[0]["w"][:, :, OBS : OBS + ACTIONS].reshape(-1, ACTIONS)
            before = stop_gradient(before) + product(w, new - action)
        else:
            before = first_both(critics, obs, new, task)
        gained = both(critics, before).min(0) - ALPHA * log_prob
        return errors - gained.sum() + PRIOR * len(aim) * from_prior(mean, variance)

    return loss


# -- what is learnt


def by_hand(length, batch, loss, chunk=None):
    """``chunk``: tasks after the others, whose random numbers are drawn there."""
    scale = 1.0 / (length * batch)

    def run(p, target, data, key):
        keys = c.streams(key, batch, "here", "there")
        steps = {name: x for name, x in data.items() if name != "noise"}

        def of(p, x):
            steps, (noise, keys) = x
            here, there = jax.vmap(lambda t: drawn(keys, t))(jnp.arange(length))
            return scale * loss(p, target, steps, noise, here, there)

        return c.gradient_by_environments(of, chunk)(p, steps, (data["noise"], keys))

    return run


def workload(length, batch, hidden, chunk=8):
    make = functools.partial(by_hand, length, batch)
    repeat, once = rows(Way(repeated, together)), rows(Way(task_once, one_by_one))
    share = rows(Way(task_once, one_by_one, shared=True))
    forms = {
        "rlfx": c.learner_by_rlfx(contexts.program, length, batch), "plain": contexts.plain(length, batch),
        "repeated, together": make(repeat), "repeated, one by one": make(rows(Way(repeated, one_by_one))),
        "task once, together": make(rows(Way(task_once, together))), "task once, one by one": make(once),
        "task once, shared": make(share), "task once, shared, again": make(rows(Way(task_once, one_by_one, True), again=True)),
        "features first": make(columns(False)), "features first, shared": make(columns(True)),
        f"task once, shared, {chunk} tasks": make(share, chunk),
        f"features first, shared, {chunk} tasks": make(columns(True), chunk),
        "task once, shared, threefry unrolled": make(share), "features first, shared, threefry unrolled": make(columns(True)),
        f"task once, shared, {chunk} tasks, threefry unrolled": make(share, chunk),
        f"features first, shared, {chunk} tasks, threefry unrolled": make(columns(True), chunk),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 8)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jnp.tanh(jax.random.normal(k[1], (*size, ACTIONS))),
        "reward": jax.random.normal(k[2], size), "after": jax.random.normal(k[3], (*size, OBS)),
        "done": (jax.random.uniform(k[4], size) < 0.05).astype(jnp.float32), "noise": jax.random.normal(k[5], (batch, CODE)),
    }  # fmt: skip
    return drawing(forms, (params_of(k[6], hidden), critics_of(k[7], hidden), data), tolerance=2e-5)
