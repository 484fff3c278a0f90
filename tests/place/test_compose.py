"""PEARL's composition: optimal assignments, run-time re-allocation, portability."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlfx.errors import PlacementError
from rlfx.place import compose as pc

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


def test_unsupported_primitives():
    t = table(1)
    rows = {**t.seconds, "train": np.full(3, np.inf)}
    with pytest.raises(PlacementError, match=r"(?s)No device of d0, d1, d2 can run train.*Add a device that can"):
        pc.compose(pc.Table(t.devices, rows, t.bandwidth), WORK)
    assert pc.portability([1.0, np.inf]) > 1.0
    assert pc.portability([1.0, 0.0]) == 0.0


def test_threads_move_to_the_bottleneck():
    pools = pc.Pools(8, 0, 0.0)
    learning = pc.reallocate(pools, learner_seconds=4.0, actor_seconds=1.0, trainer_seconds=0.0)
    assert (learning.actors, learning.trainers) == (4, 4)
    assert 0 < learning.host_share <= 0.5
    less = pc.reallocate(learning, learner_seconds=1.0, actor_seconds=1.0, trainer_seconds=2.0)
    assert less.host_share == pytest.approx(learning.host_share / 2)
    acting = pc.reallocate(learning, learner_seconds=1.0, actor_seconds=3.0, trainer_seconds=1.0)
    assert (acting.actors, acting.trainers) == (5, 3)
    assert pc.reallocate(pools, 1.0, 1.0, 0.0) == pools


def test_measure_runs_every_primitive():
    fns = {p: lambda x: x * 2.0 for p in pc.PRIMITIVES}
    args = {p: (jnp.ones(8),) for p in pc.PRIMITIVES}
    t = pc.measure(fns, args, jax.devices()[:2], np.ones((2, 2)), repeats=2)
    assert all(np.all(t.seconds[p] > 0) for p in pc.PRIMITIVES)
    with pytest.raises(PlacementError, match=r"No function for train"):
        pc.measure({p: f for p, f in fns.items() if p != "train"}, args, jax.devices()[:1], np.ones((1, 1)))
