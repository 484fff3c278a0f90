"""The executable plan is all that the executor reads: a node edited by hand is what runs."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx._target import Rewrites
from rlfx.recurrence.execute.executor import execute
from rlfx.recurrence.execute.extent import whole_extent
from rlfx.recurrence.execute.loops import WhileGoing
from rlfx.recurrence.gradient.rule import GradientRule
from rlfx.recurrence.plan.planner import Options
from rlfx.recurrence.schedule.physical import Repeated, Together, physical
from rlfx.recurrence.schedule.tiling import Blocked

CPU = rlfx.target("cpu")
SMALL = replace(CPU, room=replace(CPU.room, at_once=0, in_block=64))
W = jax.random.normal(jax.random.key(0), (2, 3, 3)) / 2.0
X0 = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


def attends(w, x, t):
    """Reads its own past, and multiplies one value with two weights."""
    past = rlfx.series(x, end=0.0)[: t + 1]
    found = jax.nn.softmax(past @ (x @ w[0])) @ past
    return jnp.tanh(found + x @ w[1]), found


def looks_back(w, x, t):
    """Slices of what is complete, after the loop."""
    past = rlfx.series(x, end=0.0)[: t + 1]
    return 0.9 * x + jnp.tanh(x @ w[0]), jnp.sort(jnp.sin(past), 0).sum()


def planned(f, length, target):
    program = rlfx.trace(f, W, X0, length=length, batch=2, loss=False)
    rule = GradientRule(program, Options(), target)
    plan = physical(rule.forward, target, WhileGoing(), batch=2)

    def run(plan):
        def outputs(w, x):
            env = rule._env([w, *program.const_values, x, jax.random.key(0)], whole_extent(program))
            done = execute(plan, env, 0)
            return [done.env[v].data for v in program.aux]

        return outputs

    return program, plan, run


def edited(plan, kind, **fields):
    """The plan with fields of its first node of a kind changed."""
    at = next(i for i, node in enumerate(plan.nodes) if isinstance(node, kind))
    nodes = list(plan.nodes)
    nodes[at] = replace(nodes[at], **fields)
    return replace(plan, nodes=tuple(nodes))


def count(jaxpr, op):
    own = sum(e.primitive is J.primitive(op) for e in jaxpr.eqns)
    return own + sum(count(body, op) for e in jaxpr.eqns for body, _ in J.sub_jaxprs(dict(e.params)))


def ops(fn, op):
    return count(jax.make_jaxpr(fn)(W, X0).jaxpr, op)


def same(got, f, length):
    _, want = rlfx.reference(f, length=length, batch=2, loss=False)(W, X0)
    np.testing.assert_allclose(jnp.moveaxis(got[0], 0, 0), want, rtol=2e-5, atol=2e-6)


def test_sections_are_those_of_the_node(monkeypatch):
    monkeypatch.setattr("rlfx.recurrence.schedule.sections.SMALLEST_TILE", 4)
    _, plan, run = planned(attends, 12, CPU)
    (loop,) = (n for n in plan.nodes if isinstance(n, Repeated))
    assert loop.sections == ((0, 4), (4, 8), (8, 12))
    assert "3 sections of 4 timesteps" in str(plan)
    assert ops(run(plan), "scan") == 3
    for sections in (((0, 4), (4, 12)), ((0, 12),)):
        other = edited(plan, Repeated, sections=sections)
        assert ops(run(other), "scan") == len(sections)
        same(run(other)(W, X0), attends, 12)
    without = edited(plan, Repeated, sections=(), tiled={})
    assert ops(run(without), "scan") == 1
    same(run(without)(W, X0), attends, 12)


def test_products_are_one_where_the_node_says_so():
    _, plan, run = planned(attends, 3, CPU)
    _, apart, run_apart = planned(attends, 3, replace(CPU, rewrites=Rewrites()))
    assert "products with 2 weights are one, with [3, 6]" in str(plan)
    assert "products" not in str(apart)
    assert ops(run(plan), "dot_general") < ops(run_apart(apart), "dot_general")
    # The same plan with the loop as it was scheduled.
    (scheduled,) = (n.loop for n in apart.nodes if isinstance(n, Repeated))
    by_hand = edited(apart, Repeated, loop=scheduled, joined=())
    assert str(jax.make_jaxpr(run_apart(by_hand))(W, X0)) == str(jax.make_jaxpr(run_apart(apart))(W, X0))
    same(run(plan)(W, X0), attends, 3)
    same(run_apart(apart)(W, X0), attends, 3)


def test_blocks_are_those_of_the_node(monkeypatch):
    monkeypatch.setattr("rlfx.recurrence.schedule.tiling.SMALLEST_SECTION", 1)
    _, plan, run = planned(looks_back, 40, SMALL)
    node = next(n for n in plan.nodes if isinstance(n, Together) and n.notes)
    (blocked,) = (p for p in node.parts if isinstance(p, Blocked))
    parts = tuple(p.equations if p is blocked else p for p in node.parts)
    at = plan.nodes.index(node)
    plain = replace(plan, nodes=(*plan.nodes[:at], replace(node, parts=parts), *plan.nodes[at + 1 :]))
    assert ops(run(plan), "sort") == len(blocked.sections) == 2  # of four blocks, and of one
    assert ops(run(plain), "sort") == 1
    for chosen in (plan, plain):
        same(run(chosen)(W, X0), looks_back, 40)


def test_a_runner_is_whatever_the_node_has():
    class Backwards:
        """Gives what it was asked for, and counts."""

        calls = 0

        def run(self, running, state, times, slices):
            Backwards.calls += 1
            return running.by(None).advance(state, times, slices)

    _, plan, run = planned(attends, 5, CPU)
    same(run(edited(plan, Repeated, runner=Backwards()))(W, X0), attends, 5)
    assert Backwards.calls == 1


@pytest.mark.parametrize("form", [rlfx.Plan(), rlfx.Plan("blocks", 4)])
def test_compiled_shows_what_runs(form):
    def loss(w, x, t):
        x = jnp.tanh(x @ w[0])
        return jnp.sum(x**2), x

    text = str(rlfx.compile(loss, length=8, batch=2, plan=form).physical(W, X0))
    acting, learning = text.split("learning\n")
    assert acting.startswith("acting on cpu\n0  ")
    assert ("scan of blocks of 4" in acting) is (form.form == "blocks")
    assert "forward scan" in learning


def test_another_target_has_other_rewrites():
    compiled = rlfx.compile(
        lambda w, x, t: (jnp.sum(x @ w[0] + x @ w[1]), jnp.tanh(x @ w[0])),
        length=4,
        batch=2,
        target=rlfx.target("h200"),
    )
    assert "acting and learning on h200 (gpu)" in str(compiled.physical(W, X0))  # in one pass
    assert "products" not in str(compiled.physical(W, X0))
    assert "on this h200" in str(compiled.explain(W, X0, verbose=True))
