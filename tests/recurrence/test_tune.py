"""Autotuning and the cost model: which plans are tried, which is taken, and what is predicted of them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx._target import Rates, Room
from rlfx.recurrence.gradient.rule import GradientRule
from rlfx.recurrence.plan.choose import checked, choose, why_not
from rlfx.recurrence.plan.planner import Options
from rlfx.recurrence.plan.predict import predict
from rlfx.recurrence.plan.tune import FINALISTS, neighbours, tune
from rlfx.recurrence.schedule.learner import is_float
from tests.recurrence.test_caching import KEY, PARAMS, STATE, B, T, n_step, recurrent, reinforce

CPU = rlfx.target("cpu")


def learner_of(f):
    program = rlfx.trace(f, PARAMS, STATE, KEY, length=T, batch=B)
    order = [v for v in program.params if is_float(v)]
    return GradientRule(program, Options(), CPU).learner(frozenset(order)), order


class Stopwatch:
    """Stands for a PlanEvaluator: it knows how long plans take."""

    def __init__(self, order, seconds):
        self.order, self.seconds, self.batch, self.target, self.asked = order, seconds, B, CPU, []

    def time(self, plans):
        self.asked = list(plans)
        return {plan: self.seconds(plan) for plan in plans}


@pytest.mark.parametrize("f", [reinforce, n_step, recurrent])
def test_every_neighbour_is_a_legal_plan(f):
    learner, order = learner_of(f)
    found = set(neighbours(learner, order, choose(learner, order, B, CPU, why_not("blocks", learner) is None), B))
    assert any(plan.cached for plan in found)
    for plan in found:
        assert checked(plan, learner, order, B, CPU) == plan


def test_the_fastest_plan_is_taken_if_it_is_worth_it():
    learner, order = learner_of(reinforce)
    best = rlfx.Plan("blocks", 4)
    clearly, hardly = (
        tune(Stopwatch(order, lambda p, f=f: f if p.cached else 1.0), learner, best) for f in (0.8, 0.99)
    )
    assert clearly.cached
    assert hardly == best


def test_what_does_not_fit_the_budget_is_not_timed():
    learner, order = learner_of(reinforce)
    watch = Stopwatch(order, lambda p: 0.1 if p.cached else 1.0)
    best = rlfx.Plan("blocks", 4)
    assert not tune(watch, learner, best, lambda p: not p.cached).cached
    assert watch.asked[0] == best
    assert len(watch.asked) <= FINALISTS


def test_autotune_from_the_outside():
    compiled = rlfx.compile(reinforce, length=T, batch=B, autotune=True)
    plain = rlfx.compile(reinforce, length=T, batch=B)
    got, expected = (jax.jit(jax.grad(lambda p, fn=fn: fn(p, STATE, KEY)[0]))(PARAMS) for fn in (compiled, plain))
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-4, atol=2e-5), got, expected)
    plan, text = compiled.plan(PARAMS, STATE, KEY), str(compiled.explain(PARAMS, STATE, KEY, verbose=True))
    assert f"ms {plan!r}" in text
    assert text.count("timed:") >= 2
    again = rlfx.compile(reinforce, length=T, batch=B, plan=rlfx.Plan.from_json(plan.to_json()))
    assert again.plan(PARAMS, STATE, KEY) == plan


@pytest.mark.parametrize("options", [{"autotune": True}, {"memory_budget": 1 << 20}])
def test_what_is_measured_is_the_compiled_program_also_without_jit(options):
    w, x = jnp.float32(0.5), jnp.arange(1.0, 5.0, dtype=jnp.float32)

    def program(w, x, t):
        y = rlfx.series(jnp.tanh(w * x))
        return (y[t] - jax.lax.stop_gradient(y[t + 1])) ** 2, jax.lax.stop_gradient(jnp.tanh(w * x))

    eager, plain = (rlfx.compile(program, length=6, batch=4, **options) for _ in range(2))
    with jax.disable_jit():
        got = jax.grad(lambda w: eager(w, x)[0])(w)
        measured = eager.explain(w, x).measured_bytes
    np.testing.assert_allclose(got, jax.grad(lambda w: plain(w, x)[0])(w), rtol=1e-5)
    if "memory_budget" in options:
        assert measured == plain.explain(w, x).measured_bytes


def test_autotune_stays_within_a_budget():
    compiled = rlfx.compile(reinforce, length=T, batch=B, autotune=True, memory_budget=1 << 20)
    assert compiled.explain(PARAMS, STATE, KEY).measured_bytes <= 1 << 20


def test_the_cost_model_knows_what_plans_save_and_cost():
    learner, _ = learner_of(reinforce)
    cpu = CPU
    at_once, blocks, replay = (
        predict(learner, p, B, cpu) for p in (rlfx.Plan(), rlfx.Plan("blocks", 2), rlfx.Plan("replay", 2))
    )
    assert blocks.flops == replay.flops  # actions are kept: the policy acts once
    assert at_once.elements < replay.elements
    assert blocks.started > at_once.started
    assert replay.moved < blocks.moved
    small = replace(cpu, rates=Rates(1e9, 1e9, 1e9, 1e-9), room=Room(cache=2000 * B))
    spilled, close = (predict(learner, p, B, small).moved for p in (rlfx.Plan(), rlfx.Plan("blocks", 1)))
    assert spilled > close - 3 * sum(x.nbytes for x in jax.tree.leaves(PARAMS)) * T
    assert at_once.seconds(small) > at_once.seconds(cpu) > 0
    forward = 2 * T * B * sum(x.size for x in jax.tree.leaves(PARAMS))
    assert blocks.flops == pytest.approx(4 * forward)  # acting, and the learner's forward and two backward products
    assert at_once.flops == pytest.approx(3 * forward)  # no state depends on actions: acting evaluates no policy
    assert "ms on this cpu" in at_once.show(cpu)


def test_cached_plans_have_fewer_products():
    program = rlfx.trace(reinforce, PARAMS, STATE, KEY, length=T, batch=B)
    order = [v for v in program.params if is_float(v)]
    plan, same = rlfx.Plan("blocks", 2, cached=True), rlfx.Plan("blocks", 2)
    rule = GradientRule(program, Options(), CPU)
    learner = rule.caching(plan, rule.learner(frozenset(order))).learner(frozenset(order))
    plain, _ = learner_of(reinforce)
    cpu = CPU
    assert predict(learner, plan, B, cpu).flops < predict(plain, same, B, cpu).flops
    assert jnp.isfinite(predict(learner, plan, B, cpu).seconds(cpu))
