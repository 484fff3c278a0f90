"""Affine recurrences as associative scans: against plain loops, and what is not affine stays a loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.execute.affine import recurrence
from rlfx.recurrence.schedule.physical import Repeated
from tests.sampling import met

CPU = rlfx.target("cpu")
WIDE = dataclasses.replace(CPU, rewrites=dataclasses.replace(CPU.rewrites, affine=True))  # as a GPU
B = 3
ENDS = np.array([False, False, True, False, True, False])

#: ``(h, x, d, p) -> h``: state, data, whether an episode ends, parameters.
AFFINE = {
    "sum": lambda h, x, d, p: h + x,
    "difference": lambda h, x, d, p: x - h,
    "discounted": lambda h, x, d, p: x + p["g"] * h,
    "discounted, episodes": lambda h, x, d, p: x + p["g"] * jnp.where(d, 0.0, 1.0) * h,
    "reset": lambda h, x, d, p: jnp.where(d, p["g"] * x, 0.9 * h + x),
    "reset before": lambda h, x, d, p: x * jnp.where(d, jnp.zeros_like(h), h) + 1.0,
    "gate of data": lambda h, x, d, p: jax.nn.sigmoid(x) * h + (1 - jax.nn.sigmoid(x)) * p["g"],
    "quotient": lambda h, x, d, p: (h - x) / (1.0 + x * x),
    "negative": lambda h, x, d, p: -(p["g"] * h) + (-h) * 0.3 + x,
    "kept": lambda h, x, d, p: jnp.where(d, x, h),
    "nothing of it": lambda h, x, d, p: jnp.sin(x) * p["g"],
    "chosen": lambda h, x, d, p: jnp.where(x > 0, 0.5 * h, h - x),
    "named": lambda h, x, d, p: jax.jit(lambda y: p["g"] * y + x)(h),
}

#: Loops, all of them.
NOT_AFFINE = {
    "bounded": lambda h, x, d, p: jnp.tanh(0.5 * h) + x,
    "square": lambda h, x, d, p: 0.1 * h * h + x,
    "largest": lambda h, x, d, p: jnp.maximum(h, x),
    "inverse": lambda h, x, d, p: x / (2.0 + h * h),
    "condition on it": lambda h, x, d, p: jnp.where(h > 0, 0.5 * h, h + x),
    "stopped": lambda h, x, d, p: p["g"] * jax.lax.stop_gradient(h) + x,
    "mixed": lambda h, x, d, p: 0.5 * jnp.roll(h, 1) + x,
}


def inputs(length, shape=(2,), seed=0):
    x = np.random.default_rng(seed).uniform(-1, 1, (length, B, *shape)).astype(np.float32)
    d = np.resize(ENDS, (B, length)).T
    return {"g": jnp.float32(0.7), "x": jnp.asarray(x), "d": jnp.asarray(d), "h": jnp.full(shape, 0.3, jnp.float32)}


def program_of(step, backward):
    """The squares of a recurrence's states, and the states."""

    def program(p, c, t):
        x, d = rlfx.inputs(p["x"])[t], rlfx.inputs(p["d"], axes="tb")[t]
        boundary = {"end" if backward else "start": p["h"]}
        h = rlfx.solve(lambda h: step(h[t + 1] if backward else h[t - 1], x, d, p), **boundary)
        return (h * h * jnp.cos(x)).sum(), c, h

    return program


def by_hand(step, backward, p):
    """The same, timestep by timestep."""
    length = p["x"].shape[0]
    h, found = jnp.broadcast_to(p["h"], p["x"].shape[1:]), {}
    for t in range(length)[:: -1 if backward else 1]:
        h = jnp.stack([step(h[b], p["x"][t, b], p["d"][t, b], p) for b in range(B)])
        found[t] = h
    h = jnp.stack([found[t] for t in range(length)])
    return (h * h * jnp.cos(p["x"])).sum() / (length * B), h


def floats(p, fn):
    """Value, states, and the gradient with respect to every float."""
    mine = {k: v for k, v in p.items() if k != "d"}
    (value, h), grads = jax.value_and_grad(lambda m: fn({**m, "d": p["d"]}), has_aux=True)(mine)
    return value, h, grads


def compiled(step, backward, length, **options):
    fn = rlfx.compile(program_of(step, backward), length=length, batch=B, target=WIDE, **options)
    return fn, jax.jit(lambda p: floats(p, lambda q: (lambda out: (out[0], out[1][1]))(fn(q, None))))


def scans(fn, p):
    """How the loops of acting run."""
    return [str(node.iteration) for node in fn.physical(p, None).acting.nodes if isinstance(node, Repeated)]


def close(one, other):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), one, other)


@pytest.mark.parametrize(("name", "backward"), met(AFFINE, [False, True]))
def test_affine_recurrences(name, backward):
    p = inputs(13)
    fn, run = compiled(AFFINE[name], backward, 13)
    assert scans(fn, p) in (["associative scan"], [])  # nothing is left of a loop whose state nobody reads
    assert scans(fn, p) or name == "nothing of it"
    close(run(p), floats(p, lambda q: by_hand(AFFINE[name], backward, q)))


@pytest.mark.parametrize("name", NOT_AFFINE)
def test_others_stay_loops(name):
    p = inputs(7)
    fn, run = compiled(NOT_AFFINE[name], False, 7)
    assert scans(fn, p) == ["scan"]
    close(run(p), floats(p, lambda q: by_hand(NOT_AFFINE[name], False, q)))


@pytest.mark.parametrize("length", [1, 2, 3, 8])
def test_few_timesteps(length):
    p, step = inputs(length), AFFINE["reset"]
    for backward in (False, True):
        close(compiled(step, backward, length)[1](p), floats(p, lambda q, back=backward: by_hand(step, back, q)))


def test_states_of_states():
    """A chain of recurrences, one of them a nonlinear function of another's state before; counters; shifts; complex numbers."""

    def program(p, c, t):
        x = rlfx.inputs(p["x"])[t]
        one = rlfx.solve(lambda h: 0.9 * h[t - 1] + x, start=0.0)
        before = rlfx.solve(lambda h: jnp.tanh(one) * h[t - 1] + one, start=1.0)
        turned = rlfx.solve(lambda z: (0.6 + 0.7j) * z[t - 1] + x.astype(jnp.complex64), start=0.0j)
        count = rlfx.solve(lambda n: jnp.where(x.sum() > 0, n[t - 1] + 1, 0), start=0)
        late = rlfx.series(x, start=0.0)[t - 1]
        return (
            (before * late).sum() + jnp.abs(turned).sum() + count.astype(jnp.float32),
            c,
            (one, before, turned, count, late),
        )

    p = {"x": inputs(11)["x"]}
    fn = rlfx.compile(program, length=11, batch=B, target=WIDE)
    assert set(scans(fn, p)) == {"associative scan"}
    meant = rlfx.reference(program, length=11, batch=B)
    got, expected = (jax.value_and_grad(lambda p, f=f: f(p, None), has_aux=True)(p) for f in (jax.jit(fn), meant))
    close(got, expected)
    assert expected[0][1][1][3].max() > 1


def test_a_state_that_follows_another_in_its_loop():
    """Eligibility traces: the second state is affine in itself, with a product of the first as coefficient."""

    def program(p, c, t):
        x = rlfx.inputs(p["x"])[t]
        out = rlfx.solve(
            lambda s: {"a": 0.5 * s[t - 1]["a"] + x, "b": s[t - 1]["a"] * s[t - 1]["b"] + jnp.sin(s[t - 1]["a"])},
            start={"a": 1.0, "b": 0.5},
        )
        return (out["a"] * out["b"]).sum(), c, out

    p = {"x": inputs(9)["x"]}
    fn = rlfx.compile(program, length=9, batch=B, target=WIDE)
    assert scans(fn, p) == ["associative scan"]
    meant = rlfx.reference(program, length=9, batch=B)
    close(*(jax.value_and_grad(lambda p, f=f: f(p, None), has_aux=True)(p) for f in (jax.jit(fn), meant)))

    def circle(p, c, t):
        x = rlfx.inputs(p["x"])[t]
        out = rlfx.solve(
            lambda s: {"a": 0.5 * s[t - 1]["b"] + x, "b": 0.3 * s[t - 1]["a"] - x}, start={"a": 1.0, "b": 0.5}
        )
        return (out["a"] * out["b"]).sum(), c, out

    fn = rlfx.compile(circle, length=9, batch=B, target=WIDE)
    assert scans(fn, p) == ["scan"]


def ending(p, c, t):
    x = rlfx.inputs(p["x"])[t]
    r = rlfx.series(x.sum() * p["g"])
    value = rlfx.solve(lambda h: 0.8 * h[t + 1] + r[t], end=1.0)
    trace = rlfx.solve(lambda h: p["g"] * h[t - 1] + x, start=0.1)
    return value * trace.sum() + rlfx.discounted_sum(r[t:], 0.5 * jnp.ones_like(r[t:])), c + 1.0, (value, trace)


def traced(p, c, t):
    """Without reads of the future: its gradient has blocks."""
    x = jnp.sin(t.now.astype(jnp.float32) + jnp.arange(2.0))
    trace = p["g"] * c + p["x"][0, 0] * x
    return (trace * trace).sum(), trace.sum(), trace


@pytest.mark.parametrize(
    ("case", "mesh"),
    met([(ending, {}), (ending, {"until": lambda c: c > 5.0}), (traced, {"plan": rlfx.Plan("blocks", 4)})], [3, None]),
)
def test_with_ends_blocks_and_a_mesh(case, mesh):
    program, options = case
    if mesh is not None:
        options = {**options, "mesh": jax.make_mesh((mesh,), ("b",), devices=jax.devices()[:mesh])}
    p, c = {k: inputs(10)[k] for k in ("g", "x")}, jnp.array([0.0, 2.5, -20.0])
    fn = rlfx.compile(program, length=10, batch=B, target=WIDE, **options)
    meant = rlfx.reference(program, length=10, batch=B, until=options.get("until"))
    close(*(jax.value_and_grad(lambda p, f=f: f(p, c), has_aux=True)(p) for f in (jax.jit(fn), meant)))


def test_under_vmap_and_in_second_order():
    step = AFFINE["discounted, episodes"]
    fn, _ = compiled(step, True, 6)
    p = inputs(6)
    value = lambda g, run: run({**p, "g": g})  # noqa: E731
    ours, meant = lambda q: fn(q, None)[0], lambda q: by_hand(step, True, q)[0]
    gs = jnp.array([0.3, 0.9])
    close(*(jax.vmap(jax.grad(value), (0, None))(gs, run) for run in (ours, meant)))
    twice = lambda run: jax.grad(lambda g: jax.grad(value)(g, run) ** 2)(gs[0])  # noqa: E731
    close(twice(ours), twice(meant))


def test_sixteen_bits_stay_in_order():
    """Put together in another order they would round otherwise."""
    p = {k: v.astype(jnp.bfloat16) if v.dtype == jnp.float32 else v for k, v in inputs(7).items()}
    assert scans(compiled(AFFINE["sum"], False, 7)[0], p) == ["scan"]


def test_what_overflows_between_ends_with_a_slope_of_zero():
    slopes = jnp.array([1e30, 1e30, 0.0, 1e30, 1e30, 1e-20])
    values = jnp.array([0.0, 0.0, 1.0, 0.0, 0.0, 2.0])
    h, expected = np.float32(0.0), []
    for slope, value in zip(np.asarray(slopes), np.asarray(values), strict=True):
        with np.errstate(over="ignore"):
            h = slope * h + value
        expected.append(h)
    start = jnp.float32(0.0)
    np.testing.assert_array_equal(recurrence(slopes, values, start), expected)
    np.testing.assert_array_equal(recurrence(slopes[::-1], values[::-1], start, backward=True), expected[::-1])


def test_launches_do_not_grow_with_time():
    """Of a returns program no loop is left, whatever the length."""
    returns = lambda p, c, t: (rlfx.discounted_sum(rlfx.inputs(p)[t:], jnp.full_like(rlfx.inputs(p)[t:], 0.9)), c)  # noqa: E731
    fn = rlfx.compile(returns, length=1000, batch=B, target=WIDE)
    text = jax.jit(jax.grad(lambda p: fn(p, None)[0])).lower(jnp.ones((1000, B))).as_text()
    assert "while" not in text
    assert "while" in jax.jit(rlfx.compile(returns, length=1000, batch=B)).lower(jnp.ones((1000, B)), None).as_text()
