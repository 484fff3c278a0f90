"""Gradients through time in blocks: those of the reference, with the activations of one block."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx.errors import ScheduleError

LENGTH, BATCH, HIDDEN = 7, 4, 3


def weights(dtype=jnp.float32) -> dict:
    rng = np.random.RandomState(0)
    shapes = {"w": (HIDDEN, HIDDEN), "u": (HIDDEN, 2), "v": (HIDDEN,), "start": (HIDDEN,)}
    return {name: jnp.asarray(0.7 * rng.randn(*shape), dtype) for name, shape in shapes.items()}


def observation(t: Any) -> jax.Array:
    return jax.random.normal(t.key_for("obs"), (2,))


def cell(p, h, x):
    return jnp.tanh(p["w"] @ h + p["u"] @ x.astype(h.dtype))


def elman(p, h, t):
    """One layer, and a stopped value of the next timestep in the loss."""
    h = cell(p, h, observation(t))
    value = rlfx.series(p["v"] @ h)
    target = jax.lax.stop_gradient(1.0 + 0.9 * value[t + 1])
    return (value[t] - target) ** 2, h


def with_resets(p, carry, t):
    """Episodes that end inside the rollout, and a counter beside the hidden state."""
    h, count = carry
    h = cell(p, h, observation(t))
    done = count % 3 == 2
    return jnp.sum(p["v"] * h) ** 2, (jnp.where(done, p["start"], h), jnp.where(done, 0, count + 1))


def stacked_layers(p, carry, t):
    """Two layers, the second with two leaves of state."""
    h, (c, m) = carry
    h = cell(p, h, observation(t))
    c = jax.nn.sigmoid(p["v"] * m) * c + jnp.tanh(p["w"] @ m + h)
    m = jnp.sin(c)
    return jnp.sum(jnp.cos(m) * p["v"]), (h, (c, m))


def named(p, x, t):
    """No carry: a series that is defined by itself, with a start from the parameters."""
    h = rlfx.solve(lambda h: cell(p, h[t - 1], observation(t) + x), start=p["start"])
    return jnp.sum(h * p["v"]), x


def across(p, h, t):
    """Environments that see each other's mean."""
    h = cell(p, h, observation(t)) + 0.1 * rlfx.mean(h, "b")
    return rlfx.max(h[0], "b") * jnp.sum(h * p["v"]), h


def shared(p, carry, t):
    """A running mean of what all environments share."""
    h, moment = carry
    h = cell(p, h, observation(t))
    moment = 0.9 * moment + 0.1 * rlfx.mean(h, "b")
    return jnp.sum((h - moment) ** 2), (h, rlfx.Shared(moment))


def small(dtype=jnp.float32):
    return jnp.full((BATCH, HIDDEN), 0.1, dtype) * jnp.arange(1, BATCH + 1, dtype=dtype)[:, None]


PROGRAMS = {
    "elman": (elman, small()),
    "resets": (with_resets, (small(), jnp.arange(BATCH))),
    "stacked layers": (stacked_layers, (small(), (small(), small()))),
    "named": (named, jnp.arange(BATCH, dtype=jnp.float32)),
    "across": (across, small()),
    "shared": (shared, (small(), rlfx.Shared(jnp.zeros(HIDDEN)))),
}
PLANS = [rlfx.Plan("blocks", k, n) for k, n in ((1, None), (3, None), (7, None), (2, 2))]


def gradient(make: Any, program: Any, carry: Any, length: int = LENGTH, wrt: Any = 0, **options) -> Any:
    fn = make(program, length=length, batch=BATCH, **options)
    differentiate = jax.value_and_grad(lambda p, c: fn(p, c, jax.random.key(1)), wrt, has_aux=True)
    run = jax.jit(differentiate) if make is rlfx.compile else differentiate
    return run(weights(), carry)


def assert_close(one: Any, other: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), one, other)


@pytest.mark.parametrize("name", PROGRAMS)
def test_blocks_of_any_length_have_the_gradient_of_the_reference(name):
    program, carry = PROGRAMS[name]
    expected = gradient(rlfx.reference, program, carry)
    for plan in PLANS:
        if plan.environments and name in ("across", "shared"):
            with pytest.raises(ScheduleError, match="needs all environments"):
                gradient(rlfx.compile, program, carry, plan=plan)
        else:
            assert_close(gradient(rlfx.compile, program, carry, plan=plan), expected)


def test_the_gradient_is_that_of_finite_differences():
    def free(p, h, t):
        h = cell(p, h, observation(t))
        return jnp.sum(p["v"] * h) ** 2, h

    loss = rlfx.compile(free, length=5, batch=BATCH, plan=rlfx.Plan("blocks", 2))
    fn, p = jax.jit(lambda p: loss(p, small(), jax.random.key(1))[0]), weights()
    found = jax.grad(fn)(p)
    for name, at in (("w", (0, 1)), ("u", (2, 0)), ("v", (1,))):
        step = 1e-2
        moved = [fn({**p, name: p[name].at[at].add(s)}) for s in (step, -step)]
        np.testing.assert_allclose(found[name][at], (moved[0] - moved[1]) / (2 * step), rtol=2e-2, atol=1e-3)


def test_the_gradient_with_respect_to_the_first_state():
    expected = gradient(rlfx.reference, elman, small(), wrt=(0, 1))
    assert_close(gradient(rlfx.compile, elman, small(), wrt=(0, 1), plan=rlfx.Plan("blocks", 3)), expected)


def test_environments_that_end_by_themselves():
    def ends(p, carry, t):
        h, left = carry
        h = cell(p, h, observation(t))
        return jnp.log(jnp.sum(h**2)) + jnp.sum(p["v"] * h), (h, left - 1)

    options = {"until": lambda carry: carry[1] <= 0}
    carry = small(), jnp.array([2, 7, 1, 4])
    expected = gradient(rlfx.reference, ends, carry, **options)
    for k in (1, 2, 3):
        assert_close(gradient(rlfx.compile, ends, carry, plan=rlfx.Plan("blocks", k), **options), expected)


def test_on_a_mesh_under_vmap_and_in_second_order():
    plan = rlfx.Plan("blocks", 3)
    one = gradient(rlfx.compile, shared, PROGRAMS["shared"][1])
    assert_close(
        gradient(rlfx.compile, shared, PROGRAMS["shared"][1], plan=plan, mesh=jax.make_mesh((2,), ("b",))), one
    )
    plain, blocks = (rlfx.compile(stacked_layers, length=5, batch=BATCH, plan=p) for p in (rlfx.Plan(), plan))
    seeds = jax.random.split(jax.random.key(0), 2)
    carry = PROGRAMS["stacked layers"][1]

    def of_seeds(fn):
        return jax.jit(jax.vmap(jax.grad(lambda p, k: fn(p, carry, k)[0]), (None, 0)))(weights(), seeds)

    assert_close(of_seeds(blocks), of_seeds(plain))

    def curvature(fn):
        slope = jax.grad(lambda p: fn(p, carry, seeds[0])[0])
        return jax.jit(jax.grad(lambda p: sum(jnp.sum(x**2) for x in jax.tree.leaves(slope(p)))))(weights())

    assert_close(curvature(blocks), curvature(plain))


def test_gradients_of_half_precision_are_added_up_in_single():
    """2,048 steps of 1: in bfloat16 the sum would stop at 256."""
    count = lambda p, c, t: (p * jnp.bfloat16(1) + 0 * c, p * 0 + c)  # noqa: E731
    for k in (1, 64):
        fn = rlfx.compile(count, length=2048, reduce="sum", plan=rlfx.Plan("blocks", k))
        assert jax.jit(jax.grad(lambda p, fn=fn: fn(p, jnp.bfloat16(0))[0]))(jnp.bfloat16(1)) == 2048


def test_remat_is_a_transform_with_the_same_meaning():
    expected = gradient(rlfx.compile, elman, small())
    assert_close(gradient(rlfx.compile, rlfx.remat(elman, every=2), small()), expected)
    fn = rlfx.compile(rlfx.remat(elman, every=2), length=LENGTH, batch=BATCH)
    assert fn.plan(weights(), small(), jax.random.key(0)) == rlfx.Plan("blocks", 2)


def bootstraps(p, h, t):
    h = cell(p, h, observation(t))
    return rlfx.series(jnp.sum(h))[t + 1], h


def sums_to_the_end(p, h, t):
    value = rlfx.series(jnp.sum(h * p["v"]))
    return rlfx.discounted_sum(value[t:], jnp.full_like(value[t:], 0.9)), cell(p, h, observation(t))


def reads_further_back(p, h, t):
    return rlfx.series(p["v"] @ h, start=0.0)[t - 2], cell(p, h, observation(t))


@pytest.mark.parametrize("program", [bootstraps, sums_to_the_end, reads_further_back])
def test_what_blocks_cannot_do_is_refused(program):
    with pytest.raises(ScheduleError, match="cannot run by the plan 'blocks': the gradient flows through"):
        gradient(rlfx.compile, program, small(), plan=rlfx.Plan("blocks", 2))


@pytest.mark.optimised
def test_memory_is_that_of_a_block():
    """No array of the compiled learner has the activations of all timesteps."""
    length, hidden = 512, 32

    def wide(p, h, t):
        x = jax.random.normal(t.key, (4,))
        z = jnp.tanh(p["a"] @ h + p["b"] @ x)
        h = z * h + (1 - z) * jnp.tanh(p["c"] @ h)
        return jnp.sum(h**2), h

    p = {"a": jnp.eye(hidden), "b": jnp.ones((hidden, 4)), "c": jnp.eye(hidden)}
    temp = {}
    for plan in (rlfx.Plan(), rlfx.Plan("blocks", 16)):
        fn = rlfx.compile(wide, length=length, batch=BATCH, plan=plan)
        step = jax.jit(jax.grad(lambda p, fn=fn: fn(p, jnp.zeros((BATCH, hidden)), jax.random.key(0))[0]))
        temp[plan.form] = step.lower(p).compile().memory_analysis().temp_size_in_bytes
    assert temp["blocks"] < temp["at once"] / 8, temp


@pytest.mark.optimised
def test_a_budget_is_met_by_blocks():
    def gru(p, h, t):
        h = cell(p, h, observation(t))
        return jnp.sum(h * p["v"]), h

    for length in (509, 512):  # a prime one, too
        plain = rlfx.compile(gru, length=length, batch=BATCH, plan=rlfx.Plan())
        budget = 18 * 4 * length  # its keys are 8 * BATCH bytes a timestep, whatever the plan is
        assert budget < plain.explain(weights(), small(), measure=True).measured_bytes / 4
        fitted = rlfx.compile(gru, length=length, batch=BATCH, memory_budget=budget)
        found = fitted.explain(weights(), small(), measure=True)
        assert found.measured_bytes <= budget
        assert found.plan.form == "blocks"


@pytest.mark.optimised
def test_a_budget_below_the_states_between_the_shortest_blocks_is_met():
    """By default blocks are short where the cache is small; a budget takes longer ones, between which fewer states are kept."""

    def memory(p, h, t):
        h = jnp.tanh(p["w"] @ h + p["u"] @ observation(t))
        return jnp.sum(h**2), h

    length, hidden, cpu = 512, 64, rlfx.target("cpu")
    p = {"w": jnp.eye(hidden) / 2, "u": jnp.ones((hidden, 2))}
    args = p, jnp.zeros((BATCH, hidden)), jax.random.key(1)
    target = replace(cpu, room=replace(cpu.room, tile=1, unmapped=1))  # or one pass would keep all activations
    chosen = rlfx.compile(memory, length=length, batch=BATCH, target=target)
    assert chosen.plan(*args) == rlfx.Plan("blocks", 1)
    states = 4 * length * BATCH * hidden
    fitted = rlfx.compile(memory, length=length, batch=BATCH, target=target, memory_budget=states // 2)
    found = fitted.explain(*args, measure=True)
    assert found.plan.form == "blocks"
    assert found.plan.block > 1
    assert found.measured_bytes <= states // 2


@pytest.mark.optimised
def test_fewer_environments_at_a_time_take_longer_blocks():
    """States are kept of all environments: of one at a time, the activations of a longer block cost less than they do."""

    def memory(p, h, t):
        h = jnp.tanh(p["w"] @ h + p["u"] @ observation(t))
        return jnp.sum(h**2), h

    length, batch, hidden = 512, 16, 64
    p = {"w": jnp.eye(hidden) / 2, "u": jnp.ones((hidden, 2))}
    args = p, jnp.zeros((batch, hidden)), jax.random.key(1)
    states = 4 * length * batch * hidden
    fitted = rlfx.compile(memory, length=length, batch=batch, memory_budget=states // 8)
    found = fitted.explain(*args, measure=True)
    assert found.plan.environments < batch
    assert found.measured_bytes <= states // 8
    free = rlfx.compile(memory, length=length, batch=batch)
    in_tiles, whole = (jax.grad(lambda p, fn=fn: fn(p, *args[1:])[0])(p) for fn in (fitted, free))
    for name in p:
        np.testing.assert_allclose(in_tiles[name], whole[name], rtol=1e-4, atol=1e-5 * np.abs(whole[name]).max())


def test_explain_names_the_leaves_through_which_the_gradient_flows():
    def program(w, carry, t):
        memory = jnp.tanh(w * carry["memory"] + carry["clock"])
        return memory, {"memory": memory, "clock": carry["clock"] + 1.0}

    carry = {"memory": jnp.float32(0.0), "clock": jnp.float32(0.0)}
    explanation = rlfx.compile(program, length=3).explain(jnp.float32(1.0), carry)
    assert explanation.active_carry == ("carry['memory']",)
    assert "the gradient flows through time in: carry['memory']" in str(explanation)
    bare = rlfx.compile(lambda w, h, t: (jnp.tanh(w * h), jnp.tanh(w * h)), length=3)
    assert bare.explain(jnp.float32(1.0), jnp.float32(0.0)).active_carry == ("carry",)
