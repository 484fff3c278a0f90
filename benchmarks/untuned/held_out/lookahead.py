"""Acting by a search of all plans of some depth in a learned model, and learning to agree with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload

OBS, ACTIONS, GAMMA = 8, 3, 0.97
drift = c.drift_step(OBS, 50)


def params_of(hidden):
    k = jax.random.split(jax.random.key(0), 3)
    sizes = {"model": (OBS + ACTIONS, hidden, OBS + 1), "pi": (OBS, hidden, ACTIONS), "v": (OBS, hidden, 1)}
    return {name: c.mlp_params(key, size) for key, (name, size) in zip(k, sizes.items(), strict=True)}


def predicted(p, x, action):
    """The model: what is observed next, and the reward."""
    out = c.mlp(p["model"], jnp.concatenate([x, action], -1))
    return jnp.tanh(out[..., :OBS]), out[..., OBS]


def searched(p, x, depth):
    """The best value of each first action, ``[..., ACTIONS]``; every node of a level at once."""
    if depth == 0:
        return c.mlp(p["v"], x)
    nodes = jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], ACTIONS, OBS))
    actions = jnp.broadcast_to(jnp.eye(ACTIONS), (*x.shape[:-1], ACTIONS, ACTIONS))
    following, reward = predicted(p, nodes, actions)
    return reward + GAMMA * searched(p, following, depth - 1).max(-1)


def searched_in_rows(p, x, depth):
    """The same for ``x[N, OBS]``, each level as one product of rows; the model's first layer is split in two."""
    first, *rest = p["model"]
    weights, bias = jnp.split(first["w"], [OBS]), first["b"]
    rewards = []
    for _ in range(depth):
        hidden = (x @ weights[0] + bias)[:, None] + weights[1]  # [N, ACTIONS, hidden]
        out = c.mlp(rest, jnp.tanh(hidden.reshape(-1, hidden.shape[-1])))
        x = jnp.tanh(out[:, :OBS])
        rewards.append(out[:, OBS].reshape(-1, ACTIONS))
    value = c.mlp(p["v"], x).reshape(-1, ACTIONS)
    for i, reward in enumerate(reversed(rewards)):
        value = reward + GAMMA * (value if i == 0 else value.max(-1).reshape(-1, ACTIONS))
    return value


def search_loss(p, x, q):
    """Agree with the search, in value and policy."""
    log_p, v = jax.nn.log_softmax(c.mlp(p["pi"], x)), c.mlp(p["v"], x)[..., 0]
    return 0.5 * (v - q.max(-1)) ** 2 - (jax.nn.softmax(4.0 * q) * log_p).sum(-1)


def model_loss(p, x, action, following, reward):
    """Predict what came."""
    told, earned = predicted(p, x, jax.nn.one_hot(action, ACTIONS))
    return 0.5 * ((told - following) ** 2).sum(-1) + 0.5 * (earned - reward) ** 2


def program(depth):
    def expert(p, state, t):
        x = state["x"]
        q = stop_gradient(searched(p, x, depth))
        action = jax.random.categorical(t.key_for("action"), 4.0 * q)
        state, step = drift(t.key_for("env"), state, action)
        known = jnp.where(step.terminated, 0.0, model_loss(p, x, action, state["x"], step.reward))
        return search_loss(p, x, q) + known, state

    return expert


def by_hand(length, batch, depth, search=searched, flat=True, chunk=None, ahead=False):
    """``ahead``: the action's random numbers are drawn before the loop."""

    def run(p, state, key):
        action_keys, env_keys = c.streams(key, batch, "action", "env")
        gumbel = lambda t: jax.vmap(lambda k: jax.random.gumbel(k, (ACTIONS,)))(c.at(action_keys, t))  # noqa: E731

        def body(state, x):
            t, noise = x if ahead else (x, gumbel(x))
            x = state["x"]
            q = search(p, x, depth)
            action = jnp.argmax(4.0 * q + noise, -1)
            after, step = jax.vmap(drift)(c.at(env_keys, t), state, action)
            return after, (x, q, action, after["x"], step.reward, step.terminated)

        times = jnp.arange(length)
        after, data = jax.lax.scan(body, state, (times, jax.vmap(gumbel)(times)) if ahead else times)

        def loss(p, data):
            x, q, action, following, reward, done = data
            known = jnp.where(done, 0.0, model_loss(p, x, action, following, reward))
            return (search_loss(p, x, q) + known).sum() / (length * batch)

        if not flat:
            return *jax.value_and_grad(loss)(p, data), after
        if chunk is None:
            return *jax.value_and_grad(loss)(p, c.rows_of(data)), after
        return *c.summed_gradient(loss, p, c.in_chunks(c.rows_of(data), chunk * batch)), after

    return run


def workload(length, batch, hidden, depth, chunk=16):
    make = lambda **how: by_hand(length, batch, depth, **how)  # noqa: E731
    by_rows = {"search": searched_in_rows}
    forms = {
        "rlfx": c.by_rlfx(program(depth), length, batch), "plain": make(), "not flattened": make(flat=False),
        "search in rows": make(**by_rows),
        f"search in rows, blocks of {chunk}": make(**by_rows, chunk=chunk),
        f"search in rows, blocks of {chunk}, drawn ahead": make(**by_rows, chunk=chunk, ahead=True),
    }  # fmt: skip
    return Workload(forms, (params_of(hidden), c.batch_of(c.drift_reset(OBS), batch), jax.random.key(2)))
