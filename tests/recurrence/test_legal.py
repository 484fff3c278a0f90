"""Programs that are legal run, and what is refused is refused in the user's words: boundaries, streams, callbacks, meshes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import CausalityError, ProgramError, RlfxError, ScheduleError

KEY = jax.random.key(0)
S = rlfx.series
ONE = jnp.float32(1.0)


def refused(error, match, fn):
    with pytest.raises(error) as caught:
        fn()
    message = str(caught.value)
    assert isinstance(caught.value, RlfxError)
    assert "\n  Fix: " in message
    assert all(part in message for part in match), message
    return message


# -- boundary values that no timestep reads --------------------------------------------------------------------------

#: Indices that never reach the end: rlfx's, and what they read at t.
INSIDE = [
    *((lambda t, k=k: t - k, lambda t, k=k: t - k) for k in range(1, 7)),
    *((lambda t, k=k: k, lambda t, k=k: k) for k in range(1)),
    *((lambda t, k=k: t // k, lambda t, k=k: t // k) for k in range(2, 6)),
    *((lambda t, k=k: t - t % k, lambda t, k=k: t - t % k) for k in range(2, 6)),
    *((lambda t, k=k: rlfx.maximum(t - k, 0), lambda t, k=k: max(t - k, 0)) for k in range(1, 5)),
    *((lambda t, k=k: rlfx.minimum(t - 1, k), lambda t, k=k: min(t - 1, k)) for k in range(1, 5)),
    *((lambda t, k=k: rlfx.minimum(t, k), lambda t, k=k: min(t, k)) for k in range(5)),
    *((lambda t, k=k: t - k * 3 % 7, lambda t, k=k: t - k * 3 % 7) for k in range(8, 14)),
    *((lambda t, k=k: (t + 1) // k - 1, lambda t, k=k: (t + 1) // k - 1) for k in range(2, 6)),
    *((lambda t, k=k: 2 * (t // 2) - k, lambda t, k=k: 2 * (t // 2) - k) for k in range(12)),
]


def test_an_end_value_that_no_read_reaches_is_no_dependence():
    """end= is taken at the last timestep: counted, every one of these recurrences would be a circle with the future."""
    T = 5

    def f(p, c, t):
        # An index that is t itself at some timesteps reads the carry, which is known there.
        reads = [jnp.sin(S(c, start=0.1 * i, end=c)[index(t)]) for i, (index, _) in enumerate(INSIDE)]
        return p * c, c + 0.1 * sum(reads[1:], reads[0])

    c = [1.0]
    for t in range(T):
        points = [at(t) for _, at in INSIDE]
        values = [np.sin(0.1 * i if s < 0 else c[s]) for i, s in enumerate(points)]
        c.append(c[-1] + 0.1 * sum(values))
    loss, (last, _) = rlfx.compile(f, length=T, reduce="sum")(jnp.float32(2.0), ONE)
    np.testing.assert_allclose(last, c[-1], rtol=1e-5)
    np.testing.assert_allclose(loss, 2.0 * sum(c[:-1]), rtol=1e-5)
    assert len(INSIDE) >= 50


@pytest.mark.parametrize("ahead", range(1, 6))
def test_a_start_value_that_no_read_reaches_is_no_dependence(ahead):
    def f(p, c, t):
        g = rlfx.solve(lambda g: 0.5 * S(g[t], start=g[t + 1], end=0.1)[t + ahead] + c, end=0.0)
        return p * g, c + 1.0

    g = dict.fromkeys(range(10), 0.0)
    for t in reversed(range(4)):
        g[t] = 0.5 * (0.1 if t + ahead >= 4 else g[t + ahead]) + 1.0 + t
    loss, _ = rlfx.compile(f, length=4, reduce="sum")(jnp.float32(2.0), ONE)
    np.testing.assert_allclose(loss, 2.0 * sum(g[t] for t in range(4)), rtol=1e-6)


def test_an_end_value_that_a_read_reaches_still_is_one():
    f = lambda p, c, t: (p * c, c + S(c, end=c)[t + 1])  # noqa: E731
    refused(CausalityError, ["x[t + 1] reads the future"], lambda: rlfx.compile(f, length=3)(2.0, ONE))


# -- the same timestep beyond the end, and before the start ----------------------------------------------------------

#: Functions of the carry that read it, or what is made of it, at the timestep itself, with the same in NumPy.
HERE = [
    (lambda c, t: S(c)[t], lambda c: c),
    (lambda c, t: S(c)[t] * 1.0, lambda c: c),
    (lambda c, t: S(S(c)[t] + 1.0)[t], lambda c: c + 1.0),
    (lambda c, t: S(S(jnp.sin(S(c)[t]))[t] * 2.0)[t] + S(c)[t], lambda c: 2.0 * np.sin(c) + c),
    (lambda c, t: S({"a": c, "b": [2.0 * c]})[t]["b"][0], lambda c: 2.0 * c),
    (lambda c, t: S(c, start=9.0)[t] - 1.0, lambda c: c - 1.0),
    (lambda c, t: jnp.where(S(c)[t] > 2.0, S(-c)[t], c), lambda c: np.where(c > 2.0, -c, c)),
    (lambda c, t: jax.lax.cond(c > 2.0, lambda x: x, lambda x: -x, S(c)[t]), lambda c: np.where(c > 2.0, c, -c)),
    (lambda c, t: jnp.stack([S(c)[t], c]).sum(), lambda c: 2.0 * c),
]
#: And one of a series that has a value behind the last timestep: what is made of it has one there, too.
ENDED = (lambda c, t: S(c, end=9.0)[t] - 1.0, lambda c: c - 1.0)


def test_the_same_timestep_is_no_other_one():
    """``S(g(S(c)[t]))[t + k]`` beyond the end, and ``start=g(S(c)[t])`` before the start, for ten functions g."""
    T = 4

    def f(p, c, t):
        after = [S(p * g(c, t))[t + k] for g, _ in (*HERE, ENDED) for k in (1, 1)]
        before = [S(p * c, start=g(c, t))[t - k] for g, _ in (*HERE, ENDED) for k in (1, 2, 3)]
        return sum([*after, *before], 0.0 * c), 1.5 * c

    c = [1.5**t for t in range(T + 1)]
    expected = 0.0
    for t in range(T):
        for _, g in (*HERE, ENDED):
            after = 9.0 if g is ENDED[1] and t + 1 == T else c[t + 1]
            expected += 2 * 2.0 * g(after) + sum(2.0 * c[t - k] if t >= k else g(c[0]) for k in (1, 2, 3))
    for make in (rlfx.compile, rlfx.reference):
        loss, _ = make(f, length=T, reduce="sum")(jnp.float32(2.0), ONE)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_a_start_value_from_data():
    f = lambda xs, c, t: (c, S(c, start=2.0 * rlfx.inputs(xs, axes="t")[t])[t - 1])  # noqa: E731
    xs = jnp.array([3.0, 5.0])
    _, out = rlfx.unroll(f, length=2)(xs, ONE)
    np.testing.assert_array_equal(out, [6.0, 1.0])


# -- streams that are shorter than a chunk and its delay -------------------------------------------------------------


def test_streams_that_wait_for_the_end():
    """A learner that reads T timesteps ahead has nothing to follow: refused if asked for, and never chosen."""
    for T in (2, 4):
        for delay in range(1, T + 3):
            f = lambda p, c, t: ((p * c - S(c)[t + delay]) ** 2, 0.9 * c)  # noqa: E731
            gradient = lambda plan=None: jax.make_jaxpr(  # noqa: E731
                jax.grad(lambda p: rlfx.compile(f, length=T, plan=plan)(p, ONE)[0])
            )(2.0)
            gradient()
            for chunk in range(1, T + 1):
                if delay < T:
                    gradient(rlfx.Plan("stream", chunk))
                    continue
                fact = f"what is learned from is {delay} timesteps ahead, and there are {T}"
                refused(ScheduleError, [fact], lambda: gradient(rlfx.Plan("stream", chunk)))


def looking_ahead(n):
    """The learner reads up to n timesteps ahead, and a boundary value beyond the end."""

    def f(p, c, t):
        future = S(c, end=0.5)
        return sum(((p * c - k * future[t + k]) ** 2 for k in range(1, n + 1)), 0.0 * c), 0.9 * c

    return f


@pytest.mark.parametrize("length", [2, 4])
def test_streams_whose_chunk_and_delay_exceed_the_length(length):
    def gradient(n, chunk):
        fn = rlfx.compile(looking_ahead(n), length=length, reduce="sum", plan=rlfx.Plan("stream", chunk))
        return jax.grad(lambda p: fn(p, ONE)[0])

    for n in range(1, length + 2):
        for chunk in range(1, length + 1):
            jax.make_jaxpr(gradient(n, chunk))(2.0)
    c = [0.9**t for t in range(length)]
    for n, chunk in ((length - 1, 2), (length - 1, length)):
        ahead = [(t, k, c[t + k] if t + k < length else 0.5) for t in range(length) for k in range(1, n + 1)]
        expected = sum(2 * (2.0 * c[t] - k * later) * c[t] for t, k, later in ahead)
        np.testing.assert_allclose(jax.jit(gradient(n, chunk))(2.0), expected, rtol=1e-5)


# -- values of one environment in a call for all ---------------------------------------------------------------------


def test_shared_closes_over_no_value_of_one_environment():
    x = jnp.arange(2.0)
    closed_over = {
        "the carry": lambda p, c, t: c,
        "what is made of it": lambda p, c, t: jnp.sin(p * c),
        "a read": lambda p, c, t: S(c, start=0.0)[t - 1],
        "data": lambda p, c, t: rlfx.inputs(x, axes="b")[t],
        "a draw": lambda p, c, t: jax.random.normal(t.key),
    }
    uses = [
        lambda a, v: a.sum() + v,
        lambda a, v: jax.jit(lambda a: a.sum() * v)(a),
        lambda a, v: jax.lax.cond(a[0] > 0, lambda: v, lambda: a[0]),
        lambda a, v: jax.vmap(lambda a: a + v)(a),
        lambda a, v: jax.lax.fori_loop(0, 2, lambda _, s: s + v, a[0]),
        lambda a, v: jax.lax.scan(lambda s, x: (s + x * v, None), 0.0, a)[0],
        lambda a, v: jax.checkpoint(lambda a: a.max() - v)(a),
        lambda a, v: jax.grad(lambda x: x * v)(a[0]),
        lambda a, v: jnp.where(a > v, a, v),
        lambda a, v: jax.tree.map(lambda x: x + v, {"a": a})["a"],
    ]
    assert len(closed_over) * len(uses) >= 50
    for make in closed_over.values():
        for use in uses:

            def f(p, c, t, make=make, use=use):
                v = make(p, c, t)
                return c, rlfx.shared(lambda a: use(a, v), c)

            message = refused(
                ProgramError,
                ["closes over a value of one of them", "rlfx.shared(lambda a, c: ..., a, c)"],
                lambda f=f: rlfx.trace(f, 2.0, jnp.arange(2.0), KEY, length=3, batch=2, loss=False),
            )
            assert "at test_legal.py:" in message

    def of_all(p, c, t):
        n = t.shared_key
        return c, rlfx.shared(lambda a: a.sum() + p + jax.random.normal(n) + 1.0 * t, c)

    assert rlfx.unroll(of_all, length=3, batch=2)(2.0, jnp.arange(2.0), KEY)[1].shape == (3, 2)


NO_REDUCTIONS = [
    "median",
    "max",
    "",
    None,
    1,
    ["mean"],
    True,
    b"sum",
    "Mean",
    "SUM",
    "sum ",
    "avg",
    0.5,
    ("sum",),
    {"mean"},
]
NO_REDUCTIONS += ["mean,sum", "prod", "none", {"reduce": "mean"}]


@pytest.mark.parametrize("reduce", NO_REDUCTIONS)
def test_how_losses_become_one(reduce):
    """By three functions: 57 members."""
    f = lambda p, c, t: (c, c)  # noqa: E731
    for make in (
        lambda: rlfx.compile(f, length=3, reduce=reduce),
        lambda: rlfx.reference(f, length=3, reduce=reduce),
        lambda: rlfx.trace(f, None, ONE, length=3, reduce=reduce),
    ):
        refused(ProgramError, ['reduce must be "mean" or "sum"', repr(reduce)], make)


# -- planning runs nothing -------------------------------------------------------------------------------------------


TIME = [None]  # of the program that is traced


def test_tuning_never_runs_a_callback():
    """Three effects in seventeen places: 51 members."""
    seen = []
    note = lambda x: seen.append(float(x)) or np.float32(x)  # noqa: E731
    one = jax.ShapeDtypeStruct((), jnp.float32)
    effects = {
        "debug.callback": lambda x: jax.debug.callback(note, x) or x,
        "pure_callback": lambda x: jax.pure_callback(note, one, x, vmap_method="sequential"),
        "io_callback": lambda x: jax.experimental.io_callback(note, one, x),
    }
    around = [
        lambda f, x: f(x),
        lambda f, x: jax.jit(f)(x),
        lambda f, x: jax.lax.cond(x > 0, f, lambda x: x, x),
        lambda f, x: jax.lax.scan(lambda x, _: (f(x), None), x, None, length=2)[0],
        lambda f, x: jax.lax.switch(1, [lambda x: x, f], x),
        lambda f, x: jax.lax.fori_loop(0, 2, lambda _, x: f(x), x),
        lambda f, x: jax.lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, f(s[1])), (0, x))[1],
        lambda f, x: jax.lax.map(f, jnp.stack([x, x])).sum(),
        lambda f, x: jax.jit(lambda x: jax.jit(f)(x) + x)(x),
        lambda f, x: jax.checkpoint(f)(x),
        lambda f, x: rlfx.every(2, lambda: f(x), otherwise=x),
        lambda f, x: f(rlfx.series(x, start=0.0)[TIME[0] - 1]),
        lambda f, x: f(rlfx.series(x)[: TIME[0] + 1].sum()),
        lambda f, x: f(rlfx.series(x).window(-2, 1, fill=0.0).sum()),
        lambda f, x: rlfx.solve(lambda s: f(0.5 * s[TIME[0] - 1] + x), start=0.0),
        lambda f, x: f(x * (1.0 * TIME[0])),
        lambda f, x: rlfx.series(f(x), end=0.0)[TIME[0] + 1],
    ]
    assert len(effects) * len(around) >= 50
    for effect in effects.values():
        for wrap in around:

            def program(p, c, t, wrap=wrap, effect=effect):
                TIME[:] = [t]
                return p * jax.lax.stop_gradient(wrap(effect, c)), 0.9 * c

            tuned = rlfx.compile(program, length=4, batch=2, autotune=True)
            assert isinstance(tuned.plan(2.0, jnp.ones(2)), rlfx.Plan)
    assert seen == []
    program = lambda p, c, t: (p * effects["debug.callback"](c), 0.9 * c)  # noqa: E731
    jax.grad(lambda p: rlfx.compile(program, length=4, batch=2, autotune=True)(p, jnp.ones(2))[0])(2.0)
    jax.effects_barrier()
    assert len(seen) == 8


# -- types -----------------------------------------------------------------------------------------------------------

TWO_TYPES = {
    "What fn of rlfx.every returns is i32[], otherwise is f32[].": (lambda c: jnp.int32(1), lambda c: c),
    "What fn of rlfx.every returns is f32[], otherwise is i32[].": (lambda c: c, lambda c: jnp.int32(1)),
    "What fn of rlfx.every returns is f32[], otherwise is bool[].": (lambda c: c, lambda c: c > 0),
    "What fn of rlfx.every returns is bf16[], otherwise is f32[].": (lambda c: c.astype(jnp.bfloat16), lambda c: c),
    "What fn of rlfx.every returns is f32[2], otherwise is f32[].": (lambda c: jnp.stack([c, c]), lambda c: c),
    "What fn of rlfx.every returns is f32[2], otherwise is f32[1].": (lambda c: jnp.stack([c, c]), lambda c: c[None]),
    "What fn of rlfx.every returns['a'] is i32[], otherwise['a'] is f32[].": (
        lambda c: {"a": jnp.int32(1)},
        lambda c: {"a": c},
    ),
    "What fn of rlfx.every returns[1] is f32[1], otherwise[1] is f32[].": (lambda c: (c, c[None]), lambda c: (c, c)),
    "What fn of rlfx.every returns has the structure PyTreeDef((*, *)), otherwise has PyTreeDef(*).": (
        lambda c: (c, c),
        lambda c: c,
    ),
    "What fn of rlfx.every returns has the structure PyTreeDef([*]), otherwise has PyTreeDef((*,)).": (
        lambda c: [c],
        lambda c: (c,),
    ),
    "What fn of rlfx.every returns has the structure PyTreeDef(None), otherwise has PyTreeDef(*).": (
        lambda c: None,
        lambda c: c,
    ),
}


KINDS = {
    "i32[]": lambda c: jnp.int32(1),
    "f32[]": lambda c: c,
    "bool[]": lambda c: c > 0,
    "bf16[]": lambda c: c.astype(jnp.bfloat16),
    "f32[2]": lambda c: jnp.stack([c, c]),
    "f32[1]": lambda c: c[None],
    "i8[2, 1]": lambda c: jnp.zeros((2, 1), jnp.int8),
    "c64[]": lambda c: c.astype(jnp.complex64),
}


def test_every_of_any_two_types():
    """56 pairs: each is refused, whichever comes first."""
    for (one, fn), (other, otherwise) in itertools.permutations(KINDS.items(), 2):
        f = lambda p, c, t, g=fn, o=otherwise: (c, rlfx.every(2, lambda: g(c), otherwise=o(c)))  # noqa: E731
        fact = f"What fn of rlfx.every returns is {one}, otherwise is {other}."
        refused(ProgramError, [fact], lambda f=f: rlfx.trace(f, None, ONE, length=3, loss=False))
    for kind in KINDS.values():
        rlfx.trace(
            lambda p, c, t, k=kind: (c, rlfx.every(2, lambda: k(c), otherwise=k(c))), None, ONE, length=3, loss=False
        )


@pytest.mark.parametrize("fact", TWO_TYPES)
def test_every_of_two_types(fact):
    fn, otherwise = TWO_TYPES[fact]
    f = lambda p, c, t: (c, rlfx.every(2, lambda: fn(c), otherwise=otherwise(c)))  # noqa: E731
    message = refused(ProgramError, [fact, "(astype)"], lambda: rlfx.trace(f, None, ONE, length=3, loss=False))
    assert "at test_legal.py:" in message


def test_every_leaves_errors_of_its_function_alone():
    def wrong():
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        rlfx.trace(lambda p, c, t: (c, rlfx.every(2, wrong, otherwise=c)), None, ONE, length=3, loss=False)


#: What a parameter meets.
MEETS = [
    lambda w, c: w * c,
    lambda w, c: c - w,
    lambda w, c: jnp.maximum(w, c),
    lambda w, c: jnp.where(c > 1, w, c),
    lambda w, c: S(w * c, start=w)[0],
    lambda w, c: jnp.sum(jnp.stack([c, c]) * w),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_python_numbers_as_parameters_are_weakly_typed(dtype):
    """As under jax.jit: they take the type of what they meet. 18 for each dtype."""
    c = jnp.asarray(1.5, dtype)
    f = lambda p, c, t: (c, [meet(p["w"], c) for meet in MEETS])  # noqa: E731
    for make in (rlfx.unroll, lambda f, length: rlfx.reference(f, length=length, loss=False)):
        program = make(f, length=2)
        for number in (0.5, 2, np.float64(0.5).item()):
            _, found = program({"w": number}, c)
            assert [x.dtype for x in found] == [dtype] * len(MEETS)
            numbers = jax.jit(lambda w, c: jnp.stack([m(w, c) for i, m in enumerate(MEETS) if i != 4]))(number, c)
            np.testing.assert_array_equal(jnp.stack([x[0] for i, x in enumerate(found) if i != 4]), numbers)
    compiled = rlfx.compile(lambda p, c, t: (p["w"] * c, c), length=2)
    assert compiled({"w": 0.5}, c)[0].dtype == dtype
    strong = jnp.asarray(0.5, jnp.float32)
    assert compiled({"w": strong}, c.astype(jnp.float32))[0].dtype == jnp.float32
    if dtype != "float32":
        with pytest.raises(Exception, match="promotion"):
            compiled({"w": strong}, c)


def test_a_module_with_functions_in_it():
    message = refused(
        ProgramError,
        ["params.activation is", "not an array", "eqx.partition(model, eqx.is_array)"],
        lambda: rlfx.compile(lambda p, c, t: (c, c), length=2)(Module(ONE, jnp.tanh), ONE),
    )
    assert "eqx.combine(params, static) inside the program" in message


class Module:
    """As an equinox module: its functions are leaves."""

    def __init__(self, weight, activation):
        self.weight, self.activation = weight, activation


jax.tree_util.register_pytree_with_keys(
    Module,
    lambda m: (((jax.tree_util.GetAttrKey(k), getattr(m, k)) for k in ("weight", "activation")), None),
    lambda _, children: Module(*children),
)
