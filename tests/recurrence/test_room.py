"""Default plans fit what is free of a device's memory, and cost nothing where that is plenty."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import rlfx
from rlfx.errors import TargetError
from rlfx.recurrence.plan import budget
from rlfx.recurrence.plan.evaluator import PlanEvaluator
from rlfx.recurrence.plan.room import USABLE, free_bytes
from tests.recurrence.test_budget import BATCH, LENGTH, STACKED, arguments, assert_same, compiled, n_step, program, temp

pytestmark = pytest.mark.optimised


def machine(memory, name="cpu", **room):
    """A machine with so little memory, whose default takes all timesteps at once where that fits, as a GPU's does."""
    known = rlfx.target(name)
    return dataclasses.replace(
        known, room=dataclasses.replace(known.room, tile=None, unmapped=None, memory=memory, **room)
    )


def test_a_program_that_does_not_fit_is_planned():
    at_once, whole = compiled(program, target=machine(None))
    assert at_once.plan(*arguments()) == rlfx.Plan()
    free = temp(whole) // 3
    little = machine(int(free / USABLE) + 8192)
    assert temp(whole) > free_bytes(little)
    fn, fitted = compiled(program, target=little)
    assert fn.plan(*arguments()) != rlfx.Plan()
    assert temp(fitted) <= free_bytes(little)
    key = jax.random.key(0)
    gradients = (jax.value_and_grad(lambda p, o, fn=fn: fn(p, o, key)[0])(*arguments()) for fn in (fn, at_once))
    assert_same(*gradients)
    assert f"free on the device {free_bytes(little) / 2**10:.4g} KiB" in str(fn.explain(*arguments(), verbose=True))


def test_copies_by_vmap_count():
    little = machine(8 * temp(compiled(program, target=machine(None))[1]))
    fn, _ = compiled(program, target=little)
    assert fn.plan(*arguments()) == rlfx.Plan()
    gradient = jax.grad(lambda p, o, key: fn(p, o, key)[0])
    keys = jax.random.split(jax.random.key(0), 24)
    mapped = jax.jit(jax.vmap(gradient, (None, None, 0)))
    assert temp(mapped.lower(*arguments(), keys).compile()) <= free_bytes(little)


def test_what_is_returned_counts():
    def stacked(params, obs, t):
        value, moved = program(params, obs, t)
        return value, moved, {"obs": obs}

    returned, needed = STACKED, temp(compiled(stacked, target=machine(None))[1])
    beside, alone = (int(bytes_ / USABLE) for bytes_ in (1.5 * needed + 1.1 * returned, needed + 0.5 * returned))
    assert compiled(stacked, target=machine(beside))[0].plan(*arguments()) == rlfx.Plan()
    assert compiled(stacked, target=machine(alone))[0].plan(*arguments()) != rlfx.Plan()


def test_where_memory_is_plenty_nothing_is_traced_or_compiled(monkeypatch):
    def refuse(*_):
        raise AssertionError("a plan was evaluated")

    monkeypatch.setattr(PlanEvaluator, "jaxpr", refuse)
    monkeypatch.setattr(PlanEvaluator, "measured", refuse)
    fn = rlfx.compile(program, length=LENGTH, batch=BATCH, target=machine(1 << 30))
    assert fn.plan(*arguments()) == rlfx.Plan()


def test_where_the_bound_is_far_below_nothing_is_compiled(monkeypatch):
    bound = (
        rlfx.compile(program, length=LENGTH, batch=BATCH, target=machine(None)).explain(*arguments()).predicted_bytes
    )
    monkeypatch.setattr(PlanEvaluator, "measured", lambda *_: pytest.fail("a plan was compiled"))
    fn = rlfx.compile(program, length=LENGTH, batch=BATCH, target=machine(int(2.5 * bound)))
    assert fn.plan(*arguments()) == rlfx.Plan()


def test_what_fits_nowhere_takes_the_least():
    """XLA or the device says so, if it comes to that: nobody gave a budget."""
    fn = rlfx.compile(n_step, length=LENGTH, batch=BATCH, target=machine(20_000))
    evaluator = fn.explain(*arguments()).evaluator
    plan = fn.plan(*arguments())
    assert budget.expected(evaluator, plan) == min(budget.expected(evaluator, p) for p in evaluator.looked_at)


def test_an_allocator_knows_better_than_a_data_sheet():
    class Device:
        def __init__(self, **stats):
            self.memory_stats = lambda: stats or None

    here = machine(1000)
    full, empty = Device(bytes_limit=800, bytes_in_use=600), Device(bytes_limit=800, bytes_in_use=10)
    assert free_bytes(here) == free_bytes(here, [Device()]) == 900
    assert free_bytes(here, [empty]) == 710
    assert free_bytes(here, [empty, full]) == 120
    assert free_bytes(here, [Device(bytes_limit=2000, bytes_in_use=0)]) == 900  # what the user says counts
    assert free_bytes(machine(None), [Device()]) is None
    assert free_bytes(machine(None), [full]) == 120
    assert free_bytes(here, [Device(bytes_limit=800, bytes_in_use=790)]) == 0
    assert free_bytes(rlfx.target("t4"), [full]) == int(USABLE * rlfx.target("t4").room.memory)  # not here


@pytest.mark.parametrize("batch", [256, 16384])
def test_a_large_batch_on_a_small_gpu(batch, monkeypatch):
    """At once, 16,384 environments do not fit a T4. Nothing that compiles for it is here: the bound decides."""

    def unavailable(*_):
        raise TargetError("nothing compiles for a T4 here")

    monkeypatch.setattr(PlanEvaluator, "measured", unavailable)

    def wide(params, obs, t):
        hidden = jnp.tanh(params["v"] @ jnp.tanh(params["w"] @ obs))
        action = jax.random.categorical(t.key_for("action"), hidden)
        moved = jax.lax.stop_gradient(jnp.roll(obs, 1) * 0.9 + 0.1 * jax.random.normal(t.key_for("env"), (1,)))
        reward = rlfx.series(moved[0] + action.astype(jnp.float32))
        returns = rlfx.discounted_sum(reward[t:], jnp.full_like(reward[t:], 0.9))
        return -jax.nn.log_softmax(hidden)[action] * jax.lax.stop_gradient(returns), moved

    shape = jax.ShapeDtypeStruct
    params = {"w": shape((256, 16), jnp.float32), "v": shape((256, 256), jnp.float32)}
    shapes = params, shape((batch, 16), jnp.float32)
    t4 = rlfx.target("t4")
    explained = rlfx.compile(wide, length=1000, batch=batch, target=t4).explain(*shapes)
    whole = rlfx.compile(wide, length=1000, batch=batch, target=t4, plan=rlfx.Plan()).explain(*shapes)
    assert explained.predicted_bytes <= free_bytes(t4)
    assert (whole.predicted_bytes > free_bytes(t4)) == (batch == 16384)
    assert (explained.plan == rlfx.Plan()) == (batch == 256)


def test_a_recurrence_that_does_not_fit_in_one_pass_runs_in_blocks():
    def predicts(params, h, t):
        p, data = params
        h = jnp.tanh(h @ p["h"] + rlfx.inputs(data)[t] @ p["x"])
        return jnp.sum(h @ p["h"]) ** 2, h

    width, length, batch = 32, 64, 8
    p = {"h": jnp.eye(width) / 2, "x": jnp.ones((4, width)) / 4}
    data, h = jnp.ones((length, batch, 4)), jnp.zeros((batch, width))

    def compiled(memory):
        little = machine(memory)
        target = dataclasses.replace(little, rewrites=dataclasses.replace(little.rewrites, starts=True))
        fn = rlfx.compile(predicts, length=length, batch=batch, target=target)
        gradient = jax.jit(jax.value_and_grad(lambda p: fn((p, data), h)[0]))
        return fn.plan((p, data), h, wrt=(True, False)), gradient.lower(p).compile(), free_bytes(target)

    plan, whole, _ = compiled(None)
    assert plan == rlfx.Plan("one pass")
    plan, fitted, free = compiled(int(temp(whole) / 2 / USABLE))
    assert plan.form == "blocks"
    assert temp(fitted) <= free < temp(whole)
    assert_same(whole(p), fitted(p))
