"""Seconds of an iteration's primitives on one device: rehearsed call by call, as a run makes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.place.compose import PRIMITIVES
from rlfx.place.pearl import parts
from rlfx.place.pearl import primitives as do
from rlfx.place.pearl.crew import Channel, Crew, Part
from rlfx.place.pearl.hosts import HostEnvironment
from rlfx.place.pearl.system import State, System

UPDATE = np.int32(0)
SENT = ("batch", "errors", "weights", "chunk")


class Column(NamedTuple):
    """Seconds of an iteration on one device.

    Attributes:
      together: of each primitive, where the device has both replay and learner.
      apart: where it has one of them, and waits for the other between calls.
      sends: to hand over each of ``SENT`` to each other device, in the order in which they were given.
      whole: where the updates are one program: of them (``"updates"``), and of insertion and last priorities (``"close"``).
    """

    together: dict[str, float]
    apart: dict[str, float]
    sends: dict[str, list[float]]
    whole: Mapping[str, float] = MappingProxyType({})


class Stopwatch:
    """Seconds by what was done; what a call returns is waited for."""

    def __init__(self) -> None:
        self.seconds: dict[Hashable, float] = dict.fromkeys(PRIMITIVES, 0.0)

    def __call__(self, what: Hashable, fn: Callable[..., Any], *args: Any) -> Any:
        """What the function returns."""
        begin = time.perf_counter()
        found = jax.block_until_ready(fn(*args))
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - begin
        return found


class Stage(NamedTuple):
    """What is rehearsed on a device: a system and its state there, and the devices that it hands over to."""

    system: System
    state: State
    keys: do.Keys
    device: Any
    others: tuple[Any, ...]


def rehearsed(system: System, state: State, key: jax.Array, device: Any, others: Sequence[Any], repeats: int) -> Column:
    """Medians over iterations after a first one, which compiles; nothing is kept.

    Of actors with host environments it is the policy alone. Without other devices nothing is apart.
    """
    keys, state = jax.device_put((do.Keys.of(key), state), device)
    stage = Stage(system, state, keys, device, tuple(others))
    together = _medians(stage, _together, repeats)
    whole = _whole(stage, repeats) if system.sub_batches == 1 else {}
    if not others:
        return Column(together, together, {what: [] for what in SENT}, whole)
    pauses = [together[name] / system.updates for name in ("sample", "train", "update")]
    apart = _medians(stage, lambda *given: _apart(*given, learner=pauses[1], replay=pauses[0] + pauses[2]), repeats)
    return Column(together, apart, {what: [apart[what, o] for o in range(len(others))] for what in SENT}, whole)


def _medians(stage: Stage, iteration: Callable[..., tuple[Any, Any]], repeats: int) -> dict[Any, float]:
    manager, memory = jax.tree.map(jnp.copy, (stage.state.manager, stage.state.memory))  # what is given is not donated
    taken = []
    for _ in range(repeats + 1):
        watch = Stopwatch()
        chunks = _acted(stage, watch)
        manager = iteration(stage, manager, memory, watch)
        memory = watch("insert", do.write, memory, UPDATE, chunks)
        manager = watch("insert", do.admit, stage.system, manager)
        taken.append(watch.seconds)
    return _typical(taken)


def _typical(taken: Sequence[Mapping[Any, float]]) -> dict[Any, float]:
    """Medians of iterations, the first one, which compiles, not counted."""
    return {name: float(np.median([seconds[name] for seconds in taken[1:]])) for name in taken[0]}


def _whole(stage: Stage, repeats: int) -> dict[str, float]:
    """Seconds of an iteration whose updates are one program, acting not counted."""
    system, learner = stage.system, stage.state.learner
    manager, memory = jax.tree.map(jnp.copy, (stage.state.manager, stage.state.memory))
    chunks = _acted(stage, Stopwatch())
    taken = []
    for _ in range(repeats + 1):
        watch = Stopwatch()
        made = watch(
            "updates", lambda m, x: [*do.all_updated(system, m, x, learner, stage.keys, 0)][-1], manager, memory
        )
        manager, memory = watch(
            "close", do.closed, system, made.manager, memory, UPDATE, chunks, made.drawn.indices[0], made.errors, True
        )
        taken.append(watch.seconds)
    typical = _typical(taken)
    return {name: typical[name] for name in ("updates", "close")}


def _together(stage: Stage, manager: Any, memory: Any, watch: Stopwatch) -> Any:
    """The manager after an iteration's updates; the learner stays the same."""
    for _ in range(stage.system.updates):
        drawn, batches = _drawn(stage, manager, memory, watch)
        _, errors = _trained(stage, drawn, batches, watch)
        manager = watch("update", do.reprioritise, stage.system, manager, drawn.indices, errors)
    return manager


def _apart(stage: Stage, manager: Any, memory: Any, watch: Stopwatch, *, learner: float, replay: float) -> Any:
    """The same, first what replay does of it, then what the learner does, with pauses as long as the other takes."""
    errors = jax.device_put(tuple(jnp.zeros((stage.system.batch,)).reshape(stage.system.sub_batches, -1)), stage.device)
    for _ in range(stage.system.updates):
        drawn, batches = _drawn(stage, manager, memory, watch)
        _sent("batch", (batches, drawn.weight), stage, watch)
        time.sleep(learner)
        manager = watch("update", do.reprioritise, stage.system, manager, drawn.indices, errors)
    weights = None
    for _ in range(stage.system.updates):
        time.sleep(replay)
        weights, errors = _trained(stage, drawn, batches, watch)
        _sent("errors", errors, stage, watch)
    _sent("weights", weights, stage, watch)
    return manager


def _sent(what: str, value: Any, stage: Stage, watch: Stopwatch) -> None:
    for o, other in enumerate(stage.others):
        watch((what, o), parts.put, value, other)


def _drawn(stage: Stage, manager: Any, memory: Any, watch: Stopwatch) -> tuple[do.Drawn, list]:
    drawn = watch("sample", do.draw, stage.system, manager, stage.keys.draw, UPDATE)
    return drawn, [watch("sample", do.read, memory, indices) for indices in drawn.indices]


def _trained(stage: Stage, drawn: do.Drawn, batches: list, watch: Stopwatch) -> tuple[Any, tuple]:
    """Weights and errors of an update."""
    system, learner, key = stage.system, stage.state.learner, stage.keys.learn
    if system.sub_batches == 1:
        _, weights, errors, _ = watch("train", do.train, system, learner, batches[0], drawn.weight[0], key, UPDATE)
        return weights, (errors,)
    total, errors = None, []
    for p, (batch, weight) in enumerate(zip(batches, drawn.weight, strict=True)):
        slope, error, _ = watch("train", do.gradient, system, learner, batch, weight, key, UPDATE, np.int32(p))
        total = slope if total is None else watch("train", do.added, total, slope)
        errors.append(error)
    _, weights = watch("train", do.apply, system, learner, total)
    return weights, tuple(errors)


def _acted(stage: Stage, watch: Stopwatch) -> tuple:
    """What each actor collects; of host environments, which are not stepped, it is zeros."""
    system, state, key = stage.system, stage.state, stage.keys.act
    weights = state.weights[0]
    if not isinstance(system.env, HostEnvironment):
        chunks = tuple(
            watch("actors", do.act, system, weights, states, key, UPDATE, np.int32(a))[1]
            for a, states in enumerate(state.actors)
        )
    else:
        obs = jax.tree.map(lambda x: np.zeros((system.envs, *x.shape[1:]), x.dtype), state.memory.obs)
        for a in range(system.actors):
            for t in range(system.length):
                watch("actors", do.choose, system, weights, obs, key, UPDATE, np.int32(a), np.int32(t))
        rows = system.envs * system.length
        chunk = jax.tree.map(lambda x: np.zeros((rows, *x.shape[1:]), x.dtype), state.memory)
        chunks = (chunk,) * system.actors
    for chunk in chunks:
        for o, other in enumerate(stage.others):
            watch(("chunk", o), parts.sent, chunk, other)
    return chunks


def woken(
    here: Callable[[], None] = lambda: None, there: Callable[[], None] = lambda: None, rounds: int = 100
) -> float:
    """Seconds from a message in a channel to the next step of the thread that waited for it: a median of both directions.

    ``here`` and ``there`` are called in the two threads before, to put them where they belong.
    """
    crew, taken = Crew(60.0), []
    messages, answers = Channel(crew, "messages", 1), Channel(crew, "answers", 1)

    def ask(part: Part) -> None:
        here()
        for _ in range(rounds):
            time.sleep(3e-4)  # who waits for long is woken more slowly
            begin = time.perf_counter()
            messages.put(part, None)
            answers.get(part)
            taken.append((time.perf_counter() - begin) / 2)

    def answer(part: Part) -> None:
        there()
        for _ in range(rounds):
            answers.put(part, messages.get(part))

    crew.start("asks", ask, last=True)
    crew.start("answers", answer)
    crew.watch()
    crew.stop()
    return float(np.median(taken))
