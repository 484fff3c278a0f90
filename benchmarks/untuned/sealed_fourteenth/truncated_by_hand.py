"""Truncated quantile critics by hand, better than usual; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import drawing
from benchmarks.untuned.sealed_fourteenth import truncated
from benchmarks.untuned.sealed_fourteenth.truncated import (
    ACTIONS,
    CRITICS,
    DROPPED,
    ENTROPY,
    FRACTIONS,
    GAMMA,
    KEPT,
    OBS,
    QUANTILES,
    noises,
    params_of,
    relu,
)  # fmt: skip

# -- critics of rows ``x[N, OBS + ACTIONS]``: ``[CRITICS, N, outputs]``


def together(nets, x):
    return jax.vmap(lambda p: c.mlp(p, x, relu))(nets)


def one_by_one(nets, x):
    return jnp.stack([c.mlp(jax.tree.map(lambda w: w[i], nets), x, relu) for i in range(CRITICS)])


def first_joined(nets, x):
    """The first layer is one product for all critics."""
    (first, *rest), hidden = nets, nets[0]["b"].shape[-1]
    made = relu(x @ jnp.moveaxis(first["w"], 0, 1).reshape(x.shape[-1], -1) + first["b"].reshape(-1))
    made = jnp.moveaxis(made.reshape(-1, CRITICS, hidden), 1, 0)
    return jax.vmap(lambda p, x: c.mlp(p, x, relu))(rest, made)


def in_columns(nets, x):
    """Features first."""
    return jax.vmap(lambda p: c.columns(p, x.T, relu))(nets).mT


def mean_head(nets):
    """The mean of a critic's quantiles is one output, of the mean weights."""
    *rest, last = nets
    return [*rest, {"w": last["w"].mean(-1, keepdims=True), "b": last["b"].mean(-1, keepdims=True)}]


# -- which of the pooled quantiles ``[N, CRITICS * QUANTILES]`` are left: them, and their parts of the mean


def sorted_all(pooled):
    return jnp.sort(pooled)[:, :KEPT], jnp.ones((1, 1))


def sorted_unstable(pooled):
    return jax.lax.sort(pooled, is_stable=False)[:, :KEPT], jnp.ones((1, 1))


def largest_found(pooled):
    """Only the dropped are looked for: all stay where they are, and those have no part."""
    least = jax.lax.top_k(pooled, CRITICS * DROPPED)[0][:, -1:]
    return pooled, (pooled < least).astype(jnp.float32)


def counted(pooled):
    """By how many are larger, of all pairs."""
    larger = (pooled[:, None, :] > pooled[:, :, None]).sum(-1)
    return pooled, (larger >= CRITICS * DROPPED).astype(jnp.float32)


# -- errors of ``z[CRITICS, N, QUANTILES]`` and ``aims[N, K]``, each pair of which has a part ``share[N, 1 or K]``: the sum

ROWS, INNER, LAST = "rows", "quantiles", "aims"


def apart(z, aims, share, layout):
    """Of all pairs, with what is named ``layout`` innermost: differences, fractions, shares, and the axis of aims."""
    if layout == LAST:
        return aims[:, None] - z[..., None], FRACTIONS[:, None], share[:, None], -1
    if layout == INNER:
        return aims[..., None] - z[:, :, None], FRACTIONS, share[..., None], -2
    return aims.T - jnp.moveaxis(z, 1, -1)[:, :, None], FRACTIONS[:, None, None], share.T, -2


def as_given(z, aims, share, layout=LAST):
    away, fractions, share, _ = apart(z, aims, share, layout)
    huber = jnp.where(jnp.abs(away) <= 1.0, 0.5 * away**2, jnp.abs(away) - 0.5)
    return (share * jnp.abs(fractions - (away < 0.0)) * huber).sum()


def again(z, aims, share, layout=LAST):
    """Nothing of the pairs is kept."""
    return jax.checkpoint(functools.partial(as_given, layout=layout))(z, aims, share)


def quantile_by_quantile(z, aims, share):
    """One of all critics after the other."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def add(total, x):
        z, fraction = x
        away = aims - z[..., None]
        huber = jnp.where(jnp.abs(away) <= 1.0, 0.5 * away**2, jnp.abs(away) - 0.5)
        return total + (share * jnp.abs(fraction - (away < 0.0)) * huber).sum(), None

    return jax.lax.scan(add, jnp.zeros(()), (jnp.moveaxis(z, -1, 0), FRACTIONS))[0]


def with_slopes(found):
    """The same by ``found(z, aims, share)``, which gives the sum and its gradient by `z` at once."""

    @jax.custom_vjp
    def errors(z, aims, share):
        return found(z, aims, share)[0]

    def backwards(slopes, by):
        return by * slopes, None, None

    errors.defvjp(found, backwards)
    return errors


def of_layout(z, layout):
    """``[CRITICS, N, QUANTILES]`` of what a layout has."""
    return jnp.moveaxis(z, -1, 1) if layout == ROWS else z


def by_sides(z, aims, share, layout):
    """What is above a quantile and what is below, clipped: fractions are multiplied after the sums."""
    away, fractions, share, axis = apart(z, aims, share, layout)
    above, below = jnp.clip(away, 0.0, 1.0), jnp.clip(away, -1.0, 0.0)
    total = lambda x: (share * x).sum(axis)  # noqa: E731
    fractions = fractions.squeeze(axis) if layout != INNER else fractions
    value = fractions * total(above * (away - 0.5 * above)) + (1.0 - fractions) * total(below * (away - 0.5 * below))
    slopes = -fractions * total(above) - (1.0 - fractions) * total(below)
    return value.sum(), of_layout(slopes, layout)


def by_pairs(z, aims, share, layout):
    away, fractions, share, axis = apart(z, aims, share, layout)
    clipped = jnp.clip(away, -1.0, 1.0)
    part = share * jnp.where(away < 0.0, 1.0 - fractions, fractions) * clipped
    return (part * (away - 0.5 * clipped)).sum(), of_layout(-part.sum(axis), layout)


def aim_by_aim(z, aims, share, unroll=1):
    """Rows innermost, one aim of all quantiles after the other."""
    z, fractions = jnp.moveaxis(z, 1, -1), FRACTIONS[:, None]
    share = jnp.broadcast_to(share.T, aims.T.shape)

    def add(total, x):
        (value, slopes), (aim, share) = total, x
        away = aim - z
        clipped = jnp.clip(away, -1.0, 1.0)
        part = share * jnp.where(away < 0.0, 1.0 - fractions, fractions) * clipped
        return (value + part * (away - 0.5 * clipped), slopes - part), None

    value, slopes = jax.lax.scan(add, (jnp.zeros_like(z), jnp.zeros_like(z)), (aims.T, share), unroll=unroll)[0]
    return value.sum(), of_layout(slopes, ROWS)


def by_sums(z, aims, share, method="scan"):
    """Of sorted aims, those in each part of the loss are counted, and their sums and squares are differences of running sums."""
    z = jnp.moveaxis(z, 0, 1).reshape(len(aims), -1)
    middle = aims.mean(-1, keepdims=True)  # running sums of what is near to zero lose less
    z, aims, fractions = z - middle, aims - middle, jnp.tile(jnp.asarray(FRACTIONS), CRITICS)
    running = lambda x: jnp.pad(jnp.cumsum(x, -1), ((0, 0), (1, 0)))  # noqa: E731
    sums, squares = running(aims), running(aims**2)
    find = jax.vmap(functools.partial(jnp.searchsorted, method=method))
    ends = [find(aims, z - 1.0), find(aims, z), find(aims, z + 1.0)]
    ends = [jnp.zeros_like(ends[0]), *ends, jnp.full_like(ends[0], aims.shape[1])]

    def between(running):
        at = [jnp.take_along_axis(running, e, -1) for e in ends]
        return [b - a for a, b in zip(at[:-1], at[1:], strict=True)]

    counts = [(b - a).astype(jnp.float32) for a, b in zip(ends[:-1], ends[1:], strict=True)]
    sums, squares = between(sums), between(squares)
    near = lambda i: 0.5 * squares[i] - z * sums[i] + 0.5 * counts[i] * z**2  # noqa: E731
    below = counts[0] * (z - 0.5) - sums[0] + near(1)
    above = sums[3] - counts[3] * (z + 0.5) + near(2)
    value = (1.0 - fractions) * below + fractions * above
    slopes = (1.0 - fractions) * (counts[0] + counts[1] * z - sums[1]) - fractions * (sums[2] - counts[2] * z + counts[3])
    slopes = jnp.moveaxis((share * slopes).reshape(-1, CRITICS, QUANTILES), 1, 0)
    return (share * value).sum(), slopes


# -- what is learnt


def by_hand(length, batch, layers=together, errors=as_given, left=sorted_all, head=True, parts=None, rows=None):
    """``parts``: so many environments after the others; ``rows``: so many rows learn after the others, for aims of them all."""
    scale = 1.0 / (length * batch)

    def aims_of(p, target, data, noise):
        """Aims of rows, and parts of the pairs."""
        size, alpha = noise.shape[:2], jnp.exp(p["log_alpha"])
        x = c.rows_of({"obs": data["obs"], "noise": noise})
        action, log_prob = c.squashed(p["actor"], x["obs"], x["noise"])
        z = layers(target, jnp.concatenate([x["obs"], action], -1))
        some, share = left(jnp.moveaxis(z, 0, 1).reshape(-1, CRITICS * QUANTILES))
        soft = (some - alpha * log_prob[:, None]).reshape(*size, -1)
        share = jnp.broadcast_to(share, (len(action), share.shape[1])).reshape(*size, -1)
        going = GAMMA * (1.0 - data["terminated"][..., None])
        aims = data["reward"][..., None] + going * c.shifted(soft, jnp.zeros_like(soft[0]))
        # at the last timestep nothing is known, and so no share is looked at
        share = c.known_of(data)[..., None] * c.shifted(share, share[-1]) * (scale / (CRITICS * QUANTILES * KEPT))
        return stop_gradient(c.rows_of((aims, share)))

    def loss(p, x):
        """Summed over rows."""
        (obs, action, noise), (aims, share) = x
        alpha = jnp.exp(p["log_alpha"])
        found = errors(layers(p["critics"], jnp.concatenate([obs, action], -1)), aims, share)
        tried, log_prob = c.squashed(p["actor"], obs, noise)
        fixed = stop_gradient(mean_head(p["critics"]) if head else p["critics"])
        worth = layers(fixed, jnp.concatenate([obs, tried], -1)).mean((0, -1))
        actor = stop_gradient(alpha) * log_prob - worth
        temperature = -p["log_alpha"] * stop_gradient(log_prob + ENTROPY)
        return found + scale * (actor + temperature).sum()

    def some(p, target, data, noise):
        x = c.rows_of((data["obs"], data["action"], noise)), aims_of(p, target, data, noise)
        if rows is None:
            return jax.value_and_grad(loss)(p, x)
        return c.summed_gradient(loss, p, c.in_chunks(x, rows))

    def run(p, target, data, key):
        given = data, noises(key, length, batch)
        if parts is None:
            return some(p, target, *given)
        cut = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(length, -1, parts, *x.shape[2:]), 1, 0), given)
        add = lambda total, x: (jax.tree.map(jnp.add, total, some(p, target, *x)), None)  # noqa: E731
        return jax.lax.scan(add, (jnp.zeros(()), jax.tree.map(jnp.zeros_like, p)), cut)[0]

    return run


def workload(length, batch, hidden, chunk=4):
    make, cut = functools.partial(by_hand, length, batch), functools.partial
    slopes = lambda found, **how: {"errors": with_slopes(cut(found, **how))}  # noqa: E731
    rows_in, inner, last = (slopes(by_pairs, layout=x) for x in (ROWS, INNER, LAST))
    sides, sides_inner = slopes(by_sides, layout=ROWS), slopes(by_sides, layout=INNER)
    joined, single, column = {"layers": first_joined}, {"layers": one_by_one}, {"layers": in_columns}
    aims, aims_4, running = slopes(aim_by_aim), slopes(aim_by_aim, unroll=4), slopes(by_sums)
    found, fast = {"left": largest_found}, {"left": sorted_unstable}
    forms = {
        "rlfx": c.learner_by_rlfx(truncated.program, length, batch), "plain": truncated.plain(length, batch),
        "rows": make(head=False), "rows, mean head": make(), "first joined": make(**joined), "one by one": make(**single),
        "features first": make(**column), "pairs again": make(errors=again),
        "pairs again, quantiles innermost": make(errors=cut(again, layout=INNER)),
        "rows innermost": make(errors=cut(as_given, layout=ROWS)), "quantile by quantile": make(errors=quantile_by_quantile),
        "slopes": make(**last), "slopes, rows innermost": make(**rows_in), "slopes, quantiles innermost": make(**inner),
        "slopes by sides, rows innermost": make(**sides), "slopes by sides, quantiles innermost": make(**sides_inner),
        "slopes, aim by aim": make(**aims), "slopes, aim by aim, unrolled by 4": make(**aims_4),
        "running sums": make(**running), "running sums, all compared": make(**slopes(by_sums, method="compare_all")),
        "running sums, sorted": make(**slopes(by_sums, method="sort")), "running sums, unstable sort": make(**running, **fast),
        "running sums, one by one": make(**running, **single), "running sums, features first": make(**running, **column),
        "slopes, rows innermost, unstable sort": make(**rows_in, **fast),
        "slopes, rows innermost, counted": make(left=counted, **rows_in),
        "slopes, rows innermost, features first": make(**rows_in, **column),
        "aim by aim, unstable sort, features first": make(**aims, **fast, **column),
        "aim by aim, unrolled by 4, largest found, one by one": make(**aims_4, **found, **single),
        f"{chunk} environments": make(parts=chunk), f"slopes, rows innermost, {chunk} environments": make(parts=chunk, **rows_in),
        f"aim by aim, {2 * chunk} environments": make(parts=2 * chunk, **aims),
        f"rows, {8 * chunk} at once": make(rows=8 * chunk), f"slopes, {8 * chunk} rows at once": make(rows=8 * chunk, **rows_in),
        f"running sums, {8 * chunk} rows at once": make(rows=8 * chunk, **running),
        f"aim by aim, {8 * chunk} rows at once": make(rows=8 * chunk, **aims, **fast),
        "aim by aim, unstable sort, threefry unrolled": make(**aims, **fast),
        "aim by aim, unstable sort, first joined, threefry unrolled": make(**aims, **fast, **joined),
        "aim by aim, unstable sort, features first, threefry unrolled": make(**aims, **fast, **column),
        "aim by aim, largest found, features first, threefry unrolled": make(**aims, **found, **column),
        "running sums, unstable sort, threefry unrolled": make(**running, **fast),
        "aim by aim, unstable sort, one by one, threefry unrolled": make(**aims, **fast, **single),
    }  # fmt: skip
    k, size = jax.random.split(jax.random.key(0), 6), (length, batch)
    data = {
        "obs": jax.random.normal(k[0], (*size, OBS)), "action": jnp.tanh(jax.random.normal(k[1], (*size, ACTIONS))),
        "reward": jax.random.normal(k[2], size), "terminated": jax.random.uniform(k[3], size) < 0.05,
        "truncated": jax.random.uniform(k[4], size) < 0.05,
    }  # fmt: skip
    return drawing(forms, (*params_of(k[5], hidden), data), tolerance=1e-4)
