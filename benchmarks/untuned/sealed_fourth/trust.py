"""TRPO's step (Schulman et al. 2015) from a stored rollout: conjugate gradients solve for a direction by products of the
divergence's Hessian with vectors, and the divergence along it bounds its length."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, GAMMA, LAMBDA, DAMPING, RADIUS = 17, 6, 0.99, 0.97, 0.1, 0.01


def params_of(key, hidden):
    k = jax.random.split(key)
    log_std = -0.5 + 0.1 * jax.random.normal(k[1], (ACTIONS,))
    return {"mean": c.mlp_params(k[0], (OBS, hidden, hidden, ACTIONS)), "log_std": log_std}


def log_prob_of(mean, log_std, action):
    return -(0.5 * ((action - mean) / jnp.exp(log_std)) ** 2 + log_std).sum(-1)


def divergence_of(mean, log_std, old_mean, old_log_std):
    """Of normals: how far the old one is from the new one."""
    squares = jnp.exp(2.0 * old_log_std) + (old_mean - mean) ** 2
    return (log_std - old_log_std + 0.5 * squares / jnp.exp(2.0 * log_std) - 0.5).sum(-1)


def dot(a, b):
    return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b)))


def along(scale, a, b):
    """``b + scale * a``."""
    return jax.tree.map(lambda a, b: b + scale * a, a, b)


def conjugate_gradients(product, b, iterations):
    """What ``product`` makes b of, nearly."""

    def body(state, _):
        x, residual, direction, squares = state
        moved = product(direction)
        alpha = squares / dot(direction, moved)
        x, residual = along(alpha, direction, x), along(-alpha, moved, residual)
        after = dot(residual, residual)
        return (x, residual, along(after / squares, direction, residual), after), None

    start = jax.tree.map(jnp.zeros_like, b), b, b, dot(b, b)
    return jax.lax.scan(body, start, None, iterations)[0][0]


def step(p, grads, product, iterations):
    """The next parameters, as far away as the divergence allows."""
    damped = lambda v: along(DAMPING, v, product(v))  # noqa: E731
    x = conjugate_gradients(damped, jax.tree.map(jnp.negative, grads), iterations)
    scale = jnp.sqrt(2.0 * RADIUS / dot(x, damped(x)))
    return along(scale, x, p)


def surrogate(params, carry, t):
    p, data = params
    x = rlfx.inputs(data)[t]
    value = rlfx.series(x["value"], end=0.0)
    then = c.Step(x["reward"], x["done"], jnp.zeros_like(x["done"]))
    gained = rlfx.gae(then, value, value[t + 1], gamma=GAMMA, lam=LAMBDA)
    advantage = (gained - rlfx.mean(gained)) / (rlfx.std(gained) + 1e-8)
    ratio = jnp.exp(log_prob_of(c.mlp(p["mean"], x["obs"]), p["log_std"], x["action"]) - x["log_mu"])
    return -ratio * advantage, carry


def divergence(params, carry, t):
    p, data = params
    mean = c.mlp(p["mean"], rlfx.inputs(data["obs"])[t])
    return divergence_of(mean, p["log_std"], *stop_gradient((mean, p["log_std"]))), carry


def by_rlfx(length, batch, iterations):
    surrogate_fn, divergence_fn = (rlfx.compile(f, length=length, batch=batch) for f in (surrogate, divergence))
    nothing = jnp.zeros(batch)

    def run(p, data):
        found, grads = jax.value_and_grad(lambda p: surrogate_fn((p, data), nothing)[0])(p)
        slope = jax.grad(lambda p: divergence_fn((p, data), nothing)[0])
        product = lambda v: jax.grad(lambda p: dot(slope(p), v))(p)  # noqa: E731
        return found, grads, step(p, grads, product, iterations)

    return run


# -- by hand: products of the Hessian with vectors, of the policy's parameters and all observations


def mean_divergence(p, obs, again=False):
    def some(p, obs):
        mean = c.mlp(p["mean"], obs)
        return divergence_of(mean, p["log_std"], *stop_gradient((mean, p["log_std"]))).mean()

    return (jax.checkpoint(some) if again else some)(p, obs)


def twice_backwards(p, obs):
    slope = jax.grad(mean_divergence)
    return lambda v: jax.grad(lambda p: dot(slope(p, obs), v))(p)


def forwards(p, obs, again=False):
    """The derivative of the gradient."""
    return lambda v: jax.jvp(lambda p: jax.grad(mean_divergence)(p, obs, again), (p,), (v,))[1]


def linearized(p, obs):
    """The same, of which all that needs no vector is computed once."""
    return jax.linearize(lambda p: jax.grad(mean_divergence)(p, obs), p)[1]


def fisher(p, obs, once=True):
    """At the old parameters the Hessian is the outputs' own, between their derivatives: Gauss and Newton's, exactly."""
    outputs = lambda p: (c.mlp(p["mean"], obs), p["log_std"])  # noqa: E731
    rows = obs.size // OBS

    def between(of_mean, of_log_std):
        return of_mean / (rows * jnp.exp(2.0 * p["log_std"])), 2.0 * of_log_std

    if once:
        pushed = jax.linearize(outputs, p)[1]
        pulled = jax.linear_transpose(pushed, p)
        return lambda v: pulled(between(*pushed(v)))[0]

    def product(v):
        moved = jax.jvp(outputs, (p,), (v,))[1]
        return jax.vjp(outputs, p)[1](between(*moved))[0]

    return product


def written(layers, obs, first):
    """Two layers of tanh: what they hold is kept once, and products with vectors are three forwards and three backwards.
    ``first``: rows are innermost."""
    rows = len(obs)
    turn = (lambda x: x.T) if first else (lambda x: x)
    act = (lambda w, x: w.T @ x) if first else (lambda w, x: x @ w)
    back = (lambda w, x: w @ x) if first else (lambda w, x: x @ w.T)
    outer = (lambda x, g: x @ g.T) if first else (lambda x, g: x.T @ g)
    bias = (lambda b: b[:, None]) if first else (lambda b: b)
    held = [turn(obs)]
    for layer in layers[:-1]:
        held.append(jnp.tanh(act(layer["w"], held[-1]) + bias(layer["b"])))
    slopes = [1.0 - x**2 for x in held[1:]]

    def product(v, log_std):
        moved = act(v[0]["w"], held[0]) + bias(v[0]["b"])
        for layer, by, x, slope in zip(layers[1:], v[1:], held[1:], slopes, strict=True):
            moved = act(layer["w"], slope * moved) + act(by["w"], x) + bias(by["b"])
        g, found = moved * bias(jnp.exp(-2.0 * log_std) / rows), []
        for i in range(len(layers) - 1, -1, -1):
            found.append({"w": outer(held[i], g), "b": g.sum(1 if first else 0)})
            g = back(layers[i]["w"], g) * slopes[i - 1] if i else g
        return found[::-1]

    return product


def by_layers(p, obs, first=False):
    of_mean = written(p["mean"], obs, first)
    return lambda v: {"mean": of_mean(v["mean"], p["log_std"]), "log_std": 2.0 * v["log_std"]}


def in_blocks(products, blocks):
    """The sum over blocks of rows, each of which keeps nothing."""

    def of(p, obs):
        parts = obs.reshape(blocks, -1, OBS)

        def product(v):
            def add(total, part):
                return jax.tree.map(jnp.add, total, products(p, part)(v)), None

            total = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, v), parts)[0]
            return jax.tree.map(lambda x: x / blocks, total)

        return product

    return of


def by_hand(length, batch, iterations, products=forwards, flat=True, blocks=None):
    """``blocks``: into so many the surrogate's rows are divided, too."""

    def run(p, data):
        gained = c.gae(data["value"], jnp.zeros(batch), data["reward"], data["done"], GAMMA, LAMBDA)
        advantage = (gained - gained.mean()) / (gained.std() + 1e-8)

        def loss(p, part):
            obs, action, log_mu, advantage = part
            log_prob = log_prob_of(c.mlp(p["mean"], obs), p["log_std"], action)
            return -(jnp.exp(log_prob - log_mu) * advantage).sum() / (length * batch)

        part = data["obs"], data["action"], data["log_mu"], advantage
        part = c.rows_of(part) if flat else part
        if blocks is None:
            found, grads = jax.value_and_grad(loss)(p, part)
        else:
            found, grads = c.summed_gradient(loss, p, c.in_chunks(part, length * batch // blocks))
        return found, grads, step(p, grads, products(p, part[0]), iterations)

    return run


def workload(length, batch, hidden, iterations=10, few=4, many=16):
    make = lambda products=forwards, **how: by_hand(length, batch, iterations, products, **how)  # noqa: E731
    cut = lambda products, blocks: make(in_blocks(products, blocks), blocks=blocks)  # noqa: E731
    anew, first = functools.partial(fisher, once=False), functools.partial(by_layers, first=True)
    forms = {
        "rlfx": by_rlfx(length, batch, iterations), "plain": make(flat=False), "rows": make(),
        "twice backwards": make(twice_backwards), "checkpointed": make(functools.partial(forwards, again=True)),
        "linearized once": make(linearized), "Gauss-Newton": make(anew), "Gauss-Newton, once": make(fisher),
        "Gauss-Newton, once, not flattened": make(fisher, flat=False), "layers written out": make(by_layers),
        "features first": make(first), f"{few} blocks": cut(forwards, few), f"Gauss-Newton, {few} blocks": cut(anew, few),
        f"Gauss-Newton, {many} blocks": cut(anew, many), f"layers written out, {few} blocks": cut(by_layers, few),
        f"layers written out, {many} blocks": cut(by_layers, many), f"features first, {few} blocks": cut(first, few),
        f"features first, {many} blocks": cut(first, many),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    p = params_of(k[5], hidden)
    obs, noise = jax.random.normal(k[0], (*size, OBS)), jax.random.normal(k[1], (*size, ACTIONS))
    mean = c.mlp(p["mean"], obs)
    action = mean + jnp.exp(p["log_std"]) * noise
    data = {
        "obs": obs, "action": action, "log_mu": log_prob_of(mean, p["log_std"], action), "value": jax.random.normal(k[2], size),
        "reward": jax.random.normal(k[3], size), "done": (jax.random.uniform(k[4], size) < 0.02).at[-1].set(True),
    }  # fmt: skip
    # The surrogate is the mean of normalised advantages, 0 but for rounding.
    return Workload(forms, (p, data), compared=lambda result: (1.0 + result[0], *result[1:]), tolerance=1e-5)
