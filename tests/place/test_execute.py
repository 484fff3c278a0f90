"""Placed functions equal unplaced ones; the runtime conserves work, frees memory, fails loudly."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlfx.errors import PlacementError
from rlfx.place import Placement, assign, baselines, hardware, online, oracle, runtime, simulate, workloads
from rlfx.place import placement as placement_module
from rlfx.place.execute import Executor, emulate
from rlfx.place.explode import explode
from rlfx.place.problem import build

MACHINE = hardware.uniform(4, flops=1e10, memory_rate=1e10, memory=1e9, bandwidth=1e9)


@pytest.mark.parametrize("work", [workloads.chainmm(32), workloads.ffnn(64, 8, 32)], ids=lambda w: w.name)
def test_execution_equals_the_function(work):
    graph = work.graph()
    problem = build(graph, MACHINE)
    args = work.arguments(jax.random.key(0))
    executor = Executor(graph, jax.devices()[:4])
    assert executor.programs < len(graph.tasks) / 4
    for assignment in (baselines.enumerative(problem), baselines.random_assignment(problem, np.random.default_rng(0))):
        executor.load(jax.tree.leaves(args), assignment)
        timeline, result = executor.run(assignment)
        np.testing.assert_allclose(result, work.fn(*args), atol=1e-5, rtol=1e-5)
        copies = {(u, t) for u, _, t, _, _ in timeline.copies}
        assert len(copies) == len(timeline.copies)  # each result crosses to each device at most once
        assert np.all(timeline.peak > 0)
        seconds = executor.measure(jax.tree.leaves(args), assignment, repeats=1)
        assert seconds > 0
        groups = [g for meta in problem.metas for g in meta if g]
        assert executor.run_synchronous(assignment, groups).makespan > 0


def test_durations_are_measured_kernel_by_kernel():
    work = workloads.chainmm(32)
    graph = work.graph()
    problem = build(graph, hardware.uniform(2, flops=1e10, memory_rate=1e10, memory=1e9, bandwidth=1e9))
    executor = Executor(graph, jax.devices()[:2])
    begin = time.perf_counter()
    measured = executor.calibrated(problem, jax.tree.leaves(work.arguments(jax.random.key(0))), repeats=2)
    assert measured.exec_time.shape == problem.exec_time.shape
    assert np.all(measured.exec_time > 0)
    assert np.all(measured.exec_time < time.perf_counter() - begin)
    for d in range(2):  # one duration a kernel and device
        assert len(np.unique(measured.exec_time[:, d])) <= executor.programs
    off = ~np.eye(2, dtype=bool)
    assert np.all(measured.transfer_time[:, off] > 0)
    assert np.all(measured.transfer_time[:, ~off] == 0)
    assert np.all(problem.exec_time != measured.exec_time)  # the given problem is left alone
    assert measured.names == problem.names


def test_durations_are_medians_of_executions_without_the_first(monkeypatch):
    """Runs of known timelines: tasks begin every 1 ms on device 0 and every 2 ms on device 1, first runs are slow."""

    def chained(x):
        for i in range(4):
            with jax.named_scope(f"s{i}"):
                x = jnp.sin(x @ x)
        return x

    graph = explode(chained, jax.ShapeDtypeStruct((8, 8), jnp.float32), name="chained", splits={})
    problem = build(graph, hardware.uniform(2, flops=1e10, memory_rate=1e10, memory=1e9, bandwidth=1e9))
    executor, runs, V = Executor(graph, jax.devices()[:2]), [], problem.tasks

    def run(assignment):
        first = 100.0 if len(runs) < 2 else 1.0
        runs.append(assignment)
        each = 1e-3 * first * (1 + int(assignment.device[0]))
        start = each * np.arange(V)
        pairs = [(u, v) for u, v in np.argwhere(problem.adjacency) if assignment.device[u] != assignment.device[v]]
        copies = tuple((u, assignment.device[u], assignment.device[v], 0.0, 5e-3) for u, v in pairs)
        # Tasks end before the next begins: what the runtime does in between belongs to them.
        return runtime.Timeline(each * V, start, start + each / 2, copies, np.zeros(2)), None

    monkeypatch.setattr(executor, "run", run)
    measured = executor.calibrated(problem, [jnp.ones((8, 8))], repeats=3)
    np.testing.assert_allclose(measured.exec_time, np.broadcast_to([1e-3, 2e-3], (V, 2)), rtol=1e-5)
    read = problem.adjacency.any(axis=1)
    np.testing.assert_allclose(measured.transfer_time[read, 0, 1], 5e-3, rtol=1e-5)
    np.testing.assert_allclose(measured.transfer_time[read, 1, 0], 5e-3, rtol=1e-5)
    assert len(runs) == 2 * 4 + 3


def test_host_devices_read_results_in_place():
    """A copy between jax arrays would wait for a thread of XLA's pool while kernels run; keys are copied all the same."""

    def fn(x, key):
        return jnp.sin(x) + jax.random.uniform(jax.random.fold_in(key, 1), x.shape)

    x, key = jax.random.normal(jax.random.key(0), (64, 64)), jax.random.key(1)
    graph = explode(fn, x, key, name="mixed", splits={})
    executor = Executor(graph, jax.devices()[:2])
    (moved,) = executor._copy(0, 0, 1, (x,))
    assert moved.devices() == {jax.devices()[1]}
    assert moved.unsafe_buffer_pointer() == x.unsafe_buffer_pointer()
    (other,) = executor._copy(0, 0, 1, (key,))
    assert other.devices() == {jax.devices()[1]}
    np.testing.assert_array_equal(jax.random.key_data(other), jax.random.key_data(key))


def test_work_is_conserved_and_overlaps():
    """Four devices, one 50 ms task each: together they take one task's time, not four."""
    barrier = threading.Barrier(4)

    def compute(v, d, values):
        barrier.wait(timeout=60)  # passes only if all four run at once
        return ()

    timeline, _ = runtime.run([[]] * 4, np.arange(4), np.arange(4), 4, compute, lambda *a: a[-1])
    assert timeline.makespan < 60


def test_run_time_order_is_obeyed():
    ran = []

    def compute(v, d, values):
        ran.append(v)
        return ()

    runtime.run([[]] * 5, np.zeros(5, int), np.array([3, 1, 4, 0, 2]), 1, compute, lambda *a: a[-1])
    assert ran == [3, 1, 4, 0, 2]


def test_results_are_freed_after_their_last_use():
    preds = [[], [0], [1], [2]]
    timeline, kept = runtime.run(
        preds, np.zeros(4, int), np.arange(4), 1, lambda v, d, x: (v,), lambda *a: a[-1],
        nbytes=np.full(4, 10.0), keep=(3,),
    )  # fmt: skip
    assert timeline.peak[0] == 20
    assert kept == {3: (3,)}


def test_a_failing_task_stops_everything_and_surfaces():
    def compute(v, d, values):
        if v == 1:
            raise FloatingPointError("task 1 failed")
        return ()

    with pytest.raises(FloatingPointError, match="task 1 failed"):
        runtime.run([[], [0], [1], [0]], np.array([0, 1, 0, 1]), np.arange(4), 2, compute, lambda *a: a[-1])


def test_emulated_durations_agree_with_the_simulator(chain):
    assignment = baselines.enumerative(chain)
    timeline = emulate(chain, assignment, slowdown=2.0)
    simulated = float(baselines.evaluate(chain, [assignment])[0])
    assert simulated * 0.999 < timeline.makespan < simulated * 1.6


def model(x, w):
    return jnp.tanh(x @ w["a"]) @ w["b"]


@pytest.fixture(scope="module")
def arguments():
    return jnp.ones((8, 16)) / 4, {"a": jnp.ones((16, 32)) / 16, "b": jnp.ones((32, 4)) / 8}


@pytest.fixture(scope="module")
def placed(arguments):
    return assign(model, *arguments, devices=jax.devices()[:4], method="polish", budget=64, hardware=MACHINE)


def test_assign_returns_a_callable_that_explains_itself(placed, arguments):
    np.testing.assert_allclose(placed(*arguments), model(*arguments), rtol=1e-5)
    text = placed.explain()
    assert "polish, 64 simulator calls" in text
    assert "x the lower bound" in text
    assert text.count("MB\n") + text.endswith("MB") >= 4


def test_a_placement_is_improved_by_executions(arguments, monkeypatch):
    machine = hardware.uniform(2, flops=1e10, memory_rate=1e10, memory=1e9, bandwidth=1e9)
    placed = assign(model, *arguments, devices=jax.devices()[:2], method="heft", hardware=machine)
    run, executed = Executor.run, []
    monkeypatch.setattr(Executor, "run", lambda self, a: executed.append(a) or run(self, a))
    better = placed.improve(*arguments, calls=16, key=jax.random.key(1))
    assert 8 <= len(executed) <= 16
    assert better.calls == placed.calls + 16
    assert any(better.assignment is a for a in executed)
    assert any(np.any(a.device != placed.assignment.device) for a in executed)
    np.testing.assert_allclose(better(*arguments), model(*arguments), rtol=1e-5)
    with pytest.raises(PlacementError, match=r"(?s)calls.*8"):
        placed.improve(*arguments, calls=7)


def descended(problem, start, fits, calls):
    """Local search where a task on device 1 takes a second, a task on device 0 two."""
    executed = []
    seconds = lambda a: executed.append(a) or float(np.sum(2 - a.device))  # noqa: E731
    return online.descend(problem, start, seconds, fits, jax.random.key(0), calls), executed


def test_executions_find_what_is_faster_and_only_run_what_fits(arguments):
    machine = hardware.uniform(2, flops=1e10, memory_rate=1e10, memory=1e9, bandwidth=1e9)
    problem = build(explode(model, *arguments, splits=2), machine)
    start = baselines.Assignment(np.zeros(problem.tasks, np.int32), simulate.run_order(problem, "critical-path"))
    best, executed = descended(problem, start, lambda a: True, 200)
    assert np.all(best.device == 1)
    assert len(executed) <= 200
    room = problem.tasks // 2
    best, executed = descended(problem, start, lambda a: a.device.sum() <= room, 200)
    assert best.device.sum() == room
    assert max(a.device.sum() for a in executed) == room
    best, executed = descended(problem, start, lambda a: False, 200)
    assert best is start
    assert len(executed) == 1


def test_no_assignment_beyond_memory_is_executed(arguments, monkeypatch):
    machine = hardware.uniform(2, flops=1e10, memory_rate=1e10, memory=1e9, bandwidth=1e9)
    placed = assign(model, *arguments, devices=jax.devices()[:2], method="heft", hardware=machine)
    device, order = (jnp.asarray(x)[None] for x in placed.assignment)
    peak = simulate.peak_memory(placed.problem, device, simulate.simulate(placed.problem, device, order))
    tight = dataclasses.replace(placed, problem=placed.problem.restricted(float(peak.max())))
    assert tight.problem.memory_may_bind
    executed, run = [], Executor.run
    monkeypatch.setattr(Executor, "run", lambda self, a: executed.append(a) or run(self, a))
    tight.improve(*arguments, calls=24)
    for a in executed:
        device, order = (jnp.asarray(x)[None] for x in a)
        schedules = simulate.simulate(tight.problem, device, order)
        assert np.all(simulate.peak_memory(tight.problem, device, schedules)[0] <= tight.problem.memory)


def test_plot_draws_graph_and_timeline(placed):
    figure = placed.plot()
    assert len(figure.axes) == 2
    assert figure.axes[1].get_xlabel() == "ms"
    figure.canvas.draw()


def test_save_and_load(placed, arguments, tmp_path):
    placed.save(tmp_path / "placement.json")
    again = Placement.load(tmp_path / "placement.json", model, *arguments, devices=jax.devices()[:4], hardware=MACHINE)
    np.testing.assert_array_equal(again.assignment.device, placed.assignment.device)
    np.testing.assert_allclose(again(*arguments), model(*arguments), rtol=1e-5)
    with pytest.raises(PlacementError, match=r"(?s)placement.json was placed on 4 devices, not on 2"):
        Placement.load(tmp_path / "placement.json", model, *arguments, devices=jax.devices()[:2])
    with pytest.raises(PlacementError, match=r"placement.json was placed for arguments .* not for "):
        Placement.load(tmp_path / "placement.json", model, arguments[0][:4], arguments[1], devices=jax.devices()[:4])

    def other(x, w):
        return jnp.exp(x @ w["a"]) @ w["b"]

    with pytest.raises(PlacementError, match=r"(?s)placement.json places another function: task .* is in only one"):
        Placement.load(tmp_path / "placement.json", other, *arguments, devices=jax.devices()[:4], hardware=MACHINE)


def test_other_shapes_are_refused(placed, arguments):
    with pytest.raises(PlacementError, match=r"(?s)placed for argument 0 of float32\[8, 16\].*float32\[2, 16\]"):
        placed(arguments[0][:2], arguments[1])
    with pytest.raises(PlacementError, match=r"model was placed for arguments PyTreeDef.* and is called with"):
        placed(arguments[0])


@pytest.mark.parametrize("transform", [
    lambda f: jax.jit(f), lambda f: jax.grad(lambda x, w: f(x, w).sum()), lambda f: jax.vmap(f, (0, None)),
    lambda f: lambda x, w: jax.lax.scan(lambda c, _: (c, f(c, w)), x, length=2), lambda f: lambda *a: jax.eval_shape(f, *a),
    lambda f: lambda x, w: jax.jvp(lambda x: f(x, w), (x,), (x,)), lambda f: jax.checkpoint(f),
])  # fmt: skip
def test_a_placement_is_not_traced(placed, arguments, transform):
    x, w = arguments
    x = x[None] if "vmap" in transform.__code__.co_names else x
    with pytest.raises(PlacementError, match=r"(?s)model is placed: .*Fix: Transform the function, then place it"):
        transform(placed)(x, w)


def test_what_a_call_holds_is_counted(arguments):
    """Arguments and results are on the first device throughout: what does not fit beside them is refused."""
    need = sum(x.nbytes for x in jax.tree.leaves(arguments)) + 2 * model(*arguments).nbytes
    graph = explode(model, *arguments, splits=4)
    problem, bare = build(graph, MACHINE, called=True), build(graph, MACHINE)
    assert problem.held.tolist() == [need, 0, 0, 0]
    assert bare.held.tolist() == [0] * 4
    everywhere = baselines.one_device(problem)
    device, order = everywhere.device[None] * 0, everywhere.order[None]
    with_held, without = (simulate.peak_memory(p, jnp.asarray(device), simulate.simulate(p, device, order))[0]
                          for p in (problem, bare))  # fmt: skip
    np.testing.assert_allclose(with_held - without, problem.held)
    schedule = oracle.simulate(problem, device[0], order[0])[1]
    np.testing.assert_allclose(oracle.peak_memory(problem, device[0], schedule), with_held)
    with pytest.raises(PlacementError, match=r"fits into memory|does not fit"):
        assign(model, *arguments, devices=jax.devices()[:2], method="one-device", budget=1,
               hardware=hardware.uniform(2, flops=1e10, memory_rate=1e10, memory=need + 100.0, bandwidth=1e9))  # fmt: skip


def test_a_single_device_is_refused(arguments):
    with pytest.raises(PlacementError, match=r"(?s)needs two devices or more, and there is 1: .*xla_force_host"):
        assign(model, *arguments, devices=jax.devices()[:1])


def test_a_function_without_operations_is_refused(arguments):
    def same(x, w):
        return x

    with pytest.raises(PlacementError, match=r"(?s)same computes nothing: .*Place a function with at least one"):
        assign(same, *arguments, devices=jax.devices()[:4], hardware=MACHINE)


def test_hardware_of_another_size_is_refused(arguments):
    with pytest.raises(PlacementError, match=r"hardware describes 4 devices and 2 are given"):
        assign(model, *arguments, devices=jax.devices()[:2], hardware=MACHINE)


def test_a_vanished_device_is_reported(placed, arguments, monkeypatch):
    present = jax.devices()[:3]
    monkeypatch.setattr(jax, "devices", lambda *a: present)
    with pytest.raises(PlacementError, match=r"(?s)Device .*3.* of the placement is gone: cpu has .*Assign again"):
        placed(*arguments)


def test_the_machine_is_measured_when_no_hardware_is_given(arguments, monkeypatch):
    seen = []
    monkeypatch.setattr(placement_module, "measured", lambda d: seen.append(d) or hardware.measured(d, size=32))
    placed = assign(model, *arguments, devices=jax.devices()[:2], method="heft")
    assert seen
    np.testing.assert_allclose(placed(*arguments), model(*arguments), rtol=1e-5)


def test_real_time_passes(placed, arguments):
    timeline, _ = placed.timed(*arguments)
    begin = time.perf_counter()
    timeline, _ = placed.timed(*arguments)
    assert 0 < timeline.makespan < time.perf_counter() - begin
