"""``jnp.where(t % n == k, fn(x), y)``: products that are chosen at every n-th timestep alone are computed there alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.cost import PRODUCTS
from rlfx.recurrence.analysis.timed import every_nth
from rlfx.recurrence.rewrite.now_and_then import with_now_and_then
from tests.sampling import met

T, B, N = 7, 2, 8
W = {name: jnp.linspace(low, 0.5, N * N, dtype=jnp.float32).reshape(N, N) for name, low in (("low", -0.5), ("high", -0.3))}
STATE = jnp.linspace(-1.0, 1.0, B * N, dtype=jnp.float32).reshape(B, N)

#: How a program chooses; at which timesteps it takes the first value; and what is known of that.
CHOICES = {
    "the last of five": (lambda t, a, b: jnp.where(t.now % 5 == 4, a, b), lambda t: t % 5 == 4, (5, 4)),
    "the first of five": (lambda t, a, b: jnp.where(t % 5 == 0, a, b), lambda t: t % 5 == 0, (5, 0)),
    "all others": (lambda t, a, b: jnp.where(t.now % 5 != 2, b, a), lambda t: t % 5 == 2, (5, 2)),
    "two conditions": (lambda t, a, b: jnp.where((t.now % 2 == 1) & (t.now % 3 == 2), a, b), lambda t: t % 6 == 5, (6, 5)),
    "a branch": (lambda t, a, b: jax.lax.cond(t.now % 3 == 1, lambda: a, lambda: b), lambda t: t % 3 == 1, None),
    "twice in five": (lambda t, a, b: jnp.where(t.now % 5 < 2, a, b), lambda t: t % 5 < 2, None),
    "once": (lambda t, a, b: jnp.where(t.now == 4, a, b), lambda t: t == 4, None),
    "the next one begins": (lambda t, a, b: jnp.where((t.now + 1) % 5 == 0, a, b), lambda t: t % 5 == 4, (5, 4)),
    "before one began": (lambda t, a, b: jnp.where((t.now - 7) % 3 == 1, a, b), lambda t: t % 3 == 2, (3, 2)),
    "not known": (lambda t, a, b: jnp.where((2 * t.now) % 5 == 3, a, b), lambda t: t % 5 == 4, None),
}


def manager(choose, through):
    """A manager's goal, for some timesteps; ``through``: the gradient goes through what follows."""

    def program(w, carry, t):
        state, goal = carry
        goal = choose(t, jnp.tanh(state @ w["high"]), goal)
        after = jnp.tanh(0.9 * state + (0.2 * goal) @ w["low"])
        kept = (after, goal) if through else jax.tree.map(jax.lax.stop_gradient, (after, goal))
        return jnp.sum((after - 0.1) ** 2), kept

    return program


def bootstrapped(choose, _):
    """What a window ends with is worth: nothing follows from it, so all timesteps are at once."""

    def program(w, carry, t):
        state, goal = carry
        after = jnp.tanh(0.9 * state + 0.1)
        worth = choose(t, jnp.tanh(after @ w["high"]).sum(), jnp.zeros((), after.dtype))
        return jnp.sum((after @ w["low"]) ** 2) - worth, (jax.lax.stop_gradient(after), goal)

    return program


def by_hand(make, takes, t0, through):
    """The mean over timesteps and environments: plain loops, each choice by Python."""

    def loss(w, carry):
        total = 0.0
        for b in range(B):
            now = jax.tree.map(lambda x, b=b: x[b], carry)
            for t in range(t0, t0 + T):
                pick = lambda _, a, other, t=t: a if takes(t) else other  # noqa: E731
                of_one, now = make(pick, through)(w, now, None)
                total += of_one
        return total / (T * B)

    return loss


CARRY = (STATE, jnp.zeros_like(STATE))


@pytest.mark.parametrize(
    ("name", "make", "through", "t0"), met(list(CHOICES), [manager, bootstrapped], [False, True], [0, 3])
)
def test_values_and_gradients_are_those_of_loops(name, make, through, t0):
    choose, takes, _ = CHOICES[name]
    fn = rlfx.compile(make(choose, through), length=T, batch=B)
    found = jax.jit(jax.value_and_grad(lambda w: fn(w, CARRY, t0=t0)[0]))(W)
    wanted = jax.jit(jax.value_and_grad(lambda w: by_hand(make, takes, t0, through)(w, CARRY)))(W)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, wanted)


PLANS = [
    (manager, False, rlfx.Plan("blocks", 2)), (manager, False, rlfx.Plan()), (manager, True, rlfx.Plan()),
    (manager, True, rlfx.Plan("one pass")), (bootstrapped, False, rlfx.Plan()),
    (bootstrapped, False, rlfx.Plan("blocks", 3, 1)), (bootstrapped, False, rlfx.Plan("blocks", 2)),
]  # fmt: skip


@pytest.mark.parametrize(("make", "through", "plan"), PLANS)
def test_under_every_plan(make, through, plan):
    program = make(CHOICES["the last of five"][0], through)
    fns = rlfx.compile(program, length=T, batch=B, plan=plan), rlfx.reference(program, length=T, batch=B)
    found, wanted = (jax.jit(jax.value_and_grad(lambda w, fn=fn: fn(w, CARRY, t0=1)[0]))(W) for fn in fns)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, wanted)


@pytest.mark.parametrize("name", CHOICES)
def test_when_it_is_is_known_whatever_t0_is(name):
    choose, _, known = CHOICES[name]
    program = rlfx.trace(manager(choose, False), W, CARRY, length=T, batch=B)
    rewritten = with_now_and_then(program)
    branches = [e for e in rewritten.equations if e.op is J.COND and e not in program.equations]
    assert [every_nth(e.inputs[0], rewritten).get(True) for e in branches] == ([] if known is None else [known])
    assert with_now_and_then(rewritten) is rewritten
    # The manager's product is in the branch, and the worker's is not.
    outside = sum(e.op in PRODUCTS for e in rewritten.equations)
    assert outside == (2 if known is None else 1)


def test_all_at_once_the_timesteps_that_need_it_compute_it():
    fn = rlfx.compile(bootstrapped(CHOICES["the last of five"][0], False), length=T, batch=B, plan=rlfx.Plan())
    assert "of 5 timesteps one computes what is needed where t % 5 == 4" in str(fn.physical(W, CARRY))
    jaxpr = J.without_dead_code(jax.make_jaxpr(jax.grad(lambda w: fn(w, CARRY)[0]))(W))
    products = [e for e in J.equations_in({"jaxpr": jaxpr}) if e.primitive in PRODUCTS]
    rows = [e.outvars[0].aval.shape for e in products if e.outvars[0].aval.shape != (N, N)]
    assert sorted(rows) == [(2, B, N), (T * B, N)]  # of t = 4, and of one beyond the end; of all points


def test_what_a_recurrence_begins_with_leaves_the_loop():
    """The branch is computed for all timesteps at once, and the loop makes the choice; a manager of its state stays in it."""

    def program(params, carry, t):
        w, xs = params
        state = jnp.where(t.now % 3 == 0, jnp.tanh(rlfx.inputs(xs)[t] @ w["high"]), carry)
        after = jnp.tanh(0.9 * state + (0.2 * state) @ w["low"])
        return jnp.sum((after - 0.1) ** 2), after

    xs = jnp.cos(jnp.arange(T * B * N, dtype=W["low"].dtype)).reshape(T, B, N)
    own = manager(CHOICES["the last of five"][0], True)
    fn, other = (rlfx.compile(f, length=T, batch=B) for f in (program, own))
    assert "of 3 timesteps one computes what is needed where t % 3 == 0" in str(fn.physical((W, xs), STATE))
    assert "one computes what is needed" not in str(other.physical(W, CARRY))
    once = with_now_and_then(rlfx.trace(program, (W, xs), STATE, length=T, batch=B))
    assert with_now_and_then(once) is once
    fns = fn, rlfx.reference(program, length=T, batch=B)
    found, wanted = (jax.jit(jax.value_and_grad(lambda w, fn=fn: fn((w, xs), STATE)[0]))(W) for fn in fns)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, wanted)


def test_what_others_need_too_is_computed_for_all():
    def program(w, carry, t):
        state, goal = carry
        worth = jnp.tanh(state @ w["high"]).sum()
        return jnp.where(t.now % 5 == 4, worth, 0.0) + worth**2, (jax.lax.stop_gradient(jnp.tanh(state)), goal)

    traced = rlfx.trace(program, W, CARRY, length=T, batch=B)
    assert with_now_and_then(traced) is traced


def test_numbers_are_drawn_as_before():
    """Noise that a branch adds is that of the same keys."""

    def program(w, carry, t):
        state, goal = carry
        noise = 0.1 * jax.random.normal(t.key_for("goal"), (N,), state.dtype)
        goal = jnp.where(t.now % 4 == 0, jnp.tanh(state @ w["high"]) + noise, goal)
        after = jnp.tanh(0.9 * state + (0.2 * goal) @ w["low"])
        return jnp.sum(after**2), (after, goal)

    key = jax.random.key(5)
    found, wanted = (make(program, length=T, batch=B)(W, CARRY, key)[0] for make in (rlfx.compile, rlfx.reference))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_what_is_read_elsewhere_is_there_for_all_timesteps():
    """Of data, of other timesteps, of the product of a series."""
    data = jnp.cos(jnp.arange(T * B * N, dtype=W["low"].dtype)).reshape(T, B, N)

    def program(params, carry, t):
        w, xs = params
        state, goal = carry
        x = rlfx.inputs(xs)[t]
        seen = rlfx.series(x @ w["low"], start=0.0)
        value = jnp.tanh((seen[t - 1] + x) @ w["high"]).sum() + jnp.tanh(x @ w["high"]).sum()
        total = jnp.where((t.now + 1) % 2 == 0, value, 0.0)
        return total + jnp.where(t.now % 3 != 1, state.sum(), (x @ w["high"]).sum()), (jnp.tanh(state), goal)

    fns = (make(program, length=T, batch=B) for make in (rlfx.compile, rlfx.reference))
    found, wanted = (jax.value_and_grad(lambda w, fn=fn: fn((w, data), CARRY)[0])(W) for fn in fns)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, wanted)
