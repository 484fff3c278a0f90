"""Deep coordination graphs (DCG, Boehmer et al. 2020) on stored episodes: what a team's actions are worth is what those of every
agent and of every pair of agents are together, told by recurrent memories; the best ones are sought by messages between pairs,
round after round (max-sum), and the best of all rounds is what targets are of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

import rlfx
from benchmarks.untuned import common as c

OBS, ACTIONS, ROUNDS, GAMMA = 12, 5, 4, 0.98
relu = jax.nn.relu


def params_of(key, hidden):
    k = jax.random.split(key, 4)
    return {
        "gru": {"x": c.dense(k[0], OBS, 3 * hidden), "h": c.dense(k[1], hidden, 3 * hidden)},
        "own": c.dense(k[2], hidden, ACTIONS), "pair": c.mlp_params(k[3], (2 * hidden, hidden, ACTIONS**2)),
    }  # fmt: skip


def edges(agents):
    """All pairs, each once."""
    return np.triu_indices(agents, 1)


def gru(p, x, h):
    xr, xz, xn = jnp.split(c.linear(p["x"], x), 3, -1)
    hr, hz, hn = jnp.split(c.linear(p["h"], h), 3, -1)
    keep = jax.nn.sigmoid(xz + hz)
    return keep * h + (1.0 - keep) * jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)


def graph(p, h):
    """Of memories ``[agents, hidden]``: what actions of agents are worth, and of pairs ``[edges, ACTIONS, ACTIONS]``."""
    i, j = edges(len(h))

    def told(a, b):
        return c.mlp(p["pair"], jnp.concatenate([a, b], -1), relu).reshape(-1, ACTIONS, ACTIONS)

    pairs = 0.5 * (told(h[i], h[j]) + told(h[j], h[i]).mT)  # the same, whoever comes first
    return c.linear(p["own"], h), pairs


def joint(own, pairs, action):
    """What the actions of all are worth."""
    i, j = edges(len(own))
    return own[jnp.arange(len(own)), action].mean() + pairs[jnp.arange(len(pairs)), action[i], action[j]].mean()


def greedy(own, pairs):
    """The best actions found by messages to those who come first and second in every pair."""
    i, j = edges(len(own))
    shared, payoff = own / len(own), pairs / len(pairs)

    def one_round(found, _):
        to_first, to_second, best, worth = found
        heard = shared.at[i].add(to_first).at[j].add(to_second)
        action = jnp.argmax(heard, -1)
        reached = joint(own, pairs, action)
        best, worth = jnp.where(reached > worth, action, best), jnp.maximum(reached, worth)
        to_second = ((heard[i] - to_first)[:, :, None] + payoff).max(1)
        to_first = ((heard[j] - found[1])[:, None] + payoff).max(2)
        normal = lambda x: x - x.mean(-1, keepdims=True)  # noqa: E731
        return (normal(to_first), normal(to_second), best, worth), None

    none = jnp.zeros((len(pairs), ACTIONS))
    start = none, none, jnp.zeros(len(own), jnp.int32), jnp.float32(-jnp.inf)
    return jax.lax.scan(one_round, start, None, length=ROUNDS)[0][2]


def program(params, carry, t):
    (p, old), data = params
    x = rlfx.inputs(data)[t]
    memory, old_memory = jax.tree.map(lambda h: jnp.where(x["first"], 0.0, h), carry)
    memory, old_memory = gru(p["gru"], x["obs"], memory), gru(old["gru"], x["obs"], old_memory)
    own, pairs = graph(p, memory)
    best = greedy(stop_gradient(own), stop_gradient(pairs))
    following = rlfx.series(joint(*graph(old, old_memory), best), end=0.0)
    target = x["reward"] + GAMMA * jnp.where(x["done"], 0.0, following[t + 1])
    return 0.5 * (joint(own, pairs, x["action"]) - stop_gradient(target)) ** 2, (memory, old_memory)


def by_rlfx(length, batch):
    loss_fn = rlfx.compile(program, length=length, batch=batch)

    def run(p, old, data):
        none = jnp.zeros((batch, data["obs"].shape[2], p["gru"]["h"]["w"].shape[0]))
        return jax.value_and_grad(lambda p: loss_fn(((p, old), data), (none, none))[0])(p)

    return run


# -- by hand, as usual


def plain(length, batch):
    def memories(p, obs, first):
        """Of one episode."""

        def body(h, x):
            obs, first = x
            h = gru(p["gru"], obs, jnp.where(first, 0.0, h))
            return h, h

        none = jnp.zeros((obs.shape[1], p["gru"]["h"]["w"].shape[0]))
        return jax.lax.scan(body, none, (obs, first))[1]

    def run(p, old, data):
        def episode(p, x):
            own, pairs = jax.vmap(graph, (None, 0))(p, memories(p, x["obs"], x["first"]))
            best = jax.vmap(greedy)(stop_gradient(own), stop_gradient(pairs))
            aims = jax.vmap(graph, (None, 0))(old, memories(old, x["obs"], x["first"]))
            following = c.shifted(jax.vmap(joint)(*aims, best), jnp.zeros(()))
            target = x["reward"] + GAMMA * jnp.where(x["done"], 0.0, following)
            return (0.5 * (jax.vmap(joint)(own, pairs, x["action"]) - stop_gradient(target)) ** 2).mean()

        return jax.value_and_grad(lambda p: jax.vmap(episode, (None, 1))(p, data).mean())(p)

    return run
