"""Quasimetric reinforcement learning by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_nineteenth import quasimetric as given
from benchmarks.untuned.sealed_nineteenth.quasimetric import (
    ACTIONS,
    FARTHEST,
    INTERVALS,
    LOOSE,
    MIXED,
    OBS,
    PARTS,
    SOFT,
    STEP,
    move,
    params_of,
    project,
    relu,
    see,
    union,
)  # fmt: skip

# -- how long unions are of intervals from ``x[..., INTERVALS]`` to y


def sorted_pairs(x, y):
    """Intervals in the order of where they begin, with the largest end so far."""
    left, right = jax.lax.sort((x, jnp.maximum(x, y)), num_keys=1)
    reached = jax.lax.cummax(right, axis=right.ndim - 1)
    gone = jnp.maximum(left[..., 1:], reached[..., :-1])
    return (right[..., 0] - left[..., 0]) + relu(right[..., 1:] - gone).sum(-1)


def counted(x, y):
    """Without an order: an end counts that is inside of no other interval."""
    right = jnp.maximum(x, y)
    begins, ends = open_ends(stop_gradient(x), stop_gradient(right))
    return jnp.where(ends, right, 0.0).sum(-1) - jnp.where(begins, x, 0.0).sum(-1)


def open_ends(left, right):
    """Whether the union of intervals ``[..., n]`` begins or ends where one of them does; no two of them begin or end at once."""
    a, b = left[..., :, None], left[..., None, :]
    begins = ~((b < a) & (a <= right[..., None, :])).any(-1)
    ends = ~((b <= right[..., :, None]) & (right[..., :, None] < right[..., None, :])).any(-1)
    return begins, ends


def counted_one_by_one(x, y):
    """The same, against one interval after the other."""
    right = jnp.maximum(x, y)
    begins, ends = one_by_one(stop_gradient(x), stop_gradient(right))
    return jnp.where(ends, right, 0.0).sum(-1) - jnp.where(begins, x, 0.0).sum(-1)


def one_by_one(left, right):
    begins = ends = True
    for j in range(left.shape[-1]):
        a, b = left[..., j : j + 1], right[..., j : j + 1]
        begins &= ~((a < left) & (left <= b))
        ends &= ~((a <= right) & (right < b))
    return begins, ends


@jax.custom_vjp
def counted_written(x, y):
    """With its derivative."""
    return ahead(x, y)[0]


def ahead(x, y):
    right = jnp.maximum(x, y)
    begins, ends = one_by_one(x, right)
    up = y > x
    value = jnp.where(ends, right, 0.0).sum(-1) - jnp.where(begins, x, 0.0).sum(-1)
    return value, (ends & up, (ends & ~up) != begins, begins)


def back(kept, by):
    by_y, by_x, begins = kept
    by = by[..., None]
    return jnp.where(by_x, jnp.where(begins, -by, by), 0.0), jnp.where(by_y, by, 0.0)


counted_written.defvjp(ahead, back)


# -- distances ``[N]`` of ``x[N, PARTS * INTERVALS]``


def mixed(most, parts, axis):
    most = jax.nn.sigmoid(most)
    return most * parts.max(axis) + (1.0 - most) * parts.mean(axis)


def parts_last(way, most, x, y):
    return mixed(most, way.union(*(v.reshape(*v.shape[:-1], PARTS, INTERVALS) for v in (x, y))), -1)


@jax.custom_vjp
def union_first(x, y):
    """Of ``[INTERVALS, ...]``, with its derivative."""
    return first_ahead(x, y)[0]


def first_ahead(x, y):
    right = jnp.maximum(x, y)
    value, kept = 0.0, []
    for i in range(len(x)):
        begins = ends = True
        for j in range(len(x)):
            if i != j:
                begins &= ~((x[j] < x[i]) & (x[i] <= right[j]))
                ends &= ~((x[j] <= right[i]) & (right[i] < right[j]))
        up = y[i] > x[i]
        value += jnp.where(ends, right[i], 0.0) - jnp.where(begins, x[i], 0.0)
        kept.append((ends & up, (ends & ~up) != begins, begins))
    return value, tuple(jnp.stack(k) for k in zip(*kept, strict=True))


def first_back(kept, by):
    by_y, by_x, begins = kept
    return jnp.where(by_x, jnp.where(begins, -by, by), 0.0), jnp.where(by_y, by, 0.0)


union_first.defvjp(first_ahead, first_back)


def intervals_first(way, most, x, y):
    """Points are innermost; intervals of a part are first."""
    turned = lambda v: v.T.reshape(PARTS, INTERVALS, -1).swapaxes(0, 1)  # noqa: E731
    return mixed(most, way.union(turned(x), turned(y)), 0)


# -- what is learnt, of rows


class Way(NamedTuple):
    union: Any = union
    distance: Any = parts_last
    joined: bool = False  # what is projected once more, and all distances, are one batch each


def losses(way, p, x, goal, here, code, there, aim):
    fixed = stop_gradient(p)
    action = given.act(p, x["obs"], goal)
    moved = move(p, here, x["action"])
    to_goal = move(fixed, stop_gradient(here), action)
    foreseen, reached = project(p, moved), project(fixed, to_goal)
    far = functools.partial(way.distance, way)
    if way.joined:
        begin, end = jnp.concatenate([code, code, foreseen, there]), jnp.concatenate([aim, there, there, foreseen])
        away, local, ahead, behind = jnp.split(far(p["most"], begin, end), 4)
    else:
        away, local = far(p["most"], code, aim), far(p["most"], code, there)
        ahead, behind = far(p["most"], foreseen, there), far(p["most"], there, foreseen)
    cost = far(fixed["most"], reached, stop_gradient(aim)) + MIXED * ((action - x["action"]) ** 2).sum(-1)
    local = relu(local - STEP) ** 2 - LOOSE
    weight = jax.nn.softplus(p["multiplier"])
    held = stop_gradient(weight) * local - weight * stop_gradient(local)
    spread = jax.nn.softplus(SOFT * (FARTHEST - away)) / SOFT
    return (spread + cost + jnp.where(x["done"], 0.0, held + 0.05 * (ahead**2 + behind**2))).sum()


def of_block(way, p, x, after):
    """Of ``x[T, B, ...]``, behind which is ``after[B, OBS]``; summed."""
    length, batch = x["done"].shape
    here = see(p, jnp.concatenate([x["obs"], after[None]]).reshape(-1, OBS))
    code = project(p, here)
    there, here, code = code[batch:], here[:-batch], code[:-batch]
    index = (x["other"] + batch * jnp.arange(length)[:, None]).reshape(-1)
    rows = c.rows_of(x)
    return losses(way, p, rows, rows["obs"][index], here, code, there, code[index])


def by_hand(length, batch, way, chunk=None, loop=True):
    """``chunk``: timesteps of a block; each sees the timestep behind it again; ``loop``: one after the other, in a loop."""

    def run(p, data):
        obs = data["obs"]
        after = obs[-1:] if chunk is None else jnp.concatenate([obs[chunk::chunk], obs[-1:]])
        scale = 1.0 / (length * batch)
        loss = lambda p, x: scale * of_block(way, p, *x)  # noqa: E731
        if chunk is None:
            return jax.value_and_grad(loss)(p, (data, after[0]))
        parts = c.in_chunks(data, chunk), after
        if loop:
            return c.summed_gradient(loss, p, parts)
        found = [jax.value_and_grad(loss)(p, jax.tree.map(lambda x: x[i], parts)) for i in range(length // chunk)]
        return functools.reduce(functools.partial(jax.tree.map, jnp.add), found)

    return run


def workload(length, batch, hidden, chunk=4):
    make = functools.partial(by_hand, length, batch)
    written = Way(counted_written)
    first, one = Way(union_first, intervals_first, True), Way(counted_one_by_one)
    forms = {
        "rlfx": given.by_rlfx(length, batch), "plain": given.plain(length, batch),
        "projected once": make(Way()), "sorted pairs": make(Way(sorted_pairs)), "counted": make(Way(counted)),
        "counted one by one": make(one), "counted one by one, joined": make(one._replace(joined=True)),
        "counted, written out": make(written), "counted, written out, joined": make(written._replace(joined=True)),
        "counted, written out, intervals first, joined": make(first),
        f"sorted pairs, blocks of {chunk}": make(Way(sorted_pairs), chunk),
        f"counted one by one, blocks of {chunk}": make(one, chunk),
        f"counted one by one, joined, blocks of {chunk}": make(one._replace(joined=True), chunk),
        f"counted, written out, blocks of {chunk}": make(written, chunk),
        f"counted, written out, intervals first, joined, blocks of {chunk}": make(first, chunk),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch
    done = (jax.random.uniform(k[0], size) < 0.05).at[-1].set(True)
    obs = jnp.cumsum(0.3 * jax.random.normal(k[1], (*size, OBS)), 0)
    action = jnp.tanh(jax.random.normal(k[2], (*size, ACTIONS)))
    data = {"obs": obs, "action": action, "done": done, "other": jax.random.randint(k[3], size, 0, batch)}
    return Workload(forms, (params_of(k[5], hidden), data), tolerance=5e-5)
