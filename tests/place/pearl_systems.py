"""Small systems for the tests of PEARL's runtime."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import rlfx.envs
from rlfx.place import pearl

ENV = rlfx.envs.make("CartPole-v1", max_steps_in_episode=20)


class Learner(NamedTuple):
    """A linear Q function, its target, and the number of updates."""

    w: jax.Array
    target: jax.Array
    updates: jax.Array


def learner(key):
    w = 0.1 * jax.random.normal(key, (4, 2))
    return Learner(w, w, jnp.int32(0))


def policy(w, obs, key, t):
    explore, which = jax.random.split(key)
    any_action = jax.random.randint(which, (), 0, 2, jnp.int32)
    greedy = jnp.argmax(obs @ w).astype(jnp.int32)
    return jnp.where(jax.random.bernoulli(explore, jnp.maximum(0.1, 1 - t / 50)), any_action, greedy)


def gradient(state, x, weight, key):
    def loss(w):
        future = jnp.where(x.terminated, 0.0, jnp.max(x.next_obs @ state.target, axis=1))
        chosen = jnp.take_along_axis(x.obs @ w, x.action[:, None], 1)[:, 0]
        errors = chosen - (0.1 * x.reward + 0.9 * future)
        return jnp.mean(weight * errors**2), errors

    grads, errors = jax.grad(loss, has_aux=True)(state.w)
    return grads, errors, {"noise": jax.random.uniform(key)}


def apply(state, grads):
    w = state.w - 0.05 * grads
    return Learner(w, 0.9 * state.target + 0.1 * w, state.updates + 1)


def system(**given):
    sizes = {"actors": 2, "envs": 3, "length": 2, "updates": 2, "batch": 8, "capacity": 64, "warmup": 20}
    parts = {
        "learner": learner,
        "weights": lambda state: state.w,
        "policy": policy,
        "gradient": gradient,
        "apply": apply,
    }
    return pearl.System(**{"env": ENV, **parts, **sizes, **given})


def deep(**given):
    """With two layers and RMSprop: sums of products, which XLA rounds as it fuses them."""

    def learner(key):
        a, b = jax.random.split(key)
        params = {"a": 0.5 * jax.random.normal(a, (4, 17)), "b": 0.5 * jax.random.normal(b, (17, 2))}
        return params, params, jax.tree.map(jnp.ones_like, params)

    def values(params, obs):
        return jnp.tanh(obs @ params["a"] + 0.1) @ params["b"]

    def gradient(state, x, weight, key):
        def loss(params):
            future = jnp.where(x.terminated, 0.0, jnp.max(values(state[1], x.next_obs), axis=1))
            chosen = jnp.take_along_axis(values(params, x.obs), x.action[:, None], 1)[:, 0]
            errors = chosen - (0.1 * x.reward + 0.9 * future)
            return jnp.mean(weight * errors**2), errors

        grads, errors = jax.grad(loss, has_aux=True)(state[0])
        return grads, errors, {"noise": jax.random.uniform(key)}

    def apply(state, grads):
        squares = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g * g, state[2], grads)
        params = jax.tree.map(lambda w, g, v: w - 0.01 * g / (jnp.sqrt(v) + 1e-5), state[0], grads, squares)
        return params, jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state[1], params), squares

    parts = {
        "learner": learner,
        "weights": lambda state: state[0]["a"] @ state[0]["b"],
        "gradient": gradient,
        "apply": apply,
    }
    return system(**{**parts, "batch": 32, **given})
