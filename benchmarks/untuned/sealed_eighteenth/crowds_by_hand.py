"""Tolls for a crowd by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_eighteenth import crowds as given
from benchmarks.untuned.sealed_eighteenth.crowds import (
    CROWDED,
    EFFORT,
    FACTS,
    MOVES,
    RATE,
    SLIP,
    STEPS,
    params_of,
    spread,
    tolls,
)  # fmt: skip

# -- moves on a torus of ``cells[..., cells]``: values of where they lead to, and the crowd that comes


def places(cells):
    """Where every move leads to, ``int[cells, MOVES]``, and from where it comes."""
    side = int(np.sqrt(cells))
    grid = np.arange(cells).reshape(side, side)
    there = np.stack([np.roll(grid, (-i, -j), (0, 1)).ravel() for i, j in STEPS], -1)
    return there, np.stack([np.roll(grid, step, (0, 1)).ravel() for step in STEPS], -1)


def matrix(cells):
    """``[cells, cells * MOVES]``, slips included: values times it are what is expected of moves."""
    there = np.zeros((cells, cells, MOVES), np.float32)
    np.put_along_axis(there, places(cells)[0][None], 1.0, 0)
    there = (1.0 - SLIP) * there + SLIP * there.mean(-1, keepdims=True)
    return there.reshape(cells, -1)


def rolled(cells):
    """As usual: what is expected, and where the crowd goes."""
    return given.expected, given.going_on


def gathered(cells):
    """By indices."""
    there, here = places(cells)
    every = np.arange(MOVES)

    def expected(value):
        found = value[..., there]
        return (1.0 - SLIP) * found + SLIP * found.mean(-1, keepdims=True)

    def going_on(crowd, policy):
        going = crowd[..., None] * ((1.0 - SLIP) * policy + SLIP / MOVES)
        return going[..., here, every].sum(-1)

    return expected, going_on


def multiplied(cells):
    """By a matrix, of rows."""
    m = matrix(cells)

    def expected(value):
        return (value.reshape(-1, cells) @ m).reshape(*value.shape, MOVES)

    def going_on(crowd, policy):
        return ((crowd[..., None] * policy).reshape(-1, cells * MOVES) @ m.T).reshape(crowd.shape)

    return expected, going_on


class Way(NamedTuple):
    moves: Any = rolled
    later: bool = False  # rewards of all timesteps at once, after the crowd has gone


def effort():
    return jnp.asarray([0.0] + 4 * [EFFORT])


def pleasure(liked, toll, crowd):
    """``[..., cells]``: what all moves have in common."""
    return liked - toll - CROWDED * jnp.log(crowd + 1e-3)


def by_hand(length, batch, rounds, way, chunk=None):
    """``[T, B, cells, MOVES]``; ``chunk``: towns after the others."""

    def loss(p, x):
        _, towns = x
        toll = tolls(p, towns["facts"])
        cells = toll.shape[-1]
        expected, going_on = way.moves(cells)

        def ahead(crowd, policy):
            return going_on(crowd, policy), crowd

        def one_round(preferences, _):
            policy = jax.nn.softmax(preferences)
            crowd = jax.lax.scan(ahead, towns["crowd"], policy)[1]
            told = pleasure(towns["liked"], toll, crowd) if way.later else crowd

            def back(value, x):
                told, policy = x
                pleased = told if way.later else pleasure(towns["liked"], toll, told)
                worth = pleased[..., None] - effort() + expected(value)
                return (policy * worth).sum(-1), worth

            worth = jax.lax.scan(back, jnp.zeros_like(toll), (told, policy), reverse=True)[1]
            return preferences + RATE * worth, None

        preferences = jnp.zeros((length, *toll.shape, MOVES))
        preferences, _ = jax.lax.scan(one_round, preferences, None, length=rounds)
        policy = jax.nn.softmax(preferences)
        after = jax.lax.scan(lambda crowd, policy: 2 * (going_on(crowd, policy),), towns["crowd"], policy)[1]
        return spread(after, toll).sum() / (length * batch)

    learn = c.gradient_by_environments(loss, chunk)
    return lambda p, towns: learn(p, jnp.zeros((length, batch)), towns)


# -- towns innermost, ``[T, MOVES, cells, B]``


def innermost(length, batch, rounds, again=False, rolled=True, after=False):
    """``rolled``: moves by slices, not by matrices; ``after``: what all rewards have in common is of all timesteps at once."""

    def run(p, towns):
        cells = towns["facts"].shape[1]
        side = int(np.sqrt(cells))
        m = matrix(cells).reshape(cells, cells, MOVES)
        ahead_m = jnp.asarray(np.moveaxis(m, 2, 1).reshape(cells, -1))  # [cells that come, MOVES * cells]
        back_m = jnp.asarray(np.moveaxis(m, 2, 0).reshape(MOVES, cells, cells).swapaxes(1, 2).reshape(-1, cells))

        def shifted(x, step):
            """Of ``x[cells, B]``."""
            grid = x.reshape(side, side, -1)
            return jnp.roll(grid, step, (0, 1)).reshape(x.shape)

        def expected(value):
            if not rolled:
                return (back_m @ value).reshape(MOVES, cells, -1)
            there = jnp.stack([shifted(value, (-i, -j)) for i, j in STEPS])
            return (1.0 - SLIP) * there + SLIP * there.mean(0)

        def going_on(crowd, policy):
            if not rolled:
                return ahead_m @ (crowd * policy).reshape(MOVES * cells, -1)
            going = crowd * ((1.0 - SLIP) * policy + SLIP / MOVES)
            return sum(shifted(going[n], step) for n, step in enumerate(STEPS))

        def loss(p):
            toll, liked, crowd = tolls(p, towns["facts"]).T, towns["liked"].T, towns["crowd"].T
            ready, cost = liked - toll, effort()[:, None, None]

            def ahead(crowd, policy):
                return going_on(crowd, policy), crowd

            def one_round(preferences, _):
                policy = jax.nn.softmax(preferences, axis=1)
                told = jax.lax.scan(ahead, crowd, policy)[1]
                pleased = lambda crowd: ready - CROWDED * jnp.log(crowd + 1e-3)  # noqa: E731

                def back(value, x):
                    told, policy = x
                    worth = (told if after else pleased(told)) - cost + expected(value)
                    return (policy * worth).sum(0), worth

                told = pleased(told) if after else told
                worth = jax.lax.scan(back, jnp.zeros_like(toll), (told, policy), reverse=True)[1]
                return preferences + RATE * worth, None

            one_round = jax.checkpoint(one_round, prevent_cse=False) if again else one_round
            preferences = jnp.zeros((length, MOVES, *toll.shape))
            preferences, _ = jax.lax.scan(one_round, preferences, None, length=rounds)
            policy = jax.nn.softmax(preferences, axis=1)
            last = jax.lax.scan(lambda crowd, policy: 2 * (going_on(crowd, policy),), crowd, policy)[1]
            return spread(last.mT, toll.T).mean()

        return jax.value_and_grad(loss)(p)

    return run


def without_common(length, batch, rounds, again=False, sums=False):
    """What all moves have in common does not change who goes where: it is no part of preferences. ``sums``: of all rounds are
    kept sums of values alone, ``[T, cells, B]``, of which preferences are made."""

    def run(p, towns):
        cells = towns["facts"].shape[1]
        there = np.zeros((cells, cells, MOVES), np.float32)
        np.put_along_axis(there, places(cells)[0][None], 1.0, 0)
        comes = jnp.asarray(np.moveaxis(matrix(cells).reshape(cells, cells, MOVES), 2, 1).reshape(cells, -1))
        moves, slips = ((1.0 - SLIP) * there.T).reshape(-1, cells), SLIP * there.mean(-1).T
        both = jnp.asarray(np.concatenate([moves, slips]))  # [(MOVES + 1) * cells, cells]

        def loss(p):
            toll, crowd = tolls(p, towns["facts"]).T, towns["crowd"].T
            ready, cost = towns["liked"].T - toll, effort()[:, None, None]

            def policy_of(kept, k):
                """Of a timestep, after so many rounds."""
                made = (moves @ kept).reshape(MOVES, cells, -1) if sums else kept
                return jax.nn.softmax(RATE * (made - k * cost), axis=0)

            def going_on(crowd, policy):
                return comes @ (crowd * policy).reshape(MOVES * cells, -1)

            def one_round(kept, k):
                def ahead(crowd, x):
                    policy = policy_of(x, k) if sums else x
                    return going_on(crowd, policy), (crowd, policy if sums else None)

                policy = None if sums else jax.vmap(policy_of, (0, None))(kept, k)
                told, made = jax.lax.scan(ahead, crowd, kept[1:] if sums else policy)[1]
                policy = made if sums else policy
                paid = ready - CROWDED * jnp.log(told + 1e-3) - (policy * cost).sum(1)

                def back(value, x):
                    paid, policy = x
                    found = both @ value
                    led = found[: MOVES * cells].reshape(MOVES, cells, -1)
                    value = paid + (policy * led).sum(0) + found[MOVES * cells :]
                    return value, value if sums else led

                found = jax.lax.scan(back, jnp.zeros_like(toll), (paid, policy), reverse=True)[1]
                return kept.at[:-1].add(found) if sums else kept + found, None

            one_round = jax.checkpoint(one_round, prevent_cse=False) if again else one_round
            kept = jnp.zeros((length + 1, *toll.shape) if sums else (length, MOVES, *toll.shape))
            kept, _ = jax.lax.scan(one_round, kept, jnp.arange(rounds, dtype=jnp.float32))
            last = lambda crowd, x: 2 * (going_on(crowd, policy_of(x, rounds)),)  # noqa: E731
            after = jax.lax.scan(last, crowd, kept[1:] if sums else kept)[1]
            return spread(after.mT, toll.T).mean()

        return jax.value_and_grad(loss)(p)

    return run


def workload(length, batch, rounds, side, hidden, chunk=8):
    make, inner, alone = (functools.partial(f, length, batch, rounds) for f in (by_hand, innermost, without_common))
    forms = {
        "rlfx": given.by_rlfx(length, batch, rounds), "plain": given.plain(length, batch, rounds),
        "towns together": make(Way()), "gathered": make(Way(gathered)), "matrices": make(Way(multiplied)),
        "matrices, rewards at once": make(Way(multiplied, later=True)),
        f"matrices, rewards at once, {chunk} towns": make(Way(multiplied, later=True), chunk),
        "towns innermost": inner(), "towns innermost, rewards at once": inner(after=True),
        "towns innermost, matrices": inner(rolled=False),
        "towns innermost, matrices, rewards at once": inner(rolled=False, after=True),
        "towns innermost, matrices, again": inner(rolled=False, after=True, again=True),
        "without what is common": alone(), "without what is common, again": alone(again=True),
        "sums of values, again": alone(sums=True, again=True),
    }  # fmt: skip
    k, cells = jax.random.split(jax.random.key(0), 4), side * side
    towns = {
        "facts": jax.random.normal(k[0], (batch, cells, FACTS)), "liked": jax.random.normal(k[1], (batch, cells)),
        "crowd": jax.nn.softmax(2.0 * jax.random.normal(k[2], (batch, cells))),
    }  # fmt: skip
    return Workload(forms, (params_of(k[3], hidden), towns), tolerance=5e-4)
