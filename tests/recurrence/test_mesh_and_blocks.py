"""Every plan has the same results: environments split over devices, the learner in blocks of timesteps."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
import rlfx.envs
from rlfx.errors import DomainError, ScheduleError
from tests.sampling import met

LENGTH, BATCH = 6, 4


def coupled(params, state, t):
    """Reductions and sorts over the batch, reads of the future, keys."""
    moved = state * params["w"] + jax.random.normal(t.key, ())
    mean = rlfx.mean(moved, "b")
    y = rlfx.series(moved, end=0.0)
    aux = {
        "past": y[: t + 1].sum(),
        "mean": rlfx.mean(moved),
        "low": rlfx.shared(lambda x: jnp.sort(x)[:2].sum(), moved),
    }
    return (moved - mean) ** 2 * y[t + 1], moved * 0.5 + 0.1 * mean, aux


def separate(params, state, t):
    """A learner without reads: it runs in blocks."""
    x = jax.lax.stop_gradient(state)
    return (params["w"] * x - jnp.sin(x)) ** 2, jnp.cos(x) + 0.1 * jax.random.normal(t.key, ())


def arguments():
    return {"w": jnp.float32(0.7)}, jnp.arange(float(BATCH), dtype=jnp.float32), jax.random.key(3)


def assert_close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5), a, b)


@pytest.mark.parametrize(("devices", "program"), met([2, 4], [coupled, separate]))
def test_a_mesh_changes_nothing(program, devices):
    mesh = jax.make_mesh((devices,), ("b",))

    def value_and_gradient(mesh):
        fn = rlfx.compile(program, length=LENGTH, batch=BATCH, mesh=mesh)

        def total(params, state):
            loss, (carry, aux) = fn(params, state, arguments()[2])
            return loss + sum(jnp.sum(x**2) for x in jax.tree.leaves((carry, aux))), (loss, carry, aux)

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(*arguments()[:2])

    assert_close(value_and_gradient(mesh), value_and_gradient(None))


def test_the_loss_alone_on_a_mesh():
    def gradient(mesh):
        fn = rlfx.compile(coupled, length=LENGTH, batch=BATCH, mesh=mesh)
        return jax.jit(jax.grad(lambda p: fn(p, *arguments()[1:])[0]))(arguments()[0])

    assert_close(gradient(jax.make_mesh((2,), ("b",))), gradient(None))


def test_a_batch_that_the_devices_do_not_divide_and_an_unknown_axis():
    mesh = jax.make_mesh((4,), ("b",))
    with pytest.raises(ScheduleError, match="batch=6 cannot be split over the 4 devices"):
        rlfx.compile(separate, length=LENGTH, batch=6, mesh=mesh)(arguments()[0], jnp.zeros(6), arguments()[2])
    with pytest.raises(ScheduleError, match="mesh_axis='x' is not an axis of the mesh"):
        rlfx.compile(separate, length=LENGTH, batch=BATCH, mesh=mesh, mesh_axis="x")


@pytest.mark.parametrize(("block_size", "until"), met([1, 2, 4, 5, LENGTH], [lambda c: c > 0.9, None]))
def test_blocks_change_nothing(block_size, until):
    def run(transform):
        fn = rlfx.compile(separate, length=LENGTH, batch=BATCH, until=until, transform=transform)
        return jax.jit(jax.value_and_grad(lambda p: fn(p, *arguments()[1:])[0]))(arguments()[0])

    assert_close(run(lambda p: rlfx.incrementalize(p, block_size=block_size)), run(None))


@pytest.mark.parametrize("block_size", [0, LENGTH + 1, 2.0, True])
def test_block_sizes_that_are_refused(block_size):
    program = rlfx.trace(separate, *arguments(), length=LENGTH, batch=BATCH)
    longer = block_size == LENGTH + 1
    fact = (
        "is not an integer between 1 and the length of the axis, T=6" if longer else "must be a positive integer, got"
    )
    with pytest.raises(DomainError, match=fact):
        rlfx.incrementalize(program, block_size=block_size)


def test_a_recurrent_learner_has_no_blocks():
    fn = rlfx.compile(coupled, length=LENGTH, batch=BATCH, transform=lambda p: rlfx.incrementalize(p, block_size=2))
    with pytest.raises(ScheduleError, match="the gradient flows through reads of other timesteps"):
        jax.grad(lambda p: fn(p, *arguments()[1:])[0])(arguments()[0])


@pytest.mark.optimised
def test_devices_meet_once_for_a_loss_without_reductions():
    """At truncations the critic sees the last observation: each device decides for its own environments whether it does."""

    def actor_critic(w, x, t):
        value = jnp.tanh(w * x)
        truncated = x > 1.0
        step = rlfx.envs.Step(x, x > 2.0, truncated, x, {})
        following = rlfx.next_value(lambda o: jnp.tanh(w * o), step, value)
        return (x + 0.9 * jax.lax.stop_gradient(following) - value) ** 2, jnp.where(truncated, 0.0, x + 0.3)

    x, w = jnp.linspace(0.0, 1.0, 4), jnp.float32(0.7)
    mesh = jax.make_mesh((2,), ("b",))
    split, whole, reference = (
        jax.value_and_grad(lambda w, fn=fn: fn(w, x)[0])
        for fn in (
            rlfx.compile(actor_critic, length=9, batch=4, mesh=mesh),
            rlfx.compile(actor_critic, length=9, batch=4),
            rlfx.reference(actor_critic, length=9, batch=4),
        )
    )
    for fn in (split, whole):
        jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=1e-5), fn(w), reference(w))
    text = jax.jit(split).lower(w).compile().as_text()
    assert len(re.findall(r"all-reduce(?:-start)?\(", text)) <= 2  # of the loss and the gradient, together or each
