"""``rlfx.effect``: what is called, with what, in which order, against plain loops of Python; the same in every plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import DomainError, ProgramError, ScheduleError, UnsupportedSliceOp
from tests.sampling import met

T, W = 5, 0.9
SEEN: list = []
START = np.array([1.0, 0.8], np.float32)


def save(now, x):
    SEEN.append(("save", int(np.ravel(now)[0]), np.round(x, 4).tolist()))


def log(x, y):
    SEEN.append(("log", np.round(x, 4).tolist(), np.round(y, 4).tolist()))


def f(w, c, t):
    ahead = rlfx.series(w * c, end=0.0)[t + 1]
    rlfx.effect(save, t, c, every=2)
    rlfx.effect(log, c, ahead)
    return jnp.sin(w * c), w * c


def expected(start, t0=0, until=None):
    """What a loop of Python calls: environments that have ended have zeros."""
    c = np.atleast_1d(np.float32(start))
    batch, states, lengths = np.ndim(start), [], np.full(c.shape, T)
    for t in range(T):
        states.append(c)
        c = np.float32(W) * c
        if until is not None:
            lengths = np.where((c < until) & (lengths == T), t + 1, lengths)
    states.append(c)
    calls = []
    for t in range(int(lengths.max())):
        going = t < lengths
        x = np.where(going, states[t], 0)
        y = np.where(t + 1 < lengths, np.float32(W) * states[t + 1], 0)
        x, y = (np.round(v if batch else v[0], 4).tolist() for v in (x, y))
        calls += [("save", t0 + t, x)] * ((t0 + t) % 2 == 0) + [("log", x, y)]
    return calls


def called(fn, *args, **kwargs):
    SEEN.clear()
    jax.block_until_ready(fn(*args, **kwargs))
    jax.effects_barrier()
    return list(SEEN)


def same(calls, wanted):
    assert [c[0] for c in calls] == [c[0] for c in wanted]
    for got, want in zip(calls, wanted, strict=True):
        for x, y in zip(got[1:], want[1:], strict=True):
            np.testing.assert_allclose(x, y, atol=2e-4)


@pytest.mark.parametrize(("batch", "until"), met([2, None], [0.75, None]))
def test_effects_are_those_of_a_loop_in_acting_learning_and_the_reference(batch, until):
    start = START if batch else START[0]
    options = {"length": T, "batch": batch, "until": None if until is None else lambda c: c < until}
    wanted = expected(start, until=until)
    compiled, interpreted = rlfx.compile(f, **options), rlfx.reference(f, **options)
    for fn in (compiled, jax.jit(compiled), interpreted):
        same(called(fn, W, start), wanted)
        gradient = jax.value_and_grad(lambda w, fn=fn: fn(w, start)[0])
        same(called(gradient, jnp.float32(W)), wanted)
    without = rlfx.compile(lambda w, c, t: (jnp.sin(w * c), w * c), **options)
    loss = lambda w, fn: fn(w, start)[0]  # noqa: E731
    for one, other in zip(*(jax.value_and_grad(loss)(jnp.float32(W), g) for g in (compiled, without)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_every_counts_in_absolute_time():
    fn = rlfx.compile(f, length=T, batch=2)
    same(called(jax.jit(fn), W, START, t0=jnp.int32(3)), expected(START, t0=3))


def feed_forward(w, c, t):
    rlfx.effect(save, t, c, every=2)
    rlfx.effect(log, c, c)
    return jnp.sin(w * c), W * c


PLANS = [
    (f, rlfx.Plan("at once")),
    (feed_forward, rlfx.Plan("at once")),
    (feed_forward, rlfx.Plan("blocks", 2)),
    (feed_forward, rlfx.Plan("stream", 2)),
]


@pytest.mark.parametrize(("program", "plan"), PLANS)
def test_every_plan_has_the_same_effects(program, plan):
    fn = rlfx.compile(program, length=T, batch=2, plan=plan)
    wanted = called(rlfx.reference(program, length=T, batch=2), W, START)
    assert len(wanted) == 8
    same(called(jax.jit(jax.grad(lambda w: fn(w, START)[0])), jnp.float32(W)), wanted)


@pytest.mark.parametrize("plan", [rlfx.Plan("replay", 2), rlfx.Plan("one pass")])
def test_a_plan_that_acts_again_is_refused(plan):
    fn = rlfx.compile(f, length=T, batch=2, plan=plan)
    with pytest.raises(ScheduleError, match="effect"):
        jax.grad(lambda w: fn(w, START)[0])(jnp.float32(W))


def test_a_program_without_a_recurrence_has_its_effects_in_the_order_of_time():
    def squares(xs, c, t):
        rlfx.effect(save, t, rlfx.inputs(xs)[t] ** 2)
        return c, None

    xs = np.arange(T, dtype=np.float32)
    assert called(rlfx.unroll(squares, length=T), xs, None) == [("save", t, float(t * t)) for t in range(T)]


def interleaved(*members):
    """Of members' calls, each given with its t0: at each timestep those of the first effect, then those of the second."""
    logs = [[c for c in calls if c[0] == "log"] for calls, _ in members]
    saves = [{c[1] - t0: c for c in calls if c[0] == "save"} for calls, t0 in members]
    merged = []
    for t in range(T):
        merged += [s[t] for s in saves if t in s]
        merged += [m[t] for m in logs if t < len(m)]
    return merged


@pytest.mark.parametrize("until", [None, 0.75])
def test_under_vmap_members_are_called_one_after_the_other(until):
    fn = rlfx.compile(f, length=T, batch=2, until=None if until is None else lambda c: c < until)
    starts = np.stack([START, START * np.float32(1.25)])
    wanted = interleaved(*((expected(c, until=until), 0) for c in starts))
    same(called(jax.vmap(lambda c: fn(W, c)[0]), starts), wanted)
    same(called(jax.jit(jax.vmap(jax.grad(lambda w, c: fn(w, c)[0]), (None, 0))), jnp.float32(W), starts), wanted)
    seeds = jax.vmap(lambda c, t0: fn(W, c, t0=t0)[0])
    wanted = interleaved(*((expected(c, t0, until), t0) for c, t0 in zip(starts, (0, 1), strict=True)))
    same(called(seeds, starts, jnp.array([0, 1])), wanted)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("until", [None, 0.75])
def test_over_a_mesh_they_are_called_once_with_all_environments(until):
    mesh = jax.make_mesh((2,), ("b",))
    fn = rlfx.compile(f, length=T, batch=2, until=None if until is None else lambda c: c < until, mesh=mesh)
    wanted = expected(START, until=until)
    same(called(fn, W, START), wanted)
    same(called(jax.jit(jax.grad(lambda w: fn(w, START)[0])), jnp.float32(W)), wanted)


def test_effects_of_an_inner_program_come_iteration_by_iteration():
    inner = rlfx.compile(f, length=T, batch=2)

    def outer(_, w, i):
        gradient = jax.grad(lambda w: inner(w, START)[0])(w)
        rlfx.effect(lambda i, w: SEEN.append(("outer", int(i), float(w))), i, w)
        return w + 0.0 * gradient, None

    run = {"length": 3, "dim": "i"}
    once = called(inner, W, START)
    for fn in (rlfx.unroll(outer, **run), rlfx.reference(outer, loss=False, **run)):
        calls = called(fn, None, jnp.float32(W))
        assert [c[1] for c in calls if c[0] == "outer"] == [0, 1, 2]
        same([c for c in calls if c[0] != "outer"], once * 3)


def test_the_memory_of_effects_does_not_grow_with_time():
    def bytes_of(length):
        def program(w, c, t):
            rlfx.effect(log, c, c, every=100)
            return w * c, rlfx.Last(c)

        fn = jax.jit(rlfx.unroll(program, length=length))
        return fn.lower(jnp.float32(W), jnp.ones(64)).compile().memory_analysis().temp_size_in_bytes

    assert bytes_of(10) == bytes_of(10_000)


def test_what_fn_raises_ends_the_call():
    def program(w, c, t):
        rlfx.effect(fail, t)
        return c, None

    def fail(now):
        if now == 3:
            raise OSError("the disk is full")

    with pytest.raises(jax.errors.JaxRuntimeError, match="OSError: the disk is full"):
        called(rlfx.unroll(program, length=5), None, jnp.float32(0.0))


REFUSED = {
    "scan": (
        lambda t, x: jax.lax.scan(lambda c, _: (rlfx.effect(log, c, c), (c, None))[1], x, None, 2),
        ProgramError,
        "scan of jax",
    ),
    "cond": (
        lambda t, x: jax.lax.cond(x > 0, lambda: rlfx.effect(log, x, x), lambda: None),
        ProgramError,
        "cond of jax",
    ),
    "vmap": (
        lambda t, x: jax.vmap(lambda y: (rlfx.effect(log, y, y), y)[1])(jnp.stack([x, x])),
        ProgramError,
        "what jax.vmap maps",
    ),
    "slice": (
        lambda t, x: rlfx.effect(log, x, rlfx.series(x)[: t + 1]),
        UnsupportedSliceOp,
        "a slice whose length depends on t",
    ),
    "key": (lambda t, x: rlfx.effect(log, x, t.key), ProgramError, r"Give its words: jax.random.key_data\(key\)"),
    "every": (lambda t, x: rlfx.effect(log, x, x, every=0), DomainError, "every must be a positive integer"),
    "arguments": (lambda t, x: rlfx.effect(log, x), ProgramError, "Give one argument of fn for each of its own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name):
    do, error, text = REFUSED[name]

    def program(_, c, t):
        do(t, c)
        return c, None

    with pytest.raises(error, match=text):
        rlfx.unroll(program, length=3)(None, jnp.float32(1.0), jax.random.key(0))


@pytest.mark.parametrize("wrap", [jax.jit, lambda g: jax.grad(lambda x: (g(x), x)[1])])
def test_an_effect_inside_of_jit_or_grad_is_one_of_the_program(wrap):
    def program(_, c, t):
        wrap(lambda x: rlfx.effect(save, t, x))(c)
        return c + 1.0, None

    assert called(rlfx.unroll(program, length=2), None, jnp.float32(0.0)) == [("save", 0, 0.0), ("save", 1, 1.0)]


def test_outside_of_a_program_there_is_no_effect():
    with pytest.raises(ProgramError, match=r"rlfx\.effect has a meaning only inside a per-timestep program"):
        rlfx.effect(log, 1.0, 2.0)
