"""Model-based policy optimisation by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_twenty_second import imagined as given
from benchmarks.untuned.sealed_twenty_second.imagined import (
    ACTIONS,
    GAMMA,
    HORIZON,
    MEMBERS,
    OBS,
    changed,
    losses,
    models_of,
    params_of,
    silu,
)  # fmt: skip

# -- what the chosen member makes of rows ``x[N, OBS + ACTIONS]``, ``member[N]``


def picked(models, x, member):
    """All members, one by one; then one of them."""
    made = jnp.stack([c.mlp(c.member(models, i), x, silu) for i in range(MEMBERS)])
    return jnp.take_along_axis(made, member[None, :, None], 0)[0]


def masked(models, x, member):
    """Layer after layer: what goes in stands in its member's place among zeros, and weights are one below the other."""
    hot = jax.nn.one_hot(member, MEMBERS)
    for i, layer in enumerate(models):
        wide = (hot[:, :, None] * x[:, None]).reshape(len(x), -1)
        x = wide @ layer["w"].reshape(-1, layer["w"].shape[-1]) + hot @ layer["b"]
        x = silu(x) if i < len(models) - 1 else x
    return x


def grouped(models, x, member, block=32):
    """Rows in order of their members, every member's in blocks of its own: only what is looked at is multiplied."""
    hot = (member[:, None] == jnp.arange(MEMBERS)).astype(jnp.int32)
    before = jnp.cumsum(hot, 0)
    blocks = -(-before[-1] // block)
    ends = jnp.cumsum(blocks)
    place = (hot * ((ends - blocks) * block + before - 1)).sum(1)
    count = -(-len(x) // block) + MEMBERS
    apart = jnp.zeros((count * block, x.shape[1])).at[place].set(x, unique_indices=True)
    whose = jnp.minimum((jnp.arange(count)[:, None] >= ends).sum(1), MEMBERS - 1)
    made = jax.lax.map(lambda a: c.mlp(c.member(models, a[1]), a[0], silu), (c.in_chunks(apart, block), whose))
    return made.reshape(count * block, -1)[place]


# -- what was imagined, ``[HORIZON, N, ...]``


def drawn(key, length, batch):
    """All that is random, ``[HORIZON, N, ...]``; and of the learner ``[2, HORIZON, N, ACTIONS]``."""
    model_keys, noise_keys = c.streams(key, batch, "model", "noise")
    at = lambda keys: jax.vmap(lambda t: c.at(keys, t))(jnp.arange(length)).reshape(-1)  # noqa: E731

    def of(key):
        def step(key):
            a, m, n = jax.random.split(key, 3)
            member = jax.random.randint(m, (), 0, MEMBERS)
            return jax.random.normal(a, (ACTIONS,)), member, jax.random.normal(n, (OBS + 1,))

        return jax.vmap(step)(jax.random.split(key, HORIZON))

    steps = jax.vmap(of, out_axes=1)(at(model_keys))
    noise = jax.vmap(lambda k: jax.random.normal(k, (2, HORIZON, ACTIONS)))(at(noise_keys))
    return steps, jnp.moveaxis(noise, 0, 2)


def imagine(p, models, obs, draws, member_of):
    """With what the actor said of the next observations, which it is asked anyway."""
    asked = lambda obs: c.mlp(p["actor"], obs, jax.nn.relu)  # noqa: E731

    def body(carry, draws):
        (obs, alive), (noise, member, model_noise) = carry, draws
        told = asked(obs)
        action, _ = squash(told, noise, -1)
        made = member_of(models, jnp.concatenate([obs, action], -1), member)
        next_obs, reward, done = changed(obs, made, model_noise)
        seen = {"obs": obs, "action": action, "reward": reward, "done": done, "next": next_obs, "alive": alive, "told": told}
        return (next_obs, alive & ~done), seen

    (last, _), seen = jax.lax.scan(body, (obs, jnp.ones(len(obs), jnp.bool_)), draws)
    return seen | {"told": c.shifted(seen["told"], asked(last))}


# -- soft actor-critic of rows: the sum of losses


def as_usual(p, old, x, noise):
    return losses(p, old, x, noise).sum()


def squash(logits, noise, axis):
    mean, log_std = jnp.split(logits, 2, axis)
    log_std = jnp.clip(log_std, -5.0, 2.0)
    u = mean + jnp.exp(log_std) * noise
    log_prob = -0.5 * noise**2 - log_std - 0.919 - 2.0 * (jnp.log(2.0) - u - jax.nn.softplus(-2.0 * u))
    return jnp.tanh(u), log_prob.sum(axis)


class Soft(NamedTuple):
    """Features of rows come last."""

    critics: Any = c.one_by_one
    actor: Any = lambda p, x: c.mlp(p, x, jax.nn.relu)
    axis: int = -1


def turned(critics, obs, action):
    x = jnp.concatenate([obs, action])
    return jnp.stack([c.columns(c.member(critics, i), x, jax.nn.relu)[0] for i in range(2)])


FIRST = Soft(turned, lambda p, x: c.columns(p, x, jax.nn.relu), 0)


def learnt(p, old, x, noise, how=None, kept=False):
    """Where features come first, all is turned. ``kept``: the actor is not asked of next observations again."""
    how = how or Soft()
    if how.axis == 0:
        x = x | {name: x[name].T for name in ("obs", "action", "next", "told")}
        noise = jnp.swapaxes(noise, 1, 2)
    alpha = stop_gradient(jnp.exp(p["log_alpha"]))
    fixed = stop_gradient(p)
    told = x["told"] if kept else how.actor(fixed["actor"], x["next"])
    action, log_prob = squash(told, noise[0], how.axis)
    soft = how.critics(old, x["next"], action).min(0) - alpha * log_prob
    target = x["reward"] + GAMMA * jnp.where(x["done"], 0.0, soft)
    critic_loss = ((how.critics(p["critics"], x["obs"], x["action"]) - target) ** 2).sum(0)
    action, log_prob = squash(how.actor(p["actor"], x["obs"]), noise[1], how.axis)
    actor_loss = alpha * log_prob - how.critics(fixed["critics"], x["obs"], action).min(0)
    temperature = -p["log_alpha"] * stop_gradient(log_prob - ACTIONS)
    return jnp.where(x["alive"], critic_loss + actor_loss + temperature, 0.0).sum()


class Way(NamedTuple):
    member: Any = picked
    loss: Any = learnt
    chunk: int | None = None  # rows that learn after the others


def by_hand(length, batch, way):
    count = length * batch * HORIZON

    def run(p, others, data, key):
        models, old = others
        obs, (steps, noise) = data["obs"].reshape(-1, OBS), drawn(key, length, batch)

        def loss(p, part):
            return way.loss(p, old, *part) / count

        x = c.rows_of(imagine(p, models, obs, steps, way.member))
        noise = noise.reshape(2, -1, ACTIONS)
        if way.chunk is None:
            return jax.value_and_grad(loss)(p, (x, noise))
        noise = jnp.swapaxes(noise.reshape(2, -1, way.chunk, ACTIONS), 0, 1)
        return c.summed_gradient(loss, p, (c.in_chunks(x, way.chunk), noise))

    return run


def workload(length, batch, hidden, chunk=256, block=32):
    make = functools.partial(by_hand, length, batch)
    some = functools.partial(grouped, block=block)
    first, kept = functools.partial(learnt, how=FIRST), functools.partial(learnt, kept=True)
    both = functools.partial(learnt, how=FIRST, kept=True)
    forms = {
        "rlfx": c.learner_by_rlfx(given.program, length, batch), "plain": given.plain(length, batch),
        "rows": make(Way(loss=as_usual)), "one by one": make(Way()), "masked, kept": make(Way(masked, kept)),
        "grouped": make(Way(some)), "grouped, kept, features first": make(Way(some, both)),
        f"one by one, {chunk} rows": make(Way(chunk=chunk)),
        f"grouped, kept, features first, {chunk} rows": make(Way(some, both, chunk)),
        "one by one, kept, threefry unrolled": make(Way(loss=kept)),
        "grouped, features first, threefry unrolled": make(Way(some, first)),
        "grouped, kept, threefry unrolled": make(Way(some, kept)),
        "grouped, kept, features first, threefry unrolled": make(Way(some, both)),
        f"grouped, kept, features first, {chunk} rows, threefry unrolled": make(Way(some, both, chunk)),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 4)
    data = {"obs": jax.random.normal(k[0], (length, batch, OBS))}
    others = models_of(k[1], hidden), params_of(k[2], hidden)["critics"]
    return drawing(forms, (params_of(k[3], hidden), others, data), tolerance=2e-5)
