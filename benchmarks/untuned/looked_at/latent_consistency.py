"""TD-MPC's learner: a latent model rolled out over the next timesteps of stored data, from every one of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, GAMMA, RHO = 16, 3, 0.99, 0.5
elu = jax.nn.elu


def params_of(key, latent, hidden):
    k = jax.random.split(key, 5)
    both = latent + ACTIONS
    sizes = {
        "encoder": (OBS, hidden, latent), "pi": (latent, hidden, ACTIONS), "model": (both, hidden, latent),
        "reward": (both, hidden, 1), "q": (both, hidden, 1),
    }  # fmt: skip
    return {name: c.mlp_params(key, size) for key, (name, size) in zip(k, sizes.items(), strict=True)}


def encoded(p, obs):
    return jnp.tanh(c.mlp(p["encoder"], obs, elu))


def separate(p, z, action):
    """What follows ``z[..., latent]``, its reward, and the value of the action."""
    x = jnp.concatenate([z, action], -1)
    return jnp.tanh(c.mlp(p["model"], x, elu)), c.mlp(p["reward"], x, elu)[..., 0], c.mlp(p["q"], x, elu)[..., 0]


def joined(p, z, action):
    """The first layers of the three networks as one product."""
    first = jax.tree.map(lambda *w: jnp.concatenate(w, -1), *(p[name][0] for name in ("model", "reward", "q")))
    model, reward, q = jnp.split(elu(c.linear(first, jnp.concatenate([z, action], -1))), 3, -1)
    last = lambda name, x: c.linear(p[name][1], x)  # noqa: E731
    return jnp.tanh(last("model", model)), last("reward", reward)[..., 0], last("q", q)[..., 0]


def aims(target, x):
    """Of each timestep: the latent that followed, and the value of its action."""
    following = encoded(target, x["next_obs"])
    action = jnp.tanh(c.mlp(target["pi"], following, elu))
    return following, x["reward"] + GAMMA * separate(target, following, action)[2]


def step_of(p, networks=separate):
    """A step in the model: the next latent and the loss, beside what was stored and aimed at."""

    def step(z, x):
        action, reward, following, aim = x
        z, r, q = networks(p, z, action)
        return z, 2.0 * ((z - following) ** 2).mean(-1) + 0.5 * (r - reward) ** 2 + 0.1 * (q - aim) ** 2

    return step


def weights(steps):
    return RHO ** np.arange(steps, dtype=np.float32)


def by_rlfx(length, batch, steps):
    def program(params, carry, t):
        (p, target), data = params
        x = rlfx.inputs(data)[t]
        stored = x["action"], x["reward"], *stop_gradient(aims(target, x))
        ahead = rlfx.series(stored).window(0, steps)
        _, losses = jax.lax.scan(step_of(p), encoded(p, x["obs"]), ahead)
        return jnp.where(t + steps <= t.length, weights(steps) @ losses, 0.0), carry

    return c.learner_by_rlfx(program, length, batch)


def by_hand(length, batch, steps, networks=separate, unroll=1, again=False, chunk=None, stacked=True):
    """``stacked``: what is ahead of each timestep is copied for every step; else a slice is read at every step."""
    count = length - steps + 1  # timesteps with enough ahead of them

    def run(p, target, data):
        stored = data["action"], data["reward"], *aims(target, data)
        slice_of = lambda k, n, x: jax.lax.dynamic_slice_in_dim(x, k, n)  # noqa: E731
        some = lambda k, n: jax.tree.map(lambda x: slice_of(k, n, x).reshape(n * batch, *x.shape[2:]), stored)  # noqa: E731

        def loss(p, part, size=count):
            begin, obs = part
            step = step_of(p, networks)
            step = jax.checkpoint(step, prevent_cse=False) if again else step
            z, k = encoded(p, obs), jnp.arange(steps)
            if stacked:
                ahead = jax.tree.map(lambda *x: jnp.stack(x), *(some(begin + i, size) for i in range(steps)))
                losses = jax.lax.scan(step, z, ahead, unroll=unroll)[1]
            else:
                losses = jax.lax.scan(lambda z, k: step(z, some(begin + k, size)), z, k, unroll=unroll)[1]
            return (weights(steps) @ losses).sum() / (length * batch)

        obs = data["obs"][:count].reshape(count * batch, OBS)
        if chunk is None:
            return jax.value_and_grad(loss)(p, (0, obs))
        parts = jnp.arange(0, count, chunk), c.in_chunks(obs, chunk * batch)
        return c.summed_gradient(lambda p, part: loss(p, part, chunk), p, parts)

    return run


def workload(length, batch, steps, latent, hidden, chunk=4):
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "next_obs": jax.random.normal(k[1], (*size, OBS)),
        "action": jnp.tanh(jax.random.normal(k[2], (*size, ACTIONS))), "reward": jax.random.normal(k[3], size),
    }  # fmt: skip
    make = lambda **how: by_hand(length, batch, steps, **how)  # noqa: E731
    forms = {
        "rlfx": by_rlfx(length, batch, steps), "plain": make(), "sliced": make(stacked=False), "joined": make(networks=joined),
        "joined, sliced, unrolled": make(networks=joined, stacked=False, unroll=steps),
        "joined, checkpointed": make(networks=joined, again=True, stacked=False),
        f"joined, blocks of {chunk}": make(networks=joined, stacked=False, unroll=steps, chunk=chunk),
        f"blocks of {chunk}": make(stacked=False, unroll=steps, chunk=chunk),
        "blocks of 1": make(stacked=False, unroll=steps, chunk=1),
    }  # fmt: skip
    return Workload(forms, (params_of(k[4], latent, hidden), params_of(k[5], latent, hidden), data))
