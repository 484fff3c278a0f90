"""The static bound of temporary bytes: it ranks plans as XLA's own numbers do, and its rules are those of any compiler."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import rlfx
from rlfx.recurrence.memory.estimate import estimate_temp_bytes, largest_values
from tests.recurrence import test_budget as budget
from tests.recurrence import test_through_time as recurrent
from tests.sampling import spread

pytestmark = pytest.mark.optimised

N = 256
BLOCKS = [rlfx.Plan(), *(rlfx.Plan("blocks", n) for n in (2, 8, 32))]


def direct():
    """Programs, what they are compiled for, and plans that are legal for them."""
    sizes = {"length": budget.LENGTH, "batch": budget.BATCH}
    replay = [rlfx.Plan("replay", n) for n in (2, 8)]
    yield budget.program, sizes, budget.arguments(), [*BLOCKS, *replay]
    yield budget.n_step, sizes, budget.arguments(), [*BLOCKS, *replay, rlfx.Plan("stream", 2), rlfx.Plan("stream", 8)]


def through_time():
    """The same, through whose state the gradient flows."""
    h, params = (
        jnp.zeros((32, 64)),
        {"w": jnp.eye(64), "u": jnp.ones((64, 2)), "v": jnp.ones(64), "start": jnp.ones(64)},
    )
    for f, carry in ((recurrent.elman, h), (recurrent.stacked_layers, (h, (h, h)))):
        yield f, {"length": 120, "batch": 32}, (params, carry), [*BLOCKS, rlfx.Plan("blocks", 8, 8)]


@pytest.mark.parametrize(
    ("learners", "least"), spread([(direct, 30), (lambda: [*direct(), *through_time()], 50)], 1), ids=["direct", "all"]
)
def test_plans_are_ranked_as_by_xla(learners, least):
    """At least nine of ten pairs that differ by 2% or more."""
    alike = []
    for f, sizes, arguments, plans in learners():
        evaluators = [rlfx.compile(f, **sizes, plan=plan).explain(*arguments, measure=True) for plan in plans]
        rows = [(e.measured_bytes, e.predicted_bytes) for e in evaluators]
        for (exact, bound), (other, other_bound) in itertools.combinations(rows, 2):
            if max(exact, other) > 1.02 * min(exact, other):
                alike.append((exact < other) == (bound < other_bound))
    assert len(alike) >= least
    assert sum(alike) >= 0.9 * len(alike)


def test_arguments_and_results_are_no_temporaries():
    assert estimate_temp_bytes(jax.make_jaxpr(lambda x: x + 1.0)(jnp.ones((1024, 1024)))) == 0


def test_both_branches_are_not_counted_together():
    def branch(n):
        return lambda x: (jnp.ones((n, 64)) @ x).sum()

    def run(p, x):
        return jax.lax.cond(p, branch(64), branch(1024), x)

    wide = estimate_temp_bytes(jax.make_jaxpr(branch(1024))(jnp.ones((64, 64))))
    assert estimate_temp_bytes(jax.make_jaxpr(run)(True, jnp.ones((64, 64)))) == pytest.approx(wide, abs=64)


def test_the_largest_values_come_with_shape_and_source_line():
    def loss(w, x):
        h = x @ w  # the largest
        return jnp.sum(jnp.sin(h) @ w.T)

    found = largest_values(jax.make_jaxpr(loss)(jnp.ones((8, 512)), jnp.ones((N, 8))), 1)
    assert found[0].bytes == 4 * N * 512
    assert found[0].shape == (N, 512)
    assert "test_estimate.py" in found[0].source
    assert str(found[0]).startswith("512 KiB  f32[256,512]  test_estimate.py:")


# -- one rule each ---------------------------------------------------------------------------------------------------

SQUARE = 4 * N * N


def expensive_read_twice(x):
    h = jnp.tanh(x)
    return ((h @ x) * (h @ x.T)).sum()


def one_loop(x):
    return jnp.sum(jnp.sin(x) * 2.0 + x)


def over_what_dies(x):
    return jnp.sum(jnp.exp(x @ x) @ x)


def in_place(x):
    return jnp.sum(jax.lax.fori_loop(0, 3, lambda i, c: c.at[i].set(2.0), x) @ x)


def stacked(x):
    return jnp.sum(jax.lax.scan(lambda c, row: (c + row, c), x[0], x)[1] @ x)


def temporaries_of_a_body(x):
    return jax.lax.scan(lambda c, _: (c + jnp.sum(x @ x @ x), None), 0.0, None, length=5)[0]


#: A program, and how many arrays of its size are in memory at once.
RULES = [
    (expensive_read_twice, 3),  # tanh, and two products
    (one_loop, 0),
    (over_what_dies, 2),  # exp is written over the first product
    (in_place, 2),  # a copy of the argument, and a product
    (stacked, 2),
    (temporaries_of_a_body, 2),
]


@pytest.mark.parametrize(("program", "arrays"), RULES)
def test_live_ranges(program, arrays):
    assert estimate_temp_bytes(jax.make_jaxpr(program)(jnp.ones((N, N)))) == pytest.approx(
        arrays * SQUARE, abs=4 * N + 64
    )
