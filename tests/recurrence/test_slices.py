"""Slices whose length depends on t, put together, taken apart and cut short: against loops over plain arrays."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import rlfx
from rlfx.errors import UnsupportedSliceOp
from tests.leaks import checking_leaks

T = 4
X = np.array([1.0, 2.0, 4.0, 8.0], np.float32)  # the series of every program here, times its parameter


def agrees(members, oracle, *, params=1.0, rtol=1e-5):
    """The members of a program, ``{name: (x, t) -> scalar}``, and the gradient of their sum, against ``oracle(name, t)``.

    All in one program, compiled; ``oracle`` is linear in the series, as the members are.
    """

    def f(p, c, t):
        x = rlfx.series(p * c)
        return 2.0 * c, {name: fn(x, t) for name, fn in members.items()}

    fn = rlfx.unroll(f, length=T)
    run = jax.jit(
        jax.value_and_grad(
            lambda p: (lambda out: (sum(v.sum() for v in out.values()), out))(fn(p, jnp.float32(1.0))[1]), has_aux=True
        )
    )
    (_, got), gradient = run(jnp.float32(params))
    expected = {name: np.array([oracle(name, t) for t in range(T)]) for name in members}
    for name in members:
        np.testing.assert_allclose(got[name], expected[name], rtol=rtol, err_msg=str(name))
    np.testing.assert_allclose(gradient, sum(e.sum() for e in expected.values()), rtol=rtol)


# -- slices put together ----------------------------------------------------------------------------------------------

#: As an index of a series, and as bounds.
PIECES = {
    ":t": (lambda x, t: x[:t], lambda t: (0, t)),
    ":t+1": (lambda x, t: x[: t + 1], lambda t: (0, t + 1)),
    "t:": (lambda x, t: x[t:], lambda t: (t, T)),
    "t+1:": (lambda x, t: x[t + 1 :], lambda t: (t + 1, T)),
    "t:t+1": (lambda x, t: x[t : t + 1], lambda t: (t, t + 1)),
    "t+2:": (lambda x, t: x[t + 2 :], lambda t: (min(t + 2, T), T)),
    ":t+2": (lambda x, t: x[: t + 2], lambda t: (0, min(t + 2, T))),
}
JOINED = [
    *itertools.product(PIECES, repeat=2),
    (":t", "t:t+1", "t+1:"),
    ("t+1:", "t:t+1", ":t"),
    (":t+1", ":t+1", ":t+1"),
    ("t+2:", ":t+2", "t:"),
]


def weighted(values):
    """A sum in which every position counts by itself."""
    return jnp.sum(values * (jnp.arange(values.shape[0]).astype(jnp.float32) + 1.0))


def test_slices_are_put_together_where_each_begins():
    def member(names, x, t):
        parts = [PIECES[n][0](x, t) for n in names]
        return weighted(jnp.concatenate(parts) if len(names) == 2 else jnp.hstack(parts))

    def oracle(names, t):
        whole = np.concatenate([X[slice(*PIECES[n][1](t))] for n in names])
        return np.sum(whole * np.arange(1, len(whole) + 1))

    agrees({names: lambda x, t, names=names: member(names, x, t) for names in JOINED}, oracle)


def test_slices_that_make_up_a_whole_have_its_length():
    whole = [
        names
        for names in JOINED
        if all(sum(hi - lo for lo, hi in (PIECES[n][1](t) for n in names)) == T for t in range(T))
    ]
    assert len(whole) == 8

    def f(p, c, t):
        x = rlfx.series(c)
        joined = [jnp.concatenate([PIECES[n][0](x, t) for n in names]) for names in whole]
        assert all(j.shape == (T,) for j in joined)
        return 2.0 * c, jnp.stack([jnp.sum(j * jnp.arange(4.0, dtype=jnp.float32)) for j in joined])

    got = rlfx.unroll(f, length=T)(None, jnp.float32(1.0))[1]
    for t, i in itertools.product(range(T), range(len(whole))):
        expected = np.concatenate([X[slice(*PIECES[n][1](t))] for n in whole[i]]) @ np.arange(4.0)
        np.testing.assert_allclose(got[t, i], expected)


# -- slices of episodes that end by themselves -------------------------------------------------------------------------

BOUNDS = {
    "2:": (lambda x, t: x[2:], lambda t, n: (2, n)),
    "4:": (lambda x, t: x[4:], lambda t, n: (4, n)),
    "t:": (lambda x, t: x[t:], lambda t, n: (t, n)),
    "t+2:": (lambda x, t: x[t + 2 :], lambda t, n: (t + 2, n)),
    "2*t:": (lambda x, t: x[2 * t :], lambda t, n: (2 * t, n)),
    "2:t": (lambda x, t: x[2:t], lambda t, n: (2, t)),
    "2:t+2": (lambda x, t: x[2 : t + 2], lambda t, n: (2, t + 2)),
    "t:t+3": (lambda x, t: x[t : t + 3], lambda t, n: (t, t + 3)),
    "t+1:t+3": (lambda x, t: x[t + 1 : t + 3], lambda t, n: (t + 1, t + 3)),
    "t-t%3:t-t%3+3": (lambda x, t: x[t - t % 3 : t - t % 3 + 3], lambda t, n: (t - t % 3, t - t % 3 + 3)),
    "3:5": (lambda x, t: x[3:5], lambda t, n: (3, 5)),
    "1:n-1": (lambda x, t: x[1 : t.length - 1], lambda t, n: (1, 5)),
}


def test_no_slice_of_an_episode_has_a_negative_length():
    length, ends = 6, np.array([1, 2, 4, 6, 6])

    def f(p, c, t):
        x = rlfx.series(p * c["x"])
        parts = {name: fn(x, t) for name, (fn, _) in BOUNDS.items()}
        out = {name: (jnp.int32(s.shape[0]), weighted(s)) for name, s in parts.items()}
        return {"x": c["x"] + 1.0, "end": c["end"]}, out

    fn = rlfx.unroll(f, length=length, batch=len(ends), until=lambda c: c["x"] > c["end"])
    carry = {"x": jnp.ones(len(ends), jnp.float32), "end": jnp.asarray(ends, jnp.float32)}
    out, gradient = jax.jit(
        lambda p: (fn(p, carry)[1], jax.grad(lambda p: sum(v.sum() for _, v in fn(p, carry)[1].values()))(p))
    )(1.0)
    total = 0.0
    for name, (t, b) in itertools.product(BOUNDS, itertools.product(range(length), range(len(ends)))):
        n = ends[b]
        values = (
            np.arange(1.0, n + 1)[slice(*(min(max(i, 0), n) for i in BOUNDS[name][1](t, n)))] if t < n else np.zeros(0)
        )
        assert out[name][0][t, b] == len(values), (name, t, b)
        expected = np.sum(values * np.arange(1, len(values) + 1))
        np.testing.assert_allclose(out[name][1][t, b], expected, rtol=1e-5, err_msg=f"{name} {t} {b}")
        total += expected
    np.testing.assert_allclose(gradient, total, rtol=1e-5)


# -- values whose length depends on t, elsewhere ------------------------------------------------------------------------

SLICED = (lambda x, t: x[: t + 1], lambda x, t: x[t:], lambda x, t: jnp.outer(x[: t + 1], x[:]))
ELSEWHERE = {
    "t - 1": lambda y, t: rlfx.series(y, start=0.0)[t - 1],
    "t + 1": lambda y, t: rlfx.series(y, end=0.0)[t + 1],
    "0": lambda y, t: rlfx.series(y)[0],
    ":t + 1": lambda y, t: rlfx.series(y)[: t + 1],
    ":": lambda y, t: rlfx.series(y)[:],
    "window": lambda y, t: rlfx.series(y).window(-1, 1),
    "lookup": lambda y, t: rlfx.series(y)[jnp.int32(0)],
    "lookup across": lambda y, t: rlfx.series(y)[jnp.int32(0), jnp.int32(0)],
    "solve": lambda y, t: rlfx.solve(lambda a: y * a[t - 1].sum(), start=1.0),
    "sum": lambda y, t: rlfx.sum(y),
    "mean over b": lambda y, t: rlfx.mean(y, "b"),
    "max over t": lambda y, t: rlfx.max(y, "t"),
    "std": lambda y, t: rlfx.std(y, "b"),
    "last": lambda y, t: rlfx.last(y),
    "shared": lambda y, t: rlfx.shared(lambda ys: ys.sum(), y),
    "shared of more": lambda y, t: rlfx.shared(lambda a, ys: a.sum() * ys, y[0], y),
    "nested": lambda y, t: jax.jit(lambda z: rlfx.series(z, start=0.0)[t - 1])(y),
}


@pytest.mark.parametrize("made", [rlfx.compile, rlfx.reference])
def test_a_value_whose_length_depends_on_t_is_no_value_of_other_points(made):
    for name, elsewhere in ELSEWHERE.items():
        for sliced in SLICED:

            def f(p, c, t, elsewhere=elsewhere, sliced=sliced):
                return jnp.sum(elsewhere(sliced(rlfx.series(c), t), t)), c

            with pytest.raises(
                UnsupportedSliceOp, match=r"of a value whose length depends on t(.|\n)*test_slices.py(.|\n)*Fix: Reduce"
            ) as e:
                made(f, length=3, batch=2)(1.0, jnp.ones(2, jnp.float32))
            assert "tau" not in str(e.value), name


def test_such_a_value_is_itself_at_its_own_timestep():
    agrees({"same": lambda x, t: rlfx.series(x[: t + 1])[t].sum()}, lambda _, t: X[: t + 1].sum())


# -- what crashed -----------------------------------------------------------------------------------------------------


def test_nothing_of_a_slice_leaks_from_its_trace():
    def f(p, c, t):
        x = rlfx.series(p * c)
        return jax.nn.softmax(x[: t + 1]) @ x[: t + 1] + jnp.max(jnp.sin(x[t:] + 1.0 * t)) + jnp.sum(
            jax.nn.relu(x[:t] * (1.0 * t))
        ), c

    with checking_leaks():
        gradient = jax.jit(jax.grad(lambda p: rlfx.compile(f, length=3, batch=2)(p, jnp.ones(2, jnp.float32))[0]))
        assert np.isfinite(gradient(0.5))


CONSTANTS = (True, False, 1, 2.5, np.float32(2.0), np.int8(3), np.True_, np.array([True, False]), 1j)


def test_a_constant_is_a_series_like_any_other():
    def f(p, c, t):
        series = [rlfx.series(v, start=v, end=v) for v in CONSTANTS]
        windows = [x.window(-1, 1, fill=type(v)(0)) for x, v in zip(series, CONSTANTS, strict=True) if np.ndim(v) == 0]
        return c, [(x[t], x[t - 1], x[t + 1], x[: t + 1].sum(0), x[:], x.lookup(0)) for x in series] + windows

    compiled = rlfx.unroll(f, length=3)(None, None)[1]
    meant = rlfx.reference(f, length=3, loss=False)(None, None)[1]
    for got, expected in zip(jax.tree.leaves(compiled), jax.tree.leaves(meant), strict=True):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(got, expected)
    valid = rlfx.unroll(lambda p, c, t: (c, rlfx.series(True).window(-1, 1, fill=False)), length=3)(None, None)[1]
    np.testing.assert_array_equal(valid, [[False, True], [True, True], [True, True]])


def test_products_of_nothing_have_gradients():
    """Of every size n, k, m of which one is 0, by two products: 74."""
    sizes = [s for s in itertools.product((0, 1, 2, 3), repeat=3) if 0 in s]
    assert 2 * len(sizes) >= 50
    weights = {str(s): jnp.ones(s[1:], jnp.float32) for s in sizes}
    carry = {str(s): jnp.ones((2, *s[:2]), jnp.float32) for s in sizes}

    def f(p, c, t):
        each = [((c[k] @ p[k]).sum(), jnp.einsum("nk,km->", c[k], p[k])) for k in p]
        return sum(a + b for a, b in each), jax.tree.map(lambda x: x * 2.0, c), each

    fn = rlfx.compile(f, length=3, batch=2)
    (loss, (_, each)), gradient = jax.jit(jax.value_and_grad(lambda p: fn(p, carry), has_aux=True))(weights)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0), (loss, each))
    jax.tree.map(lambda g, w: np.testing.assert_array_equal(g, jnp.zeros_like(w)), gradient, weights)


# -- what is not finite outside of a slice ------------------------------------------------------------------------------

INFINITE = {
    "ones @ x": lambda x, w: jnp.ones_like(x) @ x,
    "x @ w": lambda x, w: x @ w,
    "w @ x": lambda x, w: w @ x,
    "w @ matrix": lambda x, w: jnp.max(w @ jnp.stack([x, 2.0 * x], 1)),
    "softmax @ x": lambda x, w: jax.nn.softmax(w) @ x,
    "x @ x": lambda x, w: x @ x,
    "einsum": lambda x, w: jnp.einsum("i,i,i->", w, x, w),
    "sum": lambda x, w: jnp.sum(x * w),
    "mean": lambda x, w: jnp.mean(jnp.abs(x)),
    "cumsum": lambda x, w: jnp.cumsum(x * w)[0],
}
READERS = {
    "past": (lambda x, t: x[: t + 1], lambda t: (0, t + 1)),
    "before": (lambda x, t: x[:t], lambda t: (0, t)),
    "future": (lambda x, t: x[t:], lambda t: (t, T)),
    "window": (lambda x, t: x[t - 1 : t + 1], lambda t: (max(t - 1, 0), t + 1)),
}


def test_what_is_not_finite_counts_only_where_it_is_read():
    members = [m for m in itertools.product(INFINITE, READERS) if m not in (("mean", "before"), ("cumsum", "before"))]

    def f(bad, c, t):
        x = rlfx.series(jnp.where(t.now == 2, bad, c))
        slices = {name: read(x, t) for name, (read, _) in READERS.items()}
        weights = {name: jnp.cos(jnp.arange(s.shape[0]).astype(jnp.float32)) for name, s in slices.items()}
        return 2.0 * c, [INFINITE[fn](slices[name], weights[name]) for fn, name in members]

    run = jax.jit(rlfx.unroll(f, length=T))
    for bad in (np.inf, -np.inf, np.nan):
        got, x = run(jnp.float32(bad), jnp.float32(1.0))[1], np.where(np.arange(T) == 2, np.float32(bad), X)
        for (fn, name), values in zip(members, got, strict=True):
            for t in range(T):
                part = x[slice(*READERS[name][1](t))]
                expected = INFINITE[fn](part, jnp.cos(jnp.arange(len(part)).astype(jnp.float32)))
                np.testing.assert_allclose(values[t], expected, rtol=1e-5, err_msg=f"{fn} of {name} at {t}")


# -- parts of slices, and other shapes ----------------------------------------------------------------------------------

TOKENS = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)  # three tokens a timestep


def _tokens(x, a, b, np):
    return (x[a:b][:, None, None] * TOKENS[None]).reshape(-1, 2)


#: ``(series, first, stop, numpy or jax.numpy) -> scalar``.
SHAPES = {
    "[-2:]": lambda x, a, b, np: np.sum(x[a:b][-2:] * 3.0),
    "[1:-1]": lambda x, a, b, np: np.sum(x[a:b][1:-1]),
    "[::-1]": lambda x, a, b, np: np.sum(x[a:b][::-1][:1]),
    "[::2]": lambda x, a, b, np: np.sum(x[a:b][::2]),
    "first tokens": lambda x, a, b, np: np.sum(_tokens(x, a, b, np)[:3] * TOKENS),
    "all as one": lambda x, a, b, np: np.sum(
        (x[a:b][:, None, None] * TOKENS[None]).reshape(-1)[:4] * np.arange(4.0).astype("float32")
    ),
    "take_along_axis": lambda x, a, b, np: np.sum(
        np.take_along_axis(np.stack([x[a:b], 3.0 * x[a:b]], 1), np.ones_like(x[a:b])[:, None].astype(int), 1)
    ),
    "sorted": lambda x, a, b, np: np.sum(np.take_along_axis(x[a:b], np.argsort(-x[a:b]), 0)[:1]),
    "padded left": lambda x, a, b, np: np.sum(
        np.pad(x[a:b], (T - x[a:b].shape[0], 0)) * np.arange(4.0).astype("float32")
    ),
    "padded right": lambda x, a, b, np: np.sum(
        np.pad(x[a:b], (0, T - x[a:b].shape[0])) * np.arange(4.0).astype("float32")
    ),
    "padded": lambda x, a, b, np: np.sum(np.pad(x[a:b], (1, 2))[:2] * np.arange(2.0).astype("float32")),
    "named": lambda x, a, b, np: np.sum(x[a:b] if np is not jnp else checkpoint_name(x[a:b], "n")),
    "arange": lambda x, a, b, np: np.sum(x[a:b] * np.arange(1, x[a:b].shape[0] + 1).astype("float32")),
}
ENDS = {
    "past": (lambda t: (None, t + 1), lambda t: (0, t + 1)),
    "future": (lambda t: (t, None), lambda t: (t, T)),
    "around": (lambda t: (t - 1, t + 2), lambda t: (max(t - 1, 0), min(t + 2, T))),
    "block": (lambda t: (t - t % 2, t - t % 2 + 2), lambda t: (t - t % 2, t - t % 2 + 2)),
}


def test_parts_and_shapes_of_slices():
    members = {
        (name, end): lambda x, t, name=name, end=end: SHAPES[name](x, *ENDS[end][0](t), jnp)
        for name, end in itertools.product(SHAPES, ENDS)
    }
    agrees(members, lambda key, t: SHAPES[key[0]](X, *ENDS[key[1]][1](t), np))


def there(values, k):
    """An element at positions that count from the end if negative, and are clipped."""
    n = len(values)
    return values[np.clip(np.where(k < 0, k + n, k), 0, n - 1)]


#: Of values, a traced position and a vector of two, what is there; and the sum of it on arrays.
POSITIONS = {
    "[i]": (lambda s, i, ij: s[i], lambda s, i, ij: there(s, i)),
    "[i + 1]": (lambda s, i, ij: s[i + 1], lambda s, i, ij: there(s, i + 1)),
    "[-i - 1]": (lambda s, i, ij: s[-i - 1], lambda s, i, ij: there(s, -i - 1)),
    "[[i, j]]": (lambda s, i, ij: s[ij], lambda s, i, ij: there(s, ij)),
    "of what is computed": (lambda s, i, ij: (2.0 * s)[ij - 1], lambda s, i, ij: 2 * there(s, ij - 1)),
    "take": (lambda s, i, ij: jnp.take(s, ij, mode="clip"), lambda s, i, ij: there(s, np.maximum(ij, 0))),
    "dynamic_index": (lambda s, i, ij: jax.lax.dynamic_index_in_dim(s, i), lambda s, i, ij: there(s, i)),
    "dynamic_slice": (lambda s, i, ij: jax.lax.dynamic_slice_in_dim(s, i, 1), lambda s, i, ij: there(s, i)),
    "of columns": (lambda s, i, ij: jnp.stack([s, 3.0 * s], 1)[i], lambda s, i, ij: 4 * there(s, i)),
    "of a column": (lambda s, i, ij: jnp.stack([s, 3.0 * s], 1)[i, 1], lambda s, i, ij: 3 * there(s, i)),
    "vmap": (lambda s, i, ij: jax.vmap(lambda k: s[k])(ij), lambda s, i, ij: there(s, ij)),
    "two": (lambda s, i, ij: s[i] * s[0], lambda s, i, ij: there(s, i) * s[0]),
    "of a matrix": (lambda s, i, ij: jnp.outer(s, jnp.ones(2, jnp.float32))[i], lambda s, i, ij: 2 * there(s, i)),
}


def test_slices_at_traced_positions():
    """52; also at positions that are not in there, where jnp clips, and leaves the derivative of ``s[[i, j]]`` open."""
    members = [*itertools.product(POSITIONS, ENDS)]
    open_ = ("[[i, j]]", "of what is computed")
    weights = np.array([at not in open_ for at, _ in members], np.float32)
    assert len(members) >= 50
    i, ij = np.array([0, 1, 2, 1]), np.array([[0, 1], [1, 0], [2, 5], [3, -1]])

    def f(p, c, t):
        x, k, kj = rlfx.series(p * c), rlfx.inputs(jnp.asarray(i))[t], rlfx.inputs(jnp.asarray(ij))[t]
        each = [jnp.sum(POSITIONS[at][0](x[slice(*ENDS[end][0](t))], k, kj)) for at, end in members]
        return jnp.stack(each) @ weights, 2.0 * c, jnp.stack(each)

    def by_hand(p):
        find = lambda at, end, t: np.sum(POSITIONS[at][1](p * X[slice(*ENDS[end][1](t))].astype(float), i[t], ij[t]))  # noqa: E731
        return np.array([[find(*m, t) for m in members] for t in range(T)])

    fn = rlfx.compile(f, length=T, reduce="sum")
    (_, (_, got)), gradient = jax.jit(jax.value_and_grad(lambda p: fn(p, jnp.float32(1.0)), has_aux=True))(
        jnp.float32(1.5)
    )
    for k, name in enumerate(members):
        np.testing.assert_allclose(got[:, k], by_hand(1.5)[:, k], rtol=1e-5, err_msg=str(name))
    slope = ((by_hand(2.0) - by_hand(1.0)) @ weights).sum()  # of squares: exact
    np.testing.assert_allclose(gradient, slope, rtol=1e-5)


REFUSED = {
    "associative_scan": lambda x, t: jax.lax.associative_scan(jnp.add, x[: t + 1]).sum(),
    "arange": lambda x, t: jnp.sum(x[: t + 1] * jnp.arange(1.0, x[: t + 1].shape[0] + 1.0, dtype=jnp.float32)),
    "lookup at a slice": lambda x, t: x[rlfx.series(t.now)[: t + 1]].sum(),
}


@pytest.mark.parametrize("made", [rlfx.compile, rlfx.reference])
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_on_a_slice_is_refused_with_its_line(name, made):
    with pytest.raises(UnsupportedSliceOp, match=r"test_slices.py(.|\n)*Fix: "):
        made(lambda p, c, t: (REFUSED[name](rlfx.series(c), t), c), length=3)(1.0, 1.0)


def test_mapped_lookups_are_one():
    def f(p, c, t):
        i = jnp.arange(3)
        read = functools.partial(rlfx.series(p * c).lookup, outside="clip")
        mapped = [
            jax.vmap(lambda k: read(k))(i),
            jax.vmap(lambda k: read(k, k % 2))(i),
            jax.vmap(lambda k: read(k, jnp.int32(1)))(i),
        ]
        return 2.0 * c, jax.tree.map(
            lambda m, one: m - one, mapped, [read(i), read(i, i % 2), read(i, jnp.ones_like(i))]
        )

    for fn in (rlfx.unroll(f, length=3, batch=2), rlfx.reference(f, length=3, batch=2, loss=False)):
        assert not any(jnp.any(d) for d in fn(1.0, jnp.array([1.0, 10.0], jnp.float32))[1])


BITWISE = {"and": jax.lax.reduce_and, "or": jax.lax.reduce_or, "xor": jax.lax.reduce_xor}


def test_bits_along_a_slice_are_all_bits():
    """AND of integers begins with all ones, XOR with none, whatever lies outside of the slice."""

    def f(_, c, t):
        past = rlfx.series(c)[: t + 1]
        along = {name: op(past, (0,)) for name, op in BITWISE.items()}
        return 7 * c + 13, along

    _, got = jax.jit(rlfx.unroll(f, length=T))(None, jnp.int32(1023))
    series = [1023]
    for _ in range(T - 1):
        series.append(7 * series[-1] + 13)
    for name, fn in {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.items():
        np.testing.assert_array_equal(got[name], [fn.reduce(np.array(series[: t + 1], np.int32)) for t in range(T)])
