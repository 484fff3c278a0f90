"""Programs as accelerators run them, on this machine: other rewrites and schedules, the same meaning."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.recurrence.schedule.physical import Repeated
from tests import strategies
from tests.machines import AS_A_GPU
from tests.recurrence.test_generated import QUICK, mismatches, outcome
from tests.sampling import slow

CPU, GPU = rlfx.target("cpu"), rlfx.target("h200")


def acting(p, c, t):
    """A critic that the loop can do without, and a policy that it cannot, with a branch on what it sees."""
    logits = p["policy"] @ jnp.tanh(p["shared"] @ c)
    action = jax.random.categorical(t.key_for("a"), logits)
    value = jax.lax.cond(c[0] > 0, lambda: (p["critic"] @ jnp.tanh(p["hidden"] @ c)).sum(), lambda: c.sum())
    later = jnp.sin(c + 0.1 * action.astype(jnp.float32))
    returns = rlfx.discounted_sum(rlfx.series(c[0])[t:], 0.9 * jnp.ones_like(rlfx.series(c[0])[t:]))
    loss = (value - jax.lax.stop_gradient(returns)) ** 2 - jax.nn.log_softmax(logits)[action]
    return loss, jax.lax.stop_gradient(later), action


def arguments(width=4):
    draw = lambda i, *shape: 0.3 * jax.random.normal(jax.random.key(i), shape)  # noqa: E731
    p = {
        "policy": draw(0, 2, width),
        "shared": draw(1, width, width),
        "critic": draw(2, 1, 8),
        "hidden": draw(3, 8, width),
    }
    return p, draw(4, 3, width), jax.random.key(5)


def loops(fn):
    """The operations of acting's loops."""
    nodes = [
        n for n in fn.physical(*arguments()).acting.nodes if isinstance(n, Repeated) and str(n.iteration).startswith("scan")
    ]
    return [e.op.name for n in nodes for e in n.equations]


def test_what_can_leaves_the_loop_where_operations_are_slow_to_start():
    fns = [rlfx.compile(acting, length=8, batch=3, target=target) for target in (CPU, AS_A_GPU)]
    here, there = map(loops, fns)
    assert here.count("dot_general") == there.count("dot_general") == 2  # the policy
    assert "cond" not in there
    assert len(there) < len(here)
    assert not {"random_bits", "random_fold_in"} & set(there)
    results = [jax.jit(jax.value_and_grad(fn, has_aux=True))(*arguments()) for fn in fns]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), *results)


def test_under_a_budget_nothing_is_stored_to_start_less():
    fns = [rlfx.compile(acting, length=8, batch=3, target=AS_A_GPU, memory_budget=budget) for budget in (None, 1 << 20)]
    speedy, small = (fn.trace(*arguments()).directives for fn in fns)
    assert (speedy.start, speedy.ahead) == (int(GPU.rates.overhead * GPU.rates.bandwidth), GPU.room.draws)
    assert (small.start, small.ahead) == (None, None)


def test_what_costs_more_to_store_stays():
    """An image that only the loop sees: one number of it is kept."""

    def draws(p, c, t):
        image = jnp.outer(jnp.sin(c), jnp.cos(p["x"]))
        return image.sum(), c + 0.1, image.max()

    p, c = {"x": jnp.ones(4096)}, jnp.ones((2, 256))
    for overhead, inside in ((0.0, True), (1.0, False)):
        rates = dataclasses.replace(AS_A_GPU.rates, overhead=overhead)
        fn = rlfx.compile(draws, length=4, batch=2, target=dataclasses.replace(AS_A_GPU, rates=rates))
        nodes = [n for n in fn.physical(p, c).acting.nodes if isinstance(n, Repeated)]
        assert ("reduce_max" in [e.op.name for n in nodes for e in n.equations]) == inside


@pytest.mark.parametrize("first", [0, *map(slow, range(20, 600, 20))])
def test_generated_programs(first):
    found = {}
    for seed in range(first, first + 20):
        p = strategies.program(seed)
        expected = outcome(rlfx.compile(p.function, **p.options()), p, jit=True, options=QUICK)
        got = outcome(rlfx.compile(p.function, target=AS_A_GPU, **p.options()), p, jit=True, options=QUICK)
        found[seed] = mismatches(got, expected)
    assert not {seed: text for seed, text in found.items() if text}
