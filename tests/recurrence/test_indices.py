"""Indices, times and lookups against Python integers and NumPy loops; and what is refused, in the user's words."""

import itertools
import math
import operator
import time
import types

import islpy as isl
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import BoundaryError, DomainError, ProgramError, RlfxError, UnsupportedSliceOp
from rlfx.recurrence.ir.access import Reach, reach, relation
from rlfx.recurrence.language.index import LENGTH, TIME, Lookup, Point, Slice, Window, as_index, extreme

KEY = jax.random.key(0)
T, B = 5, 3
START, END = -1.0, -2.0


def traced(f, params=None, carry=None, key=None, *, length=4, batch=None):
    """Trace ``f(params, carry, t)``; what it returns is needed, where it can be."""

    def program(p, c, t):
        leaves = [x for x in jax.tree.leaves(f(p, c, t)) if isinstance(x, jax.Array)]
        return c, [x for x in leaves if all(isinstance(n, int) for n in x.shape)]

    return rlfx.trace(program, params, carry, key, length=length, batch=batch, loss=False)


def refused(error, f, *, where="at test_indices.py:", **kwargs):
    with pytest.raises(error) as caught:
        traced(f, **kwargs)
    message = str(caught.value)
    assert isinstance(caught.value, RlfxError)
    assert where in message
    assert "\n  Fix: " in message
    assert "trace.py" not in message
    return message


# -- index expressions: the same function of Python's integers ---------------------------------------------------------

INTEGERS = [int, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.intp, np.array]
OPERATIONS = [
    lambda t, n: t + n(1),
    lambda t, n: t - n(1),
    lambda t, n: n(4) - t,
    lambda t, n: n(1) + t,
    lambda t, n: t * n(2),
    lambda t, n: n(2) * t,
    lambda t, n: t // n(2),
    lambda t, n: t % n(3),
    lambda t, n: t >> n(1),
    lambda t, n: t << n(1),
    lambda t, n: t & n(1),
    lambda t, n: n(3) & t,
    lambda t, n: divmod(t, n(2))[0],
    lambda t, n: divmod(t, n(2))[1] + 1,
    lambda t, n: rlfx.minimum(t + 1, n(3)),
    lambda t, n: rlfx.maximum(n(2), t - 1),
    lambda t, n: abs(t - n(2)),
    lambda t, n: n(3) * 1,
    lambda t, n: -t + n(4),
]
ALONE = [
    lambda t: ~t + 4,
    round,
    math.floor,
    math.trunc,
    math.ceil,
    operator.pos,
    lambda t: abs(-t),
    lambda t: 4 - abs(2 - t) * 2,
]
#: What a program writes, and the same in Python's integers.
FORMS = [(lambda t, g=g, n=n: g(t, n), lambda t, g=g: g(t, int)) for g, n in itertools.product(OPERATIONS, INTEGERS)]
FORMS += [(g, g) for g in ALONE]


def at(x, i):
    return START if i < 0 else END if i >= len(x) else x[i]


@pytest.mark.parametrize(
    "run", [rlfx.unroll, lambda f, length: rlfx.reference(f, length=length, loss=False)], ids=["compiled", "reference"]
)
def test_integers_of_every_kind_in_an_index(run):
    """171 forms and more: NumPy's integers are integers, and t has Python's operations of integers."""
    forms = FORMS if run is rlfx.unroll else FORMS[:: len(INTEGERS)]

    def f(p, c, t):
        x = rlfx.series(2.0 ** (1.0 * t), start=START, end=END)
        return c, jnp.stack([x[g(t)] for g, _ in forms])

    x = 2.0 ** np.arange(T)
    np.testing.assert_array_equal(run(f, length=T)(None, None)[1], [[at(x, g(t)) for _, g in forms] for t in range(T)])


def test_numpys_integers_in_windows_and_periods():
    """Six windows and three periods of every kind of integer: 81."""
    bounds = [(lo, hi) for lo in (0, 1) for hi in (2, 3, 4)]
    signed = [n for n in INTEGERS if n not in (np.uint8, np.uint16)]
    members = [(lo - 2 * (n in signed), hi, n) for lo, hi in bounds for n in INTEGERS]
    periods = [(k, n) for k in (1, 2, 3) for n in INTEGERS]

    def f(p, c, t):
        x = rlfx.series(1.0 + t)
        windows = [x.window(n(lo), n(hi)) for lo, hi, n in members]
        return c, (windows, [rlfx.every(n(k), lambda: 1.0 * t, otherwise=-1.0) for k, n in periods])

    windows, every = rlfx.unroll(f, length=3)(None, None)[1]
    for got, (lo, hi, _) in zip(windows, members, strict=True):
        np.testing.assert_array_equal(
            got, [[k + 1 if 0 <= k < 3 else 0 for k in range(t + lo, t + hi)] for t in range(3)]
        )
    for got, (k, _) in zip(every, periods, strict=True):
        np.testing.assert_array_equal(got, [t if t % k == 0 else -1 for t in range(3)])
    for n in (True, 0, -1, 1.5, np.float32(2), jnp.arange(2)):
        refused(DomainError, lambda p, c, t: rlfx.every(n, lambda: 1.0, otherwise=0.0))
        refused(DomainError, lambda p, c, t: rlfx.series(1.0 * t).window(n, n))


def test_time_in_arithmetic_is_a_strong_int32():
    def f(p, c, t):
        with jax.numpy_dtype_promotion("standard"):
            return c, (
                jnp.int8(100) * t,
                t * jnp.int8(100),
                np.float32(0.5) * t,
                np.arange(3) * t,
                t.astype(jnp.float16),
                1.5 * t,
                2**t,
                t | 4,
            )

    out = rlfx.unroll(f, length=4)(None, None)[1]
    t = np.arange(4)
    expected = [100 * t, 100 * t, 0.5 * t, np.arange(3) * t[:, None], t, 1.5 * t, 2**t, t | 4]
    python = jnp.result_type(float)  # what jax makes of a Python float
    numpy = jax.dtypes.canonicalize_dtype(int)
    dtypes = ["int32", "int32", "float32", numpy, "float16", python, "int32", "int32"]
    for got, want, dtype in zip(out, expected, dtypes, strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == dtype
    with pytest.raises(jax.dtypes.TypePromotionError):
        traced(lambda p, c, t: jnp.float32(2.0) * t)


# -- lookups: which index is one ---------------------------------------------------------------------------------------

OF_T_ALONE = [
    lambda p, c, t: jnp.minimum(t + 1, 3),
    lambda p, c, t: jnp.where(t < 3, t + 1, t.now),
    lambda p, c, t: t * t,
    lambda p, c, t: t.now,
    lambda p, c, t: t.now - 1,
    lambda p, c, t: jnp.arange(4)[t.now],
    lambda p, c, t: jnp.asarray(TABLE)[t.now],
    lambda p, c, t: jnp.int32(3),
    lambda p, c, t: np.array([0, 1]),
    lambda p, c, t: jnp.stack([t.now, t.now + 1]),
    lambda p, c, t: (0.5 * t).astype(jnp.int32),
    lambda p, c, t: jax.lax.fori_loop(0, t.now, lambda i, s: s + i, 0),
    lambda p, c, t: jax.lax.cond(t > 1, lambda: t.now, lambda: jnp.int32(0)),
    lambda p, c, t: rlfx.series(t.now)[t],
    lambda p, c, t: rlfx.solve(lambda n: n[t - 1] + 1, start=0),
    lambda p, c, t: jax.jit(lambda u: u.now * 1)(t),
    lambda p, c, t: rlfx.sum(t.now, "t"),
    lambda p, c, t: rlfx.every(2, lambda: t.now, otherwise=t.now - 1),
    lambda p, c, t: jnp.clip(t.now + 1, 0, 3),
    lambda p, c, t: t.now // 2,
    lambda p, c, t: jnp.bitwise_xor(t.now, 1),
]  # fmt: skip
OF_MORE = [
    lambda p, c, t: p["i"],
    lambda p, c, t: t + c,
    lambda p, c, t: t - p["i"],
    lambda p, c, t: jnp.minimum(t + c, 3),
    lambda p, c, t: jax.random.randint(t.key, (2,), 0, t.now + 1),
    lambda p, c, t: rlfx.inputs(p["xs"])[t],
    lambda p, c, t: rlfx.inputs(jnp.asarray(TABLE))[t],
    lambda p, c, t: jnp.asarray(TABLE)[c],
    lambda p, c, t: rlfx.series(c)[rlfx.maximum(t - 1, 0)],
    lambda p, c, t: rlfx.solve(lambda n: n[t - 1] + c, start=0),
    lambda p, c, t: jnp.where(c > 0, t.now, 0),
    lambda p, c, t: p["i"].astype(jnp.uint8),
]
TABLE = np.array([0, 2, 1, 3])


#: What is made of an index before it is one.
MADE = [lambda i: i, lambda i: jnp.minimum(i + 1, 3), lambda i: jnp.where(i > 1, i, 0)]


def test_an_index_that_depends_on_t_and_constants_alone_is_refused():
    """63 of t alone, and 36 of more."""
    assert len(OF_T_ALONE) * len(MADE) >= 50
    for index, made in itertools.product(OF_T_ALONE, MADE):
        message = refused(DomainError, lambda p, c, t: rlfx.series(1.0 * t)[made(index(p, c, t))], key=KEY)
        assert "depends on t and constants alone" in message
        assert "x[rlfx.minimum(t + 1, t.length - 1)]" in message
        assert "x[:][i], x[t:][i]" in message
        traced(lambda p, c, t: rlfx.series(1.0 * t).lookup(made(index(p, c, t))), key=KEY)  # said to be a lookup
        traced(lambda p, c, t: rlfx.series(1.0 * t)[:][made(index(p, c, t))], key=KEY)
    p, c = {"i": jnp.int32(1), "xs": jnp.arange(4)}, jnp.int32(1)
    for index, made in itertools.product(OF_MORE, MADE):
        traced(lambda p, c, t: rlfx.series(1.0 * t)[made(index(p, c, t))], p, c, KEY)


def test_an_index_of_an_environment_and_of_t_alone():
    for index in OF_T_ALONE[:4]:
        message = refused(DomainError, lambda p, c, t: rlfx.series(c)[index(p, c, t), 0], carry=jnp.zeros(B), batch=B)
        assert "depends on t and constants alone" in message


# -- lookups: their values ---------------------------------------------------------------------------------------------

DTYPES = ["float32", "int32", "bool", "complex64", "bfloat16"]


def empty(dtype):
    return np.nan if jnp.issubdtype(dtype, jnp.inexact) else 0


def by_loop(x, i, b, t0, outside):
    """``x[i, b]`` at every t, b in plain NumPy; x: [T, B], i and b: [T, B, ...]."""
    out = np.empty(i.shape, x.dtype)
    for t, e in itertools.product(range(x.shape[0]), range(x.shape[1])):
        for k in np.ndindex(i.shape[2:]):
            s, other = int(i[(t, e, *k)]) - t0, int(b[(t, e, *k)])
            if outside == "clip":
                s, other = min(max(s, 0), t), min(max(other, 0), x.shape[1] - 1)
            there = 0 <= s <= t and 0 <= other < x.shape[1]
            out[(t, e, *k)] = x[s, other] if there else empty(x.dtype)
    return out


@pytest.mark.parametrize("t0", [0, 100, 2**31 - T - 1])
def test_lookups_against_a_loop(t0):
    """In value, for 5 dtypes, 3 shapes, own and other environments, fill and clip: 60 lookups a t0."""
    rng = np.random.default_rng(0)
    draws = {
        k: (rng.integers(-3, T + 3, (T, B, *k)) + t0, rng.integers(-2, B + 2, (T, B, *k))) for k in ((), (3,), (2, 2))
    }
    draws = {k: (np.clip(i, -(2**31), 2**31 - 1), b) for k, (i, b) in draws.items()}
    xs = {d: rng.integers(1, 5, (T, B)).astype(jnp.dtype(d)) for d in DTYPES}
    p = {
        "x": jax.tree.map(jnp.asarray, xs),
        "i": [(jnp.asarray(i, jnp.int32), jnp.asarray(b)) for i, b in draws.values()],
    }

    def f(p, c, t):
        out = []
        for d, outside in itertools.product(DTYPES, ("fill", "clip")):
            x = rlfx.inputs(p["x"][d])
            for i, b in p["i"]:
                i, b = rlfx.inputs(i)[t], rlfx.inputs(b)[t]
                out += [x.lookup(i, outside=outside), x.lookup(i, b, outside=outside)]
                if outside == "fill":
                    out += [x[i], x[i, b]]
        return c, out

    expected = []
    own = {k: np.broadcast_to(np.arange(B).reshape(1, B, *(1,) * len(k)), i.shape) for k, (i, _) in draws.items()}
    for d, outside in itertools.product(DTYPES, ("fill", "clip")):
        for k, (i, b) in draws.items():
            both = [by_loop(xs[d], i, own[k], t0, outside), by_loop(xs[d], i, b, t0, outside)]
            expected += both * (1 + (outside == "fill"))
    got = rlfx.unroll(f, length=T, batch=B)(p, None, t0=t0)[1]
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype
        wide = np.float32 if e.dtype == jnp.bfloat16 else e.dtype  # NumPy compares no NaN of bfloat16
        np.testing.assert_array_equal(np.asarray(g).astype(wide), e.astype(wide))


@pytest.mark.parametrize("outside", ["fill", "clip"])
@pytest.mark.parametrize("inside", ["parallel", "solve"])
def test_the_gradient_of_lookups(outside, inside):
    """What is filled has a gradient of zero; compiled, by reference, and counted in NumPy."""
    rng = np.random.default_rng(1)
    i, b = rng.integers(-3, T + 3, (T, B, 2)), rng.integers(-1, B + 1, (T, B, 2))
    w = rng.normal(size=(T, B, 2)).astype(np.float32)
    p = {
        "x": jnp.asarray(rng.normal(size=(T, B)), jnp.float32),
        "i": jnp.asarray(i),
        "b": jnp.asarray(b),
        "w": jnp.asarray(w),
    }

    def f(p, c, t):
        x, i, b, w = (rlfx.inputs(p[k]) for k in ("x", "i", "b", "w"))
        value = jnp.sum(w[t] * jnp.nan_to_num(x.lookup(i[t], b[t], outside=outside)))
        if inside == "solve":
            value = rlfx.solve(lambda s: 0.0 * s[t - 1] + value, start=0.0)
        return value, c

    counted = np.zeros((T, B))
    for t, e, k in itertools.product(range(T), range(B), range(2)):
        s, other = i[t, e, k], b[t, e, k]
        if outside == "clip":
            s, other = np.clip(s, 0, t), np.clip(other, 0, B - 1)
        if 0 <= s <= t and 0 <= other < B:
            counted[s, other] += w[t, e, k]
    for make in (rlfx.compile, rlfx.reference):
        grad = jax.grad(lambda x: make(f, length=T, batch=B, reduce="sum")({**p, "x": x}, None)[0])(p["x"])
        np.testing.assert_allclose(grad, counted, rtol=1e-5, atol=1e-6)


def test_lookups_of_series_of_this_loop_and_under_vmap():
    def f(p, c, t):
        i = rlfx.inputs(p)[t]
        s = rlfx.solve(lambda s: 1.0 + jnp.nan_to_num(rlfx.series(s[t - 1]).lookup(i), nan=10.0), start=0.0)
        x = rlfx.series(1.0 * t)
        return c, (
            s,
            jax.vmap(lambda k: x[k])(jnp.stack([i, i - 1])),
            jax.vmap(lambda k: x[jnp.stack([k, i])])(jnp.stack([i, i - 1])),
        )

    i = np.array([0, 1, 3, 2, 1])
    s, v = [], lambda k, t: np.float32(k) if 0 <= k <= t else np.nan
    for t in range(T):
        s.append(1.0 + (10.0 if i[t] > t else s[i[t] - 1] if i[t] > 0 else 0.0))
    for run in (rlfx.unroll(f, length=T), rlfx.reference(f, length=T, loss=False)):
        got = run(jnp.asarray(i), None)[1]
        np.testing.assert_allclose(got[0], s)
        np.testing.assert_array_equal(got[1], [[v(i[t] - d, t) for d in (0, 1)] for t in range(T)])
        np.testing.assert_array_equal(got[2], [[[v(i[t] - d, t), v(i[t], t)] for d in (0, 1)] for t in range(T)])


def test_the_value_of_another_environment_at_a_time():
    """``x[t + c, b]`` is the value that b has for ``x[t + c]``, at the ends too."""
    rng = np.random.default_rng(2)
    x, b = rng.normal(size=(T, B)).astype(np.float32), rng.integers(-1, B + 1, (T, B))

    def f(p, c, t):
        x, b = rlfx.series(rlfx.inputs(p["x"])[t], start=START, end=END), rlfx.inputs(p["b"])[t]
        return c, (x[t - 1, b], x[t, b], x[t + 2, b], x[t, 1], x[0, np.int64(2)], x[t.length - 1 - t, b])

    def want(s, other):
        return np.nan if not 0 <= other < B else START if s < 0 else END if s >= T else x[s, other]

    times = [lambda t: t - 1, lambda t: t, lambda t: t + 2, lambda t: t, lambda t: 0, lambda t: T - 1 - t]
    others = [b, b, b, np.full_like(b, 1), np.full_like(b, 2), b]
    p = {"x": jnp.asarray(x), "b": jnp.asarray(b)}
    for run in (rlfx.unroll(f, length=T, batch=B), rlfx.reference(f, length=T, batch=B, loss=False)):
        for got, when, other in zip(run(p, None)[1], times, others, strict=True):
            np.testing.assert_array_equal(got, [[want(when(t), other[t, e]) for e in range(B)] for t in range(T)])


def test_lookups_on_a_mesh():
    """Environments are numbered over all devices, also where what is read does not vary with them."""

    def f(p, c, t):
        x, same, i, b = rlfx.inputs(p["x"]), rlfx.series(1.0 * t), rlfx.inputs(p["i"])[t], rlfx.inputs(p["b"])[t]
        return c, (x[i, b], same[i, b], x[t, b], same[t, b])

    rng = np.random.default_rng(4)
    p = {"x": jnp.asarray(rng.normal(size=(T, 4)), jnp.float32)}
    p |= {"i": jnp.asarray(rng.integers(-1, T, (T, 4))), "b": jnp.asarray(rng.integers(-1, 5, (T, 4)))}
    alone = rlfx.unroll(f, length=T, batch=4)(p, None)[1]
    together = rlfx.unroll(f, length=T, batch=4, mesh=jax.make_mesh((2,), ("b",)))(p, None)[1]
    jax.tree.map(np.testing.assert_array_equal, alone, together)
    there = np.asarray((p["b"] >= 0) & (p["b"] < 4))
    np.testing.assert_array_equal(np.isnan(alone[2]), ~there)
    np.testing.assert_array_equal(np.isnan(alone[1]), ~(there & (p["i"] >= 0) & (p["i"] <= np.arange(T)[:, None])))


def test_environments_that_are_not_there():
    kinds = (int, np.int8, np.int64, np.array)
    for b in (n(k) for k in (-7, -2, -1, B, B + 1, B + 9, 100) for n in kinds):
        for read in (lambda x, t: x[t, b], lambda x, t: x.lookup(t, b)):
            message = refused(DomainError, lambda p, c, t: read(rlfx.series(c), t), carry=jnp.zeros(B), batch=B)
            assert f"reads environment {int(b)}, and there are {B}, numbered from 0 to {B - 1}" in message
    assert "this program has no batch" in refused(DomainError, lambda p, c, t: rlfx.series(1.0 * t)[t, 0])
    for outside in ("wrap", None, True, 0):
        assert f"got {outside!r}" in refused(
            DomainError, lambda p, c, t: rlfx.series(1.0 * t).lookup(t, outside=outside)
        )


@pytest.mark.parametrize("batch", [None, B])
def test_a_history_against_a_loop(batch):
    """Three calls that go on; reads by absolute time, of other environments too, filled and clipped."""
    capacity, rng = 4, np.random.default_rng(3)
    i, b = rng.integers(-3, 4 * T, (3 * T, B, 3)), rng.integers(-1, B + 1, (3 * T, B, 3))
    i = np.where(rng.random(i.shape) < 0.7, np.arange(3 * T)[:, None, None] - rng.integers(-1, 6, i.shape), i)

    def f(p, buffer, t):
        x = rlfx.series({"v": 1.0 * t + p["w"], "n": t * 1}, history=buffer)
        i, b = rlfx.inputs(p["i"])[t], rlfx.inputs(p["b"])[t]
        reads = [x.lookup(i, outside=o) for o in ("fill", "clip")]
        if batch is not None:
            reads += [x.lookup(i, b, outside=o) for o in ("fill", "clip")]
        return x.history, [*reads, x[i], x[t.now - 1]]

    program = rlfx.unroll(f, length=T, batch=batch)
    like = {"v": jnp.float32(0.0), "n": jnp.int32(0)}
    buffer, got = rlfx.History(capacity, like, batch=batch), []
    for t0 in (0, T, 2 * T):
        data = {k: jnp.asarray(v[t0 : t0 + T] if batch else v[t0 : t0 + T, 0]) for k, v in (("i", i), ("b", b))}
        buffer, out = program({"w": jnp.float32(0.5), **data}, buffer, t0=t0)
        got.append(out)
    got = jax.tree.map(lambda *xs: np.concatenate(xs), *got)

    def want(now, s, other, outside):
        oldest = max(now - capacity + 1, 0)
        if outside == "clip":
            s, other = np.clip(s, oldest, now), np.clip(other, 0, B - 1)
        there = oldest <= s <= now and 0 <= other < B
        return (s + 0.5, s) if there else (np.nan, 0)

    own = np.broadcast_to(np.arange(B)[None, :, None], b.shape)
    before = np.broadcast_to(np.arange(-1, 3 * T - 1)[:, None], (3 * T, B))
    expected = [("fill", i, own), ("clip", i, own)] + ([("fill", i, b), ("clip", i, b)] if batch else [])
    expected += [("fill", i, own), ("fill", before, own[..., 0])]
    for reads, (outside, s, other) in zip(got, expected, strict=True):
        pairs = [want(k[0], s[k], other[k], outside) for k in np.ndindex(s.shape)]
        for j, name in enumerate(("v", "n")):
            values = np.array([pair[j] for pair in pairs]).reshape(s.shape)
            np.testing.assert_array_equal(reads[name], values if batch else values[:, 0])


# -- t in Python -------------------------------------------------------------------------------------------------------

IN_PYTHON = [
    (lambda p, c, t: 1.0 if t else 0.0, "ask whether t is true", "rlfx.minimum and rlfx.maximum"),
    (lambda p, c, t: not t, "ask whether t is true", "jnp.where"),
    (lambda p, c, t: t and 1.0, "ask whether t is true", "jnp.where"),
    (lambda p, c, t: t or 1.0, "ask whether t is true", "jnp.where"),
    (lambda p, c, t: bool(t + 1), "ask whether t is true", "jnp.where"),
    (lambda p, c, t: 1.0 if t > 2 else 0.0, "ask whether a value is true", "jnp.where(t > 2, a, b)"),
    (lambda p, c, t: 1.0 if t % 4 == 0 else 0.0, "ask whether a value is true", "rlfx.every(n, fn, otherwise=v)"),
    (lambda p, c, t: max(t - 1, 0), "ask whether a value is true", "rlfx.maximum"),
    (lambda p, c, t: min(t + 1, t.length), "ask whether a value is true", "rlfx.minimum"),
    (lambda p, c, t: t in (0, 2), "ask whether a value is true", "(t == 0) | (t == 2)"),
    (lambda p, c, t: t in {0, 2}, "A set or a dict asks", "(t == 0) | (t == 2)"),
    (lambda p, c, t: {0: 1.0}[t], "A set or a dict asks", "jnp.where"),
    (lambda p, c, t: 0 < t < 3, "ask whether a value is true", "jnp.where"),
    (lambda p, c, t: sorted([t, 1]), "ask whether a value is true", "rlfx.minimum"),
    (lambda p, c, t: any([t > 1, False]), "ask whether a value is true", "jnp.where"),
    (lambda p, c, t: 1.0 if c > 0 else 0.0, "ask whether a value is true", "jnp.where"),
    (lambda p, c, t: list(range(t)), "asks for t as a Python integer", "t.length"),
    (lambda p, c, t: list(range(t.now)), "asks for a value as a Python integer", "t.length"),
    (lambda p, c, t: [1.0, 2.0][t], "asks for t as a Python integer", "t.now"),
    (lambda p, c, t: (c, c)[t + 1], "index of an array or of a tuple asks", "of a tuple each one in it"),
    (lambda p, c, t: "ab" * t, "as a Python integer", "t.now"),
    (lambda p, c, t: hex(t), "asks for t as a Python integer", "t.now"),
    (lambda p, c, t: jnp.zeros(t), "asks for t as a Python integer", "x[:t]"),
    (lambda p, c, t: jnp.zeros(6).reshape(t, -1), "as a Python integer", "t.length"),
    (lambda p, c, t: jax.random.normal(KEY, (t,)), "as a Python integer", "t.length"),
    (lambda p, c, t: jnp.split(jnp.zeros(6), [t]), "as a Python integer", "t.length"),
    (lambda p, c, t: jnp.arange(t), "t", "t.now"),
    (lambda p, c, t: int(t), "int(t)", "In arithmetic t is an int32 already"),
    (lambda p, c, t: float(t), "float(t) asks for t as a Python float", "t.astype(jnp.float32)"),
    (lambda p, c, t: complex(t), "complex(t)", "t.astype(jnp.complex64)"),
    (lambda p, c, t: math.sqrt(t), "float(t)", "t.astype(jnp.float32)"),
    (lambda p, c, t: float(t.now), "asks for the value of an array", "jnp in the place of np"),
    (lambda p, c, t: jnp.arange(t.now), "The jnp.arange argument", "t.length"),
    (lambda p, c, t: jnp.nonzero(jnp.ones(3, c.dtype) * c), "The size argument of jnp.nonzero", "jnp in the place of np"),
    (lambda p, c, t: np.asarray(t.now), "asks for the value of an array", "jnp in the place of np"),
    (lambda p, c, t: jax.lax.fori_loop(0, t, lambda i, s: s + 1, 0), "counts", "jax.lax.fori_loop(0, t.now, ...)"),
]  # fmt: skip
GIVEN_TO_JAX = [
    (lambda p, c, t: jax.lax.dynamic_slice(V, (t,), (1,)), "t is given to an operation", "t.now"),
    (lambda p, c, t: jax.lax.dynamic_index_in_dim(V, t), "t is given to an operation", "t.now"),
    (lambda p, c, t: jax.lax.dynamic_update_index_in_dim(V, 1.0, t, 0), "t is given to an operation", "t.now"),
    (
        lambda p, c, t: jax.lax.cond(t > 1, lambda: t + 1, lambda: 0),
        "comes back from one that computes with it (cond",
        "t.now",
    ),
    (lambda p, c, t: jax.lax.scan(lambda s, x: (s + x, None), t, jnp.arange(3, dtype=jnp.int32)), "(scan", "t.now"),
    (lambda p, c, t: jax.lax.fori_loop(0, 3, lambda i, s: s + i, t), "(scan", "t.now"),
]
#: A bare value, indexed with time: what the message shows, and its fix.
BARE = [
    (lambda p, obs, t: obs[t], "obs[t] indexes an array with t", "rlfx.series(obs)[t]"),
    (lambda p, obs, t: obs[t - 1], "obs[t - 1] indexes an array with t", "rlfx.series(obs)[t - 1]"),
    (lambda p, obs, t: obs[t + 1].sum(), "obs[t + 1] indexes", "rlfx.series(obs)[t + 1]"),
    (lambda p, obs, t: obs[t:], "obs[t:] indexes", "rlfx.series(obs)[t:]"),
    (lambda p, obs, t: obs[: t + 1], "obs[:t + 1] indexes", "rlfx.series(obs)[:t + 1]"),
    (lambda p, obs, t: obs[t - 2 : t], "obs[t - 2:t] indexes", "rlfx.series(obs)[t - 2:t]"),
    (lambda p, obs, t: obs[(t + 1) // 2], "obs[(t + 1) // 2] indexes", "rlfx.series(obs)[(t + 1) // 2]"),
    (lambda p, obs, t: obs.at[t].set(0.0), "obs.at[t] indexes", "rlfx.series(obs)[t]"),
    (lambda p, obs, t: jnp.arange(4.0)[t], "jnp.arange(4.0)[t] indexes", "t.now"),
    (lambda p, obs, t: np.arange(4.0)[t], "np.arange(4.0)[t] indexes", "t.now"),
    (lambda p, obs, t: np.arange(4.0)[t:], "t", "t.now"),
    (lambda p, obs, t: jnp.eye(4)[t, 0], "jnp.eye(4)[t, 0] indexes", "t.now"),
    (lambda p, obs, t: jnp.eye(4)[0, t], "jnp.eye(4)[0, t] indexes", "t.now"),
    (lambda p, obs, t: jnp.eye(4)[..., t], "jnp.eye(4)[..., t] indexes", "t.now"),
    (lambda p, obs, t: {"reward": obs}["reward"][t + 1], "['reward'][t + 1] indexes", "t.now"),
]  # fmt: skip
V = jnp.zeros(4)


def test_time_used_as_a_python_number():
    for use, fact, fix in IN_PYTHON + GIVEN_TO_JAX:
        message = refused(ProgramError, use, carry=jnp.float32(0.0), key=KEY)
        assert fact in message, message
        assert fix in message.split("Fix: ")[1], message


def test_a_bare_value_indexed_with_time():
    for use, fact, fix in BARE:
        message = refused(ProgramError, use, carry=V)
        assert fact in message.splitlines()[0], message
        assert fix in message.split("Fix: ")[1], message


def test_other_uses_of_a_condition_are_not_blamed_on_an_index():
    x = lambda c, t: rlfx.series(c, start=0.0)  # noqa: E731
    for use in (
        lambda p, c, t: 1.0 if rlfx.series(c, start=0.0)[t - 1] else 0.0,
        lambda p, c, t: not x(c, t)[t - 1] > 0,
        lambda p, c, t: (lambda own: 1.0 if own.x[t - 1] else 0.0)(types.SimpleNamespace(x=x(c, t))),
        lambda p, c, t: (lambda y: 1.0 if y[(t + 1) // 2] else 0.0)(x(c, t)),
    ):
        assert "indexes an array" not in refused(ProgramError, use, carry=jnp.float32(0.0))

    def own_error(p, c, t):
        raise ValueError("Time limit: none")

    with pytest.raises(ValueError, match="Time limit: none"):
        traced(own_error)


def test_time_through_transformations_of_jax():
    """A value that came back is no index any more; where it can't have changed, it is."""
    x = lambda t: rlfx.series(1.0 * t, start=0.0, end=0.0)  # noqa: E731
    plus_one = lambda t: jax.tree.map(lambda v: v + 1, t)  # noqa: E731
    reads = [
        lambda x, i: x[i],
        lambda x, i: x[i - 1],
        lambda x, i: x[i:],
        lambda x, i: x[: i + 1],
        lambda x, i: x[rlfx.minimum(i, 1)],
        lambda x, i: x[i // 2],
    ]
    # a function of time that comes back as another, and what reads at it
    changed = [
        lambda r, t: r(plus_one(t)),
        lambda r, t: r(plus_one({"t": t})["t"]),
        lambda r, t: r(plus_one([0, (t,)])[1][0]),
        lambda r, t: r(jax.tree.unflatten(jax.tree.structure(t), [7 * x for x in jax.tree.leaves(t)])),
        lambda r, t: jax.lax.fori_loop(0, 3, lambda i, s: (s[0] + 1, s[1] + r(s[0])), (t, 0.0)),
        lambda r, t: jax.lax.scan(lambda s, _: (s, r(s)), t, None, length=2),
        lambda r, t: r(jax.vmap(lambda v: t)(jnp.arange(3))),
        lambda r, t: r(jax.jit(lambda u: u)(t)),
        lambda r, t: jax.checkpoint(lambda u: r(u))(t),
    ]
    members = [(True, lambda p, c, t: jax.lax.cond(c > 0, lambda: x(t)[plus_one(t)], lambda: c))]
    members += [
        (j in (0, 2), lambda p, c, t, g=g, r=r: g(lambda i: jnp.sum(r(x(t), i)), t))
        for g, (j, r) in itertools.product(changed, enumerate(reads))
    ]
    assert len(members) >= 50
    # What is computed with such a value is an int32, and no index for another reason.
    others = (
        "depends on t and constants alone",
        "must be affine in t",
        "A slice to a computed time is not an array",
        "comes back from one that",
        "be moved out of it",
    )
    for as_it_is, read in members:
        message = refused((DomainError, ProgramError), read, carry=jnp.float32(0.0))
        assert any(fact in message for fact in (("what a transformation of jax",) if as_it_is else others)), message
        assert not as_it_is or "functions may close over t" in message

    def f(p, c, t):
        same = jax.tree.map(lambda v: v, t)
        branch = jax.lax.cond(t > 1, lambda: t + 1, lambda: t + 2)
        inside = jax.vmap(lambda v, u: x(t)[u - 1] + v, (0, None))(jnp.zeros(2), t)
        return c, (
            x(t)[same - 1],
            branch * 1,
            inside[1],
            jax.jit(lambda u: u.astype(jnp.float32))(t),
            x(t)[jax.tree.map(lambda v: v, [t + 1])[0]],
        )

    got = rlfx.unroll(f, length=4)(None, None)[1]
    for out, want in zip(got, ([0, 0, 1, 2], [2, 3, 3, 4], [0, 0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 0]), strict=True):
        np.testing.assert_array_equal(out, want)


# -- the ends, slices, casts -------------------------------------------------------------------------------------------


def test_the_fix_at_the_ends_says_what_was_written():
    far = [(lambda t, k=k: t + k, f"t + {k}") for k in range(1, 12)]
    far += [(lambda t, k=k: k * t + 1, f"{k} * t + 1") for k in range(2, 8)]
    far += [(lambda t, k=k: t.length - t + k, f"-t + {k + 4}") for k in range(1, 6)]
    far += [(lambda t, k=k: t // 2 + k, f"t // 2 + {k}") for k in range(3, 9)]
    for index, text in far:
        message = refused(BoundaryError, lambda p, c, t: rlfx.inputs(p)[index(t)], params=V)
        assert f"x[rlfx.minimum({text}, t.length - 1)]" in message
    before = [(lambda t, k=k: t - k, f"t - {k}") for k in range(1, 12)]
    before += [(lambda t, k=k: k - t, f"-t + {k}") for k in range(1, 3)]
    before += [(lambda t, k=k: rlfx.minimum(t - 1, k), f"rlfx.minimum(t - 1, {k})") for k in range(2)]
    before += [(lambda t, k=k: t // 2 - k, f"t // 2 - {k}") for k in range(1, 8)]
    for index, text in before:
        message = refused(BoundaryError, lambda p, c, t: rlfx.inputs(p)[index(t)], params=V)
        assert f"x[rlfx.maximum({text}, 0)]" in message
    assert len(far) + len(before) >= 50


def test_a_slice_with_a_negative_step_says_what_to_write():
    bounds = {
        ":": lambda t: (None, None),
        "t:": lambda t: (t, None),
        ":t": lambda t: (None, t),
        ":t + 1": lambda t: (None, t + 1),
        "t - 3:t": lambda t: (t - 3, t),
        "t + 1:": lambda t: (t + 1, None),
        "t:t + 3": lambda t: (t, t + 3),
        "2:": lambda t: (2, None),
        ":3": lambda t: (None, 3),
    }
    members = [*itertools.product(bounds, (-1, -2, -3, -5, -7, -11))]
    assert len(members) >= 50
    for text, step in members:
        cut = bounds[text]
        message = refused(DomainError, lambda p, c, t: rlfx.series(1.0 * t)[slice(*cut(t), step)])
        assert f"jnp.flip(x[{text}{'' if step == -1 else f':{-step}'}])" in message
        fixed = lambda x, t: jnp.flip(x[slice(*cut(t), -step)])  # noqa: E731
        traced(lambda p, c, t: jnp.sum(fixed(rlfx.series(1.0 * t), t)))  # the fix works


FITS = {
    "bool": ([True, False, 0, 1], [2, -1, 0.5, 1j, 300]),
    "uint8": ([0, 255, True, np.int64(7), np.uint8(3)], [300, -1, 256, 0.5, 1.0, 1j, np.int64(-1), 2**40]),
    "int8": ([-128, 127, np.uint8(5)], [128, -129, np.uint8(200), 0.5]),
    "int32": ([2**31 - 1, -(2**31), True], [2**31, -(2**40), 0.5, np.float32(1.0), 1j]),
    "float16": ([0, 1, 0.1, 65504.0, np.inf, np.nan, True, np.float32(0.1)], [1e6, 70000, 1j, np.complex64(1)]),
    "float32": ([0, 0.5, 2**24 + 1, np.float64(0.1), -np.inf], [1e39, 1j, np.complex64(1j)]),
    "complex64": ([0, 0.5, 1j, True], [KEY]),
}


def test_values_at_the_ends_and_in_windows_fit_or_are_refused():
    """60 values: a value is never wrapped around, cut or stripped of its imaginary part."""
    for dtype, (good, bad) in FITS.items():
        x = lambda dtype=dtype, **ends: rlfx.series(jnp.zeros((), dtype), **ends)  # noqa: E731

        def f(p, c, t):
            reads = [(x(start=v)[t - 1], x(end=v)[t + 1], x().window(0, 2, fill=v)[1]) for v in good]
            return c, [jnp.stack(r) for r in reads]

        with jax.numpy_dtype_promotion("standard"):
            got = rlfx.unroll(f, length=1)(None, None)[1]
        for out, v in zip(got, good, strict=True):
            np.testing.assert_array_equal(np.asarray(out), np.asarray(v).astype(jnp.dtype(dtype)))
        for v, name in itertools.product(bad, ("start", "end", "fill")):
            read = lambda p, c, t: x().window(0, 2, fill=v) if name == "fill" else x(**{name: v})[t]  # noqa: E731
            assert f"{name}= does not fit the series" in refused(BoundaryError, read)
    for traced_value, dtype in [
        (lambda c: c, "uint8"),
        (lambda c: c.astype(jnp.uint32), "int32"),
        (lambda c: c + 0.5, "int32"),
    ]:
        with jax.numpy_dtype_promotion("standard"):
            refused(
                BoundaryError,
                lambda p, c, t: rlfx.series(jnp.zeros((), dtype), start=traced_value(c))[t],
                carry=jnp.int32(0),
            )


def test_what_a_history_keeps():
    for capacity in (0, -1, 1.5, True, None, "3"):
        with pytest.raises(DomainError, match="History: capacity must be a positive integer, got "):
            rlfx.History(capacity, like=jnp.float32(0.0))
    assert rlfx.History(np.int64(2), like=jnp.float32(0.0)).capacity == 2
    like = {"a": jnp.zeros((), jnp.int32), "b": jnp.zeros(2)}
    good = {"a": jnp.int32(1), "b": jnp.ones(2)}
    for value, fact in [
        ({**good, "a": jnp.float32(1.5)}, "float32"),
        ({**good, "a": jnp.zeros(2, jnp.int32)}, "value['a'] has shape [2]"),
        ({**good, "b": jnp.zeros(3)}, "value['b'] has shape [3]"),
        ({**good, "b": jnp.float32(0.0)}, "value['b'] has shape []"),
        ({**good, "b": jnp.zeros(2, jnp.complex64)}, "complex64"),
        ({"a": good["a"]}, "its structure is"),
        (good["a"], "its structure is"),
        ((good["a"], good["b"]), "its structure is"),
        ({**good, "c": good["a"]}, "its structure is"),
    ]:
        message = refused(BoundaryError, lambda p, c, t: rlfx.series(value, history=c), carry=rlfx.History(3, like))
        assert "The value does not fit its history" in message
        assert fact in message
        assert "rlfx.History(capacity, like=value)" in message
    keep = lambda value: lambda p, c, t: (rlfx.series(value, history=c).history, value)  # noqa: E731
    rlfx.trace(keep(good), None, rlfx.History(3, like), length=4, loss=False)
    # 64 pairs: floats may be rounded to other floats; nothing else is lost
    dtypes = [jnp.dtype(d) for d in ("bool", "int8", "uint8", "int32", "bfloat16", "float16", "float32", "complex64")]
    for kept, given in itertools.product(dtypes, dtypes):
        write = lambda p, c, t: rlfx.series(jnp.zeros((), given), history=c)  # noqa: E731
        carry = rlfx.History(3, jnp.zeros((), kept))
        floats = all(jnp.issubdtype(d, jnp.floating) for d in (kept, given))
        with jax.numpy_dtype_promotion("standard"):
            fits = floats or jnp.promote_types(kept, given) == kept
        if fits:
            rlfx.trace(keep(jnp.zeros((), given)), None, carry, length=4, loss=False)
        else:
            assert f"its dtype is {given}" in refused(BoundaryError, write, carry=carry)


@pytest.mark.parametrize(
    "run", [rlfx.unroll, lambda f, length: rlfx.reference(f, length=length, loss=False)], ids=["compiled", "reference"]
)
def test_the_time_of_the_first_timestep(run):
    program = run(lambda p, c, t: (c, t.now), length=4)
    numbers = [n(k) for k in (0, 3, 7) for n in (*INTEGERS, jnp.int32, jnp.uint32, jnp.int8)]
    for t0 in (*numbers, -1, 2**31 - 5):
        np.testing.assert_array_equal(program(None, None, t0=t0)[1], int(t0) + np.arange(4))
    for t0 in (
        1.5,
        True,
        None,
        "1",
        np.float32(1.0),
        jnp.array([1, 2]),
        jnp.array([1]),
        jnp.float32(1.0),
        jnp.bool_(True),
    ):
        with pytest.raises(DomainError, match="t0 is the time of the first timestep, an integer"):
            program(None, None, t0=t0)
    for t0 in (2**31, 2**31 - 4, -(2**31) - 1, 10**12):
        with pytest.raises(DomainError, match="more than an int32 counts"):
            program(None, None, t0=t0)


# -- a program that is called in another -------------------------------------------------------------------------------

OUTER = r"A series of outer \(over t\) is read in <lambda> \(over t\), which is called inside of it"
INNER = r"A series of inner \(over t\) is read in outer \(over t\), where it has no value"
OTHER = r"A series of <lambda> \(over t\) is read at the time of another program, outer \(over t\)"
BOTH = r"The indices of two programs, outer \(over t\) and <lambda> \(over t\), are combined"
RAGGED = "A slice whose length depends on the time of an enclosing program"
FOREIGN = [
    (lambda ws, x, t, i: ws[i - 1], OUTER),
    (lambda ws, x, t, i: ws[i], OUTER),
    (lambda ws, x, t, i: ws[: i + 1].sum(), OUTER),
    *[(lambda ws, x, t, i, r=r: r(ws, t), OUTER) for r in (lambda w, t: w[t - 1], lambda w, t: w[t:].sum(), lambda w, t: w[0])],
    (lambda ws, x, t, i: ws[:].sum(), OUTER),
    (lambda ws, x, t, i: ws.window(-1, 1).sum(), OUTER),
    (lambda ws, x, t, i: ws.lookup(t), OUTER),
    *[(lambda ws, x, t, i, r=r: r(x, i), OTHER) for r in (lambda x, i: x[i - 1], lambda x, i: x[i], lambda x, i: x[2 * i])],
    *[(lambda ws, x, t, i, r=r: r(x, i), OTHER) for r in (lambda x, i: x[: i + 1].sum(), lambda x, i: x[i:].sum())],
    *[(lambda ws, x, t, i, r=r: x[r(t, i)], BOTH) for r in (lambda t, i: t + i, lambda t, i: i + t, lambda t, i: t - i)],
    *[(lambda ws, x, t, i, r=r: x[r(t, i)], BOTH) for r in (rlfx.minimum, rlfx.maximum, lambda t, i: i * 4 + t)],
    (lambda ws, x, t, i: x[i : t + 1].sum(), OTHER),
]  # fmt: skip


def test_an_index_of_an_enclosing_program():
    """Compiled and by reference: each is refused, where it was read at the index of the inner program."""
    runs = (rlfx.unroll, lambda f, length: rlfx.reference(f, length=length, loss=False))
    for read, fact in FOREIGN:

        def outer(_, w, i):
            ws = rlfx.series(w, start=-1.0)
            act = lambda p, c, t: (c, read(ws, rlfx.series(w + 1.0 * t, start=0.0, end=0.0), t, i))  # noqa: E731
            return w + 1.0, rlfx.unroll(act, length=3)(None, jnp.float32(0.0))[1]

        for run in runs:
            with pytest.raises(DomainError, match=fact) as caught:
                run(outer, length=4)(None, jnp.float32(10.0))
            assert "at test_indices.py:" in str(caught.value)
            assert "Fix: " in str(caught.value)


def test_a_slice_of_an_enclosing_program():
    def closed(w, past):
        return rlfx.unroll(lambda p, c, t: (c, past.mean()), length=3)(None, None)[1]

    def given(w, past):
        return rlfx.unroll(lambda p, c, t: (c, p.mean()), length=3)(past, None)[1]

    def carried(w, past):
        return rlfx.unroll(lambda p, c, t: (c, c.sum()), length=3)(None, past)[1]

    for use in (closed, given, carried):

        def outer(_, w, i):
            return w + 1.0, use(w, rlfx.series(w)[: i + 1])

        for run in (rlfx.unroll, lambda f, length: rlfx.reference(f, length=length, loss=False)):
            with pytest.raises(UnsupportedSliceOp, match=RAGGED):
                run(outer, length=4)(None, jnp.float32(10.0))


def test_a_series_of_an_inner_program_read_outside():
    def outer(_, w, i):
        kept = []

        def inner(p, c, t):
            kept.append(rlfx.series(1.0 * t, start=0.0))
            return c, kept[0][t]

        rlfx.unroll(inner, length=3)(None, None)
        return w, kept[0][i - 1]

    with pytest.raises(DomainError, match=INNER):
        rlfx.unroll(outer, length=4)(None, jnp.float32(10.0))


def test_what_programs_in_programs_may_say():
    """Read before the call; the outer time as a number; windows, means and series of what came back; three levels."""

    def outer(_, w, i):
        ws = rlfx.series(w, start=-1.0)
        before, mean = ws[i - 1], ws[: i + 1].mean()

        def act(p, c, t):
            x = rlfx.series(p + 1.0 * t, end=0.0)
            deep = rlfx.unroll(
                lambda q, d, k: (d + rlfx.series(k.astype(jnp.float32), start=5.0)[k - 1], None), length=2
            )(None, jnp.float32(0.0))[0]
            return c, (before, mean, x[t + 1], i.now * 10 + t.now, deep, x.lookup(t - i.now))

        out = rlfx.unroll(act, length=3)(w, None, t0=i * 3)[1]
        return w + 1.0, (*out, rlfx.series(out[2], start=0.0)[i - 1])

    got = rlfx.unroll(outer, length=4)(None, jnp.float32(10.0))[1]
    i, t = np.meshgrid(np.arange(4), np.arange(3), indexing="ij")
    ahead = np.where(t == 2, 0, 10 + i + 1 + t + 3 * i)
    before = np.concatenate([np.zeros((1, 3)), ahead[:-1]])
    value = np.where((t - i >= 0), 10 + i + 3 * i + t - i, np.nan)
    for out, want in zip(
        got,
        (np.where(i == 0, -1, 9 + i), 10 + i / 2, ahead, i * 10 + 3 * i + t, 5.0 + 0 * i, value, before),
        strict=True,
    ):
        np.testing.assert_allclose(out, want)


# -- how long an index takes -------------------------------------------------------------------------------------------


def random_index(rng, depth=2):
    """An index expression, written at random."""
    part = lambda: random_index(rng, depth - 1)  # noqa: E731
    k = rng.integers(8 if depth else 3)
    if k < 3:
        return (TIME, LENGTH, as_index(rng.integers(-3, 8)))[k]
    if k < 7:
        n = int(rng.integers(1, 5))
        return (lambda: part() + part(), lambda: part() * (n - 3), lambda: part() // n, lambda: part() % n)[k - 3]()
    return extreme(rng.choice(["min", "max"]), part(), part())


def by_sets(access, length):
    """What :func:`reach` finds, from the relation as an integer set, point by point."""
    domain, reads = range(length), {t: [] for t in range(length)}
    relation(access, length).wrap().foreach_point(
        lambda p: reads[p.get_coordinate_val(isl.dim_type.set, 0).to_python()].append(
            p.get_coordinate_val(isl.dim_type.set, 1).to_python()
        )
    )
    inside = {t: [s for s in reads[t] if 0 <= s < length] for t in domain}
    distances = [s - t for t in domain for s in inside[t]]
    everything = [s for t in domain for s in reads[t]]
    return Reach(
        past=any(d < 0 for d in distances),
        now=any(d == 0 for d in distances),
        future=any(d > 0 for d in distances),
        behind=max([-d for d in distances if d < 0], default=0),
        ahead=max([d for d in distances if d > 0], default=0),
        before_start=any(s < 0 for s in everything),
        after_end=any(s >= length for s in everything),
        empty=not all(inside[t] for t in domain),
    )


def test_what_an_access_reaches_is_that_of_its_integer_set():
    rng = np.random.default_rng(0)
    for _ in range(200):
        lo, hi = random_index(rng), random_index(rng)
        access = [
            Point(lo),
            Slice(lo, hi),
            Window(*sorted(map(int, rng.choice(range(-4, 5), 2, replace=False)))),
            Lookup(False),
        ]
        access, length = access[rng.choice(4, p=[0.4, 0.4, 0.15, 0.05])], int(rng.choice([1, 2, 3, 5]))
        assert reach(access, length) == by_sets(access, length), (str(access), length)


def test_long_index_expressions_are_analysed_quickly_or_refused():
    """Each in less than a second, where comparisons of sets or of symbolic lengths took minutes."""

    def chain(t, n):
        for _ in range(n):
            t = (t * 3 + 1) // 2
        return t

    def doubled(t, n):
        for _ in range(n):
            t = (t * 3 + 1) // 2 - t // 3
        return t

    x = lambda t: rlfx.series(1.0 * t, start=0.0, end=0.0)  # noqa: E731
    begin = time.process_time()
    for n in (4, 12, 18, 30):
        traced(lambda p, c, t: x(t)[chain(t, n) % 5], length=16)
    for n in (2, 4, 5):
        traced(lambda p, c, t: x(t)[doubled(t, n)], length=16)
    for n in (6, 8, 12):
        message = refused(DomainError, lambda p, c, t: x(t)[doubled(t, n)], length=16)
        assert "at most 64 are analysed" in message
        assert "x[:][i]" in message
    assert "at most 64 are analysed" in refused(DomainError, lambda p, c, t: x(t)[chain(t, 70)], length=16)
    for read in (
        lambda x, t: x[(t % 7) % 5 : (t // 2) % 3 + t % 11],
        lambda x, t: x[(t % 7) % 5 : t % 11 + t % 3 + t % 2],
        lambda x, t: x[: sum((t % n for n in (2, 3, 5, 7, 9, 11, 13, 15)), t % 17)],
    ):
        message = refused(DomainError, lambda p, c, t: read(x(t), t).sum(), length=16)
        assert "has too many //, %, minimum and maximum" in message
    for read in (
        lambda x, t: x[t % 7 : t % 5 + t % 3],
        lambda x, t: x[: t % 7 + t % 5 + t % 3],
        lambda x, t: x[t - t % 4 : t + 1],
    ):
        traced(lambda p, c, t: read(x(t), t).sum(), length=16)
    assert time.process_time() - begin < 15
