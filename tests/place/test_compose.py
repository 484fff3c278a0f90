"""PEARL's composition: optimal assignments, run-time re-allocation, portability."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlfx.errors import PlacementError
from rlfx.place import compose as pc
from rlfx.place import hardware

WORK = pc.Workload(batch=32, actors=64, experience_bytes=200, weight_bytes=10_000)


def table(seed, devices=3):
    rng = np.random.default_rng(seed)
    rows = {p: rng.uniform(1e-4, 1e-2, devices) for p in pc.PRIMITIVES}
    return pc.Table(tuple(f"d{i}" for i in range(devices)), rows, rng.uniform(1e6, 1e9, (devices, devices)))


@pytest.mark.parametrize("seed", range(5))
def test_the_composition_is_optimal(seed):
    t = table(seed)
    found = pc.compose(t, WORK)
    everything = [pc.iteration_seconds(t, WORK, 0, r, l) for r, l in itertools.product(range(3), repeat=2)]
    assert found.iteration == min(everything)
    assert found.throughput == pytest.approx(WORK.batch / found.iteration)


def test_a_slow_link_keeps_replay_and_learner_together():
    t = table(0)
    slow = pc.Table(t.devices, t.seconds, np.full((3, 3), 10.0))
    found = pc.compose(slow, WORK)
    assert found.replay == found.learner == found.actors == 0


def test_memory_follows_traffic():
    seconds = {p: np.array([1.0, 1e-3]) for p in pc.PRIMITIVES}
    fast_gpu = pc.Table(("cpu", "gpu"), seconds, np.array([[1e9, 1e9], [1e9, 1e11]]))
    found = pc.compose(fast_gpu, pc.Workload(4096, 1, 1000, 10))
    assert (found.learner, found.memory) == (1, 1)
    many_actors = pc.Table(("cpu", "gpu"), seconds, np.array([[1e11, 1e6], [1e6, 1e9]]))
    assert pc.compose(many_actors, pc.Workload(1, 4096, 1000, 10)).memory == 0


def test_memory_and_iteration_equal_a_loop_over_all_assignments():
    """80 tables with links that differ by direction: what is reported costs least, counted by hand."""
    for seed in range(80):
        t = table(seed, devices=2 + seed % 3)
        rng, n = np.random.default_rng(1000 + seed), 2 + seed % 3
        batch, actors, size, weights = (int(x) for x in rng.integers(1, 5000, 4))
        at = int(rng.integers(n))
        found = pc.compose(t, pc.Workload(batch, actors, size, weights), actors=at)
        traffic = []
        for m in range(n):
            seconds = actors * size / t.bandwidth[at][m]  # actors write transitions to it
            seconds += 8 * batch / t.bandwidth[found.replay][m]  # the replay manager says which are drawn
            seconds += batch * (size + 8) / t.bandwidth[m][found.learner]  # they go to the learner
            traffic.append(seconds)
        assert found.memory == np.argmin(traffic)


def test_a_machine_is_a_table():
    """The devices' own memory is on the diagonal of the links: what works together stays together."""
    machine = hardware.uniform(2, flops=1e9, memory_rate=1e10, memory=1e9, bandwidth=1e9)
    seconds = {p: np.array([1.0, 1e-3]) for p in pc.PRIMITIVES} | {"actors": np.array([1e-3, 1e-3])}
    found = pc.compose(pc.Table(machine.names, seconds, machine.bandwidth), pc.Workload(4096, 1, 1000, 10))
    assert (found.replay, found.learner, found.memory) == (1, 1, 1)


T = table(0)
FNS = {p: lambda x: x * 2.0 for p in pc.PRIMITIVES}
ARGS = {p: (jnp.float32(1),) for p in pc.PRIMITIVES}
BAD = {
    "table": (lambda: pc.compose(pc.Table(T.devices, {}, T.bandwidth), WORK), "seconds of 'actors' of shape None"),
    "short": (lambda: pc.compose(pc.Table(("a",), T.seconds, T.bandwidth), WORK), r"1 devices .* shape \(3,\)"),
    "links": (lambda: pc.compose(pc.Table(T.devices, T.seconds, np.ones(3)), WORK), "bandwidth must be an array"),
    "zero link": (lambda: pc.compose(pc.Table(T.devices, T.seconds, np.zeros((3, 3))), WORK), "has the bandwidth"),
    "negative": (lambda: pc.compose(pc.Table(T.devices, {**T.seconds, "train": -np.ones(3)}, T.bandwidth), WORK), "below zero"),
    "actors": (lambda: pc.compose(T, WORK, actors=3), "compose: actors must be an integer from 0 to 2, got 3"),
    "batch": (lambda: pc.compose(T, pc.Workload(0, 1, 1, 1)), "Workload: batch must be a positive integer, got 0"),
    "fractions": (lambda: pc.compose(T, pc.Workload(1, 1.5, 1, 1)), "Workload: actors must be an integer >= 0, got 1.5"),
    "arguments": (lambda: pc.measure(FNS, {}, jax.devices()[:1], np.ones((1, 1))), "No arguments for actors"),
    "no function": (lambda: pc.measure({**FNS, "actors": 3}, ARGS, jax.devices()[:1], np.ones((1, 1))), "'actors' is 3"),
    "no tuple": (lambda: pc.measure(FNS, {**ARGS, "train": 1.0}, jax.devices()[:1], np.ones((1, 1))), "arguments are a float"),
    "Python": (lambda: pc.measure({**FNS, "actors": lambda x: [1.0][int(x)]}, ARGS, jax.devices()[:1], np.ones((1, 1))),
               "'actors' cannot be compiled: ConcretizationTypeError"),
    "gymnasium": (lambda: pc.measure({**FNS, "actors": CARTPOLE.step}, ARGS, jax.devices()[:1], np.ones((1, 1))),
                  "'actors' cannot be compiled: "),
    "constants": (lambda: pc.measure({**FNS, "actors": lambda x: np.zeros(3)}, ARGS, jax.devices()[:1], np.ones((1, 1))),
                  "'actors' gives constants"),
}  # fmt: skip


class CartPole:
    """An environment in Python."""

    def step(self, action):
        return np.cumsum(np.asarray(action))


CARTPOLE = CartPole()


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    call, message = BAD[case]
    with pytest.raises(PlacementError, match=rf"(?s){message}.*Fix: "):
        call()


def test_unsupported_primitives():
    t = table(1)
    rows = {**t.seconds, "train": np.full(3, np.inf)}
    with pytest.raises(PlacementError, match=r"(?s)No device of d0, d1, d2 can run train.*Add a device that can"):
        pc.compose(pc.Table(t.devices, rows, t.bandwidth), WORK)
    assert pc.portability([1.0, np.inf]) > 1.0
    assert pc.portability([1.0, 0.0]) == 0.0


def test_threads_move_to_the_bottleneck():
    pools, step = pc.Pools(8, 0, 0.0), 1 / 3
    learning = pc.reallocate(pools, learner_seconds=4.0, actor_seconds=1.0, trainer_seconds=0.0, step=step)
    assert learning == pc.Pools(4, 4, step)
    more = pc.reallocate(learning, learner_seconds=2.0, actor_seconds=1.0, trainer_seconds=1.0, step=step)
    assert more == pc.Pools(2, 6, 2 * step)
    less = pc.reallocate(more, learner_seconds=1.0, actor_seconds=1.0, trainer_seconds=2.0, step=step)
    assert less == pc.Pools(2, 6, pytest.approx(step))
    assert pc.reallocate(less, 1.0, 1.0, 2.0, step=step) == pools  # no share is left: all act again
    acting = pc.reallocate(learning, learner_seconds=1.0, actor_seconds=3.0, trainer_seconds=1.0)
    assert acting == pc.Pools(5, 3, step)
    assert pc.reallocate(pc.Pools(7, 1, step), 1.0, 3.0, 1.0) == pools
    alone = pc.reallocate(pc.Pools(1, 1, 0.5), 4.0, 1.0, 1.0, step=0.25)  # nobody is left to be freed; the share grows
    assert alone == pc.Pools(1, 1, 0.75)
    assert pc.reallocate(pools, 1.0, 1.0, 0.0) == pc.reallocate(pools, 1.4, 1.0, 0.0) == pools
    assert pc.reallocate(pc.Pools(1, 0, 0.0), 4.0, 1.0, 0.0) == pc.Pools(1, 0, 0.0)


def test_measure_runs_every_primitive():
    fns = {p: lambda x: x * 2.0 for p in pc.PRIMITIVES}
    args = {p: (jnp.ones(8),) for p in pc.PRIMITIVES}
    t = pc.measure(fns, args, jax.devices()[:2], np.ones((2, 2)), repeats=2)
    assert all(np.all(t.seconds[p] > 0) for p in pc.PRIMITIVES)
    with pytest.raises(PlacementError, match=r"No function for train"):
        pc.measure({p: f for p, f in fns.items() if p != "train"}, args, jax.devices()[:1], np.ones((1, 1)))
