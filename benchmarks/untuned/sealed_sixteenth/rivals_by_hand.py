"""MADDPG by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_sixteenth import rivals
from benchmarks.untuned.sealed_sixteenth.rivals import ACTIONS, DECAY, GAMMA, OBS, params_of, relu, seen

# -- first layers of critics, of rows ``x[N, inputs]``: ``[agents, N, hidden]``


def together(layer, x):
    return x @ layer["w"] + layer["b"][:, None]


def joined(layer, x):
    """One product for all critics."""
    agents, inputs, hidden = layer["w"].shape
    made = x @ jnp.moveaxis(layer["w"], 0, 1).reshape(inputs, -1) + layer["b"].reshape(-1)
    return jnp.moveaxis(made.reshape(len(x), agents, hidden), 1, 0)


def one_by_one(layer, x):
    return jnp.stack([x @ w + b for w, b in zip(layer["w"], layer["b"], strict=True)])


# -- networks of agents, ``x[agents, N, inputs]``


def actors_of(nets, obs):
    """``[agents, N, ACTIONS]`` before the tanh."""
    for layer in nets[:-1]:
        obs = relu(obs @ layer["w"] + layer["b"][:, None])
    return obs @ nets[-1]["w"] + nets[-1]["b"][:, None]


def further(critics, before):
    """Values ``[agents, N]``, of what comes out of first layers; and both hidden layers."""
    _, second, last = critics
    h = relu(before)
    g = relu(h @ second["w"] + second["b"][:, None])
    return (g @ last["w"])[..., 0] + last["b"], (h, g)


def own_weights(critics):
    """What a critic's first layer makes of its own agent's action: ``[agents, ACTIONS, hidden]``."""
    w = critics[0]["w"]
    agents = len(w)
    parts = w[:, agents * OBS :].reshape(agents, agents, ACTIONS, -1)
    return jnp.stack([parts[i, i] for i in range(agents)])


def agents_first(x):
    return jnp.moveaxis(x, 1, 0)


def old_values(target, rows, first):
    """Of the target networks, ``[N, agents]``."""
    mine = jnp.tanh(actors_of(target["actors"], agents_first(rows["obs"])))
    return further(target["critics"], first(target["critics"][0], seen(rows["obs"], agents_first(mine))))[0].T


# -- losses of rows, summed; ``aim[N, agents]``, ``known[N]``


def tried_anew(p, rows, aim, known, first):
    """Critics see every joint action as it is."""
    obs, action = rows["obs"], rows["action"]
    q = further(p["critics"], first(p["critics"][0], seen(obs, action)))[0]
    push = actors_of(p["actors"], agents_first(obs))
    mine, agents = agents_first(jnp.tanh(push)), obs.shape[1]
    own = jnp.eye(agents, dtype=bool)[:, None, :, None]
    tried = jnp.where(own, mine, action).reshape(agents, len(obs), -1)
    same = jnp.broadcast_to(obs.reshape(len(obs), -1), (agents, len(obs), agents * OBS))
    fixed = stop_gradient(p["critics"])
    layer = fixed[0]
    gained = further(fixed, jnp.concatenate([same, tried], -1) @ layer["w"] + layer["b"][:, None])[0]
    return 0.5 * (known * (q - aim.T) ** 2).sum() - gained.sum() + DECAY * (push**2).sum()


def differing(p, rows, aim, known, first):
    """What the first layer makes of the others is there already: only the own action is exchanged."""
    obs, action = rows["obs"], rows["action"]
    before = first(p["critics"][0], seen(obs, action))
    q = further(p["critics"], before)[0]
    push = actors_of(p["actors"], agents_first(obs))
    fixed = stop_gradient(p["critics"])
    moved = stop_gradient(before) + (jnp.tanh(push) - agents_first(action)) @ own_weights(fixed)
    gained = further(fixed, moved)[0]
    return 0.5 * (known * (q - aim.T) ** 2).sum() - gained.sum() + DECAY * (push**2).sum()


def by_gradient(loss):
    return lambda p, rows, aim, known, first: jax.value_and_grad(loss)(p, rows, aim, known, first)


def critics_back(critics, x, h, g, error):
    """Gradients of critics' weights of ``error[agents, N]`` at their values; the first layers' are one product."""
    _, second, last = critics
    by_g = jnp.where(g > 0, error[..., None] * last["w"][:, None, :, 0], 0.0)
    by_h = jnp.where(h > 0, by_g @ second["w"].mT, 0.0)
    agents, count, hidden = by_h.shape
    flat = jnp.moveaxis(by_h, 0, 1).reshape(count, -1)
    by_first = jnp.moveaxis((x.T @ flat).reshape(-1, agents, hidden), 1, 0)
    return [
        {"w": by_first, "b": by_h.sum(1)},
        {"w": h.mT @ by_g, "b": by_g.sum(1)},
        {"w": g.mT @ error[..., None], "b": error.sum(1, keepdims=True)},
    ]


def written_out(p, rows, aim, known, first):
    """Derivatives by hand; slopes of the actors' critics by masks."""
    obs, action, critics = rows["obs"], rows["action"], p["critics"]
    x = seen(obs, action)
    before = first(critics[0], x)
    q, (h, g) = further(critics, before)
    missed = q - aim.T
    error = known * missed
    push, pull = jax.vjp(lambda nets: actors_of(nets, agents_first(obs)), p["actors"])
    mine, own = jnp.tanh(push), own_weights(critics)
    gained, (own_h, own_g) = further(critics, before + (mine - agents_first(action)) @ own)
    on = jnp.where(own_g > 0, critics[2]["w"][:, None, :, 0], 0.0)
    on = jnp.where(own_h > 0, on @ critics[1]["w"].mT, 0.0)
    (by_actors,) = pull(2.0 * DECAY * push - (1.0 - mine**2) * (on @ own.mT))
    value = 0.5 * (error * missed).sum() - gained.sum() + DECAY * (push**2).sum()
    return value, {"actors": by_actors, "critics": critics_back(critics, x, h, g, error)}


# -- features first: ``x[inputs, N]``, layers ``[agents, hidden, N]``


def columns_of(nets, x):
    for layer in nets[:-1]:
        x = relu(layer["w"].mT @ x + layer["b"][..., None])
    return nets[-1]["w"].mT @ x + nets[-1]["b"][..., None]


def first_columns(layer, x):
    agents, inputs, hidden = layer["w"].shape
    made = layer["w"].mT.reshape(-1, inputs) @ x
    return made.reshape(agents, hidden, -1) + layer["b"][..., None]


def further_columns(critics, before):
    _, second, last = critics
    h = relu(before)
    g = relu(second["w"].mT @ h + second["b"][..., None])
    return (last["w"].mT @ g)[:, 0] + last["b"], (h, g)


def old_columns(target, rows, first=None):
    obs = jnp.moveaxis(rows["obs"], 0, 2)
    mine = jnp.tanh(columns_of(target["actors"], obs))
    x = jnp.concatenate([obs.reshape(-1, obs.shape[2]), mine.reshape(-1, obs.shape[2])])
    return further_columns(target["critics"], first_columns(target["critics"][0], x))[0].T


def written_columns(p, rows, aim, known, first=None):
    critics = p["critics"]
    obs, action = (jnp.moveaxis(rows[name], 0, 2) for name in ("obs", "action"))
    x = jnp.concatenate([obs.reshape(-1, obs.shape[2]), action.reshape(-1, obs.shape[2])])
    before = first_columns(critics[0], x)
    q, (h, g) = further_columns(critics, before)
    missed = q - aim.T
    error = known * missed
    push, pull = jax.vjp(lambda nets: columns_of(nets, obs), p["actors"])
    mine, own = jnp.tanh(push), own_weights(critics)
    gained, (own_h, own_g) = further_columns(critics, before + own.mT @ (mine - action))
    on = jnp.where(own_g > 0, critics[2]["w"], 0.0)
    on = jnp.where(own_h > 0, critics[1]["w"] @ on, 0.0)
    (by_actors,) = pull(2.0 * DECAY * push - (1.0 - mine**2) * (own @ on))
    by_g = jnp.where(g > 0, error[:, None] * critics[2]["w"], 0.0)
    by_h = jnp.where(h > 0, critics[1]["w"] @ by_g, 0.0)
    agents, hidden, count = by_h.shape
    by_first = (by_h.reshape(-1, count) @ x.T).reshape(agents, hidden, -1).mT
    by_critics = [
        {"w": by_first, "b": by_h.sum(-1)},
        {"w": h @ by_g.mT, "b": by_g.sum(-1)},
        {"w": g @ error[..., None], "b": error.sum(1, keepdims=True)},
    ]
    value = 0.5 * (error * missed).sum() - gained.sum() + DECAY * (push**2).sum()
    return value, {"actors": by_actors, "critics": by_critics}


# -- what is learnt


def by_hand(length, batch, learn, first=joined, old=old_values, chunk=None, split=False):
    """``chunk``: timesteps of a block; ``split``: of the target's, too."""
    scale = 1.0 / (length * batch)

    def run(p, target, data):
        rows = c.rows_of({"obs": data["obs"], "action": data["action"]})
        if split:
            following = jax.lax.map(lambda rows: old(target, rows, first), c.in_chunks(rows, chunk * batch))
        else:
            following = old(target, rows, first)
        following = following.reshape(data["reward"].shape)
        following = c.shifted(following, jnp.zeros_like(following[0]))
        aim = (data["reward"] + GAMMA * (1.0 - data["done"][..., None]) * following).reshape(length * batch, -1)
        known = (jnp.arange(length * batch) < (length - 1) * batch).astype(jnp.float32)
        if chunk is None:
            total = learn(p, rows, aim, known, first)
        else:
            add = lambda total, x: (jax.tree.map(jnp.add, total, learn(p, *x, first)), None)  # noqa: E731
            none = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
            total = jax.lax.scan(add, none, c.in_chunks((rows, aim, known), chunk * batch))[0]
        return jax.tree.map(lambda x: scale * x, total)

    return run


def workload(length, batch, agents, hidden, chunk=4):
    make = functools.partial(by_hand, length, batch)
    anew, differ = by_gradient(tried_anew), by_gradient(differing)
    column = {"old": old_columns}
    forms = {
        "rlfx": c.learner_by_rlfx(rivals.program, length, batch), "plain": rivals.plain(length, batch),
        "tried anew, together": make(anew, together), "tried anew, joined": make(anew), "differing, joined": make(differ),
        "differing, one by one": make(differ, one_by_one), "differing, together": make(differ, together),
        "written out, joined": make(written_out), "written out, together": make(written_out, together),
        "written out, features first": make(written_columns, **column),
        f"differing, joined, blocks of {chunk}": make(differ, chunk=chunk, split=True),
        f"written out, joined, blocks of {chunk}": make(written_out, chunk=chunk, split=True),
        f"written out, together, blocks of {chunk // 2}": make(written_out, together, chunk=chunk // 2, split=True),
        f"written out, features first, blocks of {chunk}": make(written_columns, **column, chunk=chunk, split=True),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    data = {
        "obs": jax.random.normal(k[0], (*size, agents, OBS)),
        "action": jnp.tanh(jax.random.normal(k[1], (*size, agents, ACTIONS))),
        "reward": jax.random.normal(k[2], (*size, agents)),
        "done": (jax.random.uniform(k[3], size) < 0.03).astype(jnp.float32),
    }  # fmt: skip
    return Workload(forms, (params_of(k[4], agents, hidden), params_of(k[5], agents, hidden), data), tolerance=5e-6)
