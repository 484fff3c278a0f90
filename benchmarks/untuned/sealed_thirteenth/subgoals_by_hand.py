"""HIRO by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_thirteenth import subgoals
from benchmarks.untuned.sealed_thirteenth.subgoals import (
    ACTIONS,
    AHEAD,
    GAMMA,
    GOAL,
    OBS,
    acts,
    candidates_of,
    chooses,
    ends_of,
    high_loss,
    low_loss,
    noises,
    params_of,
    relu,
    windows,
)  # fmt: skip

# -- how far from what was done the lower policy is over a window, told places ``[T, B, count, GOAL]``: ``[T, B, count]``


def stacked(net, places, data):
    """All windows at once."""
    obs, done = windows(data["obs"]), windows(data["action"])  # [T, AHEAD, B, ...]
    there = windows(jnp.ones(len(places)))
    goals = places[:, None] - obs[..., None, :GOAL]
    seen = jnp.broadcast_to(obs[..., None, :], (*goals.shape[:-1], OBS))
    away = ((done[..., None, :] - acts(net, seen, goals)) ** 2).sum(-1)
    return (there[:, :, None, None] * away).sum(1)


def first_apart(net):
    """The first layer's parts: of an observation whose first numbers are taken from the place, and of the place."""
    first, *rest = net
    of_goal = first["w"][OBS:]
    return first["w"][:OBS].at[:GOAL].add(-of_goal), of_goal, first["b"], rest


def first_shared(net, places, data):
    """What the first layer makes of observations, and of places, is made once and added for each pair."""
    of_obs, of_goal, b, rest = first_apart(net)
    made = windows(data["obs"] @ of_obs + b)[..., None, :] + (places @ of_goal)[:, None]
    done, there = windows(data["action"]), windows(jnp.ones(len(places)))
    away = ((done[..., None, :] - jnp.tanh(c.mlp(rest, relu(made), relu))) ** 2).sum(-1)
    return (there[:, :, None, None] * away).sum(1)


def ends_behind(x):
    return jnp.concatenate([x, jnp.zeros((AHEAD - 1, *x.shape[1:]), x.dtype)])


def step_by_step(net, places, data, shared=True, unroll=1):
    """One timestep of all windows after the other."""
    length = len(places)
    obs, done, there = (ends_behind(x) for x in (data["obs"], data["action"], jnp.ones(length)))
    of_obs, of_goal, b, rest = first_apart(net)
    if shared:
        obs, of_places = obs @ of_obs + b, places @ of_goal

    def add(total, i):
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, i, length)  # noqa: E731
        now = cut(obs)[:, :, None]
        if shared:
            made = jnp.tanh(c.mlp(rest, relu(now + of_places), relu))
        else:
            made = acts(net, jnp.broadcast_to(now, (*places.shape[:-1], OBS)), places - now[..., :GOAL])
        return total + cut(there)[:, None, None] * ((cut(done)[:, :, None] - made) ** 2).sum(-1), None

    return jax.lax.scan(add, jnp.zeros(places.shape[:-1]), jnp.arange(AHEAD), unroll=unroll)[0]


def in_columns(net, places, data):
    """Features first, one timestep of all windows after the other, written one behind another."""
    length, of_obs, of_goal, b, rest = len(places), *first_apart(net)
    first = lambda x: jnp.moveaxis(x, -1, 0)  # noqa: E731
    of_places = jnp.einsum("gtbk,gh->htbk", first(places), of_goal)
    obs = jnp.einsum("otb,oh->htb", first(data["obs"]), of_obs) + b[:, None, None]
    done, total = first(data["action"]), jnp.zeros(places.shape[:-1])
    for i in range(AHEAD):
        rows = length - i  # windows that reach so far
        made = relu(obs[:, i:, :, None] + of_places[:, :rows])
        made = jnp.tanh(c.columns(rest, made.reshape(len(b), -1), relu)).reshape(ACTIONS, *made.shape[1:])
        total = total.at[:rows].add(((done[:, i:, :, None] - made) ** 2).sum(0))
    return total


def clipped(net, places, data):
    """One timestep of all windows that reach so far after the other."""
    length, of_obs, of_goal, b, rest = len(places), *first_apart(net)
    of_places, obs, total = places @ of_goal, data["obs"] @ of_obs + b, jnp.zeros(places.shape[:-1])
    for i in range(AHEAD):
        rows = length - i
        made = jnp.tanh(c.mlp(rest, relu(obs[i:, :, None] + of_places[:rows]), relu))
        total = total.at[:rows].add(((data["action"][i:, :, None] - made) ** 2).sum(-1))
    return total


def goal_by_goal(net, places, data):
    """One candidate of all after the other."""
    return jax.lax.map(lambda x: first_shared(net, x[:, :, None], data)[..., 0], jnp.moveaxis(places, 2, 0)).transpose(1, 2, 0)


def by_times(net, places, data):
    """One timestep and its window after the other, of all environments and candidates."""
    _, of_goal, b, rest = first_apart(net)
    obs = ends_behind(data["obs"] @ first_apart(net)[0] + b)
    done, there, of_places = ends_behind(data["action"]), ends_behind(jnp.ones(len(places))), places @ of_goal

    def one(x):
        i, place = x
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, i, AHEAD)  # noqa: E731
        made = jnp.tanh(c.mlp(rest, relu(cut(obs)[:, :, None] + place), relu))
        return (cut(there)[:, None, None] * ((cut(done)[:, :, None] - made) ** 2).sum(-1)).sum(0)

    return jax.lax.map(one, (jnp.arange(len(places)), of_places))


# -- what is learnt, of ``[T, B]``, summed: loss and gradient


def as_given(p, old, data, high):
    def loss(p):
        lower = low_loss(p["low"], old["low"], data)
        return (lower + high_loss(p["high"], old["high"], *high[:-1], high[-1][:, None])).sum()

    return jax.value_and_grad(loss)(p)


def rows(p, old, data, high, critics=c.one_by_one, columns=False):
    """Flattened, and of what is tried one critic alone; ``columns``: features first."""
    obs, goal, reward, end, discount = high
    discount = jnp.broadcast_to(discount[:, None], reward.shape)
    data, obs, goal, reward, end, discount = c.rows_of((data, obs, goal, reward, end, discount))
    on = data["obs"][:, :GOAL] + data["goal"] - data["after"][:, :GOAL]
    seen, after = jnp.concatenate([data["obs"], data["goal"]], -1), jnp.concatenate([data["after"], on], -1)
    gained = -jnp.sqrt((on**2).sum(-1) + 1e-6)
    if columns:
        on, seen, after, obs, goal, end = (x.T for x in (on, seen, after, obs, goal, end))
        join, net = lambda *x: jnp.concatenate(x), lambda net, x: c.columns(net, x, relu)
        done, column = data["action"].T, lambda n, x, a: net(n, jnp.concatenate([x, a]))[0]
        q = lambda n, x, a: jnp.stack([column(jax.tree.map(lambda w: w[i], n), x, a) for i in range(2)])  # noqa: E731
        act, choose = lambda n, x: jnp.tanh(net(n, x)), lambda n, x: 2.0 * jnp.tanh(net(n, x))
        single = column
    else:
        join, done, q = lambda *x: jnp.concatenate(x, -1), data["action"], critics
        act, choose = lambda n, x: jnp.tanh(c.mlp(n, x, relu)), chooses
        single = lambda n, x, a: c.mlp(n, join(x, a), relu)[..., 0]  # noqa: E731
    low, high = old["low"], old["high"]
    low_target = gained + GAMMA * q(low["q"], after, act(low["pi"], after)).min(0)
    high_target = reward + discount * q(high["q"], end, choose(high["pi"], end)).min(0)

    def loss(p):
        low, high = p["low"], p["high"]
        one = lambda nets: jax.tree.map(lambda w: stop_gradient(w[0]), nets)  # noqa: E731
        lower = 0.5 * ((q(low["q"], seen, done) - low_target) ** 2).sum()
        upper = 0.5 * ((q(high["q"], obs, goal) - high_target) ** 2).sum()
        tried = single(one(low["q"]), seen, act(low["pi"], seen)) + single(one(high["q"]), obs, choose(high["pi"], obs))
        return lower + upper - tried.sum()

    return jax.value_and_grad(loss)(p)


def by_hand(length, batch, count, scores=first_shared, learn=rows, chunk=None, parts=None):
    """``chunk``: so many environments' candidates after the others; ``parts``: so many environments learn after the others."""

    def run(p, old, data, key):
        last, discount = ends_of(length)
        end, obs = data["after"][last], data["obs"]
        candidates = candidates_of(data["goal"], obs, end, noises(key, length, batch, count))
        cut = lambda x, size: jnp.moveaxis(x.reshape(length, -1, size, *x.shape[2:]), 1, 0)  # noqa: E731
        places = obs[:, :, None, :GOAL] + candidates
        if chunk is None:
            away = scores(p["low"]["pi"], places, data)
        else:
            some = jax.tree.map(lambda x: cut(x, chunk), (places, data))
            away = jnp.moveaxis(jax.lax.map(lambda x: scores(p["low"]["pi"], *x), some), 0, 1).reshape(length, batch, count)
        best = jnp.take_along_axis(candidates, jnp.argmin(away, -1)[..., None, None], 2)[:, :, 0]
        reward = sum(ends_behind(data["reward"])[i : i + length] for i in range(AHEAD))
        if parts is None:
            total = learn(p, old, data, (obs, best, reward, end, discount))
        else:
            some = jax.tree.map(lambda x: cut(x, parts), (data, (obs, best, reward, end)))
            add = lambda total, x: (jax.tree.map(jnp.add, total, learn(p, old, x[0], (*x[1], discount))), None)  # noqa: E731
            total = jax.lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)), some)[0]
        return jax.tree.map(lambda x: x / (length * batch), total)

    return run


def workload(length, batch, count, hidden, chunk=4):
    make, cut = functools.partial(by_hand, length, batch, count), functools.partial
    given, joined = {"learn": as_given}, {"learn": cut(rows, critics=c.twins_joined)}
    column, double = {"learn": cut(rows, columns=True)}, 2 * chunk
    apart = cut(step_by_step, shared=False)
    program = cut(subgoals.program, count=count)
    forms = {
        "rlfx": c.learner_by_rlfx(program, length, batch), "plain": subgoals.plain(length, batch, count),
        "stacked": make(stacked, **given), "shared": make(**given), "step by step": make(apart, **given),
        "stacked, rows": make(stacked), "shared, rows": make(), "shared, rows, twins joined": make(**joined),
        "shared, features first": make(**column), "steps, rows": make(step_by_step),
        "steps, rows, twins joined": make(step_by_step, **joined), "steps not shared, rows": make(apart),
        "steps, features first": make(step_by_step, **column),
        "steps unrolled by 2, rows": make(cut(step_by_step, unroll=2)), "steps clipped, rows": make(clipped),
        "steps clipped, rows, twins joined": make(clipped, **joined), "steps clipped, features first": make(clipped, **column),
        "features first, rows": make(in_columns), "features first, twins joined": make(in_columns, **joined),
        "features first": make(in_columns, **column), "goals, rows": make(goal_by_goal),
        "goals, features first": make(goal_by_goal, **column), "times, rows": make(by_times),
        "times, rows, twins joined": make(by_times, **joined), "times, features first": make(by_times, **column),
        f"shared, {chunk} environments": make(chunk=chunk), f"shared, {double} environments": make(chunk=double),
        f"steps clipped, {chunk} environments": make(clipped, chunk=chunk),
        f"steps clipped, {double} environments": make(clipped, chunk=double),
        f"features first, {chunk} environments": make(in_columns, chunk=chunk, **column),
        f"features first, {double} environments": make(in_columns, chunk=double, **column),
        f"times, {chunk} environments": make(by_times, chunk=chunk),
        f"times, rows, {double} environments learn": make(by_times, parts=double),
        f"features first, {double} environments learn": make(in_columns, parts=double, **column),
        "times, rows, threefry unrolled": make(by_times), "steps clipped, rows, threefry unrolled": make(clipped),
        "features first, threefry unrolled": make(in_columns, **column),
    }  # fmt: skip
    k, size = jax.random.split(jax.random.key(0), 6), (length, batch)
    obs = 0.3 * jnp.cumsum(jax.random.normal(k[0], (length + 1, batch, OBS)), 0)
    data = {
        "obs": obs[:-1], "after": obs[1:], "goal": jax.random.normal(k[1], (*size, GOAL)),
        "action": jnp.tanh(jax.random.normal(k[2], (*size, ACTIONS))), "reward": jax.random.normal(k[3], size),
    }  # fmt: skip
    return drawing(forms, (params_of(k[4], hidden), params_of(k[5], hidden), data), tolerance=5e-5)
