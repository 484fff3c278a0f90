"""Cores as devices: a thread each, arrays that other devices read in place, and what ``assign_stages`` decides on them."""

import os
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlfx
from rlfx import _jaxpr as J
from rlfx.errors import PlacementError
from rlfx.place import Assignment, assign_stages, core_devices, hardware
from rlfx.place.resident import StageExecutor
from rlfx.place.stages import staged, staged_problem

MACHINE = hardware.uniform(2, flops=1e9, memory_rate=1e9, memory=1e9, bandwidth=1e8)


def test_devices_are_made_once_beside_those_of_jax():
    before, pool = jax.devices(), os.environ.get("NPROC")
    one, two = core_devices(2)
    assert (one, two) == core_devices(2)
    assert one == core_devices(1)[0]
    assert len({one, two, *before}) == len(before) + 2
    assert len({d.id for d in (one, two, *before)}) == len(before) + 2
    assert jax.devices() == before
    assert os.environ.get("NPROC") == pool
    assert jnp.ones(2).devices() == {before[0]}
    with pytest.raises(PlacementError, match="count"):
        core_devices(0)


def test_programs_run_in_the_thread_that_calls():
    def whose(x):
        return jax.pure_callback(lambda _: np.int32(threading.get_native_id()), jax.ShapeDtypeStruct((), jnp.int32), x)

    for device in core_devices(2):
        assert int(jax.jit(whose)(jax.device_put(jnp.float32(1), device))) == threading.get_native_id()


def test_two_cores_run_at_the_same_time():
    meet = threading.Barrier(2, timeout=30)

    def wait(x):
        meet.wait()  # broken, and an error, unless the other program is running, too
        return x

    def fn(x):
        return jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), x) + 1

    arguments = [jax.device_put(jnp.float32(i), device) for i, device in enumerate(core_devices(2))]
    programs = [jax.jit(fn).lower(x).compile() for x in arguments]
    found = [None, None]

    def run(i):
        found[i] = float(programs[i](arguments[i]))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1.0, 2.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_another_core_reads_an_array_where_it_is(dtype):
    one, two = core_devices(2)
    x = jax.device_put(jnp.arange(64).astype(dtype), one)
    (y,) = J.moved([x], two)
    assert y.devices() == {two}
    assert y.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
    np.testing.assert_array_equal(np.asarray(y), np.asarray(x))
    del x
    assert (y + y).devices() == {two}


def test_keys_move_too():
    one, two = core_devices(2)
    key = jax.device_put(jax.random.key(3), one)
    (moved,) = J.moved([key], two)
    assert moved.devices() == {two}
    np.testing.assert_array_equal(np.asarray(jax.random.normal(moved, (4,))), np.asarray(jax.random.normal(key, (4,))))


def update(ws, x):
    return [w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w) for w in ws]


def arguments():
    keys = jax.random.split(jax.random.key(0), 5)
    return [jax.random.normal(k, (6, 6)) for k in keys[:4]], jax.random.normal(keys[4], (8, 6))


@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
def test_stages_on_cores_equal_the_function(donated):
    ws, x = arguments()
    graph = staged(update, ws, x, carry=1, donate_argnums=donated)
    problem, rng = staged_problem(graph, MACHINE), np.random.default_rng(0)
    executor = StageExecutor(graph, problem, core_devices(2))
    for _ in range(2):
        device = rng.integers(0, 2, problem.tasks).astype(np.int32)
        assignment = Assignment(device, np.arange(problem.tasks, dtype=np.int32))
        state, want = jax.tree.map(jnp.copy, ws), ws
        for _ in range(3):
            state, want = executor(jax.tree.leaves((state, x)), assignment), update(want, x)
        for a, b in zip(state, want, strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-6)


@pytest.mark.parametrize(("alone", "stage", "devices"), [(1e-3, 1e-3, 1), (1e-2, 1e-3, 2)])
def test_the_faster_of_one_and_two_devices_is_chosen(monkeypatch, alone, stage, devices):
    """By durations that are given, not measured."""
    monkeypatch.setattr(StageExecutor, "measure", lambda *_: alone)

    def durations(self, problem, args):
        problem.exec_time[:] = stage
        return problem

    monkeypatch.setattr(StageExecutor, "calibrated", durations)
    placed = assign_stages(update, *arguments(), carry=1, devices=core_devices(2), method="heft", hardware=MACHINE)
    said = "one device: one program is predicted" if devices == 1 else "2 devices: one program on one of them takes"
    assert said in placed.explain()
    assert len(set(placed.assignment.device.tolist())) == devices
    assert (placed.problem.tasks == 1) == (devices == 1)
    for a, b in zip(placed(*arguments()), update(*arguments()), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-6)


@pytest.mark.parametrize("noise", [0.0, 0.1], ids=["no keys", "keys"])
def test_compiled_programs_of_rlfx_are_stages(noise):
    """Acting on one device, learning from what was acted before on another; a constant of NumPy in the function."""
    shift = np.linspace(0.0, 1.0, 3, dtype=np.float32)

    def act(w, x, t):
        following = jnp.tanh(w * x)
        return (following + noise * jax.random.normal(t.key, x.shape) if noise else following), x

    def loss(w, x, t):
        return jnp.mean((w * x - 1.0) ** 2), jnp.tanh(x)

    rollout = rlfx.unroll(act, length=5, batch=4)
    loss_fn = rlfx.compile(loss, length=5, batch=4)

    def iteration(state, key):
        w, x, samples = state
        following, new = rollout(w, x, key)
        slope = jax.grad(lambda w: loss_fn(w, samples, key)[0])(w)
        return (w - 0.1 * slope + shift, following, new[-1]), ()

    state = (jnp.ones(3), jnp.ones((4, 3)), 0.5 * jnp.ones((4, 3)))
    key = jax.random.key(0)
    graph = staged(iteration, state, key, carry=1)
    problem = staged_problem(graph, MACHINE)
    executor = StageExecutor(graph, problem, core_devices(2))
    assert problem.tasks > 1
    device = np.arange(problem.tasks, dtype=np.int32) % 2
    found, want = state, state
    for _ in range(3):
        found, _ = executor(jax.tree.leaves((found, key)), Assignment(device, np.arange(problem.tasks, dtype=np.int32)))
        want, _ = iteration(want, key)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)
