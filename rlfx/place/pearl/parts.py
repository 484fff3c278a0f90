"""What each part does: environments of an actor, the replay manager with the experience memory, the learner."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.place.pearl import primitives as do
from rlfx.place.pearl.crew import Channel, Crew, Part, Versions
from rlfx.place.pearl.hosts import HostEnvironment, Process
from rlfx.place.pearl.plans import Plans, helpers
from rlfx.place.pearl.system import State, System, Transition


class Places(NamedTuple):
    """The device of each part."""

    actors: Any
    replay: Any
    learner: Any
    memory: Any


class Chunk(NamedTuple):
    """What an actor sends: transitions, the version of the weights that chose, and its environments after it."""

    transitions: Transition
    version: int
    states: Any


class SubBatch(NamedTuple):
    """What the learner gets: a part of the batch of an update."""

    transitions: Any
    weight: Any


class Learned(NamedTuple):
    """What it sends back: the errors of an update's parts, the learner after it, and metrics."""

    errors: tuple
    learner: Any
    metrics: Any


class Call(NamedTuple):
    """What ``after`` gets.

    Attributes:
      iteration: how many were made in all.
      weights: the newest, on the actors' device.
      metrics: of the last update; None before the first.
    """

    iteration: int
    weights: Any
    metrics: Any


@dataclass
class Account:
    """What the replay manager counts for the report."""

    seconds: list[float] = field(default_factory=list)
    ages: Counter = field(default_factory=Counter)
    deferred: int = 0
    updates: int = 0
    reason: str = "finished"


@dataclass(frozen=True)
class Wires:
    """Everything between the parts of a run."""

    system: System
    places: Places
    keys: do.Keys
    begin: int
    end: int
    obs: Any  # dtype of observations
    weights: Versions
    chunks: tuple[Channel, ...]
    batches: Channel
    learned: Channel
    plans: Plans  # which threads of the host act, which train
    steps: tuple[Versions, ...]  # of each actor: what steps its environments
    states: tuple[Versions, ...]  # their states, by iteration
    learners: Versions  # by update: what threads that train need
    orders: tuple[Channel, ...]  # to each thread of the host, sub-batches
    answers: tuple[Channel, ...]  # what it found in them

    @property
    def together(self) -> bool:
        """Whether replay and learner are on one device."""
        return self.places.replay == self.places.learner

    def helpers(self, part: Part, i: int) -> list[int]:
        """The threads of the host that take the last sub-batches of an iteration's updates, in order."""
        return helpers(self.plans.take(part, i), self.system.sub_batches)

    @classmethod
    def of(
        cls, crew: Crew, system: System, places: Places, keys: do.Keys, state: State, iterations: int, every: int | None
    ) -> Wires:
        """Those of a run that goes on from a state; plans change ``every`` so many iterations."""
        begin = int(state.iteration)
        newest = system.version(begin)
        held = jax.device_put(state.weights, places.actors)
        versions = {newest - system.ahead + i: w for i, w in enumerate(held) if newest - system.ahead + i >= 0}
        hands = range(system.actors)

        def channels(what: str, capacity: int) -> tuple[Channel, ...]:
            return tuple(Channel(crew, f"{what} actor {a}", capacity) for a in hands)

        return cls(
            system,
            places,
            keys,
            begin,
            begin + iterations,
            jax.tree.map(lambda x: x.dtype, state.memory.obs),
            Versions(crew, system.ahead + 2, versions),
            channels("the transitions of", system.ahead + 1),
            Channel(crew, "sub-batches", system.sub_batches),
            Channel(crew, "errors", 1),
            Plans(crew, system.actors, system.sub_batches, system.ahead, begin, every),
            tuple(Versions(crew, 1, {}) for _ in hands),
            tuple(Versions(crew, 2, {}) for _ in hands),
            Versions(crew, 2, {}),
            channels("sub-batches for", system.sub_batches),
            channels("gradients of", system.sub_batches),
        )


def put(value: Any, device: Any) -> Any:
    """On a device, when this returns. What is on one host device is read there by another, and never donated."""
    leaves, tree = jax.tree.flatten(value)
    return jax.block_until_ready(jax.tree.unflatten(tree, J.moved(jax.block_until_ready(leaves), device)))


def sent(transitions: Any, device: Any) -> Any:
    """On a device, but for arrays of the host that a program of a host device reads as they are."""
    host = device.platform == "cpu" and all(isinstance(x, np.ndarray) for x in jax.tree.leaves(transitions))
    return transitions if host else put(transitions, device)


def moved(value: Any, source: Any, target: Any) -> Any:
    """From one device to another, if they are two."""
    return value if source == target else put(value, target)


@jax.jit
def _copies(value: Any) -> Any:
    return jax.tree.map(jnp.copy, value)


Step = Callable[[Part, Any, Any, int], tuple[Any, Transition]]  # part, weights, states, iteration


# -- actors ----------------------------------------------------------------------------------------------------------


def environments(wires: Wires, key: jax.Array, a: int, part: Part) -> AbstractContextManager[Step]:
    """Those of an actor, as long as the context is open: what steps them for an iteration."""
    system = wires.system
    host = isinstance(system.env, HostEnvironment)
    return _in_process(wires, key, a, part) if host else _on_device(system, key, a)


@contextmanager
def _on_device(system: System, key: jax.Array, a: int) -> Iterator[Step]:
    """JAX environments: one compiled call an iteration."""
    yield lambda _, weights, states, i: jax.block_until_ready(
        do.act(system, weights, states, key, np.int32(i), np.int32(a))
    )


@contextmanager
def _in_process(wires: Wires, key: jax.Array, a: int, part: Part) -> Iterator[Step]:
    """Host environments: a message each timestep."""
    system = wires.system
    words = np.asarray(jax.random.bits(jax.random.fold_in(key, a), (system.envs,), jnp.uint32))
    seeds = (words.astype(np.int64) + wires.begin) % 2**31  # environments begin anew where a run goes on
    with Process(part, system.env, wires.obs, seeds.tolist()) as process:
        obs = process.first()

        def steps(by: Part, weights: Any, states: Any, i: int) -> tuple[Any, Transition]:
            nonlocal obs
            rows = []
            for t in range(system.length):
                action = np.asarray(do.choose(system, weights, obs, key, np.int32(i), np.int32(a), np.int32(t)))
                following, final, reward, terminated, truncated = process.step(action, by)
                rows.append(Transition(obs, action, reward, terminated, truncated, final))
                obs = following
            return states, jax.tree.map(lambda *x: np.concatenate(x), *rows)

        yield steps


# -- the learner -----------------------------------------------------------------------------------------------------


@dataclass
class Learner:
    """The learner on its device; its weights go to the actors after an iteration's last update."""

    wires: Wires
    state: Any
    part: Part  # the thread it is in

    def __post_init__(self) -> None:
        self.key = put(self.wires.keys.learn, self.wires.places.learner)
        self.state = put(self.state, self.wires.places.learner)

    def learn(self, i: int, u: int, sub_batches: Iterator[SubBatch]) -> Learned:
        """Update ``u`` of iteration ``i``, from each sub-batch as it comes."""
        wires, system, places = self.wires, self.wires.system, self.wires.places
        update, threads = system.update(i, u), wires.helpers(self.part, i)
        if threads:
            wires.learners.publish(update, moved(self.state, places.learner, places.actors))
        begin, waited = time.perf_counter(), self.part.waited
        self.state, weights, errors, metrics = self._updated(np.int32(update), threads, sub_batches)
        wires.plans.clock.add(i, "learn", 0, time.perf_counter() - begin - (self.part.waited - waited))
        if u == system.updates - 1:
            wires.weights.publish(system.version(i + 1), moved(weights, places.learner, places.actors))
        return Learned(moved(errors, places.learner, places.replay), self.state, metrics)

    def _updated(self, update: np.int32, threads: list[int], sub_batches: Iterator[SubBatch]) -> tuple:
        system = self.wires.system
        if system.sub_batches == 1:
            batch, weight = next(sub_batches)
            state, weights, errors, metrics = do.train(system, self.state, batch, weight, self.key, update)
            jax.block_until_ready((weights, errors))  # and with them all that the program made
            return state, weights, (errors,), metrics
        total, errors, metrics = None, [], None
        for answer in itertools.chain(self._own(update, threads, sub_batches), self._others(threads)):
            found, error, metrics = answer
            total = found if total is None else do.added(total, found)
            errors.append(error)
        state, weights = do.apply(system, self.state, total)
        jax.block_until_ready((weights, errors))
        return state, weights, tuple(errors), metrics

    def _own(self, update: np.int32, threads: list[int], sub_batches: Iterator[SubBatch]) -> Iterator[tuple]:
        own = self.wires.system.sub_batches - len(threads)
        for p, (batch, weight) in enumerate(itertools.islice(sub_batches, own)):
            yield do.gradient(self.wires.system, self.state, batch, weight, self.key, update, np.int32(p))

    def _others(self, threads: list[int]) -> Iterator[tuple]:
        for thread in threads:
            yield self.wires.answers[thread].get(self.part)


def learner(wires: Wires, state: Any, part: Part) -> None:
    """The learner in a thread of its own: on another device than replay."""
    learner = Learner(wires, state, part)
    sub_batches = iter(lambda: wires.batches.get(part), None)
    for i in range(max(wires.begin, wires.system.warm), wires.end):
        for u in range(wires.system.updates):
            wires.learned.put(part, learner.learn(i, u, sub_batches))


# -- replay ----------------------------------------------------------------------------------------------------------


@dataclass
class Replay:
    """The replay manager and the experience memory: PEARL's protocol, an iteration at a time."""

    wires: Wires
    state: State
    after: Callable[[Call], str | None] | None
    account: Account

    def __call__(self, part: Part) -> None:
        """Make the iterations; ``state`` is what they lead to."""
        wires, system, places = self.wires, self.wires.system, self.wires.places
        self.part, self.key = part, put(wires.keys.draw, places.replay)
        self.manager = _copies(put(self.state.manager, places.replay))  # what is given is not donated
        self.memory = _copies(put(self.state.memory, places.memory))
        # One device does one thing at a time: its learner needs no thread, and nobody to hand over to.
        self.beside = Learner(wires, self.state.learner, part) if wires.together else None
        self.learner, self.actors, self.metrics = self.state.learner, self.state.actors, None
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
        for u in range(system.updates):
            drawn = do.draw(system, self.manager, self.key, np.int32(system.update(i, u)))
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
        system = self.wires.system
        chunks: list[Chunk] = [channel.get(self.part) for channel in self.wires.chunks]
        position = np.int32(i * system.collected % system.capacity)
        self.memory = do.write(self.memory, position, tuple(c.transitions for c in chunks))
        self.manager = do.admit(system, self.manager)
        self.actors = tuple(c.states for c in chunks)
        newest = system.version(i + 1)
        self.account.ages.update((newest - c.version) * system.updates for c in chunks)
