"""The threads of the host: in each iteration one acts for its actors, or trains on its sub-batches."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from rlfx.place.pearl import parts
from rlfx.place.pearl import primitives as do
from rlfx.place.pearl.crew import Part
from rlfx.place.pearl.plans import acting, helpers


def hand(wires: parts.Wires, thread: int, states: Any, part: Part) -> None:
    """What one of them does; it keeps the environments of the actor of its number, whoever steps them."""
    system, places = wires.system, wires.places
    act_key, learn_key = (parts.put(key, places.actors) for key in (wires.keys.act, wires.keys.learn))
    with ExitStack() as stack:
        steps = stack.enter_context(parts.environments(wires, act_key, thread, part))
        wires.steps[thread].publish(0, steps)
        wires.states[thread].publish(wires.begin, parts.put(states, places.actors))
        for i in range(wires.begin, wires.end):
            plan = wires.plans.take(part, i)
            for a in acting(plan, system.actors, thread):
                _act(wires, a, i, thread, part)
            count = helpers(plan, system.sub_batches).count(thread) if i >= system.warm else 0
            for u in range(system.updates if count else 0):
                _train(wires, i, u, count, learn_key, thread, part)
        wires.states[thread].take(part, wires.end)


def _act(wires: parts.Wires, a: int, i: int, thread: int, part: Part) -> None:
    version = wires.system.version(i - wires.system.ahead)
    weights = wires.weights.take(part, version)
    states, step = wires.states[a].take(part, i), wires.steps[a].take(part, 0)
    begin = time.perf_counter()
    states, transitions = step(part, weights, states, i)
    chunk = parts.sent(transitions, wires.places.memory)
    wires.plans.clock.add(i, "act", thread, time.perf_counter() - begin)
    wires.states[a].publish(i + 1, states)
    wires.chunks[a].put(part, parts.Chunk(chunk, version, states))


def _train(wires: parts.Wires, i: int, u: int, count: int, key: jax.Array, thread: int, part: Part) -> None:
    system, update = wires.system, wires.system.update(i, u)
    for _ in range(count):
        p, (batch, weight) = wires.orders[thread].get(part)
        learner = wires.learners.take(part, update)
        begin = time.perf_counter()
        found = do.gradient(system, learner, batch, weight, key, np.int32(update), np.int32(p))
        answer = parts.put(found, wires.places.learner)
        wires.plans.clock.add(i, "train", thread, time.perf_counter() - begin)
        wires.answers[thread].put(part, answer)
