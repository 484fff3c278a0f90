"""Seconds of an iteration before it is run: the threads of a run as simulated ones, whose calls take what a rehearsal measured.

Equation 6 of PEARL adds up an iteration's primitives as if each were one call. A run makes them ``updates`` times in turn, and a
device that waits between them takes longer for each (its caches are another's meanwhile). So a device is rehearsed twice, with
replay and learner both on it and with either alone, and who waits for whom is simulated.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlfx.place.compose import PRIMITIVES, Table
from rlfx.place.pearl.rehearsal import Column
from rlfx.place.pearl.system import System

FIRST, COUNTED, AFTER = 4, 8, 4  # simulated iterations: until the threads are in step, those that count, and some more


class Costs(NamedTuple):
    """What a rehearsal measured: seconds of an iteration.

    Attributes:
      columns: of each device.
      steps: of an actor's process; nothing for JAX environments.
      wakes: from a hand-over to the next step of the thread that waited for it.
    """

    columns: tuple[Column, ...]
    steps: float
    wakes: float

    def sends(self, what: str, source: int, target: int) -> float:
        """To hand over between two devices; nothing within one."""
        if source == target:
            return 0.0
        return self.columns[source].sends[what][target - (target > source)]

    def table(self, devices: Sequence[Any], bandwidth: np.ndarray) -> Table:
        """PEARL's: everything on one device."""
        rows = {name: np.array([column.together[name] for column in self.columns]) for name in PRIMITIVES}
        rows["actors"] += self.steps  # processes step at the same time
        return Table(tuple(map(str, devices)), rows, bandwidth)


class Queue:
    """What one simulated thread gives another: how many there are, and who waits."""

    def __init__(self, count: int = 0):
        self.count, self.waiting = count, deque()


class Timeline:
    """Simulated threads: iterators of ``("work", device, seconds)``, ``("put", queue)`` and ``("get", queue)``.

    A device works for one thread at a time, first come, first served. A thread that waited goes on ``wakes`` seconds after what
    it waited for is there.
    """

    def __init__(self, wakes: float):
        self.wakes, self.now = wakes, 0.0
        self.free: dict[Any, float] = {}
        self.numbers, self.events = itertools.count(), []

    def at(self, time: float, thread: Iterator) -> None:
        """A thread goes on at a time."""
        heapq.heappush(self.events, (time, next(self.numbers), thread))

    def run(self) -> None:
        """Until no thread can go on."""
        while self.events:
            self.now, _, thread = heapq.heappop(self.events)
            for what, where, *seconds in thread:
                if what == "work":
                    end = self.free[where] = max(self.now, self.free.get(where, 0.0)) + seconds[0]
                    self.at(end, thread)
                    break
                if what == "put":
                    if where.waiting:
                        self.at(self.now + self.wakes, where.waiting.popleft())
                    else:
                        where.count += 1
                elif where.count:
                    where.count -= 1
                else:
                    where.waiting.append(thread)
                    break


def in_turn(costs: Costs, system: System, actors: int, replay: int) -> float:
    """Seconds of an iteration in which one thread makes one part after another, replay and learner on one device."""
    column = costs.columns[replay]
    rest = column.whole or {name: column.together[name] for name in PRIMITIVES if name != "actors"}
    sent = costs.sends("weights", replay, actors) + costs.sends("chunk", actors, replay)
    return costs.columns[actors].together["actors"] + system.actors * costs.steps + sent + sum(rest.values())


def predicted(costs: Costs, system: System, actors: int, replay: int, learner: int) -> float:
    """Seconds of an iteration in the long run, replay warm: as `pearl.run` goes, without helpers.

    The experience memory is on replay's device.
    """
    together, parts = replay == learner, system.sub_batches
    whole = costs.columns[replay].whole if together else {}
    manager, trainer = (c.together if together else c.apart for c in (costs.columns[replay], costs.columns[learner]))
    sample, train, update = (
        seconds[name] / system.updates
        for seconds, name in ((manager, "sample"), (trainer, "train"), (manager, "update"))
    )
    act, insert = costs.columns[actors].apart["actors"] / system.actors, manager["insert"]
    batch, error = (costs.sends(*x) / system.updates for x in (("batch", replay, learner), ("errors", learner, replay)))
    rounds = system.length if costs.steps else 1
    time, total, ends = Timeline(costs.wakes), FIRST + COUNTED + AFTER + system.ahead, []
    batches, errors = Queue(), Queue()
    tokens = [Queue(system.ahead + 1) for _ in range(system.actors)]  # weights that an actor may take
    chunks = [Queue() for _ in range(system.actors)]

    def publish() -> Iterator[tuple]:
        for queue in tokens:
            yield "put", queue

    def inserted() -> Iterator[tuple]:
        for queue in chunks:
            yield "get", queue
        yield "work", replay, insert

    def replay_thread() -> Iterator[tuple]:
        for _ in range(total):
            if whole:
                yield "work", replay, whole["updates"]
                yield from publish()
                for queue in chunks:
                    yield "get", queue
                yield "work", replay, whole["close"]
            for u in range(0 if whole else system.updates):
                last = u == system.updates - 1
                for _ in range(parts):
                    yield "work", replay, (sample + batch) / parts
                    if together:
                        yield "work", replay, train / parts
                    else:
                        yield "put", batches
                if last and together:
                    yield from publish()
                if last:
                    yield from inserted()
                if not together:
                    yield "get", errors
                yield "work", replay, update
            ends.append(time.now)

    def learner_thread() -> Iterator[tuple]:
        for _, u in itertools.product(range(total), range(system.updates)):
            for _ in range(parts):
                yield "get", batches
                yield "work", learner, train / parts
            if u == system.updates - 1:
                yield from publish()
            yield "work", learner, error
            yield "put", errors

    def actor_thread(a: int) -> Iterator[tuple]:
        for _ in range(total):
            yield "get", tokens[a]
            if a == 0:  # who is first brings them
                yield "work", actors, costs.sends("weights", learner, actors)
            for _ in range(rounds):
                yield "work", actors, act / rounds
                if costs.steps:
                    yield "work", ("process", a), costs.steps / rounds + 2 * costs.wakes  # a message there, and one back
            yield "work", actors, costs.sends("chunk", actors, replay) / system.actors
            yield "put", chunks[a]

    time.at(0.0, replay_thread())
    if not together:
        time.at(0.0, learner_thread())
    for a in range(system.actors):
        time.at(0.0, actor_thread(a))
    time.run()
    return (ends[FIRST + COUNTED - 1] - ends[FIRST - 1]) / COUNTED
