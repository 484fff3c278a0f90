"""What is between the parts of a run, and what two of them do: environments of an actor, the learner (replay: `manager`)."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.place.pearl import primitives as do
from rlfx.place.pearl.crew import Channel, Crew, Part, Versions
from rlfx.place.pearl.hosts import Here, HostEnvironment, Process
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
    in_turn: bool  # one thread does everything, one thing after another

    @property
    def together(self) -> bool:
        """Whether replay and learner are on one device."""
        return self.places.replay == self.places.learner

    @property
    def whole(self) -> bool:
        """Whether updates are made by one program: all that they need is on one device, and batches are of one piece."""
        return self.together and self.places.memory == self.places.replay and self.system.sub_batches == 1

    def helpers(self, part: Part, i: int) -> list[int]:
        """The threads of the host that take the last sub-batches of an iteration's updates, in order."""
        return helpers(self.plans.take(part, i), self.system.sub_batches)

    @classmethod
    def of(
        cls, crew: Crew, system: System, places: Places, keys: do.Keys, state: State, iterations: int,
        every: int | None, in_turn: bool,
    ) -> Wires:  # fmt: skip
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
            Versions(crew, system.ahead + 2, versions, partial(moved, source=places.learner, target=places.actors)),
            channels("the transitions of", system.ahead + 1),
            Channel(crew, "sub-batches", system.sub_batches),
            Channel(crew, "errors", 1),
            Plans(crew, system.actors, system.sub_batches, system.ahead, begin, every),
            tuple(Versions(crew, 1, {}) for _ in hands),
            tuple(Versions(crew, 2, {}) for _ in hands),
            Versions(crew, 2, {}),
            channels("sub-batches for", system.sub_batches),
            channels("gradients of", system.sub_batches),
            in_turn,
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


Step = Callable[[Part, Any, Any, int], tuple[Any, Transition]]  # part, weights, states, iteration


# -- actors ----------------------------------------------------------------------------------------------------------


def environments(wires: Wires, key: jax.Array, a: int, part: Part) -> AbstractContextManager[Step]:
    """Those of an actor, as long as the context is open: what steps them for an iteration."""
    system = wires.system
    host = isinstance(system.env, HostEnvironment)
    return _on_host(wires, key, a, part) if host else _on_device(system, key, a)


@contextmanager
def _on_device(system: System, key: jax.Array, a: int) -> Iterator[Step]:
    """JAX environments: one compiled call an iteration."""
    yield lambda _, weights, states, i: jax.block_until_ready(
        do.act(system, weights, states, key, np.int32(i), np.int32(a))
    )


@contextmanager
def _on_host(wires: Wires, key: jax.Array, a: int, part: Part) -> Iterator[Step]:
    """Host environments: a message each timestep, or a call where nothing is done at the same time."""
    system = wires.system
    words = np.asarray(jax.random.bits(jax.random.fold_in(key, a), (system.envs,), jnp.uint32))
    seeds = (words.astype(np.int64) + wires.begin) % 2**31  # environments begin anew where a run goes on
    with (Here if wires.in_turn else Process)(part, system.env, wires.obs, seeds.tolist()) as process:
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
            wires.weights.publish(system.version(i + 1), weights)
        return Learned(moved(errors, places.learner, places.replay), self.state, metrics)

    def learn_all(self, i: int, manager: Any, memory: Any, keys: do.Keys) -> do.Updated:
        """All updates of iteration ``i``, as few programs."""
        system, made = self.wires.system, None
        for made in do.all_updated(system, manager, memory, self.state, keys, system.update(i, 0)):
            jax.block_until_ready((made.weights, made.errors))  # and with them all that the program made
            self.part.alive()
        assert made is not None
        self.state = made.learner
        self.wires.weights.publish(system.version(i + 1), made.weights)
        return made

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
