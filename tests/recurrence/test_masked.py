"""Slices to, or since, a time that the program computes: values and gradients against loops of NumPy, in every plan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import DomainError, ProgramError, ProgramTypeError, ScheduleError
from tests.sampling import slow

T, B = 6, 2
RNG = np.random.default_rng(7)
REWARD = RNG.normal(size=(T, B)).astype(np.float32)
DONE = np.array([[0, 0], [1, 0], [0, 0], [0, 1], [1, 0], [0, 0]], bool)
NEVER = 2**30
#: Without its passes XLA computes the elements of a static slice twice, and rounds differently: none is equal to the maximum,
#: and jax's derivative of it is 0 / 0. The others are in the quick lane.
OPTIMISED = pytest.mark.optimised

#: Each slice as written, and as (first, stop, step) of loops: of t, where the episode began and ends, in one call.
SLICES = {
    "t:end": (lambda x, t, begin, end: x[t:end], lambda t, begin, end: (t, end, 1)),
    "t + 1:end": (lambda x, t, begin, end: x[t + 1 : end], lambda t, begin, end: (t + 1, end, 1)),
    ":end": (lambda x, t, begin, end: x[:end], lambda t, begin, end: (0, end, 1)),
    "t:first of t + 2 and end": (lambda x, t, begin, end: x[t : (t + 2, end)], lambda t, b, e: (t, min(t + 2, e), 1)),
    "t:end:2": (lambda x, t, begin, end: x[t:end:2], lambda t, begin, end: (t, end, 2)),
    "begin:": (lambda x, t, begin, end: x[begin:], lambda t, begin, end: (begin, T, 1)),
    "begin:t + 1": (lambda x, t, begin, end: x[begin : t + 1], lambda t, begin, end: (begin, t + 1, 1)),
    "begin:t": (lambda x, t, begin, end: x[begin:t], lambda t, begin, end: (begin, t, 1)),
    "begin:end": (lambda x, t, begin, end: x[begin:end], lambda t, begin, end: (begin, end, 1)),
    "last of t - 1 and begin:t + 1": (
        lambda x, t, begin, end: x[(t - 1, begin) : t + 1],
        lambda t, begin, end: (max(t - 1, begin), t + 1, 1),
    ),
    "none": (lambda x, t, begin, end: x[t:begin], lambda t, begin, end: (t, begin, 1)),
}
#: What is made of a slice, of none as well.
REDUCED = {
    "sum": (lambda s: s.sum(), lambda x: np.sum(x)),
    "prod": (lambda s: s.prod(), lambda x: np.prod(x)),
    "mean": (lambda s: jnp.where(s.count > 0, s.mean(), 0.5), lambda x: np.mean(x) if len(x) else 0.5),
    "max": (lambda s: jnp.where(s.count > 0, s.max(), 0.25), lambda x: np.max(x) if len(x) else 0.25),
    "min": (lambda s: jnp.where(s.count > 0, s.min(), 0.75), lambda x: np.min(x) if len(x) else 0.75),
    "filled": (lambda s: jnp.sum(jnp.tanh(s.filled(0.0)) ** 2), lambda x: np.sum(np.tanh(x) ** 2)),
    "count": (lambda s: s.count.astype(jnp.float32), lambda x: float(len(x))),
}


def program(names):
    """The mean of all reductions of the slices, weighted, and each of them."""

    def f(w, carry, t):
        state, begin, left = carry
        reward, done = rlfx.inputs((REWARD, DONE))[t]
        x = rlfx.series(jnp.sin(w * reward + state))
        end = rlfx.solve(lambda e: jnp.where(done, t.now + 1, e[t + 1]), end=NEVER)
        outs = {
            name: jnp.stack([of(SLICES[name][0](x, t, begin, end)) for of, _ in REDUCED.values()]) for name in names
        }
        total = sum(jnp.sum(o * (1.0 + k)) for k, o in enumerate(outs.values()))
        return total, (0.5 * state + 0.1 * reward, jnp.where(done, t.now + 1, begin), left - 1), outs

    return f


def by_loops(names, w, *, stops=(T, T), t0=0):
    """The same: loss, outputs [T, B, reductions] by name, and the state at the end."""
    outs = {name: np.zeros((T, B, len(REDUCED))) for name in names}
    total, states = 0.0, []
    for b, stop in enumerate(stops):
        x, begins, begin, state = [], [], 0, 0.3
        for t in range(stop):
            x.append(np.sin(w * float(REWARD[t, b]) + state))
            begins.append(begin)
            state = 0.5 * state + 0.1 * float(REWARD[t, b])
            begin = t + 1 if DONE[t, b] else begin
        states.append(state)
        for t in range(stop):
            end = next((s + 1 for s in range(t, stop) if DONE[s, b]), NEVER)
            for k, name in enumerate(names):
                lo, hi, step = SLICES[name][1](t, begins[t], end)
                values = np.array(x[max(lo, 0) : max(min(hi, stop), 0) : step])
                outs[name][t, b] = [of(values) for _, of in REDUCED.values()]
                total += (1.0 + k) * np.sum(outs[name][t, b])
    return total / sum(stops), outs, np.array(states)


def first(t0=0, left=(T, T)):
    return jnp.full(B, 0.3), jnp.full(B, t0, jnp.int32), jnp.array(left, jnp.int32)


def compare(f, names, *, stops=(T, T), t0=0):
    carry = first(t0, stops)
    (loss, (_, got, *_)), slope = jax.value_and_grad(lambda w: f(w, carry, t0=t0), has_aux=True)(jnp.float32(0.7))
    want, outs, _ = by_loops(names, 0.7, stops=stops)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for name, b in ((name, b) for name in names for b in range(B)):
        np.testing.assert_allclose(
            got[name][: stops[b], b], outs[name][: stops[b], b], rtol=1e-5, atol=1e-6, err_msg=name
        )
    near = [by_loops(names, 0.7 + e, stops=stops)[0] for e in (-1e-6, 1e-6)]
    np.testing.assert_allclose(slope, (near[1] - near[0]) / 2e-6, rtol=1e-4)


@functools.cache
def compiled(names, until=False, **options):
    ends = (lambda c: c[2] <= 0) if until else None
    return rlfx.compile(program(names), length=T, batch=B, until=ends, **options)


def jitted(f):
    return lambda w, carry, t0=0: jax.jit(lambda w, carry, t0: f(w, carry, t0=t0))(w, carry, t0)


@OPTIMISED
@pytest.mark.parametrize("t0", [slow(0), 100])
def test_every_slice_and_reduction(t0):
    compare(jitted(compiled(tuple(SLICES))), tuple(SLICES), t0=t0)


def test_by_reference():
    names = ("t:end", "begin:t + 1", "t:end:2", "t:first of t + 2 and end", "none")
    compare(rlfx.reference(program(names), length=T, batch=B), names)


@OPTIMISED
@pytest.mark.parametrize("stops", [(3, 5), *(pytest.param(ends, marks=pytest.mark.slow) for ends in ((6, 4), (1, 2)))])
def test_where_environments_end(stops):
    """A slice ends with its environment, if that is before the event."""
    compare(jitted(compiled(tuple(SLICES), True)), tuple(SLICES), stops=stops)


def test_by_reference_where_environments_end():
    names = ("t:end", "begin:t + 1")
    f = rlfx.reference(program(names), length=T, batch=B, until=lambda c: c[2] <= 0)
    compare(f, names, stops=(5, 2))


def test_the_whole_future_does_not_stream():
    stream = rlfx.compile(program(("t:end",)), length=T, batch=B, plan=rlfx.Plan("stream", block=2))
    with pytest.raises(ScheduleError):
        jax.grad(lambda w: stream(w, first())[0])(jnp.float32(0.7))


PLANS = {
    "t:end": (
        lambda x, t, end: x[t:end],
        lambda t, end: (t, end),
        [rlfx.Plan("at once"), rlfx.Plan("blocks", block=2), rlfx.Plan("blocks", block=4, environments=1)],
    ),
    "t:first of t + 3 and end": (
        lambda x, t, end: x[t : (t + 3, end)],
        lambda t, end: (t, min(t + 3, end)),
        [rlfx.Plan("at once"), rlfx.Plan("blocks", block=2), rlfx.Plan("blocks", block=1)],
    ),
}


@pytest.mark.parametrize(
    ("name", "plan"), [(name, plan) for name, (*_, plans) in PLANS.items() for plan in plans], ids=str
)
def test_returns_to_the_end_of_an_episode_under_every_plan(name, plan):
    """Data to be weighted by: the gradient flows through the timestep alone, which plans may cut."""
    read, bounds, _ = PLANS[name]

    def f(w, state, t):
        reward, done = rlfx.inputs((REWARD, DONE))[t]
        end = rlfx.solve(lambda e: jnp.where(done, t.now + 1, e[t + 1]), end=NEVER)
        advantage = read(rlfx.series(jax.lax.stop_gradient(reward + state)), t, end).sum()
        return jnp.sin(w * state) * advantage, 0.5 * state + 0.1 * reward

    def loops(w):
        total = 0.0
        for b in range(B):
            states = [0.3]
            for t in range(T):
                states.append(0.5 * states[-1] + 0.1 * float(REWARD[t, b]))
            for t in range(T):
                end = next((s + 1 for s in range(t, T) if DONE[s, b]), NEVER)
                lo, hi = bounds(t, end)
                total += np.sin(w * states[t]) * sum(float(REWARD[s, b]) + states[s] for s in range(lo, min(hi, T)))
        return total / (T * B)

    loss_fn = rlfx.compile(f, length=T, batch=B, plan=plan)
    loss, slope = jax.jit(jax.value_and_grad(lambda w: loss_fn(w, jnp.full(B, 0.3))[0]))(jnp.float32(0.7))
    np.testing.assert_allclose(loss, loops(0.7), rtol=1e-5)
    np.testing.assert_allclose(slope, (loops(0.7 + 1e-6) - loops(0.7 - 1e-6)) / 2e-6, rtol=1e-4)


def test_inside_a_recurrence():
    """Its own past, since the episode began."""

    def f(w, c, t):
        begin, done = c, rlfx.inputs(DONE[:, 0])[t]

        def value(y):
            own = y[begin:t]
            return jnp.sin(w * (1.0 + t)) + 0.3 * own.sum() + 0.1 * jnp.where(own.count > 0, own.max(), 0.0)

        return rlfx.solve(value, start=0.0), jnp.where(done, t.now + 1, begin)

    def loops(w):
        y, begin = [], 0
        for t in range(T):
            own = y[begin:t]
            y.append(np.sin(w * (1.0 + t)) + 0.3 * sum(own) + 0.1 * (max(own) if own else 0.0))
            begin = t + 1 if DONE[t, 0] else begin
        return np.mean(y)

    for make in (rlfx.compile, rlfx.reference):
        loss, slope = jax.value_and_grad(lambda w, f=make(f, length=T): f(w, jnp.int32(0))[0])(jnp.float32(0.7))
        np.testing.assert_allclose(loss, loops(0.7), rtol=1e-5)
        np.testing.assert_allclose(slope, (loops(0.7 + 1e-6) - loops(0.7 - 1e-6)) / 2e-6, rtol=1e-4)


def test_what_does_not_count_reaches_nothing():
    """NaN, and infinite derivatives of what is summed, of timesteps after the event: neither values nor gradients know them."""

    def f(w, c, t):
        x = rlfx.series(jnp.where(t.now >= 3, jnp.nan, w * (1.0 + t)))
        end = jnp.int32(3) + 0 * c
        part = x[t : (t.length, end)]
        return jnp.where(part.count > 0, part.sum() + part.mean() + part.max(), 0.0), c

    loss, slope = jax.value_and_grad(lambda w: rlfx.compile(f, length=T)(w, jnp.int32(0))[0])(jnp.float32(0.7))
    parts = [np.arange(1.0 + t, 4.0) for t in range(3)]
    want = sum(p.sum() + p.mean() + p.max() for p in parts) / T
    np.testing.assert_allclose([loss, slope], [0.7 * want, want], rtol=1e-6)


def test_types_and_pytrees():
    """Integers count, booleans are any or all, a tree gives trees; of none the neutral element."""

    def f(_, c, t):
        x = rlfx.series({"n": t.now * 2, "even": t.now % 2 == 0, "v": jnp.ones((2, 3)) * t.astype(jnp.float32)})
        some, none = x[t : c + 4], x[t : jnp.minimum(c, t.now)]
        return c, (some.sum(), some.max(), some.mean(), some.any()["even"], some.all()["even"], none.sum(), none.max())

    (total, most, mean, any_, all_, nothing, least) = rlfx.unroll(f, length=5)(None, jnp.int32(0))[1]
    parts = [np.arange(t, 4) for t in range(4)]
    np.testing.assert_array_equal(total["n"][:4], [2 * p.sum() for p in parts])
    np.testing.assert_array_equal(total["even"][:4], [(p % 2 == 0).sum() for p in parts])
    np.testing.assert_allclose(total["v"][:4], [np.full((2, 3), p.sum()) for p in parts])
    np.testing.assert_allclose(mean["n"][:4], [2 * p.mean() for p in parts])
    np.testing.assert_allclose(mean["even"][:4], [(p % 2 == 0).mean() for p in parts])
    np.testing.assert_array_equal(most["n"][:4], [6] * 4)
    np.testing.assert_array_equal(any_, [True, True, True, False, False])
    np.testing.assert_array_equal(all_, [False] * 4 + [True])
    assert total["n"].dtype == most["n"].dtype == jnp.int32
    assert most["even"].dtype == bool
    np.testing.assert_array_equal(nothing["n"], [0] * 5)
    np.testing.assert_array_equal(least["n"], [np.iinfo(np.int32).min] * 5)
    assert np.isneginf(least["v"]).all()
    assert not least["even"].any()


def test_in_a_nest():
    """Of an earlier iteration, to the end of the episode in this one; and by the reference."""

    def outer(w, c, i):
        def inner(w, x, t):
            v = rlfx.series(w * x + 0.5 * t, start={"i": 0.25})
            end = rlfx.solve(lambda e: jnp.where(t.now % 3 == 2, t.now + 1, e[t + 1]), end=NEVER)
            return x + 0.1, v[i - 1, t : (t.length, end)].sum() * v[t]

        return jnp.sum(rlfx.unroll(inner, length=5)(w, c)[1]), c + 0.2

    def loops(w):
        total, before, c = 0.0, np.full(5, 0.25), 0.1
        for _ in range(3):
            v = np.array([w * (c + 0.1 * t) + 0.5 * t for t in range(5)])
            ends = [3, 3, 3, 5, 5]
            total += sum(before[t : ends[t]].sum() * v[t] for t in range(5))
            before, c = v, c + 0.2
        return total

    for make in (rlfx.compile, rlfx.reference):
        f = make(outer, length=3, reduce="sum", dim="i")
        loss, slope = jax.value_and_grad(lambda w, f=f: f(w, jnp.float32(0.1))[0])(jnp.float32(0.7))
        np.testing.assert_allclose(loss, loops(0.7), rtol=1e-5)
        np.testing.assert_allclose(slope, (loops(0.7 + 1e-6) - loops(0.7 - 1e-6)) / 2e-6, rtol=1e-4)


REFUSED = {
    "as an array": (lambda x, t, e: x[t:e] + 1.0, ProgramTypeError, "A slice to a computed time is not an array"),
    "given to jnp": (
        lambda x, t, e: rlfx.series(x[t:e]),
        ProgramTypeError,
        "its length is known when the program runs",
    ),
    "summed by jnp": (
        lambda x, t, e: jnp.sum(x[t:e]),
        ProgramTypeError,
        "A slice to a computed time is not an array",
    ),
    "its length": (lambda x, t, e: len(x[t:e]), ProgramTypeError, "Reduce it, x[t:end].sum()"),
    "returned": (lambda x, t, e: x[t:e], ProgramTypeError, "The program returned a slice to a computed time"),
    "a float": (lambda x, t, e: x[t : e.astype(jnp.float32)].sum(), DomainError, "A slice bound must be affine in t"),
    "several": (lambda x, t, e: x[t : jnp.arange(3)].sum(), DomainError, "a traced integer, or a pair of them"),
    "a pair of times": (lambda x, t, e: x[t : (e, e)].sum(), DomainError, "x[t:(t + 5, end)] for the first of both"),
    "a step from an event": (
        lambda x, t, e: x[e : t + 1 : 2].sum(),
        DomainError,
        "A slice with a step begins at an index expression",
    ),
    "to a time of t alone": (
        lambda x, t, e: x[t : jnp.minimum(t.now + 5, 3)].sum(),
        DomainError,
        "this end depends on t and constants alone: no key, carry, parameter or data is in it.",
    ),
    "since a time of t alone": (
        lambda x, t, e: x[t.now // 2 : t + 1].sum(),
        DomainError,
        "If it is meant as a computed time, give both bounds: x[t:(t.length, end)], x[(0, begin):t + 1]",
    ),
    "to a constant": (
        lambda x, t, e: x[t : jnp.asarray([1, 2])[t.now % 2]].sum(),
        DomainError,
        "Write an index expression with t itself: x[t:t + 5], x[t:rlfx.minimum(t + 5, t.length)].",
    ),
    "a promise": (
        lambda x, t, e: rlfx.series(x[t], window=2)[e : t + 1].sum(),
        DomainError,
        "was promised to be read at most 1 back",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    read, error, text = REFUSED[case]
    f = lambda w, c, t: (c, read(rlfx.series(w * (1.0 + t)), t, c))  # noqa: E731
    with pytest.raises(error) as caught:
        rlfx.unroll(f, length=3)(jnp.float32(1.0), jnp.int32(2))
    assert text in str(caught.value)
    assert "Fix: " in str(caught.value)
    assert "test_masked.py" in str(caught.value)


def test_a_promise_is_kept_by_a_pair():
    f = lambda w, c, t: (c, rlfx.series(w * (1.0 + t), window=2)[(t - 1, c) : t + 1].sum())  # noqa: E731
    np.testing.assert_allclose(rlfx.unroll(f, length=4)(jnp.float32(1.0), jnp.int32(2))[1], [0.0, 0.0, 3.0, 7.0])


def test_what_is_no_end_is_no_program():
    with pytest.raises(ProgramError):
        rlfx.unroll(lambda w, c, t: (c, rlfx.series(1.0 * t)[t:c].sum()), length=2)(None, jnp.float32(1.0))
