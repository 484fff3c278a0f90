"""A search whose costs are observed: neighbours of an assignment, executed in turn with it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from rlfx.place.baselines import Assignment, generator
from rlfx.place.problem import Problem

REPEATS = 3
DRAWS = 64  # neighbours drawn for one that fits; then the search ends


def _neighbour(problem: Problem, assignment: Assignment, rng: np.random.Generator) -> Assignment:
    """One task to another device, by chance that of a task that it reads or feeds."""
    device = assignment.device.copy()
    v = int(rng.integers(problem.tasks))
    near = np.concatenate([problem.preds[v], problem.succs[v]])
    elsewhere = near[device[near] != device[v]]
    beside = len(elsewhere) > 0 and rng.random() < 0.5
    device[v] = (
        device[rng.choice(elsewhere)] if beside else (device[v] + rng.integers(1, problem.devices)) % problem.devices
    )
    return Assignment(device, assignment.order)


def descend(
    problem: Problem,
    start: Assignment,
    seconds: Callable[[Assignment], float],
    fits: Callable[[Assignment], bool],
    key: jax.Array,
    calls: int,
) -> Assignment:
    """The best assignment after ``calls`` executions: local search in which both sides of a comparison are executed in turn.

    A machine is faster at one time than at another. A neighbour and the current assignment are therefore executed one
    after the other, once each; only a neighbour that was faster then is compared by the medians of ``REPEATS`` pairs.

    Args:
      problem: the graph, and how many devices.
      start: where to begin.
      seconds: executes an assignment.
      fits: whether the devices have the memory for an assignment; no other is executed.
      key: used once.
      calls: executions at most, those among them that compile: the first, and the first of each neighbour.
    """
    rng = generator(key)
    seconds(start)
    best, left = start, calls - 1
    while left >= 2 * REPEATS + 1:
        drawn = (_neighbour(problem, best, rng) for _ in range(DRAWS))
        other = next((near for near in drawn if fits(near)), None)
        if other is None:
            return best
        seconds(other)  # where a kernel is new to its device, it is compiled
        pair = [(seconds(best), seconds(other))]
        left -= 3
        if pair[0][1] < pair[0][0]:
            pair += [(seconds(best), seconds(other)) for _ in range(REPEATS - 1)]
            left -= 2 * (REPEATS - 1)
            now, then = np.median(pair, axis=0)
            best = other if then < now else best
    return best
