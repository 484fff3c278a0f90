"""Maximum causal entropy inverse reinforcement learning by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_fourteenth import demonstrated
from benchmarks.untuned.sealed_fourteenth.demonstrated import (
    ACTIONS,
    DEMOS,
    FEATURES,
    GAMMA,
    SLIP,
    nexts,
    params_of,
    relu,
    reward_of,
    transitions,
)  # fmt: skip

# -- what is expected after each move, ``[ACTIONS, *v.shape]``, of values ``v[CELLS, B]`` (``axis`` 0) or ``v[B, CELLS]`` (1)


def dense(side, axis):
    moves = transitions(side)
    return lambda v: jnp.einsum("ast,tb->asb" if axis == 0 else "ast,bt->abs", moves, v)


def joined(side, axis):
    """One product with the matrices of all moves."""
    moves = transitions(side).reshape(-1, side * side)

    def ahead(v):
        if axis == 0:
            return (moves @ v).reshape(ACTIONS, *v.shape)
        return jnp.moveaxis((v @ moves.T).reshape(len(v), ACTIONS, -1), 1, 0)

    return ahead


def slipped(moved):
    return (1.0 - SLIP) * moved + SLIP * moved.mean(0)


def gathered(side, axis):
    """Without slips every move leads to one cell."""
    where = jnp.asarray(nexts(side))
    return lambda v: slipped(v[where] if axis == 0 else jnp.moveaxis(v[:, where], 1, 0))


def shifted(side, axis):
    """Without slips every move shifts the map, whose edges stay."""

    def ahead(v):
        grid = v.reshape((side, side, -1) if axis == 0 else (-1, side, side))
        down, right = (0, 1) if axis == 0 else (1, 2)

        def by(axis, back):
            cut = lambda lo, hi: jax.lax.slice_in_dim(grid, lo, hi, axis=axis)  # noqa: E731
            parts = [cut(0, 1), cut(0, side - 1)] if back else [cut(1, side), cut(side - 1, side)]
            return jnp.concatenate(parts, axis)

        moved = [by(down, True), by(down, False), by(right, True), by(right, False), grid]
        return slipped(jnp.stack(moved)).reshape(ACTIONS, *v.shape)

    return ahead


# -- the soft maximum over ``q[ACTIONS, ...]``, and probabilities


def as_given(q):
    v = jax.nn.logsumexp(q, 0)
    return v, jnp.exp(q - v)


def by_softmax(q):
    """By exponentials that are made once."""
    top = jax.lax.stop_gradient(q.max(0))
    e = jnp.exp(q - top)
    total = e.sum(0)
    return top + jnp.log(total), e / total


def about_mean(q):
    """Neighbours' values are near enough for exponentials about their mean, and a sum is all there is of the actions."""
    middle = q.sum(0) / ACTIONS
    e = [jnp.exp(x - middle) for x in q]
    total = functools.reduce(jnp.add, e)
    return middle + jnp.log(total), jnp.stack(e) / total


# -- networks: rewards of maps ``[B, CELLS, FEATURES]``, ``[CELLS, B]`` (``axis`` 0) or ``[B, CELLS]``


def by_rows(p, maps, axis):
    found = reward_of(p, maps.reshape(-1, FEATURES)).reshape(maps.shape[:2])
    return found.T if axis == 0 else found


def by_columns(p, maps, axis):
    """Features first."""
    x = jnp.transpose(maps, (2, 1, 0) if axis == 0 else (2, 0, 1))
    return (p["out"] @ relu(c.columns(p["net"], x.reshape(FEATURES, -1), relu))).reshape(x.shape[1:])


# -- the loss is linear in rewards and values: how often demonstrations were in a cell, and what they expect and find there


def by_points(demos, side, axis):
    """Added at cells: how often there, ``[T, ...]``, and the part of each value."""
    length, batch = demos["state"].shape[:2]
    where = jnp.arange(length)[:, None, None], jnp.arange(batch)[None, :, None]
    there = jnp.zeros((length, batch, side * side)).at[(*where, demos["state"])].add(demos["going"])
    after = (demos["going"][..., None] * transitions(side)[demos["action"], demos["state"]]).sum(2)
    return there_and_part(there, after, axis)


def by_ones(demos, side, axis):
    """As products with ones."""
    cells = side * side
    pairs = jax.nn.one_hot(demos["action"] * cells + demos["state"], ACTIONS * cells)
    pairs = (demos["going"][..., None] * pairs).sum(2)
    there = pairs.reshape(*pairs.shape[:2], ACTIONS, cells).sum(2)
    return there_and_part(there, pairs @ transitions(side).reshape(-1, cells), axis)


def there_and_part(there, after, axis):
    part = jnp.concatenate([jnp.zeros_like(after[:1]), GAMMA * after[:-1]]) - there
    return (there.sum(0).T, jnp.moveaxis(part, 1, 2)) if axis == 0 else (there.sum(0), part)


# -- what is learnt: loss and gradient, summed


def through_time(p, maps, demos, side, axis, net, ahead, soft, parts, unroll=1, again=False):
    """The gradient is jax's."""
    there, part = parts(demos, side, axis)

    def loss(p):
        reward = net(p, maps, axis)

        def step(v, part):
            v = soft(reward + GAMMA * ahead(v))[0]
            return v, (part * v).sum()

        body = jax.checkpoint(step, prevent_cse=False) if again else step
        found = jax.lax.scan(body, jnp.zeros_like(reward), part, reverse=True, unroll=unroll)[1]
        return -(there * reward).sum() - found.sum()

    return jax.value_and_grad(loss)(p)


def by_visits(p, maps, demos, side, axis, net, ahead, soft, parts, unroll=1, again=False, back=None):
    """The gradient of rewards is how much more often demonstrations were in a cell than the policy is expected to be: visits go
    forwards in time. ``again``: policies are not kept, but made of values again; ``back``: another form of moves, whose transpose
    is taken."""
    there, part = parts(demos, side, axis)
    reward, pull = jax.vjp(lambda p: net(p, maps, axis), p)
    nothing = jnp.zeros_like(reward)
    transposed = jax.linear_transpose(ahead if back is None else back, nothing)

    def step(v, part):
        after, policy = soft(reward + GAMMA * ahead(v))
        return after, ((part * after).sum(), v if again else policy)

    found, kept = jax.lax.scan(step, nothing, part, reverse=True, unroll=unroll)[1]

    def visited(carry, x):
        (visits, total), (part, kept) = carry, x
        visits = visits + part
        policy = soft(reward + GAMMA * ahead(kept))[1] if again else kept
        return (GAMMA * transposed(policy * visits)[0], total + visits), None

    (_, total), _ = jax.lax.scan(visited, (nothing, nothing), (part, kept), unroll=unroll)
    return -(there * reward).sum() - found.sum(), pull(-there - total)[0]


def by_hand(
    length, batch, side, learn=by_visits, axis=0, net=by_rows, ahead=dense, soft=by_softmax, parts=by_points, chunk=None, **how
):
    """``chunk``: so many environments after the others."""
    if how.get("back") is not None:
        how["back"] = how["back"](side, axis)
    how |= {"side": side, "axis": axis, "net": net, "ahead": ahead(side, axis), "soft": soft, "parts": parts}

    def run(p, maps, demos):
        if chunk is None:
            total = learn(p, maps, demos, **how)
        else:
            cut = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(length, -1, chunk, *x.shape[2:]), 1, 0), demos)
            add = lambda total, x: (jax.tree.map(jnp.add, total, learn(p, *x, **how)), None)  # noqa: E731
            none = jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)
            total = jax.lax.scan(add, none, (c.in_chunks(maps, chunk), cut))[0]
        return jax.tree.map(lambda x: x / (length * batch), total)

    return run


def demonstrations(key, length, batch, side):
    """Random walks that slip, of other lengths: states, actions and whether they go on, ``[T, B, DEMOS]``."""
    k, where = jax.random.split(key, 5), jnp.asarray(nexts(side))
    size = length, batch, DEMOS
    action = jax.random.randint(k[0], size, 0, ACTIONS)
    moved = jnp.where(jax.random.uniform(k[1], size) < SLIP, jax.random.randint(k[2], size, 0, ACTIONS), action)
    begun = jax.random.randint(k[3], size[1:], 0, side * side)
    state = jax.lax.scan(lambda s, move: (where[move, s], s), begun, moved)[1]
    ends = jax.random.randint(k[4], size[1:], length // 2, length + 1)
    going = (jnp.arange(length)[:, None, None] < ends).astype(np.float32)
    return {"state": state, "action": action, "going": going}


def workload(length, batch, side, hidden, chunk=8):
    make, rows = functools.partial(by_hand, length, batch, side), {"axis": 1}
    auto, given, mean = {"learn": through_time}, {"soft": as_given}, {"soft": about_mean}
    one, look, shift = {"ahead": joined}, {"ahead": gathered}, {"ahead": shifted}
    column, ones, again, double = {"net": by_columns}, {"parts": by_ones}, {"again": True}, 2 * chunk
    look_back = {"ahead": gathered, "back": shifted}
    forms = {
        "rlfx": demonstrated.by_rlfx(length, batch, side), "plain": demonstrated.plain(length, batch, side),
        "linear, environments first": make(**auto, **given, **rows), "linear": make(**auto, **given),
        "linear, joined, environments first": make(**auto, **rows, **one), "linear, joined": make(**auto, **one),
        "linear, joined, again": make(**auto, **one, **again), "linear, gathered": make(**auto, **look),
        "linear, shifted": make(**auto, **shift), "linear, shifted, about mean": make(**auto, **shift, **mean),
        "linear, shifted, again": make(**auto, **shift, **again, **mean),
        "visits, environments first": make(**rows), "visits": make(), "visits, joined": make(**one),
        "visits, joined, environments first": make(**one, **rows), "visits, joined, again": make(**one, **again),
        "visits, joined, about mean": make(**one, **mean),
        "visits, joined, unrolled by 2": make(unroll=2, **one), "visits, joined, features first": make(**one, **column, **mean),
        "visits, gathered": make(**look), "visits, gathered and shifted back": make(**look_back, **mean),
        "visits, shifted": make(**shift), "visits, shifted, environments first": make(**shift, **rows),
        "visits, shifted, again": make(**shift, **again, **mean), "visits, shifted, about mean": make(**shift, **mean),
        "visits, shifted, ones": make(**shift, **ones, **mean),
        "visits, shifted, features first": make(**shift, **column, **mean),
        "visits, shifted, unrolled by 2": make(unroll=2, **shift, **mean),
        f"visits, joined, {chunk} environments": make(chunk=chunk, **one, **mean),
        f"visits, joined, {double} environments": make(chunk=double, **one, **mean),
        f"visits, shifted, {chunk} environments": make(chunk=chunk, **shift, **mean),
        f"visits, gathered, {chunk} environments": make(chunk=chunk, **look),
        f"visits, gathered and shifted back, {chunk} environments": make(chunk=chunk, **look_back),
        f"visits, gathered and shifted back, about mean, {double} environments": make(chunk=double, **look_back, **mean),
        f"visits, shifted, {double} environments": make(chunk=double, **shift, **mean),
        f"visits, shifted, features first, {double} environments": make(chunk=double, **shift, **column, **mean),
        f"linear, shifted, {double} environments": make(chunk=double, **auto, **shift, **mean),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 3)
    maps = jax.random.normal(k[0], (batch, side * side, FEATURES))
    return Workload(forms, (params_of(k[1], hidden), maps, demonstrations(k[2], length, batch, side)), tolerance=1e-4)
