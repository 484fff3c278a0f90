"""Evolution strategies (Salimans et al. 2017): policies about one another, in pairs, swing up a pendulum; the gradient is by
ranks of what they gained."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import rlfx
from benchmarks.untuned import common as c

OBS, SIGMA, DT, GRAVITY, MOST = 3, 0.1, 0.05, 10.0, 8.0


def params_of(key, hidden):
    return c.mlp_params(key, (OBS, hidden, hidden, 1))


def observed(state):
    """Angle and speed, ``[..., 2]``."""
    angle, speed = state[..., 0], state[..., 1]
    return jnp.stack([jnp.cos(angle), jnp.sin(angle), speed], -1)


def swung(state, torque):
    """A pendulum's next state, and the reward."""
    angle, speed = state[..., 0], state[..., 1]
    away = (angle + jnp.pi) % (2 * jnp.pi) - jnp.pi
    reward = -(away**2 + 0.1 * speed**2 + 0.001 * torque**2)
    speed = jnp.clip(speed + DT * (1.5 * GRAVITY * jnp.sin(angle) + 3.0 * torque), -MOST, MOST)
    return jnp.stack([angle + DT * speed, speed], -1), reward


def program(p, state, t):
    torque = 2.0 * jnp.tanh(c.mlp(p, observed(state))[0])
    state, reward = swung(state, torque)
    return -reward, state


def perturbed(p, key, pairs):
    """Noise of each pair, and the parameters of both of each, ``[2 * pairs, ...]``."""
    leaves, structure = jax.tree.flatten(p)
    keys = jax.random.split(key, len(leaves))
    noise = [jax.random.normal(k, (pairs, *w.shape)) for k, w in zip(keys, leaves, strict=True)]
    noise = jax.tree.unflatten(structure, noise)
    return noise, jax.tree.map(lambda w, e: jnp.concatenate([w + SIGMA * e, w - SIGMA * e]), p, noise)


def centred(fitness):
    """Ranks from -0.5 to 0.5."""
    return jnp.argsort(jnp.argsort(fitness)) / (len(fitness) - 1) - 0.5


def estimate(noise, losses):
    """The slope of ranks of losses."""
    first, second = jnp.split(centred(losses), 2)
    return jax.tree.map(lambda e: jnp.tensordot(first - second, e, 1) / (len(losses) * SIGMA), noise)


def by_rlfx(length, batch, pairs):
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, state, key):
        noise, members = perturbed(p, key, pairs)
        losses = jax.vmap(lambda p: loss_fn(p, state)[0])(members)
        return losses.mean(), estimate(noise, losses)

    return run


# -- by hand, as usual


def plain(length, batch, pairs):
    def loss_of(p, state):
        def step(state, _):
            torque = 2.0 * jnp.tanh(c.mlp(p, observed(state))[..., 0])
            state, reward = swung(state, torque)
            return state, reward

        return -jax.lax.scan(step, state, None, length=length)[1].mean()

    def run(p, state, key):
        noise, members = perturbed(p, key, pairs)
        losses = jax.vmap(loss_of, (0, None))(members, state)
        return losses.mean(), estimate(noise, losses)

    return run
