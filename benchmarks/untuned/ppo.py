"""Continuous PPO with epochs of minibatches, alone and for many seeds under `jax.vmap`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rlfx

from . import common as c
from .measure import Workload
from .one_epoch import for_seeds, seed_by_seed

OBS, ACTIONS, GAMMA, LAMBDA, CLIP, EPISODE, EPOCHS, MINIBATCHES = 27, 8, 0.99, 0.95, 0.2, 200, 4, 4
PUSH = 0.1 * np.random.default_rng(0).standard_normal((ACTIONS, OBS)).astype(np.float32)
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4, eps=1e-5))


def reset(key):
    return {"x": jax.random.normal(key, (OBS,)), "count": jnp.int32(0)}


def step_of(key, state, action):
    x = jnp.tanh(0.95 * state["x"] + 0.1 * jnp.roll(state["x"], 1) + jnp.clip(action, -1, 1) @ PUSH)
    count = state["count"] + 1
    done = (x[0] > 0.97) | (count >= EPISODE)
    new = {"x": jnp.where(done, reset(key)["x"], x), "count": jnp.where(done, 0, count)}
    return new, c.Step(-jnp.mean(x**2) - 0.01 * jnp.sum(action**2), done, jnp.zeros_like(done))


def log_prob_of(mean, log_std, action):
    return jnp.sum(-0.5 * ((action - mean) * jnp.exp(-log_std)) ** 2 - log_std - 0.919, -1)


def loss(p, minibatch):
    obs, action, old, old_value, advantage = minibatch
    mean, v = c.mlp(p["pi"], obs), c.mlp(p["v"], obs)[..., 0]
    ratio = jnp.exp(log_prob_of(mean, p["log_std"], action) - old)
    normalised = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    target = advantage + old_value
    clipped = old_value + jnp.clip(v - old_value, -CLIP, CLIP)
    value_loss = 0.5 * jnp.maximum((v - target) ** 2, (clipped - target) ** 2)
    gain = jnp.minimum(ratio * normalised, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * normalised)
    return (0.5 * value_loss - gain).mean() - 0.001 * p["log_std"].sum()


def learn(learner, minibatch):
    p, opt_state = learner
    value, grads = jax.value_and_grad(loss)(p, minibatch)
    updates, opt_state = optimizer.update(grads, opt_state, p)
    return (optax.apply_updates(p, updates), opt_state), value


def act(p, state, t):
    obs = state["x"]
    mean, v = c.mlp(p["pi"], obs), c.mlp(p["v"], obs)[0]
    action = mean + jnp.exp(p["log_std"]) * jax.random.normal(t.key_for("action"), (ACTIONS,))
    state, step = step_of(t.key_for("env"), state, action)
    value = rlfx.series(v)
    advantage = rlfx.gae(step, value, value[t + 1], gamma=GAMMA, lam=LAMBDA)
    return state, (obs, action, log_prob_of(mean, p["log_std"], action), v, advantage)


def by_rlfx(length, batch):
    rollout = rlfx.unroll(act, length=length, batch=batch)

    def update(learner, state, key):
        act_key, shuffle_key = jax.random.split(key)
        state, data = rollout(learner[0], state, act_key)
        epochs = {"epochs": EPOCHS, "minibatches": MINIBATCHES, "key": shuffle_key}
        learner, losses = rlfx.minibatch_epochs(learn, learner, data, **epochs)
        return learner, state, losses

    return update


def shuffled(learner, data, order):
    """The whole data in a new order, then minibatch by minibatch."""
    parts = jax.tree.map(lambda x: x[order].reshape(MINIBATCHES, -1, *x.shape[1:]), data)
    return jax.lax.scan(learn, learner, parts)


def gathered(learner, data, order):
    """Each minibatch when its turn comes."""
    body = lambda learner, index: learn(learner, jax.tree.map(lambda x: x[index], data))  # noqa: E731
    return jax.lax.scan(body, learner, order.reshape(MINIBATCHES, -1))


def packed(learner, data, order):
    """All of a point as one row, gathered at once."""
    columns = [x.reshape(x.shape[0], -1) for x in data]
    ends = np.cumsum([x.shape[1] for x in columns])[:-1]
    table = jnp.concatenate(columns, -1)

    def body(learner, index):
        parts = jnp.split(table[index], ends, -1)
        return learn(learner, tuple(x.reshape(-1, *y.shape[1:]) for x, y in zip(parts, data, strict=True)))

    return jax.lax.scan(body, learner, order.reshape(MINIBATCHES, -1))


def by_hand(length, batch, epoch_of):
    def update(learner, state, key):
        p = learner[0]
        act_key, shuffle_key = jax.random.split(key)
        action_keys, env_keys = c.streams(act_key, batch, "action", "env")

        def body(state, t):
            obs = state["x"]
            mean, v = c.mlp(p["pi"], obs), c.mlp(p["v"], obs)[..., 0]
            noise = jax.vmap(lambda k: jax.random.normal(k, (ACTIONS,)))(c.at(action_keys, t))
            action = mean + jnp.exp(p["log_std"]) * noise
            state, step = jax.vmap(step_of)(c.at(env_keys, t), state, action)
            return state, (obs, action, log_prob_of(mean, p["log_std"], action), v, step.reward, step.terminated)

        state, (*data, v, reward, done) = jax.lax.scan(body, state, jnp.arange(length))
        last = c.mlp(p["v"], state["x"])[..., 0]
        data = c.rows_of((*data, v, c.gae(v, last, reward, done, GAMMA, LAMBDA, unroll=min(16, length))))
        orders = jax.vmap(lambda k: rlfx.shuffle(k, length * batch))(jax.random.split(shuffle_key, EPOCHS))
        learner, losses = jax.lax.scan(lambda x, order: epoch_of(x, data, order), learner, orders)
        return learner, state, losses

    return update


def arguments(batch, hidden):
    actor, critic = jax.random.split(jax.random.key(0))
    p = {
        "pi": c.mlp_params(actor, (OBS, hidden, hidden, ACTIONS)), "v": c.mlp_params(critic, (OBS, hidden, hidden, 1)),
        "log_std": jnp.zeros(ACTIONS),
    }  # fmt: skip
    return (p, optimizer.init(p)), c.batch_of(reset, batch)


def forms_of(length, batch):
    epochs = {"plain": shuffled, "gathered": gathered, "packed": packed}
    return {"rlfx": by_rlfx(length, batch), **{name: by_hand(length, batch, epoch) for name, epoch in epochs.items()}}


def compared(result):
    """The parameters (Adam amplifies rounding where a gradient is nearly zero), and all losses."""
    (p, _), _, losses = result
    return p, losses


def workload(length, batch, hidden):
    return Workload(
        forms_of(length, batch), (*arguments(batch, hidden), jax.random.key(2)), compared=compared, tolerance=2e-3
    )


def seeds(length, batch, hidden, count):
    forms = forms_of(length, batch)
    mapped = {f"{name}, seed by seed": seed_by_seed(forms[name]) for name in ("gathered", "packed")}
    forms = {name: for_seeds(fn) for name, fn in forms.items()} | mapped
    keys = jax.random.split(jax.random.key(5), count)
    return Workload(forms, (*arguments(batch, hidden), keys), compared=compared, tolerance=2e-3)
