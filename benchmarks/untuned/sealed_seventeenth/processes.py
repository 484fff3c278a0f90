"""A policy by the gradient of what it costs in a model of Gaussian processes (PILCO, Deisenroth and Rasmussen 2011, by particles
as Parmas et al. 2018): every particle goes where a process for every number of the state says, with the process's own
uncertainty, and the policy learns through all timesteps. What was seen conditions the processes, by Cholesky's factors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve, cholesky, solve_triangular

from benchmarks.untuned import common as c

STATE, ACTIONS, EFFORT, WIDE = 5, 2, 0.01, 1.5
INPUTS = STATE + ACTIONS


def params_of(key, hidden):
    return c.mlp_params(key, (STATE, hidden, hidden, ACTIONS))


def model_of(key, points):
    """What was seen, and every process's length scales, signal and noise, by their logarithms."""
    k = jax.random.split(key, 4)
    x = jax.random.normal(k[0], (points, INPUTS))
    turned = jnp.tanh(x @ jax.random.normal(k[1], (INPUTS, STATE)) / INPUTS**0.5)
    return {
        "x": x, "y": 0.4 * turned - 0.3 * x[:, :STATE] + 0.1 * jax.random.normal(k[2], (points, STATE)),
        "scales": 0.7 + 0.2 * jax.random.normal(k[3], (STATE, INPUTS)), "signal": jnp.full(STATE, -0.7),
        "noise": jnp.full(STATE, -1.6),
    }  # fmt: skip


def covariances(process, x, y):
    """Of ``x[INPUTS]`` and of each of ``y[points, INPUTS]``."""
    far = (((x - y) / jnp.exp(process["scales"])) ** 2).sum(-1)
    return jnp.exp(2.0 * process["signal"] - 0.5 * far)


def conditioned(process, seen, y):
    """Cholesky's factor and weights ``[points]`` of one process."""
    cov = jax.vmap(lambda x: covariances(process, x, seen))(seen)
    factor = cholesky(cov + jnp.exp(2.0 * process["noise"]) * jnp.eye(len(seen)), lower=True)
    return factor, cho_solve((factor, True), y)


def predicted(process, posterior, seen, x):
    """Mean and variance at ``x[INPUTS]``."""
    factor, weights = posterior
    cov = covariances(process, x, seen)
    known = solve_triangular(factor, cov, lower=True)
    return cov @ weights, jnp.exp(2.0 * process["signal"]) + jnp.exp(2.0 * process["noise"]) - known @ known


def hyper(model):
    return {name: model[name] for name in ("scales", "signal", "noise")}


def cost_of(state, action):
    return 1.0 - jnp.exp(-0.5 * (state**2).sum(-1) / WIDE**2) + EFFORT * (action**2).sum(-1)


def program(params, state, t):
    p, model = params
    posterior = jax.vmap(conditioned, (0, None, 1))(hyper(model), model["x"], model["y"])
    action = jnp.tanh(c.mlp(p, state))
    x = jnp.concatenate([state, action])
    mean, variance = jax.vmap(predicted, (0, 0, None, None))(hyper(model), posterior, model["x"], x)
    state = state + mean + jnp.sqrt(variance) * jax.random.normal(t.key_for("next"), (STATE,))
    return cost_of(state, action), state


# -- by hand, as usual


def noise_at(keys, t):
    return jax.vmap(lambda k: jax.random.normal(k, (STATE,)))(c.at(keys, t))


def plain(length, batch):
    def run(p, model, start, key):
        posterior = jax.vmap(conditioned, (0, None, 1))(hyper(model), model["x"], model["y"])
        every = jax.vmap(predicted, (0, 0, None, None))
        (keys,) = c.streams(key, batch, "next")

        def loss(p):
            def step(state, t):
                action = jnp.tanh(c.mlp(p, state))
                x = jnp.concatenate([state, action], -1)
                mean, variance = jax.vmap(lambda x: every(hyper(model), posterior, model["x"], x))(x)
                state = state + mean + jnp.sqrt(variance) * noise_at(keys, t)
                return state, cost_of(state, action)

            state, cost = jax.lax.scan(step, start, jnp.arange(length))
            return cost.mean(), state

        (found, state), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, state

    return run
