"""Q-learning by maximum mean discrepancy by hand, better than usual; and the workload."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_twentieth import moments as given
from benchmarks.untuned.sealed_twentieth.moments import ACTIONS, OBS, WIDTHS, params_of, particles, targets

WIDEST, DOUBLINGS = WIDTHS[-1], len(WIDTHS) - 1

# -- kernels of differences: every width is half of the next one, whose kernel is squared


def powers(d):
    e = jnp.exp(d * d * (-1.0 / WIDEST))
    total = e
    for _ in range(DOUBLINGS):
        e = e * e
        total = total + e
    return total


def powers_and_slope(d):
    """And ``dk/dd``."""
    e = jnp.exp(d * d * (-1.0 / WIDEST))
    total, slope, rate = e, e, 1.0
    for _ in range(DOUBLINGS):
        e, rate = e * e, 2.0 * rate
        total, slope = total + e, slope + rate * e
    return total, slope * d * (-2.0 / WIDEST)


def exponentials(d):
    """Without powers."""
    far = d * d
    return sum(jnp.exp(far * (-1.0 / width)) for width in WIDTHS)


# -- discrepancies of ``x[N, n]`` from ``y[N, n]``: the sum of them


def separate(kernel, x, y):
    """Three kinds of pairs, those of targets without a gradient."""
    of = lambda x, y: kernel(x[:, :, None] - y[:, None]).sum()  # noqa: E731
    return (of(x, x) + stop_gradient(of(y, y)) - 2.0 * of(x, y)) / x.shape[-1] ** 2


def innermost(kernel, x, y):
    """The same, rows innermost."""
    x, y = x.T, y.T
    of = lambda x, y: kernel(x[:, None] - y).sum()  # noqa: E731
    return (of(x, x) + stop_gradient(of(y, y)) - 2.0 * of(x, y)) / len(x) ** 2


def half(kernel, x, y):
    """Every pair once, rows innermost."""
    x, y = x.T, y.T
    i, j = np.triu_indices(len(x), 1)
    own = kernel(x[i] - x[j]).sum() + stop_gradient(kernel(y[i] - y[j]).sum())
    return 2.0 * (own + x.size * len(WIDTHS) - kernel(x[:, None] - y).sum()) / len(x) ** 2


def signs(n):
    return np.repeat([1.0, -1.0], n).astype(np.float32)[:, None]


# -- the same with slopes of their own: value, and ``[N, n]``


def written_pairs(x, y):
    """Pairs with ``x``, in one pass of the whole; what is between targets, every pair once."""
    n = x.shape[-1]
    u, sign = jnp.concatenate([x, y], -1), signs(n)[:, 0]
    k, slope = powers_and_slope(x[:, :, None] - u[:, None])
    i, j = np.triu_indices(n, 1)
    between = 2.0 * powers(y[:, i] - y[:, j]).sum() + y.size * len(WIDTHS)
    weight = np.where(sign > 0, 1.0, -2.0).astype(np.float32)
    return ((k * weight).sum() + between) / n**2, (slope * sign).sum(-1) * (2.0 / n**2)


def written_innermost(x, y):
    n = x.shape[-1]
    x, y = x.T, y.T
    u, sign = jnp.concatenate([x, y]), signs(n)
    k, slope = powers_and_slope(x[:, None] - u)
    weight = np.where(sign > 0, 1.0, -2.0).astype(np.float32)
    return ((k * weight).sum() + 2.0 * between_targets(y)) / n**2, ((slope * sign).sum(1) * (2.0 / n**2)).T


def written_turns(x, y):
    """Particle after particle of all, against all of ``x``, in a loop: nothing of pairs is stored."""
    n = x.shape[-1]
    x, y = x.T, y.T
    sign = signs(n)[:, 0]

    def turn(made, given_):
        u, sign, weight = given_
        k, slope = powers_and_slope(x - u)
        return (made[0] + weight * k, made[1] + sign * slope), None

    each = jnp.concatenate([x, y]), sign, np.where(sign > 0, 1.0, -2.0).astype(np.float32)
    value, slopes = jax.lax.scan(turn, (jnp.zeros_like(x), jnp.zeros_like(x)), each)[0]
    return (value.sum() + 2.0 * between_targets(y)) / n**2, (slopes * (2.0 / n**2)).T


def between_targets(y):
    """Half of the sum over all pairs of ``y[n, N]``."""
    i, j = np.triu_indices(len(y), 1)
    return powers(y[i] - y[j]).sum() + y.size * len(WIDTHS) / 2


def written_once(x, y):
    """Every pair once: what it means for both is added by a product."""
    n = x.shape[-1]
    x, y = x.T, y.T
    i, j = np.triu_indices(n, 1)
    k, slope = powers_and_slope(x[i] - x[j])
    both = np.zeros((n, len(i)), np.float32)
    both[i, np.arange(len(i))], both[j, np.arange(len(i))] = 1.0, -1.0

    def turn(made, y):
        k, slope = powers_and_slope(x - y)
        return (made[0] + k, made[1] + slope), None

    across, slopes = jax.lax.scan(turn, (jnp.zeros_like(x), jnp.zeros_like(x)), y)[0]
    total = k.sum() + x.size * len(WIDTHS) / 2 + between_targets(y) - across.sum()
    return 2.0 * total / n**2, ((both @ slope - slopes) * (2.0 / n**2)).T


def with_slope(written):
    """As one with a gradient with respect to ``x`` alone."""

    @jax.custom_vjp
    def value(x, y):
        return written(x, y)[0]

    value.defvjp(lambda x, y: written(x, y), lambda slope, by: (by * slope, None))
    return value


class Way(NamedTuple):
    apart: Any = functools.partial(separate, powers)
    inside: bool = False  # targets are of the same part of rows


def chosen(found, action):
    """Of ``[..., ACTIONS, n]``, without indices."""
    here = action[..., None] == jnp.arange(ACTIONS)
    return jnp.where(here[..., None], found, 0.0).sum(-2)


def targets_chosen(old, data):
    """As `targets`, best actions by masks."""
    found = particles(old, data["obs"])
    following = chosen(found, jnp.argmax(found.sum(-1), -1))
    following = c.shifted(following, jnp.zeros_like(following[0]))
    return data["reward"][..., None] + given.GAMMA * jnp.where(data["done"][..., None], 0.0, following)


def by_hand(length, batch, way, chunk=None):
    """Rows; ``chunk``: so many after the others."""

    def run(p, old, data):
        rows = c.rows_of((data["obs"], data["action"], targets_chosen(old, data)))

        def loss(p, x):
            obs, action, target = x
            return way.apart(chosen(particles(p, obs), action), target) / (length * batch)

        if chunk is None:
            return jax.value_and_grad(loss)(p, rows)
        return c.summed_gradient(loss, p, c.in_chunks(rows, chunk))

    return run


def gathered(length, batch):
    """The usual one, as rows."""

    def run(p, old, data):
        obs, action, target = c.rows_of((data["obs"], data["action"], targets(old, data)))

        def loss(p):
            found = jnp.take_along_axis(particles(p, obs), action[:, None, None], 1)[:, 0]
            return jax.vmap(given.discrepancy)(found, target).mean()

        return jax.value_and_grad(loss)(p)

    return run


def workload(length, batch, hidden, count, chunk=128):
    make = lambda apart, *how: by_hand(length, batch, Way(apart), *how)  # noqa: E731
    cut = functools.partial
    forms = {
        "rlfx": c.learner_by_rlfx(given.program, length, batch), "plain": given.plain, "rows": gathered(length, batch),
        "exponentials": make(cut(separate, exponentials)), "powers": make(cut(separate, powers)),
        "powers, rows innermost": make(cut(innermost, powers)), "powers, every pair once": make(cut(half, powers)),
        "written out": make(with_slope(written_pairs)),
        "written out, rows innermost": make(with_slope(written_innermost)),
        "written out, in turn": make(with_slope(written_turns)), "written out, once": make(with_slope(written_once)),
        f"powers, {chunk} rows": make(cut(separate, powers), chunk),
        f"written out, rows innermost, {chunk} rows": make(with_slope(written_innermost), chunk),
        f"written out, in turn, {chunk} rows": make(with_slope(written_turns), chunk),
        f"written out, once, {chunk} rows": make(with_slope(written_once), chunk),
        f"powers, every pair once, {chunk} rows": make(cut(half, powers), chunk),
    }  # fmt: skip
    k = jax.random.split(jax.random.key(0), 6)
    data = c.episodes(k, (length, batch), OBS, ACTIONS)
    del data["first"]
    given_ = params_of(k[4], hidden, count), params_of(k[5], hidden, count), data
    return Workload(forms, given_, tolerance=2e-5)
