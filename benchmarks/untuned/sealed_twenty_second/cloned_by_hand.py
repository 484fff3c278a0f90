"""TD3+BC by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_twenty_second import cloned as given
from benchmarks.untuned.sealed_twenty_second.cloned import ACTIONS, ALPHA, OBS, act, params_of, relu, returns, smoothed


def critic(critics, i, obs, action):
    """One of them; its first layer in two parts."""
    first, *rest = jax.tree.map(lambda w: w[i], critics)
    h = relu(obs @ first["w"][:OBS] + action @ first["w"][OBS:] + first["b"])
    return c.mlp(rest, h, relu)[..., 0]


def alone(critics, obs, action):
    """The first one."""
    return c.mlp(jax.tree.map(lambda w: w[0], critics), jnp.concatenate([obs, action], -1), relu)[..., 0]


def split(critics, obs, action):
    return jnp.stack([critic(critics, i, obs, action) for i in range(2)])


# -- features first: ``obs[OBS, N]``


def act_columns(p, obs):
    return jnp.tanh(c.columns(p["actor"], obs, relu))


def columns(critics, obs, action):
    x = jnp.concatenate([obs, action])
    return jnp.stack([c.columns(jax.tree.map(lambda w: w[i], critics), x, relu)[0] for i in range(2)])


def columns_alone(critics, obs, action):
    return c.columns(jax.tree.map(lambda w: w[0], critics), jnp.concatenate([obs, action]), relu)[0]


class Way(NamedTuple):
    critics: Any = c.one_by_one
    first: Any = alone
    act: Any = act
    turned: bool = False  # features first
    again: bool = False  # hidden layers are computed a second time
    once: bool = False  # the actor is asked once, and its slopes sent back behind the critic's
    chunk: int | None = None  # timesteps after the others


def by_hand(length, batch, way):
    count = length * batch
    turn = (lambda x: x.T) if way.turned else (lambda x: x)

    def worth(old, x):
        obs, noise = x
        return way.critics(old["critics"], obs, smoothed(way.act(old, obs), noise)).min(0)

    def critic_loss(critics, x):
        obs, action, target = x
        found = jax.checkpoint(way.critics) if way.again else way.critics
        return ((found(critics, obs, action) - target) ** 2).sum() / count

    def up(action, critics, obs):
        """The first critic's sum, and its size."""
        q = way.first(critics, obs, action)
        return q.sum() / count, jnp.abs(q).sum() / count

    def run(p, old, data, key):
        noise = c.normals(key, "smoothing", length, batch, (ACTIONS,))
        obs, done, noise = c.rows_of((data["obs"], data["action"], noise))
        if way.chunk is None:
            obs, done, noise = turn(obs), turn(done), turn(noise)
            target = returns(data, worth(old, (obs, noise)).reshape(length, batch)).reshape(-1)
            lost, by_critics = jax.value_and_grad(critic_loss)(p["critics"], (obs, done, target))

            def actor_loss(actor):
                action = way.act({"actor": actor}, obs)
                found, size = up(action, stop_gradient(p["critics"]), obs)
                return ((action - done) ** 2).mean() - ALPHA / stop_gradient(size) * found

            more, by_actor = jax.value_and_grad(actor_loss)(p["actor"])
            return lost + more, {"actor": by_actor, "critics": by_critics}

        obs, done, noise = jax.tree.map(jax.vmap(turn), c.in_chunks((obs, done, noise), way.chunk * batch))
        following = jax.lax.map(lambda x: worth(old, x), (obs, noise)).reshape(length, batch)
        target = returns(data, following).reshape(len(obs), -1)

        def learn(total, x):
            obs, done, target = x
            found = jax.value_and_grad(critic_loss)(p["critics"], (obs, done, target))
            action = way.act(p, obs)
            made = jax.value_and_grad(up, has_aux=True)(action, p["critics"], obs)
            return jax.tree.map(jnp.add, total, (found, made[0])), (action, made[1])

        none = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p["critics"])), (jnp.zeros(()), jnp.zeros(()))
        ((lost, by_critics), (found, size)), (action, by_action) = jax.lax.scan(learn, none, (obs, done, target))
        scale = ALPHA / size

        def close(total, x):
            """The actor's slopes, of what the critic said."""
            obs, done, by_action = x

            def loss(actor):
                action = way.act({"actor": actor}, obs)
                return ((action - done) ** 2).sum() / (count * ACTIONS) - scale * (action * by_action).sum()

            return jax.tree.map(jnp.add, total, jax.grad(loss)(p["actor"])), None

        by_actor = jax.lax.scan(close, jax.tree.map(jnp.zeros_like, p["actor"]), (obs, done, by_action))[0]
        return lost + ((action - done) ** 2).mean() - scale * found, {"actor": by_actor, "critics": by_critics}

    return run


def workload(length, batch, hidden, chunk=16):
    make = functools.partial(by_hand, length, batch)
    first = Way(columns, columns_alone, act_columns, turned=True)
    forms = {
        "rlfx": c.learner_by_rlfx(given.program, length, batch), "plain": given.plain(length, batch),
        "rows": make(Way(c.mapped)), "one by one": make(Way()), "first layers joined": make(Way(c.twins_joined)),
        "first layers split": make(Way(split)), "features first": make(first), "again": make(Way(again=True)),
        f"one by one, blocks of {chunk}": make(Way(chunk=chunk)),
        f"features first, blocks of {chunk}": make(first._replace(chunk=chunk)),
        "one by one, threefry unrolled": make(Way()), "features first, threefry unrolled": make(first),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 7)
    data = c.episodes(k, (length, batch), OBS, ACTIONS)
    del data["first"]
    data["action"] = jnp.tanh(jax.random.normal(k[4], (length, batch, ACTIONS)))
    return drawing(forms, (params_of(k[5], hidden), params_of(k[6], hidden), data), tolerance=2e-5)
