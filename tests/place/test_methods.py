"""Heuristics, searches and learned methods: validity, known optima, budgets, refusals."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlfx.errors import PlacementError
from rlfx.place import baselines, hardware, methods, online, search, simulate, workloads
from rlfx.place.problem import Problem, build, edges_of
from tests.place.test_simulate import batch, random_problem


def valid(problem, assignment):
    assert assignment.device.shape == (problem.tasks,)
    assert set(assignment.device) <= set(range(problem.devices))
    assert sorted(assignment.order) == list(range(problem.tasks))


def fork():
    """Two equal chains of two tasks: on two devices the optimum is to keep each chain together."""
    adjacency = np.zeros((4, 4), bool)
    adjacency[0, 2] = adjacency[1, 3] = True
    transfer = np.full((4, 2, 2), 5.0, np.float32) * ~np.eye(2, dtype=bool)
    return Problem(
        np.ones((4, 2), np.float32), transfer.astype(np.float32), edges_of(adjacency), np.ones(4, np.float32),
        np.zeros(0, np.float32), np.zeros((0, 2), np.int32), np.full(2, 100, np.float32),
        (((0, 1), ()), ((2, 3), ())), ("a", "b", "c", "d"),
    )  # fmt: skip


@pytest.mark.parametrize("method", ["heft", "enumerate", "critical-path", "local-search", "anneal", "polish"])
def test_the_fork_is_solved(method):
    result = methods.solve(fork(), method, jax.random.key(0), 64)
    valid(fork(), result.assignment)
    assert result.cost == 2.0
    assert result.assignment.device[0] == result.assignment.device[2] != result.assignment.device[1]


def test_heuristics_are_valid_and_no_better_than_the_bound(chain):
    rng = np.random.default_rng(0)
    for assignment in (
        baselines.one_device(chain), baselines.heft(chain), baselines.enumerative(chain),
        baselines.list_schedule(chain, rng), baselines.random_assignment(chain, rng),
    ):  # fmt: skip
        valid(chain, assignment)
        assert baselines.evaluate(chain, [assignment])[0] >= chain.lower_bound() * (1 - 1e-6)


def test_enumerative_equals_trying_all_permutations():
    graph = workloads.chainmm(64).graph()
    problem = build(graph, hardware.v100_meshes(4))
    shards, _ = problem.metas[0]
    chosen = baselines.enumerative(problem).device
    readers = problem.metas[1][0][: problem.devices]
    assert len(shards) >= problem.devices

    def cost(devices):
        return sum(
            problem.transfer_time[u, chosen[u], d]
            for v, d in zip(readers, devices, strict=True)
            for u in np.flatnonzero(problem.adjacency[:, v])
        )

    best = min(cost(p) for p in itertools.permutations(range(problem.devices)))
    np.testing.assert_allclose(cost(chosen[list(readers)]), best, rtol=1e-6)


def test_barriers_cost_time(chain):
    """Two chains of 1 s tasks and 5 s transfers: crossing costs a transfer, barriers never help."""
    together = baselines.Assignment(np.array([0, 1, 0, 1], np.int32), np.arange(4, dtype=np.int32))
    crossed = baselines.Assignment(np.array([0, 1, 1, 0], np.int32), np.arange(4, dtype=np.int32))
    assert baselines.synchronous_seconds(fork(), together) == 2.0
    assert baselines.synchronous_seconds(fork(), crossed) == 7.0
    assignment = baselines.enumerative(chain)
    assert baselines.synchronous_seconds(chain, assignment) >= baselines.evaluate(chain, [assignment])[0]


def test_the_critical_path_order_is_topological(chain):
    assignment = baselines.list_schedule(chain, np.random.default_rng(0))
    u, v = np.nonzero(chain.adjacency)
    assert np.all(assignment.order[u] < assignment.order[v])


def test_heft_inserts_into_idle_gaps():
    """The same as looking through all that each device does, from its first task on."""
    for seed in range(8):
        problem = random_problem(np.random.default_rng(seed), tasks=40)
        assignment, finish = baselines.heft(problem), np.zeros(problem.tasks)
        slots = [[] for _ in range(problem.devices)]
        for v in np.argsort(-problem.to_exit[0], kind="stable"):
            options = []
            for d, busy in enumerate(slots):
                sent = [finish[u] + problem.transfer_time[u, assignment.device[u], d] for u in problem.preds[v]]
                cost, ready = float(problem.exec_time[v, d]), max(sent, default=0.0)
                at = min(t for t in (ready, *(e for _, e in busy if e > ready))
                         if all(t + cost <= b or t >= e for b, e in busy))  # fmt: skip
                options.append((at + cost, d, at))
            finish[v], d, at = min(options)
            assert assignment.device[v] == d
            slots[d].append((at, finish[v]))


def test_search_only_improves_and_counts_calls(chain):
    starts, costs = methods.heuristic_starts(chain, jax.random.key(0), 64)
    state = search.initial(chain, starts, costs, 2)
    after, trace = search.anneal(chain, jax.random.key(1), state, 256)
    assert trace.shape == (128,)
    assert np.all(np.diff(trace) <= 0)
    assignment, cost = search.winner(after)
    valid(chain, assignment)
    assert cost < costs.min()
    np.testing.assert_array_equal(baselines.evaluate(chain, [assignment])[0], np.float32(cost))


def at_work(problem, assignment):
    """A chain at an assignment whose schedule is known, without its leading axis."""
    state = search.initial(problem, [assignment], baselines.evaluate(problem, [assignment]), 1)
    run = simulate.simulate(problem, state.device, state.order)
    return jax.tree.map(lambda x: x[0], state._replace(start=run.start, finish=run.finish))


def neighbours_of(problem, state, moves, count=64):
    near = jnp.asarray(search.neighbours(problem))
    draw = jax.jit(jax.vmap(lambda k: search._changed(k, state, near, problem.devices, moves)))
    device, order = draw(jax.random.split(jax.random.key(0), count))
    return np.asarray(device), np.asarray(order)


def test_no_call_is_spent_on_the_assignment_that_is_known(chain):
    """A task follows a neighbour that is on its own device already: most such moves change nothing, none is simulated."""
    state = at_work(chain, baselines.list_schedule(chain, np.random.default_rng(0)))
    device, order = neighbours_of(chain, state, search.Moves(device=0.0, follow=1.0, swap=0.0, order=0.0))
    assert np.all(np.sum(device != np.asarray(state.device), axis=1) == 1)
    np.testing.assert_array_equal(order, np.broadcast_to(np.asarray(state.order), order.shape))


def test_swaps_exchange_tasks_that_run_at_the_same_time(chain):
    state = at_work(chain, baselines.list_schedule(chain, np.random.default_rng(0)))
    device, _ = neighbours_of(chain, state, search.Moves(device=0.0, follow=0.0, swap=1.0, order=0.0))
    old, start, finish = np.asarray(state.device), np.asarray(state.start), np.asarray(state.finish)
    for new in device:
        v, u = np.flatnonzero(new != old)
        assert (new[v], new[u]) == (old[u], old[v])
        assert start[v] < finish[u]
        assert start[u] < finish[v]


def test_hot_chains_accept_worse_neighbours_and_remember_the_best(chain):
    starts, costs = methods.heuristic_starts(chain, jax.random.key(0), 16)
    state, _ = search.anneal(chain, jax.random.key(1), search.initial(chain, starts, costs, 2), 128, hot=0.5, cold=0.4)
    assert np.all(np.asarray(state.cost) > np.asarray(state.best_cost))
    assert float(state.best_cost.min()) <= costs.min()


def test_placeto_learns_something(chain):
    result = methods.placeto(chain, jax.random.key(0), 32)
    valid(chain, result.assignment)
    assert result.cost < chain.one_device()[0]


@pytest.mark.parametrize("method", ["one-device", "critical-path", "heft", "polish"])
def test_an_order_that_frees_memory_is_tried_where_the_fastest_does_not_fit(method):
    """FFNN on one device, breadth before depth, holds nine times as much: a limit between fits in depth-first order alone."""
    graph = workloads.ffnn(batch=512, features=8, hidden=1024).graph()
    free = build(graph, hardware.p100_pcie())
    alone = baselines.one_device(free)

    def peak(problem, assignment):
        device, order = (jnp.asarray(x)[None] for x in assignment)
        return float(simulate.peak_memory(problem, device, simulate.judged(problem, device, order)[1]).max())

    (deep,) = methods.frugal(free, [alone])
    assert peak(free, deep) < 0.5 * peak(free, alone)
    problem = free.restricted(1.05 * peak(free, deep))
    result = methods.solve(problem, method, jax.random.key(0), 64)
    assert peak(problem, result.assignment) <= problem.memory.min()
    assert result.calls <= 64


def test_memory_restricted_devices_get_a_fitting_assignment():
    work = workloads.chainmm()
    graph = work.graph()
    machine = hardware.p100_pcie().fitted(graph, work.one_device_seconds)
    problem = build(graph, machine.with_memory(2.2e9))
    result = methods.solve(problem, "polish", jax.random.key(0), 512)
    schedules = simulate.simulate(problem, result.assignment.device[None], result.assignment.order[None])
    peak = np.asarray(simulate.peak_memory(problem, jnp.asarray(result.assignment.device[None]), schedules))
    assert peak.max() <= 2.2e9
    with pytest.raises(PlacementError, match=r"(?s)No assignment that one-device found in 1 simulator calls fits"):
        methods.solve(problem, "one-device", jax.random.key(0), 1)


def tight(seed, unequal):
    """A problem of which 3% of random assignments fit into memory."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, tasks=24)
    device, order = batch(rng, problem, 500)
    room = np.array([1.0, 0.6, 0.3]) if unequal else np.ones(3)
    run = simulate.simulate(problem, device, order)
    peak = np.asarray(peak_memory(problem, device, run)) / room
    return replace(problem, memory=(room * np.quantile(peak.max(axis=1), 0.03)).astype(np.float32))


peak_memory = jax.jit(simulate.peak_memory)


def test_searches_begin_with_what_fits():
    """20 problems where 3% of random assignments fit, on equal and on unequal devices."""
    found = []
    for seed in range(20):
        problem = tight(seed, unequal=seed % 2 == 1)
        starts, costs = methods.heuristic_starts(problem, jax.random.key(seed), 64)
        assert len(starts) <= 64
        found.append(methods.fits(problem, float(costs.min())))
    assert sum(found) >= 18  # the search finds the rest
    for seed in (0, 1, *np.flatnonzero(~np.array(found))):
        result = methods.solve(tight(seed, unequal=seed % 2 == 1), "polish", jax.random.key(seed), 256)
        valid(problem, result.assignment)
        assert result.calls == 256


def test_schedules_by_least_memory_fit_where_schedules_by_time_do_not():
    """Of 20 problems where 3% of random assignments fit; every schedule runs tasks after what they read."""
    fitting = {"time": 0, "memory": 0}
    for seed in range(20):
        problem, rng = tight(seed, unequal=seed % 2 == 1), np.random.default_rng(seed)
        spare = methods.sparing(problem, rng, 4)
        for one in spare:
            valid(problem, one)
            assert np.all(one.order[problem.edges[:, 0]] < one.order[problem.edges[:, 1]])
        times = [baselines.list_schedule(problem, rng) for _ in range(4)]
        for name, made in (("time", times), ("memory", spare)):
            fitting[name] += methods.fits(problem, float(baselines.evaluate(problem, made).min()))
    assert fitting["memory"] > fitting["time"], fitting


def test_what_does_not_fit_is_judged_by_what_all_devices_lack():
    problem = replace(fork(), memory=np.full(2, 1.0, np.float32))
    both = baselines.Assignment(np.array([0, 1] * problem.tasks, np.int32)[: problem.tasks], baselines.one_device(fork()).order)
    device, order = (jnp.asarray(x)[None] for x in both)
    run = simulate.simulate(problem, device, order)
    lacks = np.maximum(np.asarray(peak_memory(problem, device, run))[0] - 1.0, 0.0)
    assert np.count_nonzero(lacks) == 2
    cost = baselines.evaluate(problem, [both])[0]
    assert cost == pytest.approx(10.0 * problem.one_device().max() * (1.0 + lacks.sum()), rel=1e-5)


def test_unequal_devices_bound():
    problem = fork()
    faster = replace(problem, exec_time=problem.exec_time * np.array([[0.5, 1.0]], np.float32))
    assert faster.lower_bound() == pytest.approx(4 * 0.5 / 1.5)


def test_refusals(chain):
    with pytest.raises(PlacementError, match=r"(?s)solve: method must be \"one-device\", .*, got 'magic'"):
        methods.solve(chain, "magic", jax.random.key(0), 10)
    with pytest.raises(PlacementError, match="solve: budget must be a positive integer, got 0"):
        methods.solve(chain, "heft", jax.random.key(0), 0)


def test_descending_by_executions_finds_the_fork_and_counts_them():
    """Costs as executions would give them, here of the simulator; from everything on one device."""
    calls = []

    def seconds(assignment):
        calls.append(assignment)
        return float(baselines.evaluate(fork(), [assignment])[0])

    best = online.descend(fork(), baselines.one_device(fork()), seconds, lambda a: True, jax.random.key(0), 200)
    valid(fork(), best)
    assert 190 <= len(calls) <= 200
    assert baselines.evaluate(fork(), [best])[0] <= baselines.evaluate(fork(), [baselines.one_device(fork())])[0]
    assert online.descend(fork(), best, seconds, lambda a: True, jax.random.key(0), 6) is best
