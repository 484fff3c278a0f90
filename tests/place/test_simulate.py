"""The compiled simulator equals Algorithm 1 bit for bit; memory accounts agree; priorities act."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlfx.errors import PlacementError
from rlfx.place import hardware, oracle, workloads
from rlfx.place import simulate as sim
from rlfx.place.problem import Problem, build, checked, edges_of


def random_problem(rng, tasks=14, devices=3, ties=False):
    """A random task graph; with ``ties``, durations are small integers so that events coincide."""
    draw = (lambda *s: rng.integers(1, 4, s)) if ties else (lambda *s: rng.uniform(0.1, 3.0, s))
    adjacency = np.triu(rng.random((tasks, tasks)) < 0.25, 1)
    transfer = draw(tasks, devices, devices).astype(np.float32) * ~np.eye(devices, dtype=bool)
    return checked(
        Problem(
            draw(tasks, devices).astype(np.float32), transfer.astype(np.float32), edges_of(adjacency),
            rng.integers(1, 9, tasks).astype(np.float32), rng.integers(1, 9, 4).astype(np.float32),
            edges_of(rng.random((4, tasks)) < 0.3), np.full(devices, 50, np.float32),
            ((tuple(range(tasks)), ()),), tuple(f"t{i}" for i in range(tasks)),
        )
    )  # fmt: skip


def batch(rng, problem, count=4):
    device = rng.integers(0, problem.devices, (count, problem.tasks)).astype(np.int32)
    return device, np.stack([rng.permutation(problem.tasks) for _ in range(count)]).astype(np.int32)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), ties=st.booleans(), fifo=st.booleans(), noisy=st.booleans(), shared=st.booleans())
def test_equals_algorithm_1_exactly(seed, ties, fifo, noisy, shared):
    """Durations, memory and all; with ``shared``, several targets may be on one lane of a device."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, ties=ties)
    if shared:
        problem = replace(problem, lane=rng.integers(0, 3, (3, 3)).astype(np.int32))
    device, order = batch(rng, problem)
    exec_noise = transfer_noise = None
    if noisy:
        exec_noise, transfer_noise = (np.asarray(x) for x in sim.noise(jax.random.key(seed), problem, 4, 0.3))
    got = sim.simulate(problem, device, order, fifo=fifo, exec_noise=exec_noise, transfer_noise=transfer_noise)
    peaks = sim.peak_memory(problem, jnp.asarray(device), got)
    for i in range(4):
        noise = {} if not noisy else {"exec_noise": exec_noise[i], "transfer_noise": transfer_noise[i]}
        makespan, schedule = oracle.simulate(problem, device[i], order[i], fifo=fifo, **noise)
        assert makespan == got.makespan[i]
        for event in schedule:
            kind, v, source, target = event.task
            if kind == "exec":
                assert event.time == (got.start if event.kind == "beg" else got.finish)[i, v]
            else:
                assert source == device[i, v]
                assert event.time == (got.sent if event.kind == "beg" else got.arrived)[i, v, target]
        np.testing.assert_allclose(peaks[i], oracle.peak_memory(problem, device[i], schedule), rtol=1e-6)


def test_transfers_without_time_and_any_priorities_equal_algorithm_1():
    """60 assignments: free transfers, durations too short for float32 beside long ones, priorities of 32 bits."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng, tasks=10, ties=seed % 2 == 0)
        free = rng.random(problem.transfer_time.shape) < 0.6
        transfer = np.where(free, 0, problem.transfer_time).astype(np.float32)
        short = np.where(rng.random(problem.exec_time.shape) < 0.3, 1e-9, problem.exec_time).astype(np.float32)
        exec_time = short if seed % 3 == 0 else problem.exec_time
        problem = checked(replace(problem, transfer_time=transfer, exec_time=exec_time))
        device, _ = batch(rng, problem, 5)
        order = rng.choice(np.array([-(2**31), 2**31 - 1, *rng.integers(-(2**31), 2**31, 20)]), (5, 22))
        order = np.stack([rng.permutation(np.unique(o))[:10] for o in order]).astype(np.int32)
        for fifo in (False, True):
            got = sim.simulate(problem, device, order, fifo=fifo)
            peaks = sim.peak_memory(problem, jnp.asarray(device), got)
            for i in range(5):
                makespan, schedule = oracle.simulate(problem, device[i], order[i], fifo=fifo)
                assert makespan == got.makespan[i], (seed, i, fifo)
                for event in schedule:
                    kind, v, _, target = event.task
                    times = (got.start, got.finish) if kind == "exec" else (got.sent, got.arrived)
                    at = np.asarray(times[event.kind == "end"][i, v])
                    assert event.time == (at if kind == "exec" else at[target]), (seed, i, event)
                np.testing.assert_allclose(peaks[i], oracle.peak_memory(problem, device[i], schedule), rtol=1e-6)


@pytest.mark.slow
def test_thousands_of_tasks_on_many_devices():
    """D V² beyond 2³¹: without edges, the makespan is that of the busiest device."""
    V, D, rng = 6000, 64, np.random.default_rng(0)
    exec_time = rng.uniform(0.5, 1.5, (V, D)).astype(np.float32)
    problem = Problem(
        exec_time, np.zeros((V, D, D), np.float32), np.zeros((0, 2), np.int32), np.ones(V, np.float32),
        np.zeros(0, np.float32), np.zeros((0, 2), np.int32), np.full(D, 1e9, np.float32),
    )  # fmt: skip
    device, order = rng.integers(0, D, (1, V)).astype(np.int32), rng.permutation(V)[None].astype(np.int32)
    got = float(sim.makespan(problem, device, order)[0])
    busiest = max(exec_time[device[0] == d, d].astype(np.float64).sum() for d in range(D))
    assert got == pytest.approx(busiest, rel=1e-5)
    assert got >= problem.lower_bound()


def test_copies_of_a_device_take_turns_on_a_shared_lane():
    """By hand: one result for two devices, two seconds a copy, arrives after two and after four seconds, or both after two."""
    machine = hardware.uniform(3, flops=1e9, memory_rate=1e9, memory=1e9, bandwidth=1e9)
    seconds = (2.0 * ~np.eye(3, dtype=bool)).astype(np.float32)
    problem = Problem(
        np.ones((3, 3), np.float32), np.stack([seconds] * 3), np.array([[0, 1], [0, 2]], np.int32), np.ones(3, np.float32),
        np.zeros(0, np.float32), np.zeros((0, 2), np.int32), np.full(3, 9.0, np.float32),
    )  # fmt: skip
    device, order = np.array([[0, 1, 2]], np.int32), np.array([[0, 1, 2]], np.int32)
    own = sim.simulate(problem, device, order)
    shared = sim.simulate(replace(problem, lane=machine.with_shared_links().lane), device, order)
    np.testing.assert_array_equal(own.arrived[0, 0, 1:], [3.0, 3.0])
    np.testing.assert_array_equal(shared.arrived[0, 0, 1:], [3.0, 5.0])
    np.testing.assert_array_equal(shared.sent[0, 0, 1:], [1.0, 3.0])
    assert (own.makespan[0], shared.makespan[0]) == (4.0, 6.0)


def test_equals_algorithm_1_on_a_paper_graph():
    work = workloads.chainmm()
    graph = work.graph()
    problem = build(graph, hardware.p100_pcie().fitted(graph, work.one_device_seconds))
    device, order = batch(np.random.default_rng(0), problem, 1)
    makespan, _ = oracle.simulate(problem, device[0], order[0])
    assert makespan == sim.makespan(problem, device, order)[0]


def test_resources_are_never_shared_and_never_idle_with_work():
    rng = np.random.default_rng(3)
    problem = random_problem(rng, tasks=20)
    device, order = batch(rng, problem, 1)
    s = sim.simulate(problem, device, order)
    start, finish = np.asarray(s.start[0]), np.asarray(s.finish[0])

    def there(u, d):
        return finish[u] if device[0, u] == d else s.arrived[0, u, d]

    for d in range(problem.devices):
        mine = np.flatnonzero(device[0] == d)
        mine = mine[np.argsort(start[mine])]
        assert np.all(start[mine][1:] >= finish[mine][:-1])
        inputs = [max((there(u, d) for u in np.flatnonzero(problem.adjacency[:, v])), default=0.0) for v in mine]
        for v, previous, ready in zip(mine[1:], finish[mine][:-1], inputs[1:], strict=True):
            assert start[v] == max(previous, ready) or any(  # otherwise another ready task ran first
                start[w] < start[v] and start[w] >= ready for w in mine
            )


def test_one_device_takes_the_sum_and_lower_bound_holds():
    rng = np.random.default_rng(5)
    problem = random_problem(rng)
    device, order = batch(rng, problem, 64)
    assert np.all(np.asarray(sim.makespan(problem, device, order)) >= problem.lower_bound() * (1 - 1e-6))
    alone = sim.makespan(problem, np.zeros_like(device[:1]), order[:1])[0]
    np.testing.assert_allclose(alone, problem.one_device()[0], rtol=1e-6)


def test_memory_limit_makes_overflow_worse_than_anything_that_fits():
    rng = np.random.default_rng(7)
    problem = random_problem(rng)
    device, order = batch(rng, problem, 32)
    schedules = sim.simulate(problem, device, order)
    peak = np.asarray(sim.peak_memory(problem, jnp.asarray(device), schedules)).max(axis=1)
    limit = float(np.median(peak))
    cost = np.asarray(sim.objective(problem.restricted(limit), device, order, limited=True))
    fits = peak <= limit
    assert fits.any()
    assert (~fits).any()
    assert cost[fits].max() < cost[~fits].min()
    np.testing.assert_array_equal(cost[fits], np.asarray(schedules.makespan)[fits])


def test_run_orders():
    problem = random_problem(np.random.default_rng(1))
    for order in sim.ORDERS:
        assert sorted(sim.run_order(problem, order, jax.random.key(0))) == list(range(problem.tasks))
    deep, broad = sim.run_order(problem, "depth-first"), sim.run_order(problem, "breadth-first")
    assert problem.depth[np.argmin(deep)] == problem.depth.max()
    assert problem.depth[np.argmin(broad)] == 0
    with pytest.raises(PlacementError, match=r"(?s)order='random' needs a PRNG key.*key=jax.random.key\(0\)"):
        sim.run_order(problem, "random")
    with pytest.raises(PlacementError, match=r"(?s)run_order: order must be \"critical-path\", .*, got 'best'"):
        sim.run_order(problem, "best")


def test_noise_has_mean_one():
    problem = random_problem(np.random.default_rng(1))
    execution, transfer = sim.noise(jax.random.key(0), problem, 4000, 0.2)
    assert abs(float(execution.mean()) - 1) < 0.01
    assert abs(float(transfer.mean()) - 1) < 0.01


def test_bad_problems_are_refused():
    problem = random_problem(np.random.default_rng(1))
    zero = np.array(problem.exec_time)
    zero[2, 1] = 0.0
    with pytest.raises(PlacementError, match=r"Task 2 takes 0.0 s on device 1; every task must take some time"):
        checked(Problem(**{**vars_of(problem), "exec_time": zero}))
    for seconds in (-1.0, np.nan, np.inf):
        transfer = np.array(problem.transfer_time)
        transfer[3, 0, 1] = seconds
        with pytest.raises(
            PlacementError, match=rf"(?s)result of task 3 takes {seconds} s from device 0 to device 1.*Fix: "
        ):
            checked(replace(problem, transfer_time=transfer))
    with pytest.raises(PlacementError, match=r"Task 0 reads task \d+, which does not come before it"):
        checked(Problem(**{**vars_of(problem), "edges": edges_of(problem.adjacency | np.eye(14, k=-1, dtype=bool))}))


def vars_of(problem):
    return {name: getattr(problem, name) for name in problem.__dataclass_fields__}


def test_a_lane_is_one_of_a_devices():
    machine = hardware.uniform(2, flops=1e9, memory_rate=1e9, memory=1e9, bandwidth=1e9)
    with pytest.raises(PlacementError, match=r"Hardware.lane of 2 devices is \[\[0, 2\], \[0, 0\]\]"):
        replace(machine, lane=np.array([[0, 2], [0, 0]]))


def test_hardware_models():
    v100 = hardware.v100_meshes()
    assert v100.devices == 8
    assert v100.bandwidth[0, 3] > v100.bandwidth[0, 4] > v100.bandwidth[0, 5]
    with pytest.raises(PlacementError, match=r"uniform: bandwidth must be a finite number > 0, got 0\.0"):
        hardware.p100_pcie(bandwidth=0.0)
    machine = hardware.measured(jax.devices()[:2], size=64)
    assert np.all(machine.flops > 0)
    assert machine.bandwidth.shape == (2, 2)
    for one in (machine, v100, v100.with_links(1.0), replace(v100, memory_rate=v100.memory_rate * 2)):
        np.testing.assert_array_equal(np.diag(one.bandwidth), one.memory_rate)
    with pytest.raises(PlacementError, match=r"(?s)Hardware.flops of 8 devices has shape \(2,\).*Fix: "):
        replace(v100, flops=np.ones(2))


def test_a_task_larger_than_every_device_is_refused():
    graph = workloads.chainmm(64).graph()
    with pytest.raises(PlacementError, match=r"(?s)chainmm does not fit on any assignment: .* alone needs \d+\.\d{3} kB and "
                       r"the largest device has room for 1\.000 kB\."):
        build(graph, hardware.p100_pcie(memory=1000.0))
    with pytest.raises(PlacementError, match=r"the largest device has room for 12 bytes\."):
        build(graph, hardware.p100_pcie(memory=12.0))
