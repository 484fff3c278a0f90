"""Composition of an RL system from primitives and devices (PEARL section 5.2): actors, learner, replay, its memory."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from rlfx._checks import NATURAL, POSITIVE, TEXT, Kind, each, expect, instance, integer, number, reals, shown
from rlfx.errors import PlacementError, located
from rlfx.place.hardware import check_devices

PRIMITIVES = ("actors", "sample", "train", "update", "insert")


_NAMES = each(TEXT, "names of devices", '("cpu", "gpu")')


@dataclass(frozen=True)
class Workload:
    """Sizes that decide traffic.

    Attributes:
      batch: transitions a training step reads.
      actors: transitions that the actors add in the same time.
      experience_bytes: bytes of a transition.
      weight_bytes: bytes of the policy that the actors fetch.
    """

    batch: int
    actors: int
    experience_bytes: int
    weight_bytes: int

    def __post_init__(self) -> None:
        """Every size is one."""
        for field in dataclasses.fields(self):
            kind = integer(int(field.name == "batch"))
            size = expect(field.name, getattr(self, field.name), kind, PlacementError, of="Workload")
            object.__setattr__(self, field.name, size)


@dataclass(frozen=True)
class Table:
    """The primitive-device assignment matrix, measured or modelled.

    Attributes:
      devices: names, N of them.
      seconds: of each primitive of ``PRIMITIVES`` on each device for one iteration, ``[N]``; infinite if impossible.
      bandwidth: bytes per second ``[N, N]``; the diagonal is the device's own memory.
    """

    devices: tuple[str, ...]
    seconds: Mapping[str, np.ndarray]
    bandwidth: np.ndarray

    def __post_init__(self) -> None:
        """Each primitive takes a time on each device, and each link has a rate."""
        n = len(expect("devices", self.devices, _NAMES, PlacementError, of="Table"))
        seconds = expect("seconds", self.seconds, instance(Mapping, "a mapping", "{...}"), PlacementError, of="Table",
                         fix=f"Give [N] seconds of each of {', '.join(PRIMITIVES)}.")  # fmt: skip
        shapes = {p: np.shape(seconds[p]) if p in seconds else None for p in PRIMITIVES}
        wrong = next((p for p, shape in shapes.items() if shape != (n,)), None)
        if wrong is not None:
            fact = f"A table of {n} devices has seconds of {wrong!r} of shape {shapes[wrong]}."
            raise PlacementError(located(fact, fix=f"Give [N] seconds of each of {', '.join(PRIMITIVES)}."))
        rows = [expect(f"seconds[{p!r}]", seconds[p], reals(1, "[N]"), PlacementError, of="Table") for p in PRIMITIVES]
        if any(np.any(~(np.asarray(row) >= 0)) for row in rows):
            raise PlacementError(
                located("A table has seconds below zero.", fix="Give seconds, infinite where impossible.")
            )
        bandwidth = np.asarray(expect("bandwidth", self.bandwidth, reals(2, "[N, N]"), PlacementError, of="Table"))
        if bandwidth.shape != (n, n) or np.any(~(bandwidth > 0)):
            fact = f"A table of {n} devices has the bandwidth {bandwidth.tolist()}."
            raise PlacementError(
                located(fact, fix="Give positive bytes per second, [N, N], the devices' own on the diagonal.")
            )


class Composition(NamedTuple):
    """Where everything goes.

    Attributes:
      actors, replay, learner, memory: device indices.
      iteration: predicted seconds of one iteration.
      throughput: predicted transitions trained on per second.
      in_turn: whether `pearl.run` makes one part after another, in one thread, and steps host environments in it: where what is
        gained by parts at work together is less than what they take to hand over.
    """

    actors: int
    replay: int
    learner: int
    memory: int
    iteration: float
    throughput: float
    in_turn: bool = False


def measure(primitives: Mapping[str, Callable[..., Any]], arguments: Mapping[str, Any], devices: Sequence[Any],
            bandwidth: np.ndarray, repeats: int = 5) -> Table:  # fmt: skip
    """Fill the table by running every primitive on every device, jitted; medians after a warm-up.

    Args:
      primitives: a jax function for each of ``PRIMITIVES``.
      arguments: the tuple of arguments of each.
      devices: jax devices, N of them.
      bandwidth: of the table, ``[N, N]``.
      repeats: how many times each is timed.

    Raises:
      PlacementError: a primitive or its arguments are missing, or it runs Python that jax cannot compile; a device is
        none.
    """
    bandwidth = np.asarray(expect("bandwidth", bandwidth, reals(2, "[N, N]"), PlacementError, of="measure"), float)
    repeats = expect("repeats", repeats, POSITIVE, PlacementError, of="measure")
    devices = check_devices(devices)
    for what, given in (("function", primitives), ("arguments", arguments)):
        if not isinstance(given, Mapping):
            fix = f"Give a mapping from {', '.join(PRIMITIVES)}."
            raise PlacementError(located(f"measure: the {what} of the primitives is {shown(given)}.", fix=fix))
        missing = [p for p in PRIMITIVES if p not in given]
        if missing:
            raise PlacementError(
                located(f"No {what} for {', '.join(missing)}.", fix=f"Give one for each of {', '.join(PRIMITIVES)}.")
            )
    seconds = {}
    for name in PRIMITIVES:
        fn, row = jax.jit(_compilable(name, primitives[name], arguments[name])), []
        for device in devices:
            args = jax.device_put(tuple(arguments[name]), device)
            jax.block_until_ready(fn(*args))
            times = []
            for _ in range(repeats):
                begin = time.perf_counter()
                jax.block_until_ready(fn(*args))
                times.append(time.perf_counter() - begin)
            row.append(float(np.median(times)))
        seconds[name] = np.array(row)
    return Table(tuple(map(str, devices)), seconds, bandwidth)


def _compilable(name: str, fn: Any, args: Any) -> Callable[..., Any]:
    """The function, if jax traces it at these arguments."""
    if not callable(fn) or not isinstance(args, (tuple, list)):
        fact = f"The primitive {name!r} is {fn!r}, its arguments are a {type(args).__name__}."
        raise PlacementError(located(fact, fix="Give a jax function, and the tuple of its arguments."))
    fix = "Make Python environments with rlfx.envs.make('gymnasium/...'), or put the primitive's seconds into a Table."
    try:
        jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    except Exception as error:
        fact = f"The primitive {name!r} cannot be compiled: {type(error).__name__}: {str(error).splitlines()[0]}"
        raise PlacementError(located(fact, fix=fix)) from error
    if jaxpr.outvars and not jaxpr.eqns and not any(v in jaxpr.invars for v in jaxpr.outvars):
        fact = f"The primitive {name!r} gives constants: what it does is Python, which runs once, when it is compiled."
        raise PlacementError(located(fact, fix=fix))
    return fn


def _check(table: Table, work: Workload, actors: int) -> int:
    """The actors' device, if table, sizes and device make sense."""
    expect("table", table, _TABLE, PlacementError, of="compose")
    expect("work", work, _WORKLOAD, PlacementError, of="compose")
    return expect("actors", actors, integer(0, len(table.devices) - 1), PlacementError, of="compose")


_TABLE = instance(Table, "a Table", "measure(primitives, arguments, devices, bandwidth)")
_WORKLOAD = instance(Workload, "a Workload", "Workload(batch=32, actors=32, experience_bytes=100, weight_bytes=1000)")


def iteration_seconds(table: Table, work: Workload, actors: int, replay: int, learner: int) -> float:
    """Predicted time of one iteration (equation 6).

    Sampling, training and the priority update follow each other; insertion and acting overlap with training. A
    transfer between devices costs its bytes over the link's bandwidth, none within a device.
    """
    t, index_bytes = table.seconds, 8.0 * work.batch

    def link(a: int, b: int, nbytes: float) -> float:
        return 0.0 if a == b else nbytes / float(table.bandwidth[a, b])

    there = link(replay, learner, index_bytes + work.batch * work.experience_bytes)
    back = link(learner, replay, index_bytes)
    insert = float(t["insert"][replay]) + link(actors, replay, work.actors * work.experience_bytes)
    act = float(t["actors"][actors]) + link(learner, actors, work.weight_bytes)
    # One device runs its overlapped work one after another.
    beside = [float(t["train"][learner]), insert, act]
    where = [learner, replay, actors]
    busy = max(sum(b for b, w in zip(beside, where, strict=True) if w == d) for d in set(where))
    return float(t["sample"][replay]) + there + busy + back + float(t["update"][replay])


def compose(table: Table, work: Workload, actors: int = 0) -> Composition:
    """The assignment with the shortest iteration, then the memory where its traffic is cheapest (algorithm 2).

    Args:
      table: latencies and bandwidths.
      work: sizes.
      actors: the device of the environments, usually the host's.

    Raises:
      PlacementError: some primitive runs nowhere, or the table or the workload is malformed.

    Example:
      >>> table = Table(("cpu", "gpu"), {p: np.array([4.0, 1.0]) for p in PRIMITIVES}, np.full((2, 2), 1e9))
      >>> best = compose(table, Workload(32, 32, 100, 1000))
      >>> best.learner, best.replay
      (1, 1)
    """
    actors = _check(table, work, actors)
    pairs = list(itertools.product(range(len(table.devices)), repeat=2))
    times = [iteration_seconds(table, work, actors, r, l) for r, l in pairs]
    if not np.isfinite(min(times)):
        stuck = [p for p in PRIMITIVES if not np.isfinite(table.seconds[p]).any()] or list(PRIMITIVES)
        fact = f"No device of {', '.join(table.devices)} can run {', '.join(stuck)}."
        raise PlacementError(located(fact, fix="Add a device that can."))
    replay, learner = pairs[int(np.argmin(times))]
    seconds = [memory_seconds(table, work, actors, replay, learner, m) for m in range(len(table.devices))]
    iteration = min(times)
    return Composition(actors, replay, learner, int(np.argmin(seconds)), iteration, work.batch / iteration)


def memory_seconds(table: Table, work: Workload, actors: int, replay: int, learner: int, memory: int) -> float:
    """Time on links, and in the device's own memory, of what moves to and from an experience memory on a device.

    Actors write transitions to it, the replay manager sends the indices drawn, and the transitions go to the learner.
    """
    writes = work.actors * work.experience_bytes / float(table.bandwidth[actors, memory])
    indices = 8.0 * work.batch / float(table.bandwidth[replay, memory])
    reads = work.batch * (work.experience_bytes + 8.0) / float(table.bandwidth[memory, learner])
    return writes + indices + reads


class Pools(NamedTuple):
    """Host threads by role, and the share of the batch that the host trains."""

    actors: int
    trainers: int
    host_share: float


def _pools(value: Any) -> Pools:
    if not isinstance(value, Pools):
        raise TypeError
    NATURAL.take(value.actors), NATURAL.take(value.trainers), number(0, 1).take(value.host_share)
    return value


_POOLS = Kind("a Pools of threads and a share from 0 to 1", "Pools(actors=8, trainers=0, host_share=0.0)", _pools)


def reallocate(pools: Pools, learner_seconds: float, actor_seconds: float, trainer_seconds: float,
               threshold: float = 1.5, step: float = 0.125) -> Pools:  # fmt: skip
    """Move host threads between acting and training at run time (algorithm 1).

    If the learner takes ``threshold`` times as long as the actors, half of the actors train, and the host's share of a batch
    grows by a step; if host trainers are the slowest, it shrinks by one, and at none all of them act again; if the actors are,
    a trainer acts again.

    Args:
      pools: current threads.
      learner_seconds: time of the learner's part of a batch.
      actor_seconds: time until the actors have produced the same number of transitions.
      trainer_seconds: time of the host's part of a batch; 0 if it has none.
      threshold: how much slower the learner must be.
      step: a share of a batch; of a `pearl.System`, one of its sub-batches.

    Raises:
      PlacementError: an argument is not of its kind.

    Example:
      >>> reallocate(Pools(8, 0, 0.0), learner_seconds=4.0, actor_seconds=1.0, trainer_seconds=0.0, step=0.25)
      Pools(actors=4, trainers=4, host_share=0.25)
    """
    expect("pools", pools, _POOLS, PlacementError, of="reallocate")
    times = {"learner_seconds": learner_seconds, "actor_seconds": actor_seconds, "trainer_seconds": trainer_seconds}
    for name, seconds in times.items():
        expect(name, seconds, number(0), PlacementError, of="reallocate")
    for name, value in {"threshold": threshold, "step": step}.items():
        expect(name, value, number(above=0), PlacementError, of="reallocate")
    slowest = max(learner_seconds, actor_seconds, trainer_seconds)
    freed = pools.actors // 2
    if slowest == learner_seconds > threshold * actor_seconds and pools.trainers + freed:
        return Pools(pools.actors - freed, pools.trainers + freed, min(1.0, pools.host_share + step))
    if pools.trainers and slowest == trainer_seconds:
        share = pools.host_share - step
        return pools._replace(host_share=share) if share > step / 2 else Pools(pools.actors + pools.trainers, 0, 0.0)
    if pools.trainers and slowest == actor_seconds:
        trainers = pools.trainers - 1
        return Pools(pools.actors + 1, trainers, pools.host_share if trainers else 0.0)
    return pools


def portability(throughputs: Sequence[float]) -> float:
    """Φ: the harmonic mean of throughputs over devices or platforms; zero if one of them is not supported.

    Raises:
      PlacementError: no throughputs.

    Example:
      >>> portability([2.0, 2.0]), portability([3.0, 0.0])
      (2.0, 0.0)
    """
    kind = reals(1, "[N], of one or more")
    values = np.asarray(expect("throughputs", throughputs, kind, PlacementError, of="portability"), float)
    if not values.size or np.isnan(values).any():
        fact = f"portability of {values.tolist()}."
        raise PlacementError(located(fact, fix="Give a throughput of each device; 0.0 where it is not supported."))
    return 0.0 if np.any(values <= 0) else float(len(values) / np.sum(1.0 / values))
