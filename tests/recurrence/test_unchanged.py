"""States that no timestep changes are what they began with: plain, chosen under ``until=``, backwards, and beside others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.rewrite.unchanged import unchanged

T, B = 6, 3
CARRY = (jnp.array([0.4, -0.8, 1.1]), jnp.array([0.0, 1.0, 2.0]))


def kept_and_counted(p, carry, t):
    """What follows the last timestep stays in the carry, beside a counter."""
    last, count = carry
    value = rlfx.series(jnp.tanh(p * t.now.astype(jnp.float32) + count), end=last)
    return value[t + 1] ** 2 * last, (last, count + 1.0)


def by_loops(p, last, count, stops):
    total, ends = 0.0, []
    for b in range(B):
        n = stops[b]
        values = [np.tanh(p * t + count[b] + t) for t in range(n)] + [last[b]]
        total += sum(values[t + 1] ** 2 * last[b] for t in range(n))
        ends.append(count[b] + n)
    return total / sum(stops), ends


@pytest.mark.parametrize("ends", [False, True])
def test_values_and_gradients_are_those_of_loops(ends):
    until = (lambda c: c[1] >= 4.0) if ends else None
    stops = [4, 3, 2] if ends else [T] * B
    fn = rlfx.compile(kept_and_counted, length=T, batch=B, until=until)
    run = jax.jit(jax.value_and_grad(fn, argnums=(0, 1), has_aux=True))
    (loss, ((last, count), *_)), (slope, (of_last, of_count)) = run(jnp.float32(0.3), CARRY)
    start = [np.asarray(x, np.float64) for x in CARRY]
    want, counted = by_loops(0.3, *start, stops)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(count, counted)
    np.testing.assert_array_equal(last, CARRY[0])

    def difference(move):
        near = [by_loops(*(x + sign * 1e-6 * m for x, m in zip((0.3, *start), move, strict=True)), stops) for sign in (-1, 1)]
        return (near[1][0] - near[0][0]) / 2e-6

    zero, unit = np.zeros(B), np.eye(B)
    np.testing.assert_allclose(slope, difference((1.0, zero, zero)), rtol=1e-4)
    for b in range(B):
        np.testing.assert_allclose(of_last[b], difference((0.0, unit[b], zero)), rtol=1e-4)
        np.testing.assert_allclose(of_count[b], difference((0.0, zero, unit[b])), rtol=1e-4)


def states(program):
    return [e for e in program.reads() if e.start is not None or e.end is not None]


def test_no_loop_carries_it():
    def f(p, last, t):
        return rlfx.series(p * t.now.astype(jnp.float32), end=last)[t + 1], last

    program = rlfx.trace(f, jnp.float32(1.0), CARRY[0], length=T, batch=B)
    assert [str(e.access) for e in states(program)] == ["t + 1"]  # the carry is read no more
    assert unchanged(program) is program
    loops = str(rlfx.compile(f, length=T, batch=B).physical(jnp.float32(1.0), CARRY[0]))
    assert "scan" not in loops


def test_a_name_of_it_stays():
    """For whoever asks for what has that name."""

    def f(p, last, t):
        return p * last, jax.ad_checkpoint.checkpoint_name(last, "kept")

    program = rlfx.trace(f, jnp.float32(1.0), CARRY[0], length=T, batch=B)
    assert states(program) == []
    assert [e.params["name"] for e in program.equations if e.op.name == "name"] == ["kept"]


def test_a_state_that_is_solved_for():
    def f(p, carry, t):
        ahead = rlfx.solve(lambda s: s[t + 1], end=p)
        behind = rlfx.solve(lambda s: s[t - 1], start=2.0 * p)
        return ahead * behind * t.now.astype(jnp.float32), carry

    fn = rlfx.compile(f, length=T, reduce="sum")
    value, slope = jax.value_and_grad(lambda p: fn(p, ())[0])(jnp.float32(0.5))
    np.testing.assert_allclose((value, slope), (2 * 0.25 * 15, 4 * 0.5 * 15), rtol=1e-6)


def test_what_begins_otherwise_at_each_timestep_or_changes_is_left():
    def f(p, carry, t):
        turned, other = carry
        moving = rlfx.solve(lambda s: s[t - 1], start=p * t.now.astype(jnp.float32))
        return moving * turned, (other, turned)

    program = rlfx.trace(f, jnp.float32(1.0), (jnp.float32(1.0), jnp.float32(2.0)), length=T)
    assert unchanged(program) is program
