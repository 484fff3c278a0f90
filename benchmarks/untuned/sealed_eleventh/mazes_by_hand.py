"""Value iteration networks by hand, better than usual: every maze is planned once; and the workload."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.untuned import common as c
from benchmarks.untuned.measure import Workload
from benchmarks.untuned.sealed_eleventh import mazes as m
from benchmarks.untuned.sealed_eleventh.mazes import ACTIONS, KINDS, MOVES, heads, learnt, params_of, planned, relu

TAPS = tuple((i, j) for i in range(3) for j in range(3))

# -- all mazes' moves ``[B, MOVES, side, side]``, by convolutions of the batch


def conv(x, w, order="NCHW"):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=(order, "OIHW", order))


def by_vmap(p, mazes, iterations):
    return jax.vmap(lambda maze: planned(p, maze, iterations))(mazes)


def rewards(p, mazes):
    """``[B, 1, side, side]``."""
    return conv(relu(conv(mazes, p["first"]) + p["bias"]), p["reward"])


def looped(step, value, iterations, unroll, again):
    """``unroll`` of as many as there are: no loop."""
    step = jax.checkpoint(step) if again else step
    if unroll == iterations:
        for _ in range(iterations):
            value = step(value)
        return value
    return jax.lax.scan(lambda v, _: (step(v), None), value, None, length=iterations, unroll=unroll)[0]


def batched(p, mazes, iterations, unroll=1, again=False):
    reward = rewards(p, mazes)
    q_of = lambda v: conv(jnp.concatenate([reward, v], 1), p["q"])  # noqa: E731
    return q_of(looped(lambda v: q_of(v).max(1, keepdims=True), jnp.zeros_like(reward), iterations, unroll, again))


def reward_once(p, mazes, iterations, unroll=1, again=False):
    """What the reward adds is the same in every iteration."""
    reward = rewards(p, mazes)
    fixed = conv(reward, p["q"][:, :1])
    q_of = lambda v: fixed + conv(v, p["q"][:, 1:])  # noqa: E731
    return q_of(looped(lambda v: q_of(v).max(1, keepdims=True), jnp.zeros_like(reward), iterations, unroll, again))


def channels_last(p, mazes, iterations, unroll=1, again=False):
    hidden = relu(conv(mazes.transpose(0, 2, 3, 1), p["first"], "NHWC") + p["bias"][:, 0, 0])
    reward = hidden @ p["reward"][0, :, 0]
    fixed = conv(reward, p["q"][:, :1], "NHWC")
    q_of = lambda v: fixed + conv(v, p["q"][:, 1:], "NHWC")  # noqa: E731
    step = lambda v: q_of(v).max(-1, keepdims=True)  # noqa: E731
    return q_of(looped(step, jnp.zeros_like(reward), iterations, unroll, again)).transpose(0, 3, 1, 2)


# -- by what is shifted: ``x[..., side, side, B]``, environments innermost


def patches(x):
    """``[9, ..., side, side, B]``: the neighbours of every place."""
    side = x.shape[-2]
    x = jnp.pad(x, ((0, 0),) * (x.ndim - 3) + ((1, 1), (1, 1), (0, 0)))
    return jnp.stack([x[..., i : i + side, j : j + side, :] for i, j in TAPS])


def together(patches):
    """The transpose of it."""
    side = patches.shape[-2]
    whole = jnp.zeros((*patches.shape[1:-3], side + 2, side + 2, patches.shape[-1]))
    for (i, j), part in zip(TAPS, patches, strict=True):
        whole = whole.at[..., i : i + side, j : j + side, :].add(part)
    return whole[..., 1:-1, 1:-1, :]


def product(w, x):
    """``w[out, 9 or channels] x[9 or channels, side, side, B]``, as one product."""
    return (w @ x.reshape(w.shape[-1], -1)).reshape(-1, *x.shape[-3:])


def weighted(w, x):
    """The same as sums of what is scaled."""
    return sum(w[:, i, None, None, None] * x[i] for i in range(w.shape[-1]))


def rewards_shifted(p, mazes):
    """``[side, side, B]``."""
    x = patches(mazes.transpose(1, 2, 3, 0))  # [9, KINDS, side, side, B]
    x = jnp.swapaxes(x, 0, 1).reshape(9 * KINDS, *x.shape[2:])
    hidden = relu(product(p["first"].reshape(-1, KINDS * 9), x) + p["bias"][..., None])
    return product(p["reward"][0, :, :, 0].T, hidden)[0]


def shifted(p, mazes, iterations, sums=product, unroll=1, again=False):
    reward = rewards_shifted(p, mazes)
    of_reward, of_value = (p["q"][:, i].reshape(MOVES, 9) for i in range(2))
    fixed = product(of_reward, patches(reward))
    q_of = lambda v: fixed + sums(of_value, patches(v))  # noqa: E731
    return q_of(looped(lambda v: q_of(v).max(0), jnp.zeros_like(reward), iterations, unroll, again)).transpose(3, 0, 1, 2)


def matrix_of(side):
    """Which place is which neighbour of which: ``[9, side * side, side * side]``."""
    found = np.zeros((9, side, side, side, side), np.float32)
    for tap, (i, j) in enumerate(TAPS):
        for y in range(max(0, 1 - i), min(side, side + 1 - i)):
            for x in range(max(0, 1 - j), min(side, side + 1 - j)):
                found[tap, y + i - 1, x + j - 1, y, x] = 1.0
    return found.reshape(9, side**2, side**2)


def as_matrices(p, mazes, iterations, unroll=1, again=False):
    """A convolution of so small maps is a product with a matrix of all places."""
    batch, side = mazes.shape[0], mazes.shape[-1]
    taps = matrix_of(side)
    reward = rewards(p, mazes).reshape(batch, -1)
    of_reward, of_value = (
        jnp.einsum("mk,kio->imo", p["q"][:, i].reshape(MOVES, 9), taps).reshape(side**2, -1) for i in range(2)
    )
    fixed = (reward @ of_reward).reshape(batch, MOVES, -1)
    q_of = lambda v: fixed + (v @ of_value).reshape(batch, MOVES, -1)  # noqa: E731
    q = q_of(looped(lambda v: q_of(v).max(1), jnp.zeros_like(reward), iterations, unroll, again))
    return q.reshape(batch, MOVES, side, side)


# -- the way back written out: of every place the best move alone


def slopes_of(best, by, value, weights, lookups):
    """Of the best moves' slopes ``by[side, side, B]``: the value's, and the weights'."""
    if lookups:
        spread = weights.T[:, best]
    else:
        spread = product(weights.T, jnp.where(best == jnp.arange(MOVES)[:, None, None, None], 1.0, 0.0))
    of_value = together(spread * by)
    chosen = jnp.where(best == jnp.arange(MOVES)[:, None, None, None], by, 0.0)
    return of_value, chosen, chosen.reshape(MOVES, -1) @ patches(value).reshape(9, -1).T


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def iterated(weights, fixed, iterations, sums, unroll, lookups):
    """The value ``[side, side, B]`` after all iterations; ``fixed[MOVES, side, side, B]``: what the reward adds."""
    return iterated_forwards(weights, fixed, iterations, sums, unroll, lookups)[0]


def iterated_forwards(weights, fixed, iterations, sums, unroll, lookups):
    def step(value, _):
        q = fixed + sums(weights, patches(value))
        best, most = jnp.zeros(value.shape, jnp.int8), q[0]
        for i in range(1, MOVES):
            best, most = jnp.where(q[i] > most, jnp.int8(i), best), jnp.maximum(q[i], most)
        return most, (best, value)

    start = jnp.zeros(fixed.shape[1:])
    value, kept = jax.lax.scan(step, start, None, length=iterations, unroll=unroll)
    return value, (weights, kept)


def iterated_backwards(iterations, sums, unroll, lookups, kept, by):
    weights, (best, value) = kept

    def step(carry, x):
        by, of_weights, of_fixed = carry
        by, chosen, more = slopes_of(x[0], by, x[1], weights, lookups)
        return (by, of_weights + more, of_fixed + chosen), None

    start = by, jnp.zeros_like(weights), jnp.zeros((MOVES, *by.shape))
    (_, of_weights, of_fixed), _ = jax.lax.scan(step, start, (best, value), reverse=True, unroll=unroll)
    return of_weights, of_fixed


iterated.defvjp(iterated_forwards, iterated_backwards)


def written_out(p, mazes, iterations, sums=product, unroll=1, lookups=False):
    reward = rewards_shifted(p, mazes)
    of_reward, of_value = (p["q"][:, i].reshape(MOVES, 9) for i in range(2))
    fixed = product(of_reward, patches(reward))
    value = iterated(of_value, fixed, iterations, sums, unroll, lookups)
    return (fixed + product(of_value, patches(value))).transpose(3, 0, 1, 2)


# -- losses


def looked_up(q, row, column):
    """Of all timesteps, where each environment stands: ``[T, B, MOVES]``."""
    return q[jnp.arange(len(q)), :, row, column]


def by_ones(q, row, column):
    """Without lookups: a product of each maze with where it is stood."""
    side, moves = q.shape[-1], q.reshape(*q.shape[:2], -1)
    return jnp.einsum("tbp,bmp->tbm", jax.nn.one_hot(row * side + column, side**2), moves)


def by_hand(length, batch, iterations, plan, find=looked_up, chunk=None, **how):
    """``chunk``: so many mazes are planned after the others."""

    def run(p, mazes, data):
        def loss(p):
            if chunk is None:
                q = plan(p, mazes, iterations, **how)
            else:
                q = jax.lax.map(lambda mazes: plan(p, mazes, iterations, **how), c.in_chunks(mazes, chunk))
                q = q.reshape(batch, *q.shape[2:])
            q = find(q, data["row"], data["column"])
            return learnt(*heads(p, q), data)

        return jax.value_and_grad(loss)(p)

    return run


def workload(length, batch, side, iterations, hidden, chunk=16):
    make = functools.partial(by_hand, length, batch, iterations)
    flat, few, sums = {"unroll": iterations}, {"unroll": 4}, {"sums": weighted}
    ones, out = {"find": by_ones}, written_out
    forms = {
        "rlfx": c.learner_by_rlfx(m.program_of(iterations), length, batch), "plain": m.plain(length, batch, iterations),
        "by vmap": make(by_vmap), "batched": make(batched), "batched, again": make(batched, again=True),
        "batched, no loop": make(batched, **flat), "reward once": make(reward_once),
        "reward once, ones": make(reward_once, **ones),
        "reward once, unrolled by 4": make(reward_once, **few), "reward once, no loop": make(reward_once, **flat),
        "channels last": make(channels_last), "channels last, no loop": make(channels_last, **flat), "shifted": make(shifted),
        "shifted, ones": make(shifted, **ones), "shifted, unrolled by 4": make(shifted, **few),
        "shifted, no loop": make(shifted, **flat), "shifted, again": make(shifted, again=True),
        "weighted": make(shifted, **sums),
        "weighted, again": make(shifted, **sums, again=True), "matrices": make(as_matrices),
        "matrices, ones": make(as_matrices, **ones), "matrices, unrolled by 4": make(as_matrices, **few),
        "matrices, again": make(as_matrices, again=True), "written out": make(out), "written out, ones": make(out, **ones),
        "written out, lookups": make(out, lookups=True), "written out, weighted": make(out, **sums),
        "written out, weighted, lookups": make(out, lookups=True, **sums),
        "written out, weighted, ones": make(out, **sums, **ones),
        f"written out, {chunk} mazes": make(out, chunk=chunk), f"written out, {chunk // 2} mazes": make(out, chunk=chunk // 2),
        f"written out, weighted, {chunk} mazes": make(out, chunk=chunk, **sums),
        f"shifted, {chunk} mazes": make(shifted, chunk=chunk),
        f"shifted, no loop, {chunk} mazes": make(shifted, chunk=chunk, **flat),
        "written out, unrolled by 4": make(out, **few), "written out, weighted, unrolled by 4": make(out, **sums, **few),
    }  # fmt: skip
    k, size = jax.random.split(jax.random.key(0), 8), (length, batch)
    walls = (jax.random.uniform(k[0], (batch, side, side)) < 0.3).astype(jnp.float32)
    goal = jax.nn.one_hot(jax.random.randint(k[1], (batch,), 0, side**2), side**2).reshape(batch, side, side)
    data = {
        "row": jax.random.randint(k[2], size, 0, side), "column": jax.random.randint(k[3], size, 0, side),
        "action": jax.random.randint(k[4], size, 0, ACTIONS), "reward": jax.random.normal(k[5], size),
        "done": jax.random.uniform(k[6], size) < 0.05,
    }  # fmt: skip
    return Workload(forms, (params_of(k[7], hidden), jnp.stack([walls, goal], 1), data), tolerance=1e-4)
