"""Two indices: series over (i, t), read outside of the inner program and inside of it, against plain loops."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import BoundaryError, CausalityError, DomainError, ProgramError

I, T, B, EDGE = 4, 5, 2, np.float32(0.25)

#: Each form of an index of n points: as written, and which points it reads at k.
FORMS = {
    "t": (lambda t: t, lambda k, n: [k]),
    "t - 1": (lambda t: t - 1, lambda k, n: [k - 1]),
    "t + 2": (lambda t: t + 2, lambda k, n: [k + 2]),
    "t // 2": (lambda t: t // 2, lambda k, n: [k // 2]),
    "t - t % 3": (lambda t: t - t % 3, lambda k, n: [k - k % 3]),
    "N - 1 - t": (lambda t: t.length - 1 - t, lambda k, n: [n - 1 - k]),
    "min(t + 1, N - 1)": (lambda t: rlfx.minimum(t + 1, t.length - 1), lambda k, n: [min(k + 1, n - 1)]),
    "max(t - 2, 0)": (lambda t: rlfx.maximum(t - 2, 0), lambda k, n: [max(k - 2, 0)]),
    "0": (lambda t: 0, lambda k, n: [0]),
    "N - 1": (lambda t: t.length - 1, lambda k, n: [n - 1]),
    "t:": (lambda t: slice(t, None), lambda k, n: range(k, n)),
    ":t + 1": (lambda t: slice(None, t + 1), lambda k, n: range(k + 1)),
    "t - 2:t + 1": (lambda t: slice(t - 2, t + 1), lambda k, n: range(max(k - 2, 0), k + 1)),
    "t:t + 3": (lambda t: slice(t, t + 3), lambda k, n: range(k, min(k + 3, n))),
    "block": (lambda t: slice(t - t % 2, t - t % 2 + 2), lambda k, n: range(k - k % 2, min(k - k % 2 + 2, n))),
    ":": (lambda t: slice(None), lambda k, n: range(n)),
}
#: What an inner program may read of its own series: earlier iterations, and as many at each.
EARLIER = {
    "i - 1": (lambda i: i - 1, lambda k: [k - 1]),
    "i - 2": (lambda i: i - 2, lambda k: [k - 2]),
    "i // 2 - 1": (lambda i: i // 2 - 1, lambda k: [k // 2 - 1]),
    "i - i % 3 - 1": (lambda i: i - i % 3 - 1, lambda k: [k - k % 3 - 1]),
    "i - 2:i": (lambda i: slice(i - 2, i), lambda k: [k - 2, k - 1]),
    "i - 1:i + 1": (lambda i: slice(i - 1, i + 1), lambda k: [k - 1, k]),
    "block": (lambda i: slice(i - i % 2 - 2, i - i % 2), lambda k: [k - k % 2 - 2, k - k % 2 - 1]),
}


def ys(w):
    """y[i, t, b], what all tests of the table read."""
    i, t, b = (np.arange(n, dtype=np.float32) for n in (I, T, B))
    return jnp.sin(w * (1 + i[:, None, None]) * (1 + t[None, :, None]) + 0.7 * b[None, None, :])


def y_at(w, x, i, t):
    return jnp.sin(w * (1.0 + i) * (1.0 + t) + x)


def summed(value):
    """Over all that is read: iterations, timesteps, both."""
    for _ in range(value.ndim):
        value = jnp.sum(value, 0)
    return value


def inside(pairs):
    """The sum of all reads, each with a weight of its own: the gradient of that is what was read."""

    def outer(params, x, i):
        def inner(params, x, t):
            w, weights = params
            y = rlfx.series(y_at(w, x, i, t), start={"i": EDGE, "t": EDGE}, end={"t": EDGE})
            reads = [summed(y[EARLIER[phi][0](i), FORMS[psi][0](t)]) for phi, psi in pairs]
            return x, sum(c * r for c, r in zip(weights, reads, strict=True))

        return jnp.sum(rlfx.unroll(inner, length=T, batch=B)(params, x)[1]), x

    return rlfx.compile(outer, length=I, reduce="sum", dim="i")


def inside_by_loops(pairs, w, weights):
    y, total = ys(w), 0.0
    for ((phi, psi), c), i, t in itertools.product(zip(pairs, weights, strict=True), range(I), range(T)):
        for j, s in itertools.product(EARLIER[phi][1](i), FORMS[psi][1](t, T)):
            total += c * jnp.sum(y[j, s] if j >= 0 and 0 <= s < T else jnp.full(B, EDGE))
    return total


def outside(pairs):
    """A series of what an inner program gave, read at an index of i; of that, another inner program reads at an index of t."""

    def outer(params, x, i):
        w, weights = params
        y = rlfx.unroll(lambda w, x, t: (x, y_at(w, x, i, t)), length=T, batch=B)(w, x)[1]
        over_i = rlfx.series(y, start=EDGE, end=EDGE)
        arrays = [over_i[FORMS[phi][0](i)] for phi, _ in pairs]
        arrays = [jnp.sum(a, 0) if a.ndim == 3 else a for a in arrays]

        def inner(params, x, t):
            weights, arrays = params
            over_t = (rlfx.series(rlfx.inputs(a)[t], start=EDGE, end=EDGE) for a in arrays)
            reads = [summed(a[FORMS[psi][0](t)]) for a, (_, psi) in zip(over_t, pairs, strict=True)]
            return x, sum(c * r for c, r in zip(weights, reads, strict=True))

        return jnp.sum(rlfx.unroll(inner, length=T, batch=B)((weights, arrays), x)[1]), x

    return rlfx.compile(outer, length=I, reduce="sum", dim="i")


def outside_by_loops(pairs, w, weights):
    y, total = ys(w), 0.0
    edge = jnp.full((T, B), EDGE)
    for (phi, psi), c in zip(pairs, weights, strict=True):
        for i in range(I):
            a = sum((y[j] if 0 <= j < I else edge for j in FORMS[phi][1](i, I)), jnp.zeros((T, B)))
            for t in range(T):
                for s in FORMS[psi][1](t, T):
                    total += c * jnp.sum(a[s] if 0 <= s < T else jnp.full(B, EDGE))
    return total


def table_is_right(program, by_loops, pairs):
    w, weights = jnp.float32(0.3), [jnp.float32(c) for c in np.linspace(-1, 1, len(pairs))]
    x = jnp.asarray(0.7 * np.arange(B, dtype=np.float32))
    got = jax.jit(jax.value_and_grad(lambda p: program(p, x)[0]))((w, weights))
    want = jax.jit(jax.value_and_grad(lambda p: by_loops(pairs, *p)))((w, weights))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got[1][0], want[1][0], rtol=1e-4, atol=1e-3)
    for pair, a, b in zip(pairs, got[1][1], want[1][1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=str(pair))


SAMPLE = [
    ("i - 1", "t + 2"),
    ("i - 2", "t - 2:t + 1"),
    ("i // 2 - 1", "N - 1 - t"),
    ("i - i % 3 - 1", "t:"),
    ("i - 1", ":"),
    ("i - 2:i", "t"),
    ("i - 1:i + 1", "t - 1"),
    ("block", "t - 2:t + 1"),
]
ACROSS = [("t - 1", "t + 2"), ("t:", "block"), ("N - 1 - t", "t"), ("t - 2:t + 1", ":t + 1"), ("t // 2", "t:t + 3")]


def test_a_sample_of_the_table():
    table_is_right(inside(SAMPLE), inside_by_loops, SAMPLE)
    table_is_right(outside(ACROSS), outside_by_loops, ACROSS)


@pytest.mark.slow
@pytest.mark.parametrize("phi", EARLIER)
def test_every_form_inside(phi):
    pairs = [(phi, psi) for psi in FORMS]
    table_is_right(inside(pairs), inside_by_loops, pairs)


@pytest.mark.slow
@pytest.mark.parametrize("phi", FORMS)
def test_every_form_outside(phi):
    pairs = [(phi, psi) for psi in FORMS]
    table_is_right(outside(pairs), outside_by_loops, pairs)


# -- a recurrence over both --------------------------------------------------------------------------------------------


def knot(w, carry, i):
    """y[i, t] of the iterations before, of the timestep before, and a state that goes on over i."""

    def smooth(w, x, t):
        def value(y):
            before = 0.4 * y[i - 1, t] + 0.3 * y[i - 1, t + 1] + 0.1 * y[i - 2, t - 1 : t + 2].sum()
            return jnp.sin(w * (1.0 + i) + before + 0.2 * y[i, t - 1] + 0.1 * x)

        y = rlfx.solve(value, start={"i": EDGE, "t": EDGE}, end={"t": EDGE})
        return 0.9 * x + 0.1 * y, y**2

    carry, out = rlfx.unroll(smooth, length=T, batch=B)(w, carry)
    return jnp.mean(out), carry


def knot_by_loops(w, x):
    y, total = {}, 0.0
    at = lambda i, t: y[i, t] if i >= 0 and 0 <= t < T else jnp.full(B, EDGE)  # noqa: E731
    for i in range(I):
        for t in range(T):
            near = sum(at(i - 2, s) for s in range(max(t - 1, 0), min(t + 2, T)))
            before = 0.4 * at(i - 1, t) + 0.3 * at(i - 1, t + 1) + 0.1 * near
            y[i, t] = jnp.sin(w * (1.0 + i) + before + 0.2 * at(i, t - 1) + 0.1 * x)
            x = 0.9 * x + 0.1 * y[i, t]
        total += jnp.mean(jnp.stack([y[i, t] ** 2 for t in range(T)]))
    return total


def test_a_recurrence_over_both():
    w, x = jnp.float32(0.3), jnp.array([0.1, 0.7])
    f = rlfx.compile(knot, length=I, reduce="sum", dim="i")
    want = jax.jit(jax.value_and_grad(knot_by_loops))(w, x)
    np.testing.assert_allclose(jax.jit(jax.value_and_grad(lambda w: f(w, x)[0]))(w), want, rtol=1e-5)
    ref = rlfx.reference(knot, length=I, reduce="sum", dim="i")
    np.testing.assert_allclose(ref(w, x)[0], want[0], rtol=1e-5)


def lagged(c, x, i):
    """A learner whose target is its own value of the iteration before; the gradient of the loss knows it for a constant."""

    def critic(w, x, t):
        value = rlfx.series(w * x, start={"i": 0.5}, end=1.0)
        return (value[t] - 0.9 * value[i - 1, t + 1]) ** 2, x + 0.1

    w = c
    (loss, _), g = jax.value_and_grad(rlfx.compile(critic, length=3), has_aux=True)(w, x)
    return w - 0.1 * g, loss


def test_inside_of_a_gradient():
    def step(_, w, i):
        return lagged(w, jnp.float32(0.3), i)

    run = rlfx.unroll(step, length=I, dim="i")
    w = jnp.float32(0.8)
    np.testing.assert_allclose(run(None, w)[1], by_hand(w), rtol=1e-5)
    slope = jax.grad(lambda w: jnp.sum(run(None, w)[1]))(w)
    np.testing.assert_allclose(slope, jax.grad(lambda w: jnp.sum(by_hand(w)))(w), rtol=1e-5)


def by_hand(w):
    """With the gradient of each loss written out: the targets are constants in it, and none in the outer one."""
    before, losses = [jnp.float32(0.5)] * 3, []
    xs = [0.3, 0.4, 0.5]
    for _ in range(I):
        y = [*before[1:], 1.0]
        losses.append(sum((w * x - 0.9 * v) ** 2 for x, v in zip(xs, y, strict=True)) / 3)
        g = sum(2 * x * (w * x - 0.9 * v) for x, v in zip(xs, y, strict=True)) / 3
        before = [w * x for x in xs]
        w = w - 0.1 * g
    return jnp.stack(losses)


def test_a_call_that_is_made_again():
    """The program that notes the reads is kept for no other call; nor are the values of its trace."""

    def inner_of(before):
        return lambda w, c, t: (c, rlfx.series(w * (1.0 + t), start={"i": -1.0})[before, t])

    def outer(_, w, i):
        inner = rlfx.unroll(inner_of(i - 1), length=2)
        first, second = inner(w, None)[1], inner(2.0 * w, None)[1]
        return w + 1.0, (first, second)

    with jax.checking_leaks():
        first, second = rlfx.unroll(outer, length=3, dim="i")(None, jnp.float32(1.0))[1]
    np.testing.assert_allclose(first, [[-1, -1], [1, 2], [2, 4]])
    np.testing.assert_allclose(second, [[-1, -1], [2, 4], [4, 8]])


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED = {
    "all earlier iterations": (
        lambda x, i, t: x[:i, t].sum(),
        DomainError,
        "x[:i, ...] is a slice over i inside inner (over t): how many there are depends on i.",
    ),
    "more with each iteration": (
        lambda x, i, t: x[i // 2 : i, t].sum(),
        DomainError,
        "Fix: Read as many at each i, x[i - 8:i, t]; or return x from inner, and reduce a slice of what came back.",
    ),
    "none of them": (
        lambda x, i, t: x[i : i - 2, t].sum(),
        DomainError,
        "x[i:i - 2, ...], a slice over i inside inner (over t), is empty.",
    ),
    "with a step": (
        lambda x, i, t: x[i - 4 : i : 2, t].sum(),
        DomainError,
        "x[i - 4:i, ...], a slice over i inside inner (over t), has a step, 2.",
    ),
    "a slice without a start": (
        lambda x, i, t: rlfx.series(x[t])[i - 2 : i, t].sum(),
        BoundaryError,
        "is read before the first i, and the series has no value there.",
    ),
    "no start": (
        lambda x, i, t: rlfx.series(x[t])[i - 1, t],
        BoundaryError,
        "is read before the first i, and the series has no value there.",
    ),
    "the future of its own call": (
        lambda x, i, t: rlfx.series(x[i - 1, t], start={"i": 0.0}, end={"i": 0.0})[i + 1, t],
        CausalityError,
        "i + 1",
    ),
    "three indices": (
        lambda x, i, t: x[i - 1, t, 0],
        DomainError,
        "Give two indices, the first of outer, the second of inner",
    ),
    "one": (
        lambda x, i, t: x[i - 1],
        DomainError,
        "A series of inner (over t) is read at the time of another program, outer (over i).",
    ),
    "the outer twice": (
        lambda x, i, t: x[i, i],
        DomainError,
        "A series of inner (over t) is read at the time of another program, outer (over i).",
    ),
    "the inner twice": (
        lambda x, i, t: x[t - 1, t],
        DomainError,
        "t",
    ),
    "a sum of both": (
        lambda x, i, t: x[2 * i + t, t],
        DomainError,
        "The indices of two programs, outer (over i) and inner (over t)",
    ),
    "a product of dimensions": (
        lambda x, i, t: x[i * 8 + t],
        DomainError,
        "The indices of two programs, outer (over i) and inner (over t)",
    ),
    "made inside of a gradient": (
        lambda x, i, t: jax.grad(lambda v: rlfx.series(v, start={"i": 0.0})[i - 1, t] + v)(1.0 * t),
        ProgramError,
        "A series with two indices is made inside of a function that jax transforms",
    ),
    "a boundary of the program": (
        lambda x, i, t: rlfx.series(1.0 * t, start={"i": 1.0 * t})[i - 1, t],
        BoundaryError,
        "start={'i': ...} is a value of the program",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    read, error, text = REFUSED[case]

    def outer(_, w, i):
        def inner(w, c, t):
            return c, read(rlfx.series(w * (1.0 * t), start={"i": 0.0, "t": 0.0}), i, t)

        return w, rlfx.unroll(inner, length=3)(w, None)[1]

    with pytest.raises(error) as caught:
        rlfx.unroll(outer, length=4, dim="i")(None, jnp.float32(1.0))
    assert text in str(caught.value)
    assert "Fix: " in str(caught.value)
    assert "test_two_indices.py" in str(caught.value)


def test_iterations_that_end_apart_are_refused():
    def outer(_, w, i):
        inner = lambda w, c, t: (c + 0.5, rlfx.series(c, start={"i": 0.0})[i - 1, t])  # noqa: E731
        return w, rlfx.unroll(inner, length=3, until=lambda c: c > 1.0)(w, w)[1]

    with pytest.raises(ProgramError, match="A program with until= is read at other iterations"):
        rlfx.unroll(outer, length=4, dim="i")(None, jnp.float32(1.0))
