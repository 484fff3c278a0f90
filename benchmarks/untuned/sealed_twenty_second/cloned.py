"""TD3+BC (Fujimoto and Gu 2021) on stored sequences: twin critics learn returns of three steps, of target networks whose actions
are smoothed by noise; the actor goes up the first critic, scaled by its mean size in the batch, and stays close to the data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, GAMMA, STEPS, NOISE, CLIP, ALPHA = 17, 6, 0.99, 3, 0.2, 0.5, 2.5
relu = jax.nn.relu


def params_of(key, hidden):
    k = jax.random.split(key)
    critic = lambda key: c.mlp_params(key, (OBS + ACTIONS, hidden, hidden, 1))  # noqa: E731
    return {
        "actor": c.mlp_params(k[0], (OBS, hidden, hidden, ACTIONS)),
        "critics": jax.vmap(critic)(jax.random.split(k[1])),
    }


def act(p, obs):
    return jnp.tanh(c.mlp(p["actor"], obs, relu))


def smoothed(action, noise):
    return jnp.clip(action + jnp.clip(NOISE * noise, -CLIP, CLIP), -1.0, 1.0)


def program(params, carry, t):
    (p, old), data = params
    x = rlfx.inputs(data)[t]
    action = smoothed(act(old, x["obs"]), jax.random.normal(t.key_for("smoothing"), (ACTIONS,)))
    following = rlfx.series(c.mapped(old["critics"], x["obs"], action).min(0), end=0.0)
    going = rlfx.series(GAMMA * (1.0 - x["done"]))[t : t + STEPS]
    gained = rlfx.discounted_sum(rlfx.series(x["reward"])[t : t + STEPS], going)
    target = stop_gradient(gained + jnp.prod(going) * following[t + STEPS])
    critic_loss = ((c.mapped(p["critics"], x["obs"], x["action"]) - target) ** 2).sum(0)

    action = act(p, x["obs"])
    q = c.mapped(stop_gradient(p["critics"]), x["obs"], action)[0]
    scale = ALPHA / stop_gradient(rlfx.mean(jnp.abs(q), over=("t", "b")))
    return critic_loss - scale * q + ((action - x["action"]) ** 2).mean(), carry


# -- by hand, as usual


def returns(data, following):
    """Of three steps, ``[T, B]``; ``following``: what each timestep is worth."""
    going = GAMMA * (1.0 - data["done"].astype(jnp.float32))
    aim, left = jnp.zeros_like(following), jnp.ones_like(following)
    for i in range(STEPS):
        later = lambda x, i=i: jnp.pad(x[i:], ((0, i), (0, 0)))  # noqa: E731
        aim, left = aim + left * later(data["reward"]), left * later(going)
    return aim + left * jnp.pad(following[STEPS:], ((0, STEPS), (0, 0)))


def plain(length, batch):
    def run(p, old, data, key):
        noise = c.normals(key, "smoothing", length, batch, (ACTIONS,))
        following = c.mapped(old["critics"], data["obs"], smoothed(act(old, data["obs"]), noise)).min(0)
        target = returns(data, following)

        def loss(p):
            critic_loss = ((c.mapped(p["critics"], data["obs"], data["action"]) - target) ** 2).sum(0).mean()
            action = act(p, data["obs"])
            q = c.mapped(stop_gradient(p["critics"]), data["obs"], action)[0]
            scale = ALPHA / stop_gradient(jnp.abs(q).mean())
            return critic_loss - scale * q.mean() + ((action - data["action"]) ** 2).mean()

        return jax.value_and_grad(loss)(p)

    return run
