"""PPO with curiosity by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_twenty_first import curious as given
from benchmarks.untuned.sealed_twenty_first.curious import (
    ACTIONS,
    BETA,
    BONUS,
    CLIP,
    EPISODE,
    GAMMA,
    LAMBDA,
    OBS,
    errors_of,
    params_of,
    point_loss,
    relu,
    reset,
)  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def known(layer, p, x, y):
    """``y``, which is ``layer(p, x)`` and was kept; what is known of it goes back as if it were made here."""
    return y


known.defvjp(lambda layer, p, x, y: (y, (p, x)), lambda layer, saved, by: (*jax.vjp(layer, *saved)[1](by), None))


def moved(fresh, state, action):
    """The environment, of a batch, with what new episodes begin with."""
    x = jnp.tanh(0.95 * state["x"] + 0.1 * jnp.roll(state["x"], 1, -1) + 0.05 * (action.astype(jnp.float32) - 1.5)[:, None])
    count = state["count"] + 1
    done = (x[:, 0] > 0.9) | (count >= EPISODE)
    new = {"x": jnp.where(done[:, None], fresh, x), "count": jnp.where(done, 0, count)}
    return new, -jnp.mean(x**2, -1), done


def drawn(keys, t):
    """Of all environments: noise of actions, and new episodes."""
    noise = jax.vmap(lambda k: jax.random.gumbel(k, (ACTIONS,)))(c.at(keys[0], t))
    return noise, jax.vmap(lambda k: jax.random.normal(k, (OBS,)))(c.at(keys[1], t))


def apart(p, obs):
    return c.mlp(p["v"], obs)[..., 0], c.mlp(p["code"], obs, relu)


def joined(p, obs):
    """Values and features, whose first layers are one product."""
    first = jax.tree.map(lambda a, b: jnp.concatenate([a, b], -1), p["v"][0], p["code"][0])
    v, code = jnp.split(c.linear(first, obs), [p["v"][0]["w"].shape[-1]], -1)
    return c.mlp(p["v"][1:], jnp.tanh(v))[..., 0], c.mlp(p["code"][1:], relu(code), relu)


def turned_nets(p, obs):
    """Values and features with features first, in products."""
    x = obs.reshape(-1, OBS).T
    v, code = c.columns(p["v"], x)[0], c.columns(p["code"], x, relu).T
    return v.reshape(obs.shape[:-1]), code.reshape(*obs.shape[:-1], -1)


def all_turned(p, seen, data, advantages, logits_of=None):
    """The loss of all points, features first in everything but in ``logits_of``; ``seen[T + 1, B, OBS]``."""
    batch, action = seen.shape[1], data["action"].reshape(-1)
    going = 1.0 - data["done"].reshape(-1).astype(jnp.float32)
    x = seen.reshape(-1, OBS).T
    acted = (jnp.arange(ACTIONS)[:, None] == action).astype(jnp.float32)
    values, codes = c.columns(p["v"], x)[0], c.columns(p["code"], x, relu)
    code, following = codes[:, :-batch], codes[:, batch:]
    told = c.columns(p["forward"], jnp.concatenate([code, acted]), relu)
    guess = jax.nn.log_softmax(c.columns(p["inverse"], jnp.concatenate([code, following]), relu), 0)
    ahead, inverse = 0.5 * ((told - following) ** 2).sum(0), -(guess * acted).sum(0)
    logits = c.columns(p["pi"], x[:, :-batch]) if logits_of is None else logits_of(p, data).reshape(-1, ACTIONS).T
    log_p = jax.nn.log_softmax(logits, 0)
    rows = lambda x: x.reshape(-1, batch)  # noqa: E731
    normal, target = jax.tree.map(jnp.ravel, stop_gradient(advantages(rows(values), rows(ahead))))
    log_prob = (log_p * acted).sum(0)
    ratio = jnp.exp(log_prob - stop_gradient(log_prob))
    gain = jnp.minimum(ratio * normal, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * normal)
    learnt = 0.5 * (values[:-batch] - target) ** 2 - gain + 0.01 * (jnp.exp(log_p) * log_p).sum(0)
    return (learnt + going * ((1.0 - BETA) * inverse + BETA * ahead)).mean()


class Way(NamedTuple):
    ahead: bool = True  # what is drawn comes before the loop
    nets: object = apart
    kept: bool = True  # the policy's layers are kept from acting
    chunk: int | None = None  # timesteps that learn after the others; what is rewarded is known before
    unroll: int = 1
    turned: bool = False  # all of the learner has features first


def by_hand(length, batch, way):
    def run(p, state, key):
        keys, times = c.streams(key, batch, "action", "env"), jnp.arange(length)
        draw = functools.partial(drawn, keys)

        def body(state, x):
            noise, fresh = x if way.ahead else draw(x)
            layers, y = [], state["x"]
            for layer in p["pi"][:-1]:
                layers.append(jnp.tanh(c.linear(layer, y)))
                y = layers[-1]
            layers.append(c.linear(p["pi"][-1], y))
            action = jnp.argmax(layers[-1] + noise, -1)
            after, reward, done = moved(fresh, state, action)
            told = {"obs": state["x"], "action": action, "reward": reward, "done": done}
            return after, told | ({"layers": layers} if way.kept else {})

        state, data = jax.lax.scan(body, state, jax.vmap(draw)(times) if way.ahead else times, unroll=way.unroll)
        seen = jnp.concatenate([data["obs"], state["x"][None]])
        going = 1.0 - data["done"].astype(jnp.float32)

        def logits_of(p, x):
            if not way.kept:
                return c.mlp(p["pi"], x["obs"])
            y = x["obs"]
            for i, layer in enumerate(p["pi"]):
                make = c.linear if i == len(p["pi"]) - 1 else lambda layer, x: jnp.tanh(c.linear(layer, x))
                y = known(make, layer, y, x["layers"][i])
            return y

        def advantages(values, ahead):
            advantage = c.gae(values[:-1], values[-1], data["reward"] + BONUS * going * ahead, data["done"], GAMMA, LAMBDA)
            normal = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            return normal, advantage + values[:-1]

        def lost(logits, value, ahead, inverse, x):
            log_p = jax.nn.log_softmax(logits)
            old = c.pick(stop_gradient(log_p), x["action"])
            learnt = point_loss(log_p, value, x["action"], old, x["advantage"], x["target"])
            return (learnt + x["going"] * ((1.0 - BETA) * inverse + BETA * ahead)).sum() / (length * batch)

        if way.turned:
            how = (logits_of,) if way.kept else ()
            return *jax.value_and_grad(all_turned)(p, seen, data, advantages, *how), state
        x = data | {"going": going}
        if way.chunk is None:

            def loss(p):
                values, codes = way.nets(p, seen)
                ahead, inverse = errors_of(p, codes[:-1], codes[1:], data["action"])
                normal, target = stop_gradient(advantages(values, ahead))
                return lost(logits_of(p, x), values[:-1], ahead, inverse, x | {"advantage": normal, "target": target})

            return *jax.value_and_grad(loss)(p), state

        values, codes = way.nets(p, seen)
        normal, target = advantages(values, errors_of(p, codes[:-1], codes[1:], data["action"])[0])

        def loss_of_some(p, part):
            x, following = part
            values, codes = way.nets(p, jnp.concatenate([x["obs"], following]))
            ahead, inverse = errors_of(p, codes[:-1], codes[1:], x["action"])
            return lost(logits_of(p, x), values[:-1], ahead, inverse, x)

        parts = c.in_chunks(x | {"advantage": normal, "target": target}, way.chunk), seen[way.chunk :: way.chunk][:, None]
        return *c.summed_gradient(loss_of_some, p, parts), state

    return run


def workload(length, batch, hidden, code, chunk=16):
    make = functools.partial(by_hand, length, batch)
    once, turned = Way(kept=False), Way(kept=False, turned=True)
    kept = turned._replace(kept=True)
    forms = {
        "rlfx": c.by_rlfx(given.program, length, batch), "plain": given.plain(length, batch),
        "once": make(once._replace(ahead=False)), "once, drawn ahead": make(once),
        f"joined, blocks of {chunk}": make(Way(nets=joined, kept=False, chunk=chunk)),
        "all turned, drawn ahead": make(turned), "all turned, kept, drawn ahead": make(kept),
        "once, drawn ahead, threefry unrolled": make(once),
        "turned, kept, drawn ahead, threefry unrolled": make(Way(nets=turned_nets)),
        "all turned, threefry unrolled": make(turned._replace(ahead=False)),
        "all turned, drawn ahead, threefry unrolled": make(turned),
        "all turned, kept, drawn ahead, threefry unrolled": make(kept),
        "all turned, kept, drawn ahead, unrolled by 4, threefry unrolled": make(kept._replace(unroll=4)),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 2)
    state = c.batch_of(reset, batch)
    state["count"] = jax.random.randint(k[0], (batch,), 0, EPISODE)
    return drawing(forms, (params_of(k[1], hidden, code), state), tolerance=5e-5)
