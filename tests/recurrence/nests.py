"""Nests of programs, written at random: as programs of rlfx, and as plain loops that share nothing with it but jax.numpy.

Each level is a recurrence with reads of its past, outputs that read its future, reductions, perhaps an end of its own, and a
call of the level inside: its value, its value and gradient, or what it stacks.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import rlfx

START, END = 0.25, 0.5

#: What is read of the past: with an index of the dimension, and of a list of values by the number of the timestep.
PAST = {
    "t - 1": (lambda s, t: s[t - 1], lambda s, k: s[k - 1] if k >= 1 else START),
    "t - 2": (lambda s, t: s[t - 2], lambda s, k: s[k - 2] if k >= 2 else START),
    ":t + 1": (lambda s, t: s[: t + 1].sum(), lambda s, k: sum(s[: k + 1])),
    "t - 2:t": (lambda s, t: s[t - 2 : t].sum(), lambda s, k: sum(s[max(k - 2, 0) : k])),
    "t // 2": (lambda s, t: s[t // 2], lambda s, k: s[k // 2]),
    "window": (lambda s, t: s.window(-1, 1, fill=0.5).sum(), lambda s, k: s[k] + (s[k - 1] if k else 0.5)),
}
FUTURE = {
    "t + 1": (lambda s, t: s[t + 1], lambda s, k: s[k + 1] if k + 1 < len(s) else END),
    "t:": (lambda s, t: s[t:].sum(), lambda s, k: sum(s[k:])),
    "t:t + 2": (lambda s, t: s[t : t + 2].sum(), lambda s, k: sum(s[k : k + 2])),
    "N - 1 - t": (lambda s, t: s[t.length - 1 - t], lambda s, k: s[len(s) - 1 - k]),
    "none": (lambda s, t: 0.0, lambda s, k: 0.0),
}
CALLS = ("value", "gradient", "unroll")


@dataclass(frozen=True)
class Level:
    """One program of a nest."""

    dim: str
    length: int
    batch: int | None
    past: str
    future: str
    reduced: bool
    until: float | None
    call: str | None = None
    inner: Level | None = None
    budget: int | None = None


def random_nest(seed: int) -> Level:
    rng = np.random.default_rng(seed)
    inner = None
    for dim in ("t", "k", "i")[: int(rng.choice([2, 2, 2, 3]))]:
        inner = Level(
            dim,
            int(rng.integers(2, 4)),
            int(rng.integers(2, 3)) if rng.random() < 0.5 else None,
            str(rng.choice(list(PAST))),
            str(rng.choice(list(FUTURE))),
            bool(rng.random() < 0.5),
            float(rng.uniform(0.4, 1.2)) if rng.random() < 0.3 else None,
            str(rng.choice(CALLS)) if inner else None,
            inner,
            10**9 if rng.random() < 0.2 else None,
        )
    return inner


# -- as programs -------------------------------------------------------------------------------------------------------


def function_of(level: Level, reference: bool = False):
    """``f(w, x) -> (loss, x)`` of a nest; ``reference``: interpreted."""

    def step(w, x, t):
        s = rlfx.series(jnp.sin(w * x + 0.3 * t), start=START, end=END)
        inside = called(level, w, x) if level.inner else 0.0
        y = jnp.tanh(x + 0.3 * PAST[level.past][0](s, t) + 0.5 * inside)
        out = y + 0.2 * FUTURE[level.future][0](s, t) + (rlfx.mean(y) if level.reduced else 0.0)
        return out**2, 0.8 * x + 0.3 * y, out

    options = {"length": level.length, "dim": level.dim, "until": until_of(level)}
    if level.batch is not None:
        options["batch"] = {"b" + level.dim: level.batch}
    if reference:
        return rlfx.reference(step, **options)
    return rlfx.compile(step, **options, memory_budget=level.budget)


def until_of(level: Level):
    return None if level.until is None else lambda x: x > level.until


def called(level: Level, w, x):
    """What a level takes of the one inside."""
    inner, theirs = function_of(level.inner), given(level.inner, x)
    if level.call == "gradient":
        value, slope = jax.value_and_grad(lambda w: inner(w, theirs)[0])(0.9 * w + 0.1 * x)
        return value + 0.3 * slope
    if level.call == "unroll":
        return jnp.sum(inner(0.9 * w, theirs)[1][0])
    return inner(0.9 * w + 0.1 * x, theirs)[0]


def given(level: Level, x):
    """The carry that a program begins with."""
    return x if level.batch is None else x + 0.1 * jnp.arange(level.batch, dtype=jnp.float32)


# -- as loops ----------------------------------------------------------------------------------------------------------


def loops(level: Level, w, x):
    """``(loss, x)``: the same, with an index for each value."""
    members = [x] if level.batch is None else [x[b] for b in range(level.batch)]
    states, values, ys = [], [], []
    for x in members:
        s, y = [], []
        for k in range(level.length):
            s.append(jnp.sin(w * x + 0.3 * k))
            inside = called_by_loops(level, w, x) if level.inner else 0.0
            y.append(jnp.tanh(x + 0.3 * PAST[level.past][1](s, k) + 0.5 * inside))
            x = 0.8 * x + 0.3 * y[-1]
            if level.until is not None and x > level.until:
                break
        states.append(x)
        values.append(s)
        ys.append(y)
    everywhere = [y for own in ys for y in own]
    mean = sum(everywhere) / len(everywhere) if level.reduced else 0.0
    outs = [
        y + 0.2 * FUTURE[level.future][1](s, k) + mean
        for s, own in zip(values, ys, strict=True)
        for k, y in enumerate(own)
    ]
    loss = sum(out**2 for out in outs) / len(outs)
    return loss, states[0] if level.batch is None else jnp.stack(states)


def called_by_loops(level: Level, w, x):
    theirs = given(level.inner, x)
    if level.call == "gradient":
        value, slope = jax.value_and_grad(lambda w: loops(level.inner, w, theirs)[0])(0.9 * w + 0.1 * x)
        return value + 0.3 * slope
    if level.call == "unroll":
        return jnp.sum(loops(level.inner, 0.9 * w, theirs)[1])
    return loops(level.inner, 0.9 * w + 0.1 * x, theirs)[0]


# -- compared ----------------------------------------------------------------------------------------------------------

W, X = np.float32(0.7), np.float32(0.2)


def outcome(run, level: Level, jit: bool = False) -> np.ndarray:
    """The loss, the last carry, and the loss' derivatives with respect to the parameter and the carry."""
    of = lambda w, x: run(w, given(level, x))  # noqa: E731
    both = jax.value_and_grad(lambda w, x: (lambda loss, end: (loss, jnp.sum(end)))(*of(w, x)), (0, 1), has_aux=True)
    (loss, end), grads = (jax.jit(both) if jit else both)(W, X)
    return np.array([loss, end, *grads], np.float64)


def compiled_outcome(level: Level) -> np.ndarray:
    f = function_of(level)
    return outcome(lambda w, x: (lambda loss, rest: (loss, rest[0]))(*f(w, x)), level, jit=True)


def reference_outcome(level: Level) -> np.ndarray:
    f = function_of(level, reference=True)
    return outcome(lambda w, x: (lambda loss, rest: (loss, rest[0]))(*f(w, x)), level)


def loops_outcome(level: Level) -> np.ndarray:
    return outcome(lambda w, x: loops(level, w, x), level)
