"""A memory budget, and stored values in host memory: the results stay the same, the bytes fall where they should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import rlfx
from rlfx.errors import DomainError, MemoryBudgetError
from rlfx.recurrence.estimate import estimate_temp_bytes

LENGTH, BATCH, SIZE = 64, 16, 256


def program(params, obs, t):
    """Large observations, Monte-Carlo returns."""
    obs = checkpoint_name(obs, "obs")
    hidden = jnp.tanh(params["w"] @ obs)
    action = jax.random.categorical(t.key_for("action"), hidden)
    moved = jax.lax.stop_gradient(jnp.roll(obs, 1) * 0.9 + 0.1 * jax.random.normal(t.key_for("env"), (1,)))
    reward = rlfx.series(moved[0] + action.astype(jnp.float32))
    returns = jax.lax.stop_gradient(rlfx.discounted_sum(reward[t:], jnp.full_like(reward[t:], 0.9)))
    return -jax.nn.log_softmax(hidden)[action] * returns, moved


def n_step(params, obs, t):
    """The same, with returns over five timesteps."""
    hidden = jnp.tanh(params["w"] @ obs)
    action = jax.random.categorical(t.key_for("action"), hidden)
    moved = jax.lax.stop_gradient(jnp.roll(obs, 1) * 0.9 + 0.1 * jax.random.normal(t.key_for("env"), (1,)))
    reward = rlfx.series(moved[0] + action.astype(jnp.float32))
    returns = rlfx.discounted_sum(reward[t : t + 5], jnp.full_like(reward[t : t + 5], 0.9))
    return -jax.nn.log_softmax(hidden)[action] * jax.lax.stop_gradient(returns), moved


def arguments():
    w = np.random.RandomState(0).randn(32, SIZE).astype(np.float32) / SIZE**0.5
    return {"w": jnp.asarray(w)}, jnp.ones((BATCH, SIZE))


def compiled(f, **options):
    fn = rlfx.compile(f, length=LENGTH, batch=BATCH, **options)
    params, obs = arguments()
    step = jax.jit(jax.value_and_grad(lambda p, o: fn(p, o, jax.random.key(0)), has_aux=True))
    return fn, step.lower(params, obs).compile()


def temp(executable):
    return executable.memory_analysis().temp_size_in_bytes


def assert_same(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5), one, other)


STACKED = LENGTH * BATCH * SIZE * 4


@pytest.mark.parametrize("share", [1.1, 0.6, 0.4])
def test_a_budget_below_the_stacked_observations_is_met(share):
    _, plain = compiled(program, plan=rlfx.Plan())
    budget = int(share * STACKED)
    fn, fitted = compiled(program, memory_budget=budget)
    assert temp(fitted) <= budget < temp(plain)
    assert_same(fitted(*arguments()), plain(*arguments()))
    if share < 1:
        assert fn.plan(*arguments()).form == "replay"


def test_a_generous_budget_changes_nothing():
    assert compiled(program, memory_budget=1 << 30)[0].plan(*arguments()) == compiled(program)[0].plan(*arguments())


def test_monte_carlo_and_n_step_choose_different_plans():
    """TimeRL Fig. 11: one has to wait for the end of the rollout, the other learns behind the actor and forgets."""
    budget = STACKED // 2
    assert compiled(program, memory_budget=budget)[0].plan(*arguments()).form == "replay"
    fn, fitted = compiled(n_step, memory_budget=budget)
    assert fn.plan(*arguments()).form == "stream"
    assert temp(fitted) <= budget


def test_a_budget_that_nothing_meets_names_the_smallest_that_would_do():
    with pytest.raises(MemoryBudgetError) as error:
        compiled(program, memory_budget=20_000)
    text = str(error.value)
    assert "program does not fit into memory_budget=20000 (19.53 KiB). The smallest plan needs" in text
    assert "What does not shrink" in text
    smallest = int(text.split("Give memory_budget=")[1].split(",")[0])
    _, fitted = compiled(program, memory_budget=smallest)
    assert temp(fitted) <= smallest


@pytest.mark.parametrize("budget", [0, -5, "1GB", True])
def test_a_budget_is_a_number_of_bytes(budget):
    with pytest.raises(DomainError, match="is not a number of bytes"):
        rlfx.compile(program, length=3, memory_budget=budget)


def test_temporary_bytes_fall_with_the_number_of_blocks():
    """Beyond what is stored, one over the number of blocks, by XLA's count."""
    sizes = {n: temp(compiled(program, plan=rlfx.Plan("blocks", LENGTH // n))[1]) for n in (2, 4, 8)}
    estimated = {n: estimate_temp_bytes(gradient_jaxpr(rlfx.Plan("blocks", LENGTH // n))) for n in (2, 4, 8)}
    assert sizes[2] > sizes[4] > sizes[8] > STACKED
    for n in sizes:
        assert abs(estimated[n] / sizes[n] - 1) < 0.2


def gradient_jaxpr(plan):
    fn = rlfx.compile(program, length=LENGTH, batch=BATCH, plan=plan)
    return jax.make_jaxpr(jax.value_and_grad(lambda p, o: fn(p, o, jax.random.key(0)), has_aux=True))(*arguments())


# -- host memory -----------------------------------------------------------------------------------------------------


def offloaded(f=program, **which):
    fn = rlfx.compile(rlfx.offload(f, **which), length=LENGTH, batch=BATCH)
    return fn, jax.value_and_grad(lambda p, o: fn(p, o, jax.random.key(0)), has_aux=True)


@pytest.mark.parametrize("which", [{"names": ["obs"]}, {"min_bytes": STACKED}])
def test_offloaded_values_are_written_to_and_fetched_from_the_host(which):
    fn, gradient = offloaded(**which)
    assert_same(jax.jit(gradient)(*arguments()), compiled(program)[1](*arguments()))
    assert f"f32[{LENGTH},{BATCH},{SIZE}] (host)" in str(fn.explain(*arguments()))
    cuda = jax.jit(gradient).trace(*arguments()).lower(lowering_platforms=("cuda",)).as_text()
    placements = [line for line in cuda.splitlines() if "annotate_device_placement" in line]
    to_host = [line for line in placements if "pinned_host" in line]
    to_device = [line for line in placements if '"device"' in line]
    assert to_host
    assert all(f"tensor<{BATCH}x{SIZE}xf32>" in line for line in to_host)  # one timestep as it is acted
    assert to_device
    assert all(f"tensor<8x{BATCH}x{SIZE}xf32>" in line for line in to_device)  # one block as it is learned from


def test_nothing_goes_to_the_host_unasked():
    fn = rlfx.compile(program, length=LENGTH, batch=BATCH)
    step = jax.jit(jax.grad(lambda p, o: fn(p, o, jax.random.key(0))[0]))
    assert "pinned_host" not in step.trace(*arguments()).lower(lowering_platforms=("cuda",)).as_text()
    small, _ = offloaded(min_bytes=1 << 30)
    assert "(host)" not in str(small.explain(*arguments()))


def test_offload_of_a_program_is_refused_with_the_reason():
    traced = rlfx.trace(program, *arguments(), length=LENGTH, batch=BATCH)
    with pytest.raises(DomainError, match=r"No value of program is named 'image'; named values: \['obs'\]"):
        rlfx.offload(traced, names=["image"])
    with pytest.raises(DomainError, match="takes names= or min_bytes="):
        rlfx.offload(traced)
    unrolled = rlfx.trace(lambda p, c, t: (c, c), None, jnp.float32(0.0), length=3, loss=False)
    with pytest.raises(DomainError, match="stores nothing for a learner"):
        rlfx.offload(unrolled, min_bytes=1)
