"""Learners of values: quantiles of which the largest are left out (TQC), values of many discounts, Munchausen's DQN; and one
whose policy learns through the physics, some timesteps at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c
from benchmarks.untuned.ordinary import parts
from benchmarks.untuned.ordinary.critics import DIMS, GAMMA, OBS, noises, with_noise
from benchmarks.untuned.ordinary.distributions import at_points
from benchmarks.untuned.ordinary.parts import relu

# -- TQC (Kuznetsov et al. 2020): five critics of 25 quantiles; the ten largest of all are no part of the target

QUANTILES, DROPPED = 25, 2


def quantiles_params(key, hidden, members):
    sizes = OBS + DIMS, hidden, hidden, QUANTILES
    return jax.vmap(lambda k: c.mlp_params(k, sizes))(jax.random.split(key, members))


def quantiles(critics, obs, action):
    """``[..., members, QUANTILES]``."""
    x = jnp.concatenate([obs, action], -1)
    return jax.vmap(lambda p: c.mlp(p, x, relu), out_axes=-2)(critics)


def truncated_losses(p, target, x, next_obs, here, there):
    next_action, next_log = c.squashed(stop_gradient(p["actor"]), next_obs, there)
    all_of_them = quantiles(target, next_obs, next_action)
    members = all_of_them.shape[-2]
    kept = jnp.sort(all_of_them.reshape(*all_of_them.shape[:-2], -1), axis=-1)[..., : -DROPPED * members]
    soft, going = kept - 0.2 * next_log[..., None], GAMMA * (1.0 - x["done"])
    aim = stop_gradient(x["reward"][..., None] + going[..., None] * soft)
    error = aim[..., None, None, :] - quantiles(p["critics"], x["obs"], x["action"])[..., None]
    huber = jnp.where(jnp.abs(error) > 1.0, jnp.abs(error) - 0.5, 0.5 * error**2)
    middle = (jnp.arange(QUANTILES) + 0.5) / QUANTILES
    critic = (jnp.abs(middle[:, None] - (error < 0.0)) * huber).mean((-2, -1)).sum(-1)
    action, log_prob = c.squashed(p["actor"], x["obs"], here)
    return critic + 0.2 * log_prob - quantiles(stop_gradient(p["critics"]), x["obs"], action).mean((-2, -1))


def truncated(length, batch, hidden, members):
    k = jax.random.split(jax.random.key(0), 3)
    p = {"actor": c.mlp_params(k[0], (OBS, hidden, hidden, 2 * DIMS)), "critics": quantiles_params(k[1], hidden, members)}
    data, target = parts.stored(1, length, batch, (OBS,), (DIMS,)), quantiles_params(k[2], hidden, members)
    return parts.learner(*with_noise(truncated_losses, length, batch), length, batch, p, target, data, random=True)


# -- an actor-critic whose values are of sixteen discounts; the policy learns by the longest horizon

ACTIONS, DISCOUNTS, LAMBDA = 6, 16, 0.9


def many_params(key, hidden):
    k = jax.random.split(key, 3)
    return {
        "body": c.mlp_params(k[0], (OBS, hidden, hidden)), "v": c.dense(k[1], hidden, DISCOUNTS),
        "pi": c.dense(k[2], hidden, ACTIONS),
    }  # fmt: skip


def discounts():
    return 1.0 - jnp.exp(jnp.linspace(jnp.log(0.5), jnp.log(0.005), DISCOUNTS))


def many_losses(p, h, value, target, action):
    log_p = jax.nn.log_softmax(c.linear(p["pi"], h))
    advantage = stop_gradient(target - value)[..., -1]
    return 0.5 * ((value - target) ** 2).mean(-1) - c.pick(log_p, action) * advantage


def many_program(params, carry, t):
    (p, _), data = params
    x = rlfx.inputs(data, axes=parts.axes(data))[t]
    body = lambda obs: relu(c.mlp(p["body"], obs, relu))  # noqa: E731
    h = body(x["obs"])
    value, last = c.linear(p["v"], h), stop_gradient(c.linear(p["v"], body(x["last"])))
    following = rlfx.series(stop_gradient(value), end=last)[t + 1]
    discount = jnp.where(x["done"], 0.0, discounts())
    mixed = lambda g: x["reward"] + discount * ((1.0 - LAMBDA) * following + LAMBDA * g[t + 1])  # noqa: E731
    return many_losses(p, h, value, rlfx.solve(mixed, end=last), x["action"]), carry


def many_plain(p, _, data):
    h = relu(c.mlp(p["body"], parts.with_last(data), relu))
    value = c.linear(p["v"], h)
    following, discount = stop_gradient(value[1:]), jnp.where(data["done"][..., None], 0.0, discounts())

    def body(target, x):
        target = x[0] + x[1] * target
        return target, target

    now = data["reward"][..., None] + discount * (1.0 - LAMBDA) * following
    _, target = jax.lax.scan(body, following[-1], (now, LAMBDA * discount), reverse=True)
    return many_losses(p, h[:-1], value[:-1], target, data["action"]).mean()


def many(length, batch, hidden):
    data, p = parts.stored(1, length, batch, (OBS,), ACTIONS), many_params(jax.random.key(0), hidden)
    return parts.learner(many_program, parts.usual(many_plain), length, batch, p, (), data)


# -- Munchausen's DQN (Vieillard et al. 2020): how likely the old policy thought the action is a reward, too

TEMPERATURE = 0.03


def munchausen_losses(p, old, x, next_obs):
    likely = lambda q: jax.nn.log_softmax(q / TEMPERATURE)  # noqa: E731
    before, after = c.mlp(old, x["obs"], relu), c.mlp(old, next_obs, relu)
    bonus = 0.9 * jnp.clip(TEMPERATURE * c.pick(likely(before), x["action"]), -1.0, 0.0)
    log_pi = likely(after)
    soft = (jnp.exp(log_pi) * (after - TEMPERATURE * log_pi)).sum(-1)
    aim = x["reward"] + bonus + GAMMA * (1.0 - x["done"]) * soft
    return (c.pick(c.mlp(p, x["obs"], relu), x["action"]) - aim) ** 2


def munchausen(length, batch, hidden):
    p, old = (c.mlp_params(jax.random.key(i), (OBS, hidden, hidden, ACTIONS)) for i in range(2))
    data = parts.stored(2, length, batch, (OBS,), ACTIONS)
    return parts.learner(*at_points(munchausen_losses), length, batch, p, old, data)


# -- SHAC (Xu et al. 2022): the policy learns through sixteen timesteps of a pendulum's physics, and what a critic says after them

WINDOW = 16


def swung(state, push):
    """A pendulum, a timestep on, and what that costs: ``state[..., 2]``, the angle and the speed."""
    angle, speed = state[..., 0], state[..., 1]
    cost = (1.0 - jnp.cos(angle)) ** 2 + 0.01 * speed**2 + 0.001 * push**2
    speed = jnp.clip(speed + 0.05 * (15.0 * jnp.sin(angle) + 6.0 * push), -8.0, 8.0)
    return jnp.stack([angle + 0.05 * speed, speed], -1), cost


def observed(state):
    return jnp.stack([jnp.cos(state[..., 0]), jnp.sin(state[..., 0]), state[..., 1] / 8.0], -1)


def pushed(p, state, noise):
    return swung(state, jnp.tanh(c.mlp(p["pi"], observed(state))[..., 0] + 0.3 * noise))


def swung_losses(p, state, cost, after, into, target):
    """``into``: the timesteps of the window before this one."""
    actor = GAMMA**into * cost - jnp.where(into == WINDOW - 1, GAMMA**WINDOW * after, 0.0)
    return actor + (c.mlp(p["v"], observed(stop_gradient(state)))[..., 0] - stop_gradient(target)) ** 2


def swung_program(params, state, t):
    (p, old), _ = params
    state = jnp.where(t % WINDOW == 0, stop_gradient(state), state)
    following, cost = pushed(p, state, jax.random.normal(t.key_for("noise")))
    after = c.mlp(old, observed(following))[0]
    target = rlfx.solve(lambda g: -cost + GAMMA * ((1.0 - LAMBDA) * after + LAMBDA * g[t + 1]), end=after)
    return swung_losses(p, state, cost, after, t % WINDOW, target), following


def swung_plain(length, batch, start):
    def loss(p, old, _, key):
        (noise,) = noises(key, ("noise",), length, batch, ())
        into = jnp.arange(length) % WINDOW

        def body(state, x):
            state = jnp.where(x[1] == 0, stop_gradient(state), state)
            following, cost = pushed(p, state, x[0])
            return following, (state, following, cost)

        _, (state, following, cost) = jax.lax.scan(body, start, (noise, into))
        after = c.mlp(old, observed(following))[..., 0]

        def back(target, x):
            target = -x[0] + GAMMA * ((1.0 - LAMBDA) * x[1] + LAMBDA * target)
            return target, target

        _, target = jax.lax.scan(back, after[-1], stop_gradient((cost, after)), reverse=True)
        return swung_losses(p, state, cost, after, into[:, None], target).mean()

    return parts.usual(loss)


def physics(length, batch, hidden):
    p, old = parts.nets(jax.random.key(0), 3, hidden, 1), c.mlp_params(jax.random.key(1), (3, hidden, hidden, 1))
    start = jax.random.normal(jax.random.key(2), (batch, 2))
    return parts.learner(swung_program, swung_plain(length, batch, start), length, batch, p, old, (), start, random=True)
