"""Diffusion Q-learning: a denoiser fits stored actions, and what it makes of noise in a few steps pleases two critics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, CODE = 16, 4, 8
mish = lambda x: x * jnp.tanh(jax.nn.softplus(x))  # noqa: E731


def params_of(key, hidden):
    k = jax.random.split(key, 3)
    both = OBS + ACTIONS
    actor = c.mlp_params(k[0], (both + CODE, hidden, hidden, ACTIONS))
    return actor, [c.mlp_params(key, (both, hidden, hidden, 1)) for key in k[1:]]


def schedule(steps):
    """How much is left of an action after each step, and what is taken away in one."""
    beta = np.linspace(0.1, 0.6, steps, dtype=np.float32)
    return np.cumprod(1.0 - beta, dtype=np.float32), beta


def codes(steps):
    """``[steps, CODE]``: sines and cosines of the number of a step."""
    angle = np.arange(steps)[:, None] / 10.0 ** np.linspace(0, 1, CODE // 2)
    return np.concatenate([np.sin(angle), np.cos(angle)], -1).astype(np.float32)


def noise_of(actor, obs, action, code):
    shape = (*action.shape[:-1], CODE)
    return c.mlp(actor, jnp.concatenate([obs, action, jnp.broadcast_to(code, shape)], -1), mish)


def split_first(actor, obs):
    """The denoiser with the observation's part of its first product computed once for all steps."""
    w = actor[0]["w"]
    from_obs = obs @ w[:OBS] + actor[0]["b"]

    def noise(action, code):
        h = mish(from_obs + action @ w[OBS : OBS + ACTIONS] + code @ w[OBS + ACTIONS :])
        return c.mlp(actor[1:], h, mish)

    return noise


def whole_first(actor, obs):
    return lambda action, code: noise_of(actor, obs, action, code)


def made(noise, start, steps, unroll=1, again=False):
    """An action from noise ``start[..., ACTIONS]``."""
    left, beta = schedule(steps)

    def step(action, x):
        code, left, beta = x
        action = (action - beta / jnp.sqrt(1.0 - left) * noise(action, code)) / jnp.sqrt(1.0 - beta)
        return jnp.clip(action, -2.0, 2.0), None

    step = jax.checkpoint(step, prevent_cse=False) if again else step
    xs = tuple(jnp.asarray(x[::-1]) for x in (codes(steps), left, beta))
    return jax.lax.scan(step, start, xs, unroll=unroll)[0]


def point_loss(noise, critics, x, start, level, drawn, steps, q=None, **how):
    """Of one point, or of rows of them: ``level[...]`` is the step whose noise ``drawn`` is told."""
    left = jnp.asarray(schedule(steps)[0])[level][..., None]
    noisy = jnp.sqrt(left) * x["action"] + jnp.sqrt(1.0 - left) * drawn
    fit = ((noise(noisy, jnp.asarray(codes(steps))[level]) - drawn) ** 2).mean(-1)
    both = jnp.concatenate([x["obs"], made(noise, start, steps, **how)], -1)
    value = jnp.minimum(*(c.mlp(critic, both, mish)[..., 0] for critic in critics)) if q is None else q(critics, both)
    return fit - 0.1 * value


def program(steps):
    def learner(params, carry, t):
        (actor, critics), data = params
        x = rlfx.inputs(data)[t]
        start = jax.random.normal(t.key_for("start"), (ACTIONS,))
        drawn = jax.random.normal(t.key_for("drawn"), (ACTIONS,))
        level = jax.random.randint(t.key_for("level"), (), 0, steps)
        return point_loss(whole_first(actor, x["obs"]), stop_gradient(critics), x, start, level, drawn, steps), carry

    return learner


def mapped(critics, both):
    """Both critics by `jax.vmap` over their stacked weights."""
    stacked = jax.tree.map(lambda *w: jnp.stack(w), *critics)
    return jax.vmap(lambda p: c.mlp(p, both, mish)[..., 0])(stacked).min(0)


def by_hand(length, batch, steps, first=whole_first, chunk=None, flat=True, **how):
    def run(actor, critics, data, key):
        keys = c.streams(key, batch, "start", "drawn", "level")
        normal = jax.vmap(lambda k: jax.random.normal(k, (ACTIONS,)))
        ts = jnp.arange(length)
        start, drawn = (jax.vmap(lambda t, k=k: normal(c.at(k, t)))(ts) for k in keys[:2])
        level = jax.vmap(lambda t: jax.vmap(lambda k: jax.random.randint(k, (), 0, steps))(c.at(keys[2], t)))(ts)

        def loss(actor, part):
            x, *drawn = part
            return point_loss(first(actor, x["obs"]), critics, x, *drawn, steps, **how).sum() / (length * batch)

        part = (data, start, level, drawn)
        if chunk is None:
            return jax.value_and_grad(loss)(actor, c.rows_of(part) if flat else part)
        return c.summed_gradient(loss, actor, c.in_chunks(c.rows_of(part), chunk * batch))

    return run


def workload(length, batch, steps, hidden, chunk=4):
    k = jax.random.split(jax.random.key(0), 3)
    data = {
        "obs": jax.random.normal(k[0], (length, batch, OBS)),
        "action": jnp.tanh(jax.random.normal(k[1], (length, batch, ACTIONS))),
    }
    make = lambda **how: by_hand(length, batch, steps, **how)  # noqa: E731
    split, unrolled = {"first": split_first}, {"unroll": steps}
    forms = {
        "rlfx": c.learner_by_rlfx(program(steps), length, batch), "plain": make(), "not flattened": make(flat=False),
        "first product split": make(**split), "split, unrolled": make(**split, **unrolled),
        "split, steps again": make(**split, again=True), "critics together": make(q=mapped),
        f"blocks of {chunk}": make(chunk=chunk, **unrolled), "blocks of 1": make(chunk=1, **unrolled),
        f"split, unrolled, blocks of {chunk}": make(**split, **unrolled, chunk=chunk),
    }  # fmt: skip
    return Workload(forms, (*params_of(k[2], hidden), data, jax.random.key(3)))
