"""A search whose costs are observed: neighbours of an assignment, executed in turn with it."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from rlfx.place.baselines import Assignment
from rlfx.place.problem import Problem

REPEATS = 3


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
    problem: Problem, start: Assignment, seconds: Callable[[Assignment], float], key: jax.Array, calls: int
) -> Assignment:
    """The best assignment after ``calls`` executions: local search in which both sides of a comparison are executed in turn.

    A machine is faster at one time than at another. A neighbour and the current assignment are therefore executed one
    after the other, once each; only a neighbour that was faster then is compared by the medians of ``REPEATS`` pairs.

    Args:
      problem: the graph, and how many devices.
      start: where to begin.
      seconds: executes an assignment.
      key: used once.
      calls: executions at most; the first two, which compile, are among them.
    """
    rng = np.random.default_rng(np.asarray(jax.random.bits(key, (4,), np.uint32)).tolist())
    best, left = start, calls
    while left >= 2 * REPEATS + 1:
        other = _neighbour(problem, best, rng)
        seconds(other)  # where a kernel is new to its device, it is compiled
        pair = [(seconds(best), seconds(other))]
        left -= 3
        if pair[0][1] < pair[0][0]:
            pair += [(seconds(best), seconds(other)) for _ in range(REPEATS - 1)]
            left -= 2 * (REPEATS - 1)
            now, then = np.median(pair, axis=0)
            best = other if then < now else best
    return best
