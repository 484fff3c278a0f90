"""Nests of programs, written at random: as programs of rlfx, and as plain loops that share nothing with it, nor with jax.

Each level is a recurrence with reads of its past, outputs that read its future, reductions, perhaps an end of its own, reads of
what the call of an earlier iteration had, and a call of the level inside: its value, its value and gradient, what it stacks, or
any of these inside of what jax transforms.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

import rlfx
from rlfx.errors import ScheduleError
from tests.recurrence.duals import number, sin, tanh, value_and_slope

START, END, EDGE = 0.25, 0.5, 0.125
DIMS = ("t", "k", "i")  # the innermost first

#: What is read of the past: with an index of the dimension, and of a list of values by the number of the timestep.
PAST = {
    "t - 1": (lambda s, t: s[t - 1], lambda s, k: s[k - 1] if k >= 1 else START),
    "t - 2": (lambda s, t: s[t - 2], lambda s, k: s[k - 2] if k >= 2 else START),
    ":t + 1": (lambda s, t: s[: t + 1].sum(), lambda s, k: sum(s[: k + 1])),
    "t - 2:t": (lambda s, t: s[t - 2 : t].sum(), lambda s, k: sum(s[max(k - 2, 0) : k])),
    "t // 2": (lambda s, t: s[t // 2], lambda s, k: s[k // 2]),
    "window": (lambda s, t: s.window(-1, 1, fill=0.5).sum(), lambda s, k: s[k] + (s[k - 1] if k else 0.5)),
}
#: And of the future; n is the length of the dimension, whose end may come before.
FUTURE = {
    "t + 1": (lambda s, t: s[t + 1], lambda s, k, n: s[k + 1] if k + 1 < len(s) else END),
    "t:": (lambda s, t: s[t:].sum(), lambda s, k, n: sum(s[k:])),
    "t:t + 2": (lambda s, t: s[t : t + 2].sum(), lambda s, k, n: sum(s[k : k + 2])),
    "N - 1 - t": (lambda s, t: s[t.length - 1 - t], lambda s, k, n: s[n - 1 - k] if n - 1 - k < len(s) else END),
    "none": (lambda s, t: 0.0, lambda s, k, n: 0.0),
}
#: What is read of the calls before, of which ``at(n, k)`` is timestep k of the n-th before this one.
EARLIER = {
    "i - 1, t": (lambda s, i, t: s[i - 1, t], lambda at, k, n: at(1, k)),
    "i - 1, t + 1": (lambda s, i, t: s[i - 1, t + 1], lambda at, k, n: at(1, k + 1)),
    "i - 2:i, t": (lambda s, i, t: s[i - 2 : i, t].sum(), lambda at, k, n: at(1, k) + at(2, k)),
    "i - 1, :": (lambda s, i, t: s[i - 1, :].sum(), lambda at, k, n: sum(at(1, m) for m in range(n))),
}
#: How the level inside is called; below the line, where jax transforms the call.
CALLS = ("value", "gradient", "unroll", "pullback")
TRANSFORMED = ("vmap", "scan", "cond", "checkpoint")


@dataclass(frozen=True)
class Level:
    """One program of a nest.

    Attributes:
      earlier: what it reads of itself at earlier iterations of the program around it.
      on: whether its time goes on from call to call.
      carried: whether the state that the program inside ends with is a part of the next one.
      plan: how its gradient is computed, where that is legal.
    """

    dim: str
    length: int
    batch: int | None = None
    past: str = "t - 1"
    future: str = "none"
    reduced: bool = False
    until: float | None = None
    call: str | None = None
    inner: Level | None = None
    budget: int | None = None
    earlier: str | None = None
    on: bool = False
    carried: bool = False
    plan: tuple | None = None


def random_nest(seed: int) -> Level:
    rng = np.random.default_rng(seed)
    inner, depth = None, int(rng.choice([2, 2, 2, 2, 3]))
    for n, dim in enumerate(DIMS[:depth]):
        until = float(rng.uniform(0.4, 1.2)) if rng.random() < 0.3 else None
        call = str(rng.choice(CALLS if rng.random() < 0.7 else TRANSFORMED)) if inner else None
        if call in TRANSFORMED:  # there, another iteration can't be read
            inner = replace(inner, earlier=None)
        crosses = until is None and n + 1 < depth and rng.random() < 0.4
        inner = Level(
            dim,
            int(rng.integers(2, 4)),
            int(rng.integers(2, 3)) if rng.random() < 0.5 else None,
            str(rng.choice(list(PAST))),
            str(rng.choice(list(FUTURE))),
            bool(rng.random() < 0.5),
            until,
            call,
            inner,
            10**9 if rng.random() < 0.05 else None,
            str(rng.choice(list(EARLIER))) if crosses else None,
            bool(rng.random() < 0.3),
            bool(rng.random() < 0.3),
            [None, None, None, ("blocks", 1), ("blocks", 2), ("replay", 2), ("stream", 1)][int(rng.integers(7))],
        )
    return inner


def without_plans(level: Level) -> Level:
    return replace(level, plan=None, inner=None if level.inner is None else without_plans(level.inner))


# -- as programs -------------------------------------------------------------------------------------------------------


def function_of(level: Level, reference: bool = False, i=None):
    """``f(w, x) -> (loss, (x, outs))`` of a nest; ``reference``: interpreted; ``i``: the time of the program around it."""
    once = None if level.inner is None or level.inner.earlier else function_of(level.inner)
    start, end = START, END
    if level.earlier:
        start, end = {DIMS[DIMS.index(level.dim) + 1]: EDGE, level.dim: START}, {level.dim: END}

    def step(w, x, t):
        s = rlfx.series(jnp.sin(w * x + 0.3 * t), start=start, end=end)
        inside, left = called(level, once or function_of(level.inner, i=t), w, x, t) if level.inner else (0.0, 0.0)
        before = EARLIER[level.earlier][0](s, i, t) if level.earlier else 0.0
        y = jnp.tanh(x + 0.3 * PAST[level.past][0](s, t) + 0.2 * before + 0.5 * inside)
        out = y + 0.2 * FUTURE[level.future][0](s, t) + (rlfx.mean(y) if level.reduced else 0.0)
        return out**2, 0.8 * x + 0.3 * y + 0.1 * left, out

    options = {"length": level.length, "dim": level.dim, "until": until_of(level)}
    if level.batch is not None:
        options["batch"] = {"b" + level.dim: level.batch}
    if reference:
        return rlfx.reference(step, **options)
    if level.plan and not level.budget:
        options["plan"] = rlfx.Plan(level.plan[0], block=level.plan[1])
    return rlfx.compile(step, **options, memory_budget=level.budget)


def until_of(level: Level):
    return None if level.until is None else lambda x: x > level.until


def called(level: Level, f, w, x, t):
    """What a level takes of the one inside: a number, and what its state ends with."""
    theirs, a = given(level.inner, x), 0.9 * w + 0.1 * x
    inner = lambda w: f(w, theirs, t0=t.now * level.inner.length if level.inner.on else 0)  # noqa: E731
    value = lambda w: inner(w)[0]  # noqa: E731
    left = lambda rest: jnp.mean(rest[0]) if level.carried else 0.0  # noqa: E731
    match level.call:
        case "gradient":
            (value, rest), slope = jax.value_and_grad(inner, has_aux=True)(a)
            return value + 0.3 * slope, left(rest)
        case "unroll":
            rest = inner(a)[1]
            return jnp.sum(rest[1]), left(rest)
        case "pullback":
            slope, rest = jax.grad(lambda w: (lambda rest: (jnp.sum(rest[1]), rest))(inner(w)[1]), has_aux=True)(a)
            return 0.3 * slope, left(rest)
        case "vmap":
            return jnp.sum(jax.vmap(value)(jnp.stack([a, w]))), 0.0
        case "scan":
            return jax.lax.scan(lambda sum, w: (sum + value(w), None), jnp.float32(0.0), jnp.stack([a, w]))[0], 0.0
        case "cond":
            return jax.lax.cond(t.now % 2 == 0, value, lambda w: 0.5 * w, a), 0.0
        case "checkpoint":
            return jax.checkpoint(value)(a), 0.0
    value, rest = inner(a)
    return value, left(rest)


def given(level: Level, x):
    """The carry that a program begins with."""
    return x if level.batch is None else x + 0.1 * jnp.arange(level.batch, dtype=jnp.float32)


# -- as loops ----------------------------------------------------------------------------------------------------------


class Loops:
    """The same, with an index for each value.

    Attributes:
      closest: how near a comparison of floats came to being decided the other way.
    """

    def __init__(self):
        self.closest = np.inf

    def run(self, level: Level, w, x, before=(), t0=0):
        """``(loss, (states, outs, s))``, lists by member; ``before``: the s of earlier calls, the last one last."""
        starts = [x] if level.batch is None else [x + 0.1 * b for b in range(level.batch)]
        states, values, ys = [], [], []
        for b, x in enumerate(starts):
            s, y, calls = [], [], []
            at = lambda n, k, b=b: self.at(level, before, n, b, k)  # noqa: E731
            for k in range(level.length):
                s.append(sin(w * x + 0.3 * (t0 + k)))
                inside, left = self.called(level, w, x, t0 + k, calls) if level.inner else (0.0, 0.0)
                earlier = EARLIER[level.earlier][1](at, k, level.length) if level.earlier else 0.0
                y.append(tanh(x + 0.3 * PAST[level.past][1](s, k) + 0.2 * earlier + 0.5 * inside))
                x = 0.8 * x + 0.3 * y[-1] + 0.1 * left
                if level.until is not None:
                    self.closest = min(self.closest, abs(number(x) - level.until))
                    if number(x) > level.until:
                        break
            states.append(x)
            values.append(s)
            ys.append(y)
        mean = sum(sum(y) for y in ys) / sum(map(len, ys)) if level.reduced else 0.0
        future = FUTURE[level.future][1]
        n = level.length
        outs = [
            [y + 0.2 * future(s, k, n) + mean for k, y in enumerate(own)] for s, own in zip(values, ys, strict=True)
        ]
        return sum(o * o for own in outs for o in own) / sum(map(len, outs)), (states, outs, values)

    def at(self, level, before, n, b, k):
        if not 0 <= k < level.length:
            return START if k < 0 else END
        return before[-n][b][k] if n <= len(before) else EDGE

    def called(self, level: Level, w, x, now, calls):
        inner, a = level.inner, 0.9 * w + 0.1 * x
        both = lambda w: self.run(inner, w, x, tuple(calls), now * inner.length if inner.on else 0)  # noqa: E731
        stacked = lambda w: (lambda rest: (sum(map(sum, rest[1])), rest))(both(w)[1])  # noqa: E731
        match level.call:
            case "gradient":
                value, slope, rest = value_and_slope(both, a)
                value = value + 0.3 * slope
            case "unroll":
                value, rest = stacked(a)
            case "pullback":
                _, slope, rest = value_and_slope(stacked, a)
                value = 0.3 * slope
            case "vmap" | "scan":
                return both(a)[0] + both(w)[0], 0.0
            case "cond":
                return both(a)[0] if now % 2 == 0 else 0.5 * a, 0.0
            case "checkpoint":
                return both(a)[0], 0.0
            case _:
                value, rest = both(a)
        calls.append(rest[2])
        return value, sum(rest[0]) / len(rest[0]) if level.carried else 0.0


# -- compared ----------------------------------------------------------------------------------------------------------

W, X = np.float32(0.7), np.float32(0.2)
RTOL, ATOL = 2e-4, 2e-5
BY_REFERENCE = (3, 9, 15)  # of 20 seeds, those that are interpreted, too


def outcome(f, level: Level):
    """The loss, the last carry, and the loss' derivatives with respect to the parameter and the carry: ``(w, x) -> [4]``."""
    of = lambda w, x: (lambda loss, rest: (loss, jnp.sum(rest[0])))(*f(w, given(level, x)))  # noqa: E731

    def numbers(w, x):
        (loss, end), grads = jax.value_and_grad(of, (0, 1), has_aux=True)(w, x)
        return jnp.stack([loss, end, *grads])

    return numbers


def compiled_outcome(level: Level) -> np.ndarray:
    try:
        return np.asarray(jax.jit(outcome(function_of(level), level))(W, X), np.float64)
    except ScheduleError:  # the plan is not legal
        if level == without_plans(level):
            raise
        return compiled_outcome(without_plans(level))


def reference_outcome(level: Level) -> np.ndarray:
    return np.asarray(outcome(function_of(level, reference=True), level)(W, X), np.float64)


def loops_outcome(level: Level) -> tuple[np.ndarray, float]:
    """By loops; and how near a comparison came to being decided the other way."""
    loops = Loops()
    loss, by_w, rest = value_and_slope(lambda w: loops.run(level, w, float(X)), float(W))
    _, by_x, _ = value_and_slope(lambda x: loops.run(level, float(W), x), float(X))
    return np.array([loss, sum(rest[0]), by_w, by_x], np.float64), loops.closest


def compared(level: Level, *, reference: bool) -> dict:
    """``{"outcome": "right", "off": ...}``: how far off in units of the tolerance, compiled and, if asked, by reference.

    "close" is no verdict: float32 may end an environment at another timestep than float64.
    """
    want, closest = loops_outcome(level)
    assert np.isfinite(want).all(), level
    if closest < 1e-3:
        return {"outcome": "close"}
    ways = {"off": compiled_outcome} | ({"off_by_reference": reference_outcome} if reference else {})
    off = {name: float(np.max(np.abs(of(level) - want) / (ATOL + RTOL * np.abs(want)))) for name, of in ways.items()}
    return {"outcome": "right" if max(off.values()) <= 1 else "wrong", **{k: round(v, 4) for k, v in off.items()}}
