"""One-epoch PPO, alone or for many seeds under `jax.vmap`, and n-step A2C: feed-forward, a rollout and one gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

import rlfx

from . import common as c
from .measure import Workload

OBS, ACTIONS, GAMMA, LAMBDA, CLIP, STEPS = 8, 4, 0.99, 0.95, 0.2, 5
drift = c.drift_step(OBS, 50)


def params_of(obs, actions, hidden):
    actor, critic = jax.random.split(jax.random.key(0))
    return {
        "pi": c.mlp_params(actor, (obs, hidden, hidden, actions)),
        "v": c.mlp_params(critic, (obs, hidden, hidden, 1)),
    }


def heads(p, obs):
    return c.mlp(p["pi"], obs), c.mlp(p["v"], obs)[..., 0]


def ppo_loss(logits, v, log_prob, old, normalised, target):
    ratio = jnp.exp(log_prob - old)
    gain = jnp.minimum(ratio * normalised, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * normalised)
    return c.actor_critic_loss(logits, v, 0.0, 0.0, target) - gain


def ppo(p, state, t):
    logits, v = heads(p, state["x"])
    action = jax.random.categorical(t.key_for("action"), stop_gradient(logits))
    state, step = drift(t.key_for("env"), state, action)
    value = rlfx.series(v)
    advantage = stop_gradient(rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=LAMBDA))
    normalised = (advantage - rlfx.mean(advantage)) / (rlfx.std(advantage) + 1e-8)
    log_prob = jax.nn.log_softmax(logits)[action]
    return ppo_loss(logits, v, log_prob, stop_gradient(log_prob), normalised, advantage + stop_gradient(v)), state


def a2c(p, state, t):
    logits, v = heads(p, state["x"])
    action = jax.random.categorical(t.key_for("action"), stop_gradient(logits))
    state, step = c.cartpole_step(t.key_for("env"), state, action)
    value = rlfx.series(v)
    target = stop_gradient(rlfx.n_step_return(step, value[t + 1], gamma=GAMMA, n=STEPS))
    log_prob = jax.nn.log_softmax(logits)[action]
    return c.actor_critic_loss(logits, v, log_prob, target - stop_gradient(v), target), state


def ppo_points(v, last, log_prob, reward, done):
    """What the loss of a point takes beside the networks' outputs and its own log-probability."""
    advantage = c.gae(v, last, reward, done, GAMMA, LAMBDA)
    return log_prob, (advantage - advantage.mean()) / (advantage.std() + 1e-8), advantage + v


def a2c_points(v, last, log_prob, reward, done):
    going = GAMMA * (1.0 - done.astype(jnp.float32))
    target = reward + going * c.shifted(v, last)
    for _ in range(STEPS - 1):
        target = reward + going * c.shifted(target, last)
    return target - v, target


def by_hand(step_of, points, loss_of, length, batch, flat=True, chunk=None):
    def run(p, state, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")

        def body(state, t):
            logits, v = heads(p, state["x"])
            action = c.categorical(c.at(action_keys, t), logits)
            after, step = jax.vmap(step_of)(c.at(env_keys, t), state, action)
            log_prob = c.pick(jax.nn.log_softmax(logits), action)
            return after, (state["x"], action, v, log_prob, step.reward, step.terminated)

        after, (obs, action, v, log_prob, reward, done) = jax.lax.scan(body, state, jnp.arange(length))
        given = points(v, heads(p, after["x"])[1], log_prob, reward, done)

        def loss(p, data):
            obs, action, given = data
            logits, v = heads(p, obs)
            return loss_of(logits, v, c.pick(jax.nn.log_softmax(logits), action), *given).sum() / (length * batch)

        data = obs, action, given
        if not flat:
            return *jax.value_and_grad(loss)(p, data), after
        if chunk is None:
            return *jax.value_and_grad(loss)(p, c.rows_of(data)), after
        return *c.summed_gradient(loss, p, c.in_chunks(c.rows_of(data), chunk * batch)), after

    return run


def for_seeds(fn):
    return lambda p, state, keys: jax.vmap(fn, (None, None, 0))(p, state, keys)


def seed_by_seed(fn):
    return lambda p, state, keys: jax.lax.map(lambda key: fn(p, state, key), keys)


def forms_of(program, hand, length, batch, chunk):
    make = lambda **how: by_hand(*hand, length, batch, **how)  # noqa: E731
    return {
        "rlfx": c.by_rlfx(program, length, batch),
        "plain": make(),
        "not flattened": make(flat=False),
        f"blocks of {chunk}": make(chunk=chunk),
    }


def seeds(length, batch, hidden, count, chunk=32):
    """`count` seeds of one-epoch PPO."""
    forms = forms_of(ppo, (drift, ppo_points, ppo_loss), length, batch, chunk)
    mapped = {
        f"{name}, seed by seed": seed_by_seed(fn) for name, fn in forms.items() if name.startswith(("plain", "blocks"))
    }
    forms = {name: for_seeds(fn) for name, fn in forms.items()} | mapped
    state = c.batch_of(c.drift_reset(OBS), batch)
    return Workload(forms, (params_of(OBS, ACTIONS, hidden), state, jax.random.split(jax.random.key(7), count)))


def n_step(length, batch, hidden, chunk=1):
    forms = forms_of(a2c, (c.cartpole_step, a2c_points, c.actor_critic_loss), length, batch, chunk)
    state = c.batch_of(c.cartpole_reset, batch)
    return Workload(forms, (params_of(4, 2, hidden), state, jax.random.key(2)))
