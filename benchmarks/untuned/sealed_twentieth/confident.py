"""Neural bandits that are sure of little (NeuralUCB, Zhou et al. 2020, with a diagonal, as its authors run it): of every arm that
is offered the slope of its worth in all parameters is found; an arm is worth trying where slopes of arms tried before were small
in those directions. What was tried is learnt from."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c

CONTEXT, ARMS, BONUS, RIDGE, NOISE = 16, 8, 0.5, 0.1, 0.1
relu = jax.nn.relu


def params_of(key, hidden):
    return c.mlp_params(key, (CONTEXT, hidden, hidden, 1))


def bandits_of(key, p, batch):
    """Of every bandit what is rewarded, and of every parameter the squared slopes so far."""
    task = jax.random.normal(key, (batch, CONTEXT))
    hidden = p[0]["b"].shape[0]
    return {"task": unit(task), "seen": jax.tree.map(lambda w: jnp.full((batch, *w.shape), RIDGE * hidden), p)}


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def worth(p, arm):
    return c.mlp(p, arm, relu)[0]


def truth(task, arm):
    return jnp.cos(3.0 * (task @ arm))


def unsure(slope, seen):
    """Of one arm."""
    parts = jax.tree.map(lambda g, s: (g**2 / s).sum(), slope, seen)
    return jnp.sqrt(sum(jax.tree.leaves(parts)))


def program(p, bandit, t):
    arms = unit(jax.random.normal(t.key_for("arms"), (ARMS, CONTEXT)))
    value, slope = jax.vmap(jax.value_and_grad(worth), (None, 0))(stop_gradient(p), arms)
    bound = value + BONUS * jax.vmap(unsure, (0, None))(slope, bandit["seen"])
    arm = jnp.argmax(bound)
    reward = truth(bandit["task"], arms[arm]) + NOISE * jax.random.normal(t.key_for("noise"))
    seen = jax.tree.map(lambda s, g: s + g[arm] ** 2, bandit["seen"], slope)
    return 0.5 * (worth(p, arms[arm]) - reward) ** 2, {"task": bandit["task"], "seen": seen}


# -- by hand, as usual


def plain(length, batch):
    def run(p, bandits, key):
        arm_keys, noise_keys = c.streams(key, batch, "arms", "noise")

        def pull(bandit, arm_key, noise_key):
            arms = unit(jax.random.normal(arm_key, (ARMS, CONTEXT)))
            value, slope = jax.vmap(jax.value_and_grad(worth), (None, 0))(p, arms)
            arm = jnp.argmax(value + BONUS * jax.vmap(unsure, (0, None))(slope, bandit["seen"]))
            reward = truth(bandit["task"], arms[arm]) + NOISE * jax.random.normal(noise_key)
            seen = jax.tree.map(lambda s, g: s + g[arm] ** 2, bandit["seen"], slope)
            return {"task": bandit["task"], "seen": seen}, (arms[arm], reward)

        def body(bandits, t):
            return jax.vmap(pull)(bandits, c.at(arm_keys, t), c.at(noise_keys, t))

        bandits, (arm, reward) = jax.lax.scan(body, bandits, jnp.arange(length))
        loss = lambda p: (0.5 * (c.mlp(p, arm, relu)[..., 0] - reward) ** 2).mean()  # noqa: E731
        return *jax.value_and_grad(loss)(p), bandits

    return run
