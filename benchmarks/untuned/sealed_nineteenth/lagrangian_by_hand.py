"""Deep Lagrangian networks by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_nineteenth import lagrangian as given
from benchmarks.untuned.sealed_nineteenth.lagrangian import (
    BELOW,
    DT,
    FORESEEN,
    JOINTS,
    LEAST,
    LOWER,
    STEPS,
    params_of,
    told,
)

N = range(JOINTS)
DIAGONAL = np.flatnonzero(LOWER[0] == LOWER[1])
AT = {(int(i), int(j)): n for n, (i, j) in enumerate(zip(*LOWER, strict=True))}

# -- mass matrices and forces of arms ``[JOINTS][...]``, a list of numbers; ``made[BELOW + 1, ...]`` is what the network tells


def entries(p, made):
    """Of the factor, by row and column."""
    made = [made[n] + p[-1]["b"][n] for n in range(BELOW)]
    return {at: jax.nn.softplus(made[n]) + LEAST if at[0] == at[1] else made[n] for at, n in AT.items()}


def factored(p, made, moving, speed):
    """The factor, its change, its transpose times speed, and that times the change of the factor."""
    lower = entries(p, made)
    slope = lambda at, n: jax.nn.sigmoid(made[n] + p[-1]["b"][n]) if at[0] == at[1] else 1.0  # noqa: E731
    changing = {at: slope(at, n) * moving[n] for at, n in AT.items()}
    turned = [sum(lower[i, j] * speed[i] for i in range(j, JOINTS)) for j in N]
    return lower, changing, turned


def changed(lower, changing, turned, speed):
    """How momentum changes with where the arm is."""
    moved = [sum(changing[i, j] * speed[i] for i in range(j, JOINTS)) for j in N]
    return [sum(changing[i, j] * turned[j] + lower[i, j] * moved[j] for j in range(i + 1)) for i in N]


def weights_of(p, made, turned, speed):
    """By what each number that the network tells moves the Lagrangian."""
    slope = lambda i, j, n: jax.nn.sigmoid(made[n] + p[-1]["b"][n]) if i == j else 1.0  # noqa: E731
    return [turned[j] * speed[i] * slope(i, j, n) for (i, j), n in AT.items()]


def solved(lower, x):
    """By two triangular systems."""
    y = []
    for i in N:
        y.append((x[i] - sum(lower[i, j] * y[j] for j in range(i))) / lower[i, i])
    z = [None] * JOINTS
    for i in reversed(N):
        z[i] = (y[i] - sum(lower[j, i] * z[j] for j in range(i + 1, JOINTS))) / lower[i, i]
    return z


def times_mass(lower, x):
    turned = [sum(lower[i, j] * x[i] for i in range(j, JOINTS)) for j in N]
    return [sum(lower[i, j] * turned[j] for j in range(i + 1)) for i in N]


# -- networks of rows ``q[N, JOINTS]`` or of columns ``q[JOINTS, N]``: what they tell, how it changes, and the way back


class Rows:
    axis = -1

    @staticmethod
    def up(w, x):
        return x @ w

    @staticmethod
    def down(w, x):
        return x @ w.T

    @staticmethod
    def bias(b):
        return b


class Columns:
    axis = 0

    @staticmethod
    def up(w, x):
        return w.T @ x

    @staticmethod
    def down(w, x):
        return w @ x

    @staticmethod
    def bias(b):
        return b[:, None]


def listed(layout, x):
    return [x[i] for i in range(len(x))] if layout is Columns else [x[..., i] for i in range(x.shape[-1])]


def along_and_back(layout, p, q, speed):
    """One derivative along the speed, and one from behind, written out."""
    first, second, last = p
    h = jnp.tanh(layout.up(first["w"], q) + layout.bias(first["b"]))
    g = jnp.tanh(layout.up(second["w"], h) + layout.bias(second["b"]))
    by_h, by_g = 1.0 - h**2, 1.0 - g**2
    moving = by_g * layout.up(second["w"], by_h * layout.up(first["w"], speed))
    made, moving = (listed(layout, layout.up(last["w"], x)) for x in (g, moving))

    def back(weights):
        by = layout.down(last["w"], jnp.stack(weights, layout.axis)) * by_g
        return listed(layout, layout.down(first["w"], layout.down(second["w"], by) * by_h))

    return made, moving, back


def stacked(layout, p, q, speed):
    """What is told and its change are products of one matrix."""
    first, second, last = p
    n = q.shape[1 + layout.axis] if layout is Columns else len(q)
    rows = 1 if layout is Columns else 0
    join = lambda a, b: jnp.concatenate([a, b], rows)  # noqa: E731
    cut = lambda x: (jax.lax.slice_in_dim(x, 0, n, axis=rows), jax.lax.slice_in_dim(x, n, 2 * n, axis=rows))  # noqa: E731
    x, along = cut(layout.up(first["w"], join(q, speed)))
    h = jnp.tanh(x + layout.bias(first["b"]))
    by_h = 1.0 - h**2
    x, along = cut(layout.up(second["w"], join(h, by_h * along)))
    g = jnp.tanh(x + layout.bias(second["b"]))
    by_g = 1.0 - g**2
    made, moving = (listed(layout, x) for x in cut(layout.up(last["w"], join(g, by_g * along))))

    def back(weights):
        by = layout.down(last["w"], jnp.stack(weights, layout.axis)) * by_g
        return listed(layout, layout.down(first["w"], layout.down(second["w"], by) * by_h))

    return made, moving, back


def by_jax(layout, p, q, speed):
    """Derivatives are jax's own."""

    def net(q):
        x = q
        for layer in p[:-1]:
            x = jnp.tanh(layout.up(layer["w"], x) + layout.bias(layer["b"]))
        return layout.up(p[-1]["w"], x)

    made, moving = jax.jvp(net, (q,), (speed,))
    back = jax.vjp(net, q)[1]
    turned = lambda weights: listed(layout, back(jnp.stack(weights, layout.axis))[0])  # noqa: E731
    return listed(layout, made), listed(layout, moving), turned


def all_ways(layout, p, q, speed):
    """Derivatives along all joints, ahead alone."""
    first, second, last = p
    h = jnp.tanh(layout.up(first["w"], q) + layout.bias(first["b"]))
    g = jnp.tanh(layout.up(second["w"], h) + layout.bias(second["b"]))
    by_h, by_g = 1.0 - h**2, 1.0 - g**2
    slopes = []
    for i in N:
        along = layout.up(second["w"], by_h * layout.bias(first["w"][i])) * by_g
        slopes.append(listed(layout, layout.up(last["w"], along)))
    made, speeds = listed(layout, layout.up(last["w"], g)), listed(layout, speed)
    moving = [sum(slopes[i][n] * speeds[i] for i in N) for n in range(BELOW + 1)]
    return made, moving, lambda weights: [sum(slopes[i][n] * weights[n] for n in range(BELOW + 1)) for i in N]


class Way(NamedTuple):
    layout: Any = Rows
    net: Any = along_and_back
    unrolled: bool = True  # the steps are not in a loop
    shared: bool = True  # the first step and the torque told are of one evaluation
    again: bool = False  # steps are computed once more on the way back


def evaluated(way, p, q, speed):
    """The factor of the mass matrix and the forces, of an array of positions and one of speeds."""
    made, moving, back = way.net(way.layout, p, q, speed)
    speeds = listed(way.layout, speed)
    lower, changing, turned = factored(p, made, moving, speeds)
    potential = jnp.full_like(turned[0], -1.0)
    slope = back([*weights_of(p, made, turned, speeds), potential])
    return lower, [a - b for a, b in zip(changed(lower, changing, turned, speeds), slope, strict=True)]


def losses(way, p, given_):
    """Of rows, summed."""
    x, torques, following, going = given_
    columns = way.layout is Columns
    turned = lambda v: jnp.moveaxis(v, 0, -1) if columns else v  # noqa: E731
    steps = lambda v: jnp.moveaxis(v, 1, 0) if not columns else jnp.moveaxis(v, 0, -1)  # noqa: E731
    q, speed, acceleration, torque = (turned(x[name]) for name in ("q", "speed", "acceleration", "torque"))
    torques, following, going = steps(torques), tuple(map(steps, following)), steps(going)
    axis = way.layout.axis
    of = functools.partial(evaluated, way, p)

    def moved(found, q, speed, torque):
        lower, force = found
        pushed = [a - b for a, b in zip(listed(way.layout, torque), force, strict=True)]
        speed = speed + DT * jnp.stack(solved(lower, pushed), axis)
        return q + DT * speed, speed

    def missed(state, x):
        following, going = x
        return (going * sum((a - b) ** 2 for a, b in zip(state, following, strict=True)).mean(axis)).sum()

    found = of(q, speed)
    lower, force = found
    pushes = [a + b for a, b in zip(times_mass(lower, listed(way.layout, acceleration)), force, strict=True)]
    total = ((jnp.stack(pushes, axis) - torque) ** 2).mean(axis).sum()
    scale = FORESEEN / STEPS

    def step(state, x):
        torque, *rest = x
        state = moved(of(*state), *state, torque)
        return state, missed(state, rest)

    step = jax.checkpoint(step, prevent_cse=not way.unrolled) if way.again else step
    xs, state = (torques, following, going), (q, speed)
    if way.shared:
        first, xs = jax.tree.map(lambda v: v[0], xs), jax.tree.map(lambda v: v[1:], xs)
        state = moved(found, *state, first[0])
        total += scale * missed(state, first[1:])
    if not way.unrolled:
        return total + scale * jax.lax.scan(step, state, xs)[1].sum()
    for i in range(len(xs[0])):
        state, cost = step(state, jax.tree.map(lambda v: v[i], xs))
        total += scale * cost
    return total


def by_hand(length, batch, way, chunk=None):
    """``chunk``: points after the others."""

    def loss(p, x):
        return losses(way, p, x) / (length * batch)

    def run(p, data):
        x = c.rows_of(told(data))
        if chunk is None:
            return jax.value_and_grad(loss)(p, x)
        return c.summed_gradient(loss, p, c.in_chunks(x, chunk))

    return run


def workload(length, batch, hidden, chunk=128):
    make = functools.partial(by_hand, length, batch)
    best = Way(Columns)
    forms = {
        "rlfx": given.by_rlfx(length, batch), "plain": given.plain(length, batch),
        "rows, solved out, in a loop": make(Way(net=by_jax, unrolled=False, shared=False)),
        "rows, solved out": make(Way(net=by_jax)), "rows, written out": make(Way()), "rows, stacked": make(Way(net=stacked)),
        "rows, ahead alone": make(Way(net=all_ways)), "columns": make(best), "columns, stacked": make(Way(Columns, stacked)),
        "columns, in a loop": make(Way(Columns, unrolled=False)),
        f"rows, {chunk} points": make(Way(), chunk), f"rows, stacked, {chunk} points": make(Way(net=stacked), chunk),
        f"columns, {chunk} points": make(best, chunk), f"columns, again, {chunk} points": make(best._replace(again=True), chunk),
        f"columns, stacked, {chunk} points": make(Way(Columns, stacked), chunk),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    size = length, batch, JOINTS
    done = (jax.random.uniform(k[0], size[:2]) < 0.05).at[-1].set(True)
    acceleration, torque = 2.0 * jax.random.normal(k[1], size), jax.random.normal(k[2], size)
    speed = DT * jnp.cumsum(acceleration, 0)
    q = jax.random.normal(k[3], size[1:]) + DT * jnp.cumsum(speed, 0)
    data = {"q": q, "speed": speed, "acceleration": acceleration, "torque": torque, "done": done}
    return Workload(forms, (params_of(k[4], hidden), data), tolerance=5e-5)
