"""Two indices: series over (i, t), read outside of the inner program and inside of it, against plain loops."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import BoundaryError, CausalityError, DomainError, ProgramError
from rlfx.recurrence.language.masked import Masked

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
#: What an inner program reads of its own series at other iterations: the same forms, but a slice of fixed length has that length.
ITERATIONS = FORMS | {
    "t - 2:t + 1": (lambda i: slice(i - 2, i + 1), lambda k, n: range(k - 2, k + 1)),
    "t:t + 3": (lambda i: slice(i, i + 3), lambda k, n: range(k, k + 3)),
}
#: And some that read earlier ones alone, so that one call gives and takes.
EARLIER = {
    "i - 1": (lambda i: i - 1, lambda k, n: [k - 1]),
    "i - 2": (lambda i: i - 2, lambda k, n: [k - 2]),
    "i // 2 - 1": (lambda i: i // 2 - 1, lambda k, n: [k // 2 - 1]),
    "i - i % 3 - 1": (lambda i: i - i % 3 - 1, lambda k, n: [k - k % 3 - 1]),
    "i - 2:i": (lambda i: slice(i - 2, i), lambda k, n: [k - 2, k - 1]),
    ":i": (lambda i: slice(None, i), lambda k, n: range(k)),
    "block before": (lambda i: slice(i - i % 2 - 2, i - i % 2), lambda k, n: [k - k % 2 - 2, k - k % 2 - 1]),
}


INSIDE = ITERATIONS | EARLIER


def ys(w):
    """y[i, t, b], what all tests of the table read; float64."""
    i, t, b = (np.arange(n) for n in (I, T, B))
    return np.sin(w * (1 + i[:, None, None]) * (1 + t[None, :, None]) + 0.7 * b[None, None, :])


def y_at(w, x, i, t):
    return jnp.sin(w * (1.0 + i) * (1.0 + t) + x)


def summed(value):
    """Over all that is read: iterations, timesteps, both."""
    value = value.sum() if isinstance(value, Masked) else value
    for _ in range(value.ndim):
        value = jnp.sum(value, 0)
    return value


def _two(i, t):
    """Of two numbers the first is a slice: otherwise it could be a timestep, and the second an environment."""
    return (slice(i, i + 1), t) if isinstance(i, int) and isinstance(t, int) else (i, t)


def inside(pairs):
    """The sum of all reads, each with a weight of its own: the gradient of that is what was read."""

    def outer(params, x, i):
        def inner(params, x, t):
            w, weights = params
            y = rlfx.series(y_at(w, x, i, t), start={"i": EDGE, "t": EDGE}, end={"i": EDGE, "t": EDGE})
            reads = [summed(y[_two(INSIDE[phi][0](i), FORMS[psi][0](t))]) for phi, psi in pairs]
            return x, sum(c * r for c, r in zip(weights, reads, strict=True))

        return jnp.sum(rlfx.unroll(inner, length=T, batch=B)(params, x)[1]), x

    return rlfx.compile(outer, length=I, reduce="sum", dim="i")


def inside_by_loops(pairs, w):
    """The sum of each read, over i, t, b."""
    y, edge = ys(w), np.full(B, EDGE)
    return [
        sum(
            float(np.sum(y[j, s] if 0 <= j < I and 0 <= s < T else edge))
            for i, t in itertools.product(range(I), range(T))
            for j, s in itertools.product(INSIDE[phi][1](i, I), FORMS[psi][1](t, T))
        )
        for phi, psi in pairs
    ]


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


def outside_by_loops(pairs, w):
    y, edge, found = ys(w), np.full((T, B), EDGE), []
    for phi, psi in pairs:
        total = 0.0
        for i in range(I):
            a = sum((y[j] if 0 <= j < I else edge for j in FORMS[phi][1](i, I)), np.zeros((T, B)))
            for t in range(T):
                total += sum(float(np.sum(a[s] if 0 <= s < T else edge[0])) for s in FORMS[psi][1](t, T))
        found.append(total)
    return found


def table_is_right(program, by_loops, pairs):
    """Each read, which is the gradient of its weight; their weighted sum, and its central difference."""
    w, weights = 0.3, np.linspace(-1, 1, len(pairs))
    x = jnp.asarray(0.7 * np.arange(B, dtype=np.float32))
    value, (slope, reads) = jax.jit(jax.value_and_grad(lambda p: program(p, x)[0]))(
        (jnp.float32(w), [jnp.float32(c) for c in weights])
    )
    want, above, below = (np.array(by_loops(pairs, v)) for v in (w, w + 1e-5, w - 1e-5))
    for pair, a, b in zip(pairs, reads, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=str(pair))
    np.testing.assert_allclose(value, weights @ want, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(slope, weights @ (above - below) / 2e-5, rtol=1e-4, atol=1e-3)


SAMPLE = [
    ("i - 1", "t + 2"),
    ("i - 2", "t - 2:t + 1"),
    ("i // 2 - 1", "N - 1 - t"),
    ("i - i % 3 - 1", "t:"),
    ("i - 1", ":"),
    ("i - 2:i", "t"),
    (":i", "t - 1"),
    ("block before", "t - 2:t + 1"),
]
#: Reads of this iteration, of later ones, of all.
ANY = [
    ("t // 2", "t + 2"),
    ("N - 1 - t", "t:"),
    ("0", "t - 2:t + 1"),
    (":", "t - 1"),
    ("t:", "block"),
    (":t + 1", "min(t + 1, N - 1)"),
    ("t:t + 3", ":t + 1"),
    ("max(t - 2, 0)", "N - 1 - t"),
]
ACROSS = [("t - 1", "t + 2"), ("t:", "block"), ("N - 1 - t", "t"), ("t - 2:t + 1", ":t + 1"), ("t // 2", "t:t + 3")]


def test_a_sample_of_the_table():
    table_is_right(inside(SAMPLE), inside_by_loops, SAMPLE)
    table_is_right(inside(ANY), inside_by_loops, ANY)
    table_is_right(outside(ACROSS), outside_by_loops, ACROSS)


@pytest.mark.slow
@pytest.mark.parametrize("phi", INSIDE)
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


def far(length, batch):
    """y reads iterations before it, as far back as there are. What else is read, also of later ones, is for a second call."""

    def outer(w, carry, i):
        def smooth(w, x, t):
            def value(y):
                before = 0.3 * y[:i, t].sum() + 0.1 * y[i // 2 - 1, :].sum() + 0.2 * y[i, t - 1]
                return jnp.sin(w * (1.0 + i) + before + 0.1 * x)

            edges = {"i": EDGE, "t": EDGE}
            y = rlfx.series(rlfx.solve(value, start=edges), start=edges, end=edges)
            z = rlfx.series(y[i - 1, t] ** 2, end={"i": EDGE})
            own = y[i // 2, t + 1] * jnp.float32(y[i:, t].count)
            return 0.9 * x + 0.1 * y[t], jnp.sum(y[:, t] ** 2) + own + z[i + 1, t] + y[: i + 1, t - 1].max()

        carry, out = rlfx.unroll(smooth, length=length, batch=batch)(w, carry)
        return jnp.mean(out), carry

    return outer


def far_by_loops(w, x, iterations, length):
    y, x, edge = {}, [float(v) for v in x], float(EDGE)
    at = lambda i, t, b: y[i, t, b] if 0 <= i < iterations and 0 <= t < length else edge  # noqa: E731
    points = list(itertools.product(range(iterations), range(len(x)), range(length)))
    for i, b, t in points:
        row = sum(at(i // 2 - 1, s, b) for s in range(length))
        before = 0.3 * sum(at(j, t, b) for j in range(i)) + 0.1 * row + 0.2 * at(i, t - 1, b)
        y[i, t, b] = np.sin(w * (1.0 + i) + before + 0.1 * x[b])
        x[b] = 0.9 * x[b] + 0.1 * y[i, t, b]
    total = 0.0
    for i, b, t in points:
        z = at(i, t, b) ** 2 if i + 1 < iterations else edge
        most = max(at(j, t - 1, b) for j in range(i + 1))
        total += sum(at(j, t, b) ** 2 for j in range(iterations)) + at(i // 2, t + 1, b) * (iterations - i) + z + most
    return total / (length * len(x))


def test_what_a_call_needs_of_itself_and_what_else_it_reads():
    """The state goes on though later iterations are read: what a call gives does not need them."""
    w, x = 0.3, np.array([0.1, 0.7], np.float32)
    loops = lambda w: far_by_loops(w, x, I, T)  # noqa: E731
    f = rlfx.compile(far(T, B), length=I, reduce="sum", dim="i")
    got = jax.value_and_grad(lambda w: f(w, jnp.asarray(x))[0])(jnp.float32(w))
    np.testing.assert_allclose(got, [loops(w), (loops(w + 1e-6) - loops(w - 1e-6)) / 2e-6], rtol=1e-4)


def test_what_else_is_read_by_reference():
    x = np.array([0.7], np.float32)
    ref = rlfx.reference(far(2, 1), length=2, reduce="sum", dim="i")
    np.testing.assert_allclose(ref(jnp.float32(0.3), jnp.asarray(x))[0], far_by_loops(0.3, x, 2, 2), rtol=1e-5)


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
    "to a computed time": (
        lambda x, i, t: x[: i.now % 2, t].sum(),
        DomainError,
        "A bound of a slice over i inside inner (over t) is no index expression of i.",
    ),
    "of all, to a computed time": (
        lambda x, i, t: x[:i, t : (t.length, t.now)].sum(),
        DomainError,
        "Of a slice over i inside inner (over t), x[i + -3 : i + 0, filled, ...], timesteps to a computed time are read.",
    ),
    "two numbers": (
        lambda x, i, t: x[2, 0],
        DomainError,
        "x[2, 0] inside inner (over t) has two meanings: i = 2 at t = 0, and t = 2 of environment 0.",
    ),
    "both ways": (
        lambda x, i, t: rlfx.solve(lambda y: x[t] + y[i - 1, t] + y[i + 1, t], start={"i": 0.0}, end={"i": 0.0}),
        CausalityError,
        "a circle that needs both the past and the future of i",
    ),
    "itself": (
        lambda x, i, t: rlfx.solve(lambda y: x[t] + y[i // 2, t], start={"i": 0.0}),
        CausalityError,
        "A value at time i depends on itself at the same time",
    ),
    "with an effect": (
        lambda x, i, t: (rlfx.effect(print, x[t]), x[0, t])[1],
        ProgramError,
        "inner has an effect (rlfx.effect, or a callback of jax), and reads iterations that are not all before its own",
    ),
    "more with each iteration": (
        lambda x, i, t: x[i // 2 : i, t].sum(),
        DomainError,
        "Fix: Read as many at each i, x[i - 8:i, t], or all before it, x[:i, t]; or return x from inner, and reduce a slice of",
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
