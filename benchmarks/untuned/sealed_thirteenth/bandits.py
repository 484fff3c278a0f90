"""A neural linear bandit (Riquelme et al. 2018) whose features are learnt through its updates (ALPaCA, Harrison et al. 2018):
Bayesian linear regression by recursive least squares on what a network makes of context and arm; arms are chosen by sampled
values, and how likely every reward was before it was seen is what is learnt, features and prior, over many tasks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

CONTEXT, ARMS, WAVES, VARIANCE = 10, 5, 24, 0.1


def params_of(key, hidden, features):
    """``mean`` and ``log_prior`` (of a diagonal, in variances of the noise): what is believed of weights before."""
    k = jax.random.split(key)
    return {
        "net": c.mlp_params(k[0], (CONTEXT, hidden, hidden, ARMS * features)),
        "mean": 0.1 * jax.random.normal(k[1], (features,)), "log_prior": jnp.zeros(features),
    }  # fmt: skip


def tasks_of(key, batch):
    """What is rewarded: waves of the context, of other weights for each task and arm."""
    k = jax.random.split(key)
    waves = jnp.broadcast_to(jax.random.normal(k[0], (CONTEXT, WAVES)), (batch, CONTEXT, WAVES))
    return {"waves": waves, "weights": jax.random.normal(k[1], (batch, WAVES, ARMS)) / WAVES**0.5}


def begins(p, batch):
    """Mean and covariance of each environment's weights."""
    both = p["mean"], jnp.diag(jnp.exp(p["log_prior"]))
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), both)


def features_of(net, context):
    """``[..., ARMS, features]``."""
    made = jnp.tanh(c.mlp(net, context))
    return made.reshape(*context.shape[:-1], ARMS, -1)


def rewards_of(task, context):
    """Of all arms, without noise."""
    return jnp.sin(context @ task["waves"]) @ task["weights"]


def updated(mean, cov, f, reward):
    """By one reward of features ``f``; and the error and (relative) variance there was."""
    gain = cov @ f
    spread, error = 1.0 + f @ gain, reward - f @ mean
    return mean + gain * (error / spread), cov - jnp.outer(gain, gain) / spread, error, spread


def unlikely(error, spread):
    return 0.5 * (error**2 / (VARIANCE * spread) + jnp.log(spread))


def program(params, carry, t):
    p, tasks = params
    task = rlfx.inputs(tasks, axes="b")[t]
    mean, cov = carry
    context = jax.random.normal(t.key_for("context"), (CONTEXT,))
    f = features_of(p["net"], context)
    spread = jnp.sqrt(VARIANCE * ((f @ cov) * f).sum(-1))
    sampled = f @ mean + spread * jax.random.normal(t.key_for("arm"), (ARMS,))
    arm = jnp.argmax(stop_gradient(sampled))
    reward = rewards_of(task, context)[arm] + VARIANCE**0.5 * jax.random.normal(t.key_for("reward"))
    mean, cov, error, spread = updated(mean, cov, f[arm], reward)
    return unlikely(error, spread), (mean, cov)


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, tasks, key):
        loss = lambda p: loss_fn((p, tasks), begins(p, batch), key)  # noqa: E731
        (found, ((mean, _), _)), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, mean

    return run


# -- by hand, as usual


def drawing(key, batch):
    """Of a timestep: contexts, noise of the arms' values, and of the reward."""
    contexts, arms, rewards = c.streams(key, batch, "context", "arm", "reward")

    def of(t):
        normals = lambda keys, *size: jax.vmap(lambda k: jax.random.normal(k, size))(c.at(keys, t))  # noqa: E731
        return normals(contexts, CONTEXT), normals(arms, ARMS), normals(rewards)

    return of


def plain(length, batch):
    def run(p, tasks, key):
        draw = drawing(key, batch)

        def loss(p):
            def one(carry, task, context, noise, more):
                mean, cov = carry
                f = features_of(p["net"], context)
                spread = jnp.sqrt(VARIANCE * ((f @ cov) * f).sum(-1))
                arm = jnp.argmax(stop_gradient(f @ mean + spread * noise))
                reward = rewards_of(task, context)[arm] + VARIANCE**0.5 * more
                mean, cov, error, spread = updated(mean, cov, f[arm], reward)
                return (mean, cov), unlikely(error, spread)

            def step(carry, t):
                return jax.vmap(one)(carry, tasks, *draw(t))

            (mean, _), found = jax.lax.scan(step, begins(p, batch), jnp.arange(length))
            return found.mean(), mean

        (found, mean), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return found, grads, mean

    return run
