"""Differentiable control (Amos et al. 2018): what a network makes of the context is the cost of a linear quadratic problem, whose
optimal controls should be those that an expert took; the gradient goes through the controller."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.untuned import common as c

CONTEXT, STATE, CONTROL = 16, 6, 2


def params_of(key, hidden):
    """``a`` and ``b``: how states and controls move the state; the network: costs."""
    k = jax.random.split(key, 3)
    return {
        "a": 0.8 * jnp.eye(STATE) + 0.06 * jax.random.normal(k[0], (STATE, STATE)),
        "b": 0.4 * jax.random.normal(k[1], (STATE, CONTROL)),
        "net": c.mlp_params(k[2], (CONTEXT, hidden, 2 * STATE + CONTROL)),
    }


def cost_of(net, context):
    """Weights of the squares of states and of controls, and what states cost linearly."""
    made = c.mlp(net, context)
    q, r, s = jnp.split(made, [STATE, STATE + CONTROL], -1)
    return jax.nn.softplus(q), 0.2 + jax.nn.softplus(r), s


def gains(p, cost, value):
    """What is best at one timestep, ``gain @ x + offset``, and its value; ``value``: what follows is worth."""
    (q, r, s), (big, small) = cost, value
    a, b = p["a"], p["b"]
    mixed, squares = b.T @ big @ a, jnp.diag(r) + b.T @ big @ b
    gain = -jnp.linalg.solve(squares, mixed)
    offset = -jnp.linalg.solve(squares, b.T @ small)
    return (gain, offset), (jnp.diag(q) + a.T @ big @ a + mixed.T @ gain, s + a.T @ small + mixed.T @ offset)


def nothing():
    """Of no gain and no value: what is behind the end."""
    return tuple((jnp.zeros((rows, STATE)), jnp.zeros(rows)) for rows in (CONTROL, STATE))


def program(params, x, t):
    (p, _), data = params
    seen = rlfx.inputs(data)[t]
    cost = cost_of(p["net"], seen["context"])
    (gain, offset), _ = rlfx.solve(lambda plan: gains(p, cost, plan[t + 1][1]), end=nothing())
    u = gain @ x + offset
    return ((u - seen["control"]) ** 2).sum(), p["a"] @ x + p["b"] @ u


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)
    return lambda p, x, data: jax.value_and_grad(lambda p: loss_fn(((p, None), data), x)[0])(p)


# -- by hand, as usual


def controls(p, context, x, unroll=1):
    """Of one environment, over all timesteps."""

    def backwards(value, cost):
        made, value = gains(p, cost, value)
        return value, made

    def forwards(x, made):
        u = made[0] @ x + made[1]
        return p["a"] @ x + p["b"] @ u, u

    made = jax.lax.scan(backwards, nothing()[1], cost_of(p["net"], context), reverse=True, unroll=unroll)[1]
    return jax.lax.scan(forwards, x, made, unroll=unroll)[1]


def plain(length, batch):
    def of_one(p, x, data):
        return ((controls(p, data["context"], x) - data["control"]) ** 2).sum(-1)

    def run(p, x, data):
        over = jax.vmap(of_one, (None, 0, 1))
        return jax.value_and_grad(lambda p: over(p, x, data).mean())(p)

    return run
