"""Stages: grouping, what a call moves, and execution with weights that stay."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlfx.errors import PlacementError
from rlfx.place import Assignment, assign_stages, hardware, oracle, simulate
from rlfx.place.cluster import clustered
from rlfx.place.graph import check
from rlfx.place.resident import StageExecutor
from rlfx.place.stages import staged, staged_problem, whole

MACHINE = hardware.uniform(2, flops=1e9, memory_rate=1e9, memory=1e9, bandwidth=1e8)


def network(key):
    k, l = jax.random.split(key)
    return {"in": jax.random.normal(k, (6, 16)), "out": jax.random.normal(l, (16, 1))}


def value(weights, x):
    return (jnp.tanh(x @ weights["in"]) @ weights["out"])[:, 0]


def update(state, batch):
    """Critics towards the least of their targets, which follow them."""
    critics, targets = state
    goal = batch["reward"] + 0.9 * jnp.min(jnp.stack([value(w, batch["next"]) for w in targets]), axis=0)
    losses, new = [], []
    for weights in critics:
        loss, slope = jax.value_and_grad(lambda w: jnp.mean((value(w, batch["obs"]) - goal) ** 2))(weights)
        losses.append(loss)
        new.append(jax.tree.map(lambda w, g: w - 0.1 * g, weights, slope))
    targets = [jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, *pair) for pair in zip(targets, new, strict=True)]
    return (new, targets), jnp.stack(losses)


@pytest.fixture(scope="module")
def given():
    keys = jax.random.split(jax.random.key(0), 8)
    state = ([network(k) for k in keys[:3]], [network(k) for k in keys[3:6]])
    batch = {"obs": jax.random.normal(keys[6], (8, 6)), "next": jax.random.normal(keys[7], (8, 6)), "reward": jnp.ones(8)}
    return state, batch


def distance(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def random_assignment(tasks, rng):
    return Assignment(rng.integers(0, 2, tasks).astype(np.int32), rng.permutation(tasks).astype(np.int32))


def test_clusters_partition_without_cycles():
    rng = np.random.default_rng(0)
    for _ in range(60):
        n = int(rng.integers(2, 40))
        edges = sorted({tuple(sorted(map(int, rng.choice(n, 2, replace=False)))) for _ in range(2 * n)})
        labels = [None if x == 3 else int(x) for x in rng.integers(0, 4, n)]
        seconds = rng.uniform(0.1, 1.0, n).tolist()
        groups = clustered(edges, seconds, labels, launch=0.3, largest=3.0, path=float(rng.uniform(0, 9)), at_most=8)
        assert sorted(v for g in groups for v in g) == list(range(n))
        of = {v: i for i, g in enumerate(groups) for v in g}
        assert all(of[u] <= of[v] for u, v in edges)  # groups are in an order in which they can run
        assert all(len({labels[v] for v in g} - {None}) <= 1 for g in groups)


def test_independent_chains_stay_apart():
    edges = [(0, 1), (1, 2), (3, 4), (4, 5), (2, 6), (5, 6)]
    groups = clustered(edges, [1.0] * 6 + [0.01], [None] * 7, launch=0.1, largest=9.0, at_most=9)
    assert [0, 1, 2] in groups
    assert [3, 4, 5] in groups


def test_graph_means_the_function(given):
    graph = staged(update, *given, carry=1)
    check(graph)
    want = update(*given)
    assert 3 <= len(graph.tasks) <= 40
    assert distance(graph.evaluate(*given), want) < 1e-6
    one = whole(graph)
    assert len(one.tasks) == 1
    assert distance(one.evaluate(*given), want) < 1e-6


def test_constants_of_the_function_come_after_its_arguments():
    shift, rows = np.linspace([0.0], [1.0], 3, axis=1, dtype=np.float32), np.array([2, 0], np.int32)

    @jax.jit
    def of_rows(x):
        return x[rows]

    def fn(w, scale):
        return jnp.tanh(of_rows(w) * scale + shift)

    args = jnp.arange(12.0).reshape(4, 3), jnp.float32(0.1)
    graph = staged(fn, *args)
    check(graph)
    shapes = [graph.blocks[i].shape for i, node in enumerate(graph.nodes) if node.role == "input"]
    assert shapes[:2] == [(4, 3), ()]
    assert set(shapes[2:]) == {(1, 3), (2,)}
    assert graph.constant == set(range(2, len(shapes)))
    want = np.tanh(np.asarray(args[0])[rows] * np.float32(0.1) + shift)
    np.testing.assert_allclose(np.asarray(graph.evaluate(*args)), want, atol=1e-6)


def test_named_scopes_and_jitted_functions_are_stages():
    @jax.jit
    def critic(w, x):
        return jnp.sum((x @ w) ** 2)

    def fn(w, x):
        with jax.named_scope("encoder"):
            y = jnp.sin(x @ w)
        return jax.grad(lambda w: critic(w, y))(w)

    graph = staged(fn, jnp.ones((4, 4)), jnp.ones((2, 4)), names=("encoder", "critic"))
    names = [graph.nodes[i].name for i in graph.tasks]
    assert any("encoder" in name for name in names)
    assert any("critic" in name for name in names)
    with pytest.raises(PlacementError, match="'reward' names no scope, module or jitted function of fn"):
        staged(fn, jnp.ones((4, 4)), jnp.ones((2, 4)), names=("reward",))


@pytest.mark.parametrize("devices", [2, 3])
def test_simulator_with_sources_equals_oracle(given, devices):
    graph = staged(update, *given, carry=1)
    machine = hardware.uniform(devices, flops=1e9, memory_rate=1e9, memory=1e9, bandwidth=1e7)
    machine = machine.with_shared_links() if devices == 3 else machine
    problem, rng = staged_problem(graph, machine), np.random.default_rng(1)
    assert problem.source_bytes.sum() > 0
    assert problem.lane.size == (9 if devices == 3 else 0)
    moved = 0
    for fifo in (False, True):
        for _ in range(8):
            device = rng.integers(0, devices, problem.tasks).astype(np.int32)
            order = rng.permutation(problem.tasks).astype(np.int32)
            want, _ = oracle.simulate(problem, device, order, fifo=fifo)
            got = simulate.simulate(problem, device[None], order[None], fifo=fifo).makespan[0]
            assert want == got
            moved += len(oracle.sent_sources(problem, device))
    assert moved


def test_what_a_call_moves_by_hand():
    """Two stages on two devices: the batch goes to the second, the carried weights are there already."""

    def fn(weights, x):
        with jax.named_scope("a"):
            one = weights[0] + jnp.sum(x @ weights[0])
        with jax.named_scope("b"):
            two = weights[1] + jnp.sum(x @ weights[1])
        return (one, two)

    weights = (jnp.ones((4, 4)), jnp.ones((4, 4)))
    graph = staged(fn, weights, jnp.ones((8, 4)), names=("a", "b"), carry=1)
    machine = hardware.uniform(2, flops=1e9, memory_rate=1e9, memory=1e9, bandwidth=1e6, latency=1e-3)
    problem = staged_problem(graph, machine)
    assert problem.tasks == 2
    apart = simulate.simulate(problem, np.array([[0, 1]], np.int32), np.array([[0, 1]], np.int32))
    arrives = 1e-3 + 8 * 4 * 4 / 1e6
    np.testing.assert_allclose(float(apart.start[0, 1]), arrives, rtol=1e-6)
    np.testing.assert_allclose(float(apart.start[0, 0]), 0.0)
    swapped = simulate.simulate(problem, np.array([[1, 0]], np.int32), np.array([[0, 1]], np.int32))
    np.testing.assert_allclose(float(swapped.start[0, 0]), arrives, rtol=1e-6)


@pytest.mark.parametrize("threads", [True, False], ids=["threads", "one thread"])
@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
def test_executed_equals_function(given, threads, donated):
    graph = staged(update, *given, carry=1, donate_argnums=donated)
    problem, rng = staged_problem(graph, MACHINE), np.random.default_rng(2)
    executor = StageExecutor(graph, problem, jax.devices()[:2])
    executor.threads = threads
    for _ in range(3):
        assignment = random_assignment(problem.tasks, rng)
        state, want = jax.tree.map(jnp.copy, given[0]), given[0]
        for _ in range(3):
            state, losses = executor(jax.tree.leaves((state, given[1])), assignment)
            want, expected = update(want, given[1])
            assert distance((state, losses), (want, expected)) < 1e-5
    assert not any(x.is_deleted() for x in jax.tree.leaves(given))


def test_weights_stay_where_they_are_used(given):
    graph = staged(update, *given, carry=1)
    problem = staged_problem(graph, MACHINE)
    executor = StageExecutor(graph, problem, jax.devices()[:2])
    assignment = Assignment(np.arange(problem.tasks, dtype=np.int32) % 2, np.arange(problem.tasks, dtype=np.int32))
    state, _ = executor(jax.tree.leaves(given), assignment)
    places = {next(iter(x.devices())) for x in jax.tree.leaves(state)}
    assert places == set(jax.devices()[:2])
    flat = jax.tree.leaves((state, given[1]))
    assert executor.unknown(flat) == []  # neither what came back nor the same batch is looked at again
    executor.load(flat, assignment)
    before = [dict(known.on) for known in executor.inputs]
    executor.load(flat, assignment)
    assert all(a[d] is b[d] for a, known in zip(before, executor.inputs, strict=True) for b in [known.on] for d in a)


def test_donated_state_is_gone_and_the_rest_is_not(given):
    graph = staged(update, *given, carry=1, donate_argnums=(0,))
    problem = staged_problem(graph, MACHINE)
    executor = StageExecutor(graph, problem, jax.devices()[:2])
    alone = Assignment(np.zeros(problem.tasks, np.int32), np.arange(problem.tasks, dtype=np.int32))
    state = jax.tree.map(jnp.copy, given[0])
    executor(jax.tree.leaves((state, given[1])), alone)
    assert any(x.is_deleted() for x in jax.tree.leaves(state))
    assert not any(x.is_deleted() for x in jax.tree.leaves(given[1]))


def test_a_stage_that_raises_ends_the_call(given):
    graph = staged(update, *given, carry=1)
    problem = staged_problem(graph, MACHINE)
    executor = StageExecutor(graph, problem, jax.devices()[:2])
    assignment = Assignment(np.arange(problem.tasks, dtype=np.int32) % 2, np.arange(problem.tasks, dtype=np.int32))
    plan = executor.plan(assignment)

    def broken(*_):
        raise RuntimeError("this stage is broken")

    step = plan.steps[1][0]
    object.__setattr__(step, "run", broken)
    with pytest.raises(RuntimeError, match="this stage is broken"):
        executor(jax.tree.leaves(given), assignment)
    executor.plans.clear()
    assert distance(executor(jax.tree.leaves(given), assignment), update(*given)) < 1e-5


def test_assign_measures_decides_and_says_so(given, monkeypatch):
    # On a busy machine one measurement is of a moment that another is not of: stages are said to take a second each.
    measured = StageExecutor.calibrated

    def slow(self, problem, args):
        problem = measured(self, problem, args)
        assert (problem.exec_time > 0).all()
        return replace(problem, exec_time=np.ones_like(problem.exec_time))

    monkeypatch.setattr(StageExecutor, "calibrated", slow)
    far = hardware.uniform(2, flops=1e9, memory_rate=1e9, memory=1e9, bandwidth=1e8, latency=1e-2)
    placed = assign_stages(update, *given, carry=1, devices=jax.devices()[:2], method="heft", hardware=far)
    state, losses = placed(*given)
    want = update(*given)
    assert distance((state, losses), want) < 1e-5
    assert distance(placed(state, given[1]), update(want[0], given[1])) < 1e-5
    # One program takes microseconds: no assignment pays.
    assert placed.problem.tasks == 1
    assert "one device: one program is predicted" in placed.explain()
    timeline, _ = placed.timed(*given)
    assert timeline.makespan > 0
    with pytest.raises(PlacementError, match="was placed for argument"):
        placed(given[0], {**given[1], "reward": jnp.ones(9)})


def test_assign_by_description_places_on_two_devices(given):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    slow = hardware.uniform(2, flops=1e5, memory_rate=1e9, memory=1e9, bandwidth=1e9)
    placed = assign_stages(update, *shapes, carry=1, devices=jax.devices()[:2], method="heft", hardware=slow)
    assert set(placed.assignment.device) == {0, 1}
    assert placed.seconds < placed.alone
    assert "2 devices: one program on one of them takes" in placed.explain()
    assert distance(placed(*given), update(*given)) < 1e-5


def test_carried_that_comes_back_otherwise_is_refused(given):
    with pytest.raises(PlacementError, match="carry=1: the first 1 results of <lambda> are not like"):
        staged(lambda state, batch: (batch, state), *given, carry=1)
