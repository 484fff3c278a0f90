"""Tolls for a crowd (a mean-field game, by online mirror descent, Perolat et al. 2022): everyone in a town goes where it is worth
most, given where all others go, for a number of rounds, in each of which values of actions come from behind and the crowd goes
ahead; the network that sets tolls learns through all rounds how the crowd will be spread."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import rlfx
from benchmarks.untuned import common as c

FACTS, MOVES, SLIP, RATE, CROWDED, EFFORT, TOLL = 6, 5, 0.1, 0.5, 0.2, 0.05, 0.2
STEPS = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))


def params_of(key, hidden):
    return c.mlp_params(key, (FACTS, hidden, hidden, 1))


def tolls(p, facts):
    """Of cells ``facts[..., cells, FACTS]``."""
    return jax.nn.softplus(c.mlp(p, facts)[..., 0])


def neighbours(x):
    """``x[..., cells]`` of a torus, at where every move leads to: ``[..., cells, MOVES]``."""
    side = int(np.sqrt(x.shape[-1]))
    grid = x.reshape(*x.shape[:-1], side, side)
    there = [jnp.roll(grid, (-i, -j), (-2, -1)).reshape(x.shape) for i, j in STEPS]
    return jnp.stack(there, -1)


def expected(value):
    """What is expected of moves ``[..., cells, MOVES]``, of which some slip."""
    there = neighbours(value)
    return (1.0 - SLIP) * there + SLIP * there.mean(-1, keepdims=True)


def going_on(crowd, policy):
    """Where those of ``crowd[..., cells]`` are next."""
    going = crowd[..., None] * ((1.0 - SLIP) * policy + SLIP / MOVES)
    side = int(np.sqrt(crowd.shape[-1]))
    grid = going.reshape(*crowd.shape[:-1], side, side, MOVES)
    return sum(jnp.roll(grid[..., n], step, (-2, -1)).reshape(crowd.shape) for n, step in enumerate(STEPS))


def rewards(liked, toll, crowd):
    """Of ``[..., cells, MOVES]``: cells that are liked, not crowded, and cheap; going takes an effort."""
    effort = EFFORT * jnp.asarray([0.0, 1.0, 1.0, 1.0, 1.0])
    return (liked - toll - CROWDED * jnp.log(crowd + 1e-3))[..., None] - effort


def spread(crowd, toll):
    """What the town wants: the crowd nowhere dense, and low tolls."""
    return (crowd**2).sum(-1) * crowd.shape[-1] + TOLL * (toll**2).mean(-1)


def round_of(given, crowd, t):
    """A program over t: where the crowd is, and preferences after this round."""
    preferences, liked, toll = given
    preference = rlfx.inputs(preferences, axes="t")[t]
    policy = jax.nn.softmax(preference)
    reward = rewards(liked, toll, crowd)
    value = rlfx.solve(lambda v: (policy * (reward + expected(v[t + 1]))).sum(-1), end=jnp.zeros_like(liked))
    worth = reward + expected(rlfx.series(value, end=jnp.zeros_like(liked))[t + 1])
    return going_on(crowd, policy), preference + RATE * worth


def tolled(given, crowd, t):
    """A program over t: what the town wants of a timestep."""
    preferences, toll = given
    policy = jax.nn.softmax(rlfx.inputs(preferences)[t])
    after = going_on(crowd, policy)
    return spread(after, rlfx.inputs(toll, axes="b")[t]), after


def by_rlfx(length, batch, rounds):
    one_round = rlfx.unroll(round_of, length=length)
    town = rlfx.compile(tolled, length=length, batch=batch)

    def descent(params, preferences, k):
        """A program over rounds."""
        toll, towns = params
        mine = rlfx.inputs({"toll": toll, **towns}, axes="b")[k]
        return one_round((preferences, mine["liked"], mine["toll"]), mine["crowd"])[1], None

    descend = rlfx.unroll(descent, length=rounds, dim="k", batch=batch)

    def run(p, towns):
        def loss(p):
            toll = tolls(p, towns["facts"])
            preferences = jnp.zeros((batch, length, toll.shape[-1], MOVES))
            preferences, _ = descend((toll, {name: towns[name] for name in ("liked", "crowd")}), preferences)
            return town((jnp.moveaxis(preferences, 0, 1), toll), towns["crowd"])[0]

        return jax.value_and_grad(loss)(p)

    return run


# -- by hand, as usual


def plain(length, batch, rounds):
    def of_town(p, town):
        toll = tolls(p, town["facts"])

        def ahead(crowd, policy):
            after = going_on(crowd, policy)
            return after, (crowd, after)

        def one_round(preferences, _):
            policy = jax.nn.softmax(preferences)
            _, (crowd, _) = jax.lax.scan(ahead, town["crowd"], policy)

            def back(value, x):
                crowd, policy = x
                worth = rewards(town["liked"], toll, crowd) + expected(value)
                return (policy * worth).sum(-1), worth

            _, worth = jax.lax.scan(back, jnp.zeros_like(toll), (crowd, policy), reverse=True)
            return preferences + RATE * worth, None

        preferences = jnp.zeros((length, toll.shape[-1], MOVES))
        preferences, _ = jax.lax.scan(one_round, preferences, None, length=rounds)
        _, (_, after) = jax.lax.scan(ahead, town["crowd"], jax.nn.softmax(preferences))
        return spread(after, toll).mean()

    def run(p, towns):
        return jax.value_and_grad(lambda p: jax.vmap(of_town, (None, 0))(p, towns).mean())(p)

    return run
