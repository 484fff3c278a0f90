"""What is so far, along axes: by pairs as jax has it, in programs, in what they call, and along slices; with derivatives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.cpu.cumulative import SO_FAR
from rlfx.recurrence.cpu.elementwise import ELEMENTS
from rlfx.recurrence.ir.interpret import rewritten

KEY = jax.random.key(0)
ALL = [lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp]
T, B = 7, 3


def fast(fn):
    return rewritten(fn, ELEMENTS)


def operations(fn, *args):
    return {e.primitive for e in J.equations_in({"jaxpr": jax.make_jaxpr(fn)(*args)})}


@pytest.mark.parametrize("op", ALL)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((1,), 0), ((2,), 0), ((7, 2), 1), ((5, 25), 1), ((30, 3), 0), ((2, 67, 3), 1)])
def test_values_and_gradients_are_those_of_jax(op, reverse, shape, axis):
    fn = functools.partial(op, axis=axis, reverse=reverse)
    assert operations(fast(fn), jnp.ones(shape)).isdisjoint(SO_FAR)
    x = jax.random.normal(KEY, shape)
    np.testing.assert_allclose(fast(fn)(x), fn(x), rtol=2e-6, atol=2e-6)
    of = lambda fn: lambda x: jnp.sum(jnp.sin(fn(x)))  # noqa: E731
    np.testing.assert_allclose(jax.grad(of(fast(fn)))(x), jax.grad(of(fn))(x), rtol=2e-5, atol=2e-5)
    second = lambda fn: jax.jvp(jax.grad(of(fn)), (x,), (jnp.ones_like(x),))[1]  # noqa: E731
    np.testing.assert_allclose(second(fast(fn)), second(fn), rtol=2e-4, atol=2e-4)


def test_what_is_equal_infinite_or_not_a_number():
    """Derivatives of those that are equal are split as jax splits them."""
    infinite, nothing = [0.0, -jnp.inf, jnp.inf, 1.0, 0.0, -1.0], [1.0, jnp.nan, 2.0, 3.0, 0.0, 1.0]
    x = jnp.asarray([[1.0, 1.0, 0.0, 1.0, 2.0, 2.0], infinite, nothing])
    for op in ALL:
        fn = functools.partial(op, axis=1)
        np.testing.assert_allclose(fast(fn)(x), fn(x), rtol=1e-6)
    for op in (lax.cummax, lax.cummin):
        of = lambda x, op=op: jnp.sum(op(x, axis=0) * jnp.arange(1.0, 7.0))  # noqa: E731
        np.testing.assert_array_equal(jax.grad(fast(of))(x[0]), jax.grad(of)(x[0]))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bfloat16, jnp.float16, jnp.complex64])
def test_types_are_kept(dtype):
    x = jnp.round(4 * jax.random.normal(KEY, (5, 9))).astype(dtype)
    ops = [lax.cumsum, lax.cumlogsumexp] if dtype == jnp.complex64 else ALL[:1] if dtype == jnp.int32 else [*ALL[:1], *ALL[2:]]
    for op in ops:
        found, expected = fast(functools.partial(op, axis=1))(x), op(x, axis=1)
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(np.asarray(found, complex), np.asarray(expected, complex), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("op", ALL)
def test_along_slices_and_at_a_point_as_in_plain_loops(op):
    """Forwards and backwards along what is to come, along a point's own axis, and in a user's loop."""

    def point(p, seen, to_come, axis):
        own = op(seen, axis=0)
        looped = lax.scan(lambda s, v: (s + op(v * seen, axis=0, reverse=True).sum(), s), 0.0, seen)[0]
        ahead = jnp.sin(p * op(to_come, axis=axis)).sum() + jnp.cos(op(to_come, axis=axis, reverse=True)).sum()
        return ahead + jnp.tanh(own).sum() + 0.1 * jnp.sin(looped)

    def program(params, carry, t):
        p, data = params
        seen = rlfx.inputs(data)[t]
        return point(p, seen, rlfx.series(jnp.sum(seen) * p)[t:], 0), carry

    def by_hand(p):
        total = 0.0
        for b in range(B):
            sums = data[:, b].sum(-1) * p
            total += sum(point(p, data[t, b], sums[t:], 0) for t in range(T))
        return total / (T * B)

    data = 0.5 + 0.3 * jax.random.normal(KEY, (T, B, 6))
    fn = rlfx.compile(program, length=T, batch=B)
    found = jax.jit(jax.value_and_grad(lambda p: fn((p, data), None)[0]))(0.7)
    np.testing.assert_allclose(found, jax.value_and_grad(by_hand)(0.7), rtol=2e-5)
    assert operations(lambda p: fn((p, data), None)[0], 0.7).isdisjoint(SO_FAR)


def test_what_is_infinite_at_other_timesteps_reaches_no_gradient():
    """Sums, maxima, choices and comparisons of a slice meet what is outside of it as it is."""
    length = 5

    def point(p, x):
        z = jnp.maximum(x + p, x - 1.0)
        return (jnp.sqrt(jnp.where(z > 2.0, z, x)) * x).sum()

    def program(p, carry, t):
        x = jnp.where(t.now == length - 1, jnp.inf, p * (1.0 + t.astype(jnp.float32)))
        return point(p, rlfx.series(x)[:t]), carry  # no timestep reads the last one

    def by_hand(p):
        x = p * (1.0 + jnp.arange(float(length)))
        return sum(point(p, x[:t]) for t in range(length)) / length

    fn = rlfx.compile(program, length=length)
    np.testing.assert_allclose(jax.value_and_grad(lambda p: fn(p, None)[0])(0.7), jax.value_and_grad(by_hand)(0.7), rtol=1e-5)


@pytest.mark.parametrize("plan", [None, rlfx.Plan("blocks", 2), rlfx.Plan(environments=1)])
def test_points_along_one_axis_are_those_along_two(plan):
    """Gathers, scatters and products of each point, beside what varies with time alone, or with environments."""

    def program(params, carry, t):
        p, data, of_time = params
        x, u = rlfx.inputs(data)[t], rlfx.inputs(of_time, axes="t")[t]
        h = jnp.tanh(x @ p)
        table = jnp.zeros(4).at[jnp.argsort(h)[:2]].add(h[:2] * u)
        both = h.reshape(2, 2) @ table.reshape(2, 2)
        return jnp.sum(both[jnp.argmax(h) % 2] * carry), 0.9 * carry

    cpu = rlfx.target("cpu")
    apart = dataclasses.replace(cpu, rewrites=dataclasses.replace(cpu.rewrites, rows=False))
    given = jax.random.normal(KEY, (5, 4)), jax.random.normal(jax.random.key(1), (T, 4, 5)), jnp.linspace(0.5, 1.0, T)

    def gradient(target):
        fn = rlfx.compile(program, length=T, batch=4, target=target, plan=plan)
        return jax.jit(jax.value_and_grad(lambda p: fn((p, *given[1:]), jnp.linspace(0.1, 1.0, 4))[0]))

    found, expected = gradient(cpu)(given[0]), gradient(apart)(given[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
    assert str(jax.make_jaxpr(gradient(cpu))(given[0])) != str(jax.make_jaxpr(gradient(apart))(given[0])) or plan is not None
