"""Bootstrapped DQN with randomised priors (Osband et al. 2018): an ensemble of networks, to each of which one is added that never
learns; the member that was drawn for an episode acts in it, and every member learns double Q-learning of its own from a random
half of the timesteps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, GAMMA, SCALE, KEEP, EPISODE = 12, 4, 0.99, 3.0, 0.5, 25
step_of, reset = c.drift_step(OBS, EPISODE), c.drift_reset(OBS)
relu = jax.nn.relu


def params_of(key, members, hidden):
    """Stacked: ``[members, ...]``."""
    return jax.vmap(lambda k: c.mlp_params(k, (OBS, hidden, hidden, ACTIONS)))(jax.random.split(key, members))


def values(nets, priors, obs):
    """Of one observation: ``[members, ACTIONS]``."""
    of = lambda net, prior: c.mlp(net, obs, relu) + SCALE * stop_gradient(c.mlp(prior, obs, relu))  # noqa: E731
    return jax.vmap(of)(nets, priors)


def program(params, carry, t):
    p, (old, priors) = params
    state, member = carry
    members = len(p[0]["b"])
    q = values(p, priors, state["x"])
    action = jnp.argmax(q[member])
    after, step = step_of(t.key_for("env"), state, action)
    best, kept = rlfx.series(jnp.argmax(q, -1)), rlfx.series(values(old, priors, state["x"]))
    following = jnp.take_along_axis(kept[t + 1], best[t + 1][:, None], -1)[:, 0]
    target = step.reward + GAMMA * (1.0 - step.terminated) * following
    learns = jax.random.bernoulli(t.key_for("mask"), KEEP, (members,))
    error = q[:, action] - stop_gradient(target)
    another = jax.random.randint(t.key_for("member"), (), 0, members)
    return 0.5 * (learns * error**2).sum(), (after, jnp.where(step.terminated, another, member))


# -- by hand, as usual


def all_values(nets, priors, obs):
    """``[..., members, ACTIONS]``."""
    of = lambda net, prior: c.mlp(net, obs, relu) + SCALE * stop_gradient(c.mlp(prior, obs, relu))  # noqa: E731
    return jnp.moveaxis(jax.vmap(of)(nets, priors), 0, -2)


def learnt(q, after, old_after, data):
    """Summed over ``[T, B]``; ``after`` and ``old_after``: values one timestep on."""
    following = c.pick(old_after, jnp.argmax(after, -1))
    target = data["reward"][..., None] + GAMMA * (1.0 - data["done"][..., None]) * following
    chosen = jnp.take_along_axis(q, data["action"][..., None, None], -1)[..., 0]
    return 0.5 * (data["learns"] * (chosen - stop_gradient(target)) ** 2).sum()


def masks(keys, t, members):
    return jax.vmap(lambda k: jax.random.bernoulli(k, KEEP, (members,)))(c.at(keys, t))


def plain(length, batch):
    def run(p, others, carry, key):
        (old, priors), members = others, len(p[0]["b"])
        env_keys, mask_keys, member_keys = c.streams(key, batch, "env", "mask", "member")

        def act(carry, t):
            state, member = carry
            q = all_values(p, priors, state["x"])
            action = jnp.argmax(jax.vmap(lambda q, m: q[m])(q, member), -1)
            after, step = jax.vmap(step_of)(c.at(env_keys, t), state, action)
            another = jax.vmap(lambda k: jax.random.randint(k, (), 0, members))(c.at(member_keys, t))
            data = {
                "obs": state["x"], "action": action, "reward": step.reward, "done": step.terminated.astype(jnp.float32),
                "learns": masks(mask_keys, t, members),
            }  # fmt: skip
            return (after, jnp.where(step.terminated, another, member)), data

        end, data = jax.lax.scan(act, carry, jnp.arange(length))
        following = c.shifted(data["obs"], end[0]["x"])

        def loss(p):
            q = all_values(p, priors, data["obs"])
            after = all_values(stop_gradient(p), priors, following)
            return learnt(q, after, all_values(old, priors, following), data) / (length * batch)

        return *jax.value_and_grad(loss)(p), end

    return run
