"""Maximum causal entropy inverse reinforcement learning (Ziebart et al. 2010; deep, Wulfmeier et al. 2015): a network tells the
reward of every cell of a map, soft value iteration over a finite horizon tells what is then done at every timestep, and that
should be what was demonstrated on the map. Moves slip."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import rlfx
from benchmarks.untuned import common as c

FEATURES, DEMOS, GAMMA, SLIP = 6, 4, 0.97, 0.2
MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1), (0, 0))
ACTIONS = len(MOVES)
relu = jax.nn.relu


def nexts(side):
    """Where a move leads: cells ``int[ACTIONS, CELLS]``; nobody leaves the map."""
    row, column = np.divmod(np.arange(side * side), side)
    on = lambda x, by: np.clip(x + by, 0, side - 1)  # noqa: E731
    return np.stack([on(row, down) * side + on(column, right) for down, right in MOVES])


def transitions(side):
    """Probabilities ``[ACTIONS, CELLS, CELLS]``: the move that was meant, or any."""
    moved = np.eye(side * side, dtype=np.float32)[nexts(side)]
    return jnp.asarray((1.0 - SLIP) * moved + SLIP * moved.mean(0))


def params_of(key, hidden):
    """``out`` has no bias: a constant reward changes no policy."""
    k = jax.random.split(key)
    net = c.mlp_params(k[0], (FEATURES, hidden, hidden))
    return {"net": net, "out": jax.random.normal(k[1], (hidden,)) / np.float32(np.sqrt(hidden))}


def reward_of(p, features):
    return relu(c.mlp(p["net"], features, relu)) @ p["out"]


def program(params, carry, t, moves):
    p, (maps, demos) = params
    x, features = rlfx.inputs(demos)[t], rlfx.inputs(maps, axes="b")[t]
    reward = reward_of(p, features)

    def worth(after):
        return reward + GAMMA * (moves @ after)  # [ACTIONS, CELLS]

    nothing = jnp.zeros_like(reward)
    value = rlfx.solve(lambda v: jax.nn.logsumexp(worth(v[t + 1]), 0), end=nothing)
    log_policy = worth(rlfx.series(value, end=nothing)[t + 1]) - value
    return -(x["going"] * log_policy[x["action"], x["state"]]).sum(), carry


def by_rlfx(length, batch, side):
    loss_fn = rlfx.compile(functools.partial(program, moves=transitions(side)), length=length, batch=batch)
    return lambda p, maps, demos: jax.value_and_grad(lambda p: loss_fn((p, (maps, demos)), jnp.zeros(batch))[0])(p)


# -- by hand, as usual


def plain(length, batch, side):
    moves = transitions(side)

    def run(p, maps, demos):
        def loss(p):
            reward = reward_of(p, maps)

            def step(value, x):
                q = reward[:, None] + GAMMA * jnp.einsum("ast,bt->bas", moves, value)
                value = jax.nn.logsumexp(q, 1)
                log_policy = q - value[:, None]
                chosen = jax.vmap(lambda log_policy, a, s: log_policy[a, s])(log_policy, x["action"], x["state"])
                return value, (x["going"] * chosen).sum()

            chosen = jax.lax.scan(step, jnp.zeros_like(reward), demos, reverse=True)[1]
            return -chosen.sum() / (length * batch)

        return jax.value_and_grad(loss)(p)

    return run
