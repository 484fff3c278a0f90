"""The replay manager and the experience memory: PEARL's protocol, an iteration at a time, and all that is in its thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.place.pearl import parts
from rlfx.place.pearl import primitives as do
from rlfx.place.pearl.crew import Part
from rlfx.place.pearl.parts import Account, Call, Chunk, Learned, Learner, SubBatch, Wires, moved, put
from rlfx.place.pearl.system import State


@jax.jit
def _copies(value: Any) -> Any:
    return jax.tree.map(jnp.copy, value)


@dataclass
class Replay:
    """The replay manager and the experience memory: PEARL's protocol, an iteration at a time."""

    wires: Wires
    state: State
    after: Callable[[Call], str | None] | None
    account: Account

    def __call__(self, part: Part) -> None:
        """Make the iterations; ``state`` is what they lead to."""
        with ExitStack() as stack:
            self._all(part, stack)

    def _all(self, part: Part, stack: ExitStack) -> None:
        wires, system, places = self.wires, self.wires.system, self.wires.places
        self.steps: list[parts.Step] = []
        if wires.in_turn:  # nobody else acts
            act_key = put(wires.keys.act, places.actors)
            every = (parts.environments(wires, act_key, a, part) for a in range(system.actors))
            self.steps = [stack.enter_context(each) for each in every]
        self.part, self.keys = part, put(wires.keys, places.replay)
        self.manager = _copies(put(self.state.manager, places.replay))  # what is given is not donated
        self.memory = _copies(put(self.state.memory, places.memory))
        # One device does one thing at a time: its learner needs no thread, and nobody to hand over to.
        self.beside = Learner(wires, self.state.learner, part) if wires.together else None
        self.learner, self.actors, self.metrics = self.state.learner, put(self.state.actors, places.actors), None
        reason, i, last = None, wires.begin, time.perf_counter()
        while i < wires.end and reason is None:
            wires.plans.go_on(i, system.warm)
            self._iteration(i)
            i += 1
            now = time.perf_counter()
            self.account.seconds.append(now - last)
            last = now
            if self.after is not None:
                call = Call(i, wires.weights.take(part, system.version(i)), self.metrics)
                with part.paused():
                    reason = self.after(call)
        self.account.reason = reason or "finished"
        newest = system.version(i)
        kept = [wires.weights.take(part, max(0, newest - age)) for age in range(system.ahead, -1, -1)]
        self.state = State(jnp.int32(i), self.learner, tuple(kept), self.manager, self.memory, self.actors)

    def _iteration(self, i: int) -> None:
        system = self.wires.system
        if i < system.warm:
            self._insert(i)
            return
        if self.wires.whole:
            self._whole_iteration(i)
            return
        for u in range(system.updates):
            drawn = do.draw(system, self.manager, self.keys.draw, np.int32(system.update(i, u)))
            learned = self._learning(i, u, drawn)
            last = u == system.updates - 1
            now = last and bool(drawn.free)
            if now:  # while the learner learns
                self._insert(i)
            errors, self.learner, self.metrics = learned()
            self.manager = do.reprioritise(system, self.manager, drawn.indices, errors)
            if last and not now:
                self._insert(i)
                self.account.deferred += 1
            self.account.updates += 1
        jax.block_until_ready(self.manager)

    def _whole_iteration(self, i: int) -> None:
        """The same where one program makes the updates: the insertion waits for it, but has its place in the order."""
        assert self.beside is not None
        system, made = self.wires.system, self.beside.learn_all(i, self.manager, self.memory, self.keys)
        self.learner, self.metrics = made.learner, made.metrics
        first, chunks = bool(made.drawn.free), self._chunks(i)
        self.manager, self.memory = do.closed(
            system, made.manager, self.memory, self._position(i), chunks, made.drawn.indices[0], made.errors, first
        )
        self.account.deferred += not first
        self.account.updates += system.updates
        jax.block_until_ready(self.manager)

    def _read(self, drawn: do.Drawn, p: int, device: Any) -> SubBatch:
        places = self.wires.places
        batch = do.read(self.memory, moved(drawn.indices[p], places.replay, places.memory))
        return SubBatch(moved(batch, places.memory, device), moved(drawn.weight[p], places.replay, device))

    def _learning(self, i: int, u: int, drawn: do.Drawn) -> Callable[[], Learned]:
        """Have the learner begin, and those who help it; what waits for its end."""
        wires = self.wires
        threads = wires.helpers(self.part, i)
        own = wires.system.sub_batches - len(threads)
        for p, thread in enumerate(threads, own):
            wires.orders[thread].put(self.part, (p, self._read(drawn, p, wires.places.actors)))
        sub_batches = (self._read(drawn, p, wires.places.learner) for p in range(own))
        if self.beside is not None:
            learned = self.beside.learn(i, u, sub_batches)
            return lambda: learned
        for sub_batch in sub_batches:
            wires.batches.put(self.part, sub_batch)
        return lambda: wires.learned.get(self.part)

    def _insert(self, i: int) -> None:
        chunks = self._chunks(i)
        self.memory = do.write(self.memory, self._position(i), chunks)
        self.manager = do.admit(self.wires.system, self.manager)

    def _position(self, i: int) -> np.int32:
        """Where the transitions of an iteration begin."""
        return np.int32(i * self.wires.system.collected % self.wires.system.capacity)

    def _chunks(self, i: int) -> tuple:
        """The transitions of an iteration by actor, once they are there."""
        system = self.wires.system
        chunks: list[Chunk]
        if self.wires.in_turn:
            chunks = [self._acted(a, i) for a in range(system.actors)]
        else:
            chunks = [channel.get(self.part) for channel in self.wires.chunks]
        self.actors = tuple(c.states for c in chunks)
        newest = system.version(i + 1)
        self.account.ages.update((newest - c.version) * system.updates for c in chunks)
        return tuple(c.transitions for c in chunks)

    def _acted(self, a: int, i: int) -> Chunk:
        """What an actor collects, in this thread."""
        version = self.wires.system.version(i - self.wires.system.ahead)
        weights = self.wires.weights.take(self.part, version)
        states, transitions = self.steps[a](self.part, weights, self.actors[a], i)
        return Chunk(parts.sent(transitions, self.wires.places.memory), version, states)
