"""Muesli by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_twenty_first import muesli as given
from benchmarks.untuned.sealed_twenty_first.muesli import (
    ACTIONS,
    CLIP,
    GAMMA,
    OBS,
    STEPS,
    params_of,
    relu,
    returns_of,
)  # fmt: skip


class Way(NamedTuple):
    turned: bool = True  # features first, points innermost
    split: bool = False  # a state's product with the model's first weights apart from an action's
    fewer: bool = True  # no model goes on behind the last timestep
    heads: bool = False  # of all steps at once
    wide: bool = False  # of all actions at once, what is worth what
    envs: int | None = None  # environments that learn after the others
    targets: int | None = None  # environments of which targets are made after the others


def by_hand(length, batch, way):
    axis = 0 if way.turned else -1

    def linear(layer, x):
        return layer["w"].T @ x + layer["b"][:, None] if way.turned else c.linear(layer, x)

    def ones_of(action):
        every = jnp.arange(ACTIONS)
        return ((every[:, None] == action) if way.turned else (action[:, None] == every)).astype(jnp.float32)

    def cut(x, begin, end, axis_of_points=-1 if way.turned else 0):
        return jax.lax.slice_in_dim(x, begin, end, axis=axis_of_points % x.ndim)

    def seen(p, obs):
        first, second = p["see"]
        state = relu(linear(second, relu(linear(first, obs))))
        out = linear(p["now"], state)
        pi, v = (out[:-1], out[-1]) if way.turned else (out[:, :-1], out[:, -1])
        return state, jax.nn.log_softmax(pi, axis), v

    def parts_of(p):
        """The model's first weights, of states (with biases) and of actions."""
        first, n = p["model"][0], len(p["model"][1]["w"])
        return {"w": first["w"][:n], "b": first["b"]}, first["w"][n:]

    def led(p, state, ones):
        first, second = p["model"]
        if way.split:
            of_state, of_action = parts_of(p)
            h = linear(of_state, state) + (of_action.T @ ones if way.turned else ones @ of_action)
        else:
            h = linear(first, jnp.concatenate([state, ones], axis))
        return relu(linear(second, relu(h)))

    def worth(p, state):
        """What actions are worth, of rewards and values in one product: ``[ACTIONS, N]``, or ``[N, ACTIONS]``."""
        (of_state, of_action), second, then = parts_of(p), p["model"][1], p["then"]
        q = jax.tree.map(lambda x: x[..., -1:] + GAMMA * x[..., -2:-1], then)
        made, found = linear(of_state, state), []
        if way.wide and way.turned:
            h = relu(made[:, None] + of_action.T[:, :, None]).reshape(len(made), -1)
            return linear(q, relu(linear(second, h))).reshape(ACTIONS, -1)
        if way.wide:
            return linear(q, relu(linear(second, relu(made[:, None] + of_action))))[..., 0]
        for a in range(ACTIONS):
            h = made + (of_action[a][:, None] if way.turned else of_action[a])
            found.append(linear(q, relu(linear(second, relu(h)))))
        return jnp.concatenate(found, axis)

    def points(x):
        """``[T, B, ...]`` as rows or columns."""
        x = x.reshape(-1, *x.shape[2:])
        return x.T if way.turned else x

    def gather(x, ones):
        return (x * ones).sum(axis)

    def judged(old, data):
        """By the target network, ``[T, B]`` of environments: the prior policy, actions' worth, the value, and returns."""
        size = data["done"].shape
        state, prior, value = seen(old, points(data["obs"]))
        q, ones = worth(old, state), ones_of(data["action"].reshape(-1))
        rows = lambda x: x.reshape(size)  # noqa: E731
        log_rho = rows(gather(prior, ones)) - data["log_mu"]
        returns = returns_of(rows(gather(q, ones)), rows((jnp.exp(prior) * q).sum(axis)), log_rho, data)
        back = lambda x: (x.T if way.turned else x).reshape(*size, -1)  # noqa: E731
        return back(prior), back(q), rows(value), returns

    def lost(p, data):
        """Summed over all points."""
        size, n = data["done"].shape[1], data["done"].size
        flat = {name: data[name].reshape(-1) for name in ("reward", "returns", "gained", "log_mu", "done")}
        ones, better = ones_of(data["action"].reshape(-1)), points(data["better"])
        state, log_p, value = seen(p, points(data["obs"]))
        taken = gather(log_p, ones)
        ratio = jnp.minimum(stop_gradient(jnp.exp(taken - flat["log_mu"])), 1.0)
        loss = (0.5 * (value - flat["returns"]) ** 2 - ratio * flat["gained"] * taken - (better * log_p).sum(axis)).sum()
        there, going = jnp.ones(n), 1.0 - flat["done"].astype(jnp.float32)
        states, wanted = [], []

        def missed(states, weight, reward, going, aim, policy):
            out = linear(p["then"], states)
            pi, value, told = (out[:-2], out[-2], out[-1]) if way.turned else (out[:, :-2], out[:, -2], out[:, -1])
            log_p = jax.nn.log_softmax(pi, axis)
            found = 0.5 * (told - reward) ** 2 + going * (0.5 * (value - aim) ** 2 - (policy * log_p).sum(axis))
            return (weight * found).sum() / STEPS

        def ahead(x, k):
            """Of points ``k`` timesteps later; of the last ones that there are, or zeros."""
            x = cut(x, k * size, n)
            if way.fewer:
                return x
            pad = [(0, 0)] * x.ndim
            pad[-1 if way.turned else 0] = (0, k * size)
            return jnp.pad(x, pad)

        def one_more(x):
            """Behind the last timestep there is nothing."""
            pad = [(0, 0)] * x.ndim
            pad[-1 if way.turned else 0] = (0, size)
            return jnp.pad(x, pad)

        later = jax.tree.map(lambda x: one_more(cut(x, size, n)), (flat["returns"], better))
        for k in range(STEPS):
            m = n - k * size if way.fewer else n
            state, there = cut(state, 0, m), cut(there, 0, m)
            state = led(p, state, ahead(ones, k))
            told = there, ahead(flat["reward"], k), ahead(going, k), *(ahead(x, k) for x in later)
            there = there * told[2]
            if way.heads:
                states.append(state)
                wanted.append(told)
            else:
                loss += missed(state, *told)
        if way.heads:
            join = lambda *xs: jnp.concatenate(xs, -1 if way.turned else 0)  # noqa: E731
            loss += missed(join(*states), *jax.tree.map(join, *wanted))
        return loss / (length * batch)

    def over(data, envs):
        return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(length, -1, envs, *x.shape[2:]), 1, 0), data)

    def run(p, old, data):
        if way.targets is None:
            prior, q, value, returns = judged(old, data)
        else:
            made = jax.lax.map(lambda x: judged(old, x), over(data, way.targets))
            prior, q, value, returns = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(length, batch, *x.shape[3:]), made)
        gained = returns - value
        spread = jnp.sqrt((gained**2).mean() + 1e-8)
        better = jax.nn.softmax(prior + jnp.clip((q - value[..., None]) / spread, -CLIP, CLIP))
        data = data | {"returns": returns, "gained": gained / spread, "better": better}
        if way.envs is None:
            return jax.value_and_grad(lost)(p, data)
        return c.summed_gradient(lost, p, over(data, way.envs))

    return run


def workload(length, batch, hidden, envs=16):
    make, some = functools.partial(by_hand, length, batch), {"envs": envs, "targets": envs}
    rows, best = Way(turned=False, fewer=False), Way()
    forms = {
        "rlfx": given.by_rlfx(length, batch), "plain": given.plain(length, batch),
        "rows": make(rows), "rows, wide": make(rows._replace(wide=True)),
        f"rows, fewer, {envs} environments": make(rows._replace(fewer=True, **some)),
        "turned": make(best._replace(fewer=False)), "turned, fewer": make(best),
        "turned, fewer, wide": make(best._replace(wide=True)),
        "turned, fewer, split": make(best._replace(split=True)), "turned, fewer, heads at once": make(best._replace(heads=True)),
        f"turned, fewer, {envs} environments": make(best._replace(**some)),
        f"turned, fewer, targets of {envs} environments": make(best._replace(targets=envs)),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 8)
    data = c.episodes(k, (length, batch), OBS, ACTIONS)
    del data["first"]
    data["log_mu"] = -1.8 + 0.3 * jax.random.normal(k[4], (length, batch))
    return Workload(forms, (params_of(k[5], hidden), params_of(k[6], hidden), data), tolerance=5e-5)
