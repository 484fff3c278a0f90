"""States that no timestep changes are what they began with: plain, chosen under ``until=``, backwards, and beside others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import ScheduleError
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


def returned_as_well(p, carry, t):
    """A state, what follows from it, what it began with, and the same by a recurrence."""
    held, count = carry
    ahead = rlfx.solve(lambda s: s[t + 1], end=p)
    return held * ahead * count, (held, count + 1.0), (held, jnp.sin(held) * p, p, ahead)


PLANS = [(None, None), (None, B), (rlfx.Plan("blocks", 2), None), (rlfx.Plan("blocks", 2), B), (rlfx.Plan("blocks", 3, 1), B)]


@pytest.mark.parametrize(("plan", "batch"), PLANS)
@pytest.mark.parametrize("ends", [False, True])
def test_what_is_returned_has_the_axes_that_it_was_written_with(plan, batch, ends):
    until = (lambda c: c[1] >= 4.0) if ends else None
    carry = CARRY if batch else tuple(x[1] for x in CARRY)
    options = {"length": T, "batch": batch, "until": until}
    fn, reference = rlfx.compile(returned_as_well, plan=plan, **options), rlfx.reference(returned_as_well, **options)

    def weighed(fn, p, carry):
        loss, (_, aux, *_) = fn(p, carry)
        weights = [jnp.cos(jnp.arange(jnp.size(x), dtype=jnp.float32)).reshape(jnp.shape(x)) for x in aux]
        return loss + sum(jnp.sum(w * x) for w, x in zip(weights, aux, strict=True)), aux

    def run(fn):
        wrt = 0 if plan and plan.environments else (0, 1)  # the carry's gradient is of all environments
        return jax.value_and_grad(lambda *a: weighed(fn, *a), argnums=wrt, has_aux=True)(jnp.float32(0.3), carry)

    ((value, aux), grads), ((want, written), slopes) = run(fn), run(reference)
    lead = (T,) if batch is None else (T, B)
    assert [x.shape for x in aux] == [x.shape for x in written]
    assert [x.shape for x in aux[:3]] == [lead, lead, ()]
    for mine, other in zip(jax.tree.leaves((value, aux, grads)), jax.tree.leaves((want, written, slopes)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=1e-6)


def test_what_is_returned_on_a_mesh_and_of_several_copies():
    mesh = jax.make_mesh((3,), ("b",), devices=jax.devices()[:3])
    whole, split = (rlfx.compile(returned_as_well, length=T, batch=B, mesh=m) for m in (None, mesh))
    (_, want), (_, got) = (fn(jnp.float32(0.3), CARRY)[1] for fn in (whole, split))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    (_, copies) = jax.vmap(lambda p: whole(p, CARRY)[1])(jnp.array([0.3, 0.6]))
    assert [x.shape for x in copies] == [(2, T, B), (2, T, B), (2,), (2, *want[3].shape)]
    for a, b in zip(copies, want, strict=True):
        np.testing.assert_allclose(a[0], b, rtol=1e-6)


def test_a_stream_returns_no_timesteps_of_environments_that_end():
    """Where a state that does not change is returned, its zeros after an end are of every timestep."""

    def program(p, carry, t):
        held, count = carry
        step = jax.lax.stop_gradient(jnp.tanh(count + held))
        return (p * step) ** 2, (held, count + 1.0), held

    plan, until = rlfx.Plan("stream", 2), lambda c: c[1] >= 4.0
    run = jax.value_and_grad(lambda fn, p: fn(p, CARRY), argnums=1, has_aux=True)
    (_, (_, aux)), _ = run(rlfx.compile(program, length=T, batch=B, plan=plan), jnp.float32(0.3))
    np.testing.assert_array_equal(aux, np.broadcast_to(CARRY[0], (T, B)))
    with pytest.raises(ScheduleError, match="aux is returned for every timestep"):
        run(rlfx.compile(program, length=T, batch=B, plan=plan, until=until), jnp.float32(0.3))
    (_, (_, aux, lengths)), _ = run(rlfx.compile(program, length=T, batch=B, until=until), jnp.float32(0.3))
    counted = np.arange(T)[:, None] < np.asarray(lengths)
    np.testing.assert_array_equal(aux, np.where(counted, np.asarray(CARRY[0]), 0.0))
