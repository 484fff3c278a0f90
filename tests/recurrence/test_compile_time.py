"""Compile time and depth: planning takes work in proportion to the equations, whatever their shape, and never recurses.

Work is counted in Python calls, not seconds, so that the tests are exact on a busy machine.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import envs
from rlfx.recurrence.gradient.rule import GradientRule
from rlfx.recurrence.memory.estimate import estimate_temp_bytes
from rlfx.recurrence.plan.planner import Options, evaluator_of
from rlfx.recurrence.schedule.plan import Plan
from tests.sampling import slow, spread

KEY = jax.random.key(0)
S = rlfx.series


def chain(n, x):
    for _ in range(n):
        x = jnp.sin(x)
    return x


def diamonds(n, x):
    for _ in range(n // 3):
        x = jnp.sin(x) + jnp.cos(x)
    return x


def draw(t):
    return jax.random.normal(t.key)


def sums_of_prefixes(n, x):
    total = jnp.float32(0.0)
    for _ in range(n // 3):
        x = jnp.sin(x)
        total += x.sum()
    return total


def shift_register(n, c, new):
    return dict(zip(c, [new, *c.values()], strict=False))


def reads(n, x, t):
    return sum(x[t - 1 - i % 3] for i in range(n // 2))


def behind(n, x, t):
    for _ in range(n // 4):
        x = S(1.1 * x, start=0.0)[t - 1]
    return x


def ahead(n, x, t):
    for _ in range(n // 4):
        x = S(1.1 * x, end=0.0)[t + 1]
    return x


def to_and_fro(n, x, t):
    """One loop in the future after one in the past after ...: stages."""
    for _ in range(n // 20):
        x = rlfx.solve(lambda y, x=x: 0.5 * y[t - 1] + x, start=0.0)
        x = rlfx.solve(lambda y, x=x: 0.5 * y[t + 1] + x, end=0.0)
    return x


#: Programs of about n equations.
SHAPES = {
    "a chain on the carry": lambda n: lambda p, c, t: (p * c, chain(n, c)),
    "diamonds on the carry": lambda n: lambda p, c, t: (p * c, diamonds(n, c)),
    "a chain on the way of the gradient": lambda n: lambda p, c, t: (chain(n, p * c), 0.9 * c),
    "diamonds on the way of the gradient": lambda n: lambda p, c, t: (diamonds(n, p * c), 0.9 * c),
    "a chain through which the gradient flows back in time": lambda n: lambda p, c, t: (c, chain(n, p * c)),
    "a chain of parameters": lambda n: lambda p, c, t: (chain(n, p) * c, 0.9 * c),
    "diamonds for the aux": lambda n: lambda p, c, t: (p * c, 0.9 * c, diamonds(n, c)),
    "a chain on a draw": lambda n: lambda p, c, t: (p * c + chain(n, draw(t)), 0.9 * c),
    "diamonds on a draw": lambda n: lambda p, c, t: (p * c + diamonds(n, draw(t)), 0.9 * c),
    "a chain on a draw in the loop": lambda n: lambda p, c, t: (p * c, 0.9 * c + chain(n, draw(t))),
    "diamonds on a draw in the loop": lambda n: lambda p, c, t: (p * c, 0.9 * c + diamonds(n, draw(t))),
    "diamonds on t in the loop": lambda n: lambda p, c, t: (p * c, 0.9 * c + diamonds(n, 1.0 * t)),
    "many draws": lambda n: lambda p, c, t: (p * c, c + sum(chain(8, draw(t) + i) for i in range(n // 9))),
    "a chain on a slice": lambda n: lambda p, c, t: (chain(n, S(p * c)[t:]).sum(), 0.9 * c),
    "diamonds on a slice": lambda n: lambda p, c, t: (diamonds(n, S(p * c)[t:]).sum(), 0.9 * c),
    "diamonds on a slice that is not lifted": lambda n: lambda p, c, t: (diamonds(n, S(p * c)[:t]).prod(), 0.9 * c),
    "many sums of one chain on a slice": lambda n: lambda p, c, t: (sums_of_prefixes(n, S(p * c)[t:]), 0.9 * c),
    "a chain beyond the end": lambda n: lambda p, c, t: (S(chain(n, p * c))[t + 1], 0.9 * c),
    "a chain before the start": lambda n: lambda p, c, t: (S(p * c, start=chain(n, c))[t - 1], 0.9 * c),
    "diamonds before the start": lambda n: lambda p, c, t: (S(p * c, start=diamonds(n, c))[t - 1], 0.9 * c),
    "many reads of one series": lambda n: lambda p, c, t: (reads(n, S(p * c, start=0.0), t), 0.9 * c),
    "many series": lambda n: lambda p, c, t: (sum(S(p * c + i, start=0.0)[t - 1] for i in range(n // 5)), 0.9 * c),
    "many series beyond the end": lambda n: lambda p, c, t: (sum(S(p * c + i)[t + 1] for i in range(n // 5)), 0.9 * c),
    "series of series": lambda n: lambda p, c, t: (behind(n, p * c, t), 0.9 * c),
    "series of series ahead": lambda n: lambda p, c, t: (ahead(n, p * c, t), 0.9 * c),
    "loops there and back": lambda n: lambda p, c, t: (to_and_fro(n, p * c, t), 0.9 * c),
}  # fmt: skip


def planned(f, carry=1.0):
    """The program, planned for its value and its gradient."""
    program = rlfx.trace(f, jnp.float32(2.0), jax.tree.map(jnp.float32, carry), KEY, length=4)
    rule = GradientRule(program, Options(), rlfx.target("cpu"))
    rule.forward  # noqa: B018
    rule.plan(rule.learner(frozenset(program.params)), program.params)
    return rule


def calls(fn):
    """How many Python functions are called, those in C apart."""
    count = 0

    def one_more(frame, event, arg):
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(one_more)
    try:
        fn()
    finally:
        sys.setprofile(before)
    return count


def test_planning_takes_work_in_proportion_to_the_equations():
    for fn in SHAPES.values():
        planned(fn(8))  # what is done once
    ratios = {}
    for name, fn in SHAPES.items():
        once, twice = (calls(lambda n=n, fn=fn: planned(fn(n))) for n in (60, 120))
        ratios[name] = twice / once
    assert max(ratios.values()) < 2.3, ratios


def test_a_shift_register_in_the_carry():
    """What varies with the environment, or with t, arrives at its last element through all others."""

    def f(p, c, t):
        return p * c[f"k{len(c) - 1}"], shift_register(len(c), c, draw(t))

    once, twice = (
        calls(lambda n=n: planned(f, {f"k{i}": 0.0 for i in sorted(range(n), key=lambda i: f"k{i}")})) for n in (40, 80)
    )
    assert twice / once < 2.6


@pytest.mark.parametrize("n", [500, 1000, 2000])
def test_deep_programs_are_planned_without_recursion(n):
    for name in (
        "diamonds on a draw in the loop",
        *(("a chain on a slice", "a chain before the start") if n == 2000 else ()),
    ):
        program = rlfx.trace(SHAPES[name](n), jnp.float32(2.0), jnp.float32(1.0), KEY, length=4)
        assert GradientRule(program, Options(), rlfx.target("cpu")).forward.stages


def test_deep_programs_are_right():
    """Chains of 800 operations on a draw, a start value, a slice and a value beyond the end."""

    def repeated(x):
        for _ in range(400):
            x = 0.999 * x + 0.001
        return x

    def f(p, c, t):
        late = S(repeated(p * c))
        return (
            S(p * c, start=repeated(c))[t - 1] + late[t + 1] + repeated(S(p * c)[t:]).sum(),
            c + repeated(draw(t)),
        )

    _, draws = rlfx.unroll(lambda p, c, t: (c, draw(t)), length=3)(None, None, KEY)
    step = lambda x: 0.999**400 * x + (1 - 0.999**400)  # noqa: E731
    c = [1.0]
    for d in draws:
        c.append(c[-1] + step(d))
    total = 0.0
    for t in range(3):
        total += (step(1.0) if t == 0 else 2.0 * c[t - 1]) + step(2.0 * c[t + 1]) + sum(step(2.0 * x) for x in c[t:3])
    loss, _ = rlfx.compile(f, length=3, reduce="sum")(jnp.float32(2.0), jnp.float32(1.0), KEY)
    np.testing.assert_allclose(loss, total, rtol=1e-4)


def test_a_shuffle_inside_a_timestep():
    def f(p, c, t):
        order = rlfx.shuffle(t.key, 11)
        return c + order[0], order

    total, orders = rlfx.unroll(f, length=3)(None, jnp.int32(0), KEY)
    assert (np.sort(orders, axis=1) == np.arange(11)).all()
    assert total == orders[:, 0].sum()


def test_estimates_of_deep_programs():
    rule = planned(SHAPES["diamonds on the carry"](1200))
    evaluator = evaluator_of(rule, rule.program.params)
    assert estimate_temp_bytes(evaluator.jaxpr(Plan())) < 10_000


@pytest.mark.parametrize("least", spread([250, 500], 1))
def test_a_learner_of_2000_equations_is_planned_and_estimated_in_proportion(least):
    """Gradients through time, with 250, 500 and 1,000 equations in the loop (up to 2,000): n log n at most."""

    def work(n):
        def f(p, c, t):
            h = c
            for _ in range(n // 2):
                h = jnp.sin(h * p)
            return h, h

        def plan():
            fn = rlfx.compile(f, length=40, batch=8)
            assert fn.explain(jnp.float32(1.0), jnp.ones(8)).predicted_bytes > 0

        return calls(plan)

    work(8)
    few, more, most = map(work, (least, 2 * least, 4 * least))
    assert more / few < 2.3
    assert most / more < 2.3


@pytest.mark.parametrize("f", [chain, diamonds], ids=["chain", "diamonds"])
def test_blocks_of_a_deep_loss(f):
    """Of parameters alone, of what has the batch, and of a number repeated for all of the batch."""
    n, x = 1200, jnp.arange(4.0)

    def loss(p, x):
        return jnp.mean(f(n, p) * x + f(n, x) + f(n, jnp.broadcast_to(p, x.shape)) * x)

    whole, parts = jax.make_jaxpr(loss), jax.make_jaxpr(rlfx.incrementalize(loss, blocks=2))
    once, twice = len(whole(2.0, x).eqns), len(parts(2.0, x).eqns)
    assert n < once < 5 * n
    assert twice < 2 * once


@pytest.mark.parametrize(
    "name", ["inverted_pendulum", slow("reacher"), slow("ant")]
)
def test_a_brax_environment_is_lowered(name):
    """A scan by hand takes 0.9 million calls on the first of them, this 2.2; it never came back."""
    pytest.importorskip("brax")
    env = envs.make(f"brax/{name}")
    state = env.reset(KEY)

    def f(p, c, t):
        c, step = env.step(t.key_for("env"), c, env.action_space.sample(t.key_for("act")))
        return c, step.reward

    assert calls(lambda: jax.jit(rlfx.unroll(f, length=4)).lower(None, state, KEY)) < 6_000_000
