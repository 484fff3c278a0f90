"""Every way to place, behind one signature and one account of simulator calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from rlfx._checks import KEY, POSITIVE, expect, installed, one_of
from rlfx.errors import PlacementError, located
from rlfx.place import baselines, search
from rlfx.place.baselines import Assignment
from rlfx.place.problem import PROBLEM, Problem, size


class Result(NamedTuple):
    """What a method found.

    Attributes:
      assignment: devices and run-time order.
      cost: its objective, seconds.
      calls: simulator calls used.
      params: of the policy, if the method learns one.
    """

    assignment: Assignment
    cost: float
    calls: int
    params: Any = None


Method = Callable[[Problem, jax.Array, int], Result]


def frugal(problem: Problem, assignments: list[Assignment]) -> list[Assignment]:
    """The same devices in depth-first order: what was begun is finished, and its operands are freed, before more is begun."""
    order = baselines.run_order(problem, "depth-first")
    return [assignment._replace(order=order) for assignment in assignments]


def _fixed(make: Callable[[Problem], Assignment]) -> Method:
    """One assignment; where it does not fit, its devices in depth-first order."""

    def method(problem: Problem, key: jax.Array, budget: int) -> Result:
        made = make(problem)
        assignment, cost = baselines.best(problem, [made])
        if budget < 2 or fits(problem, cost):
            return Result(assignment, cost, 1)
        return Result(*baselines.best(problem, [made, *frugal(problem, [made])]), 2)

    return method


def sparing(problem: Problem, rng: np.random.Generator, count: int) -> list[Assignment]:
    """Schedules by least memory, the first as it is, the others ever more at random."""
    return [baselines.sparing(problem, rng, spread=i / count) for i in range(count)]


def critical_path(problem: Problem, key: jax.Array, budget: int) -> Result:
    """Best of 50 randomised critical-path schedules, or of the budget if that is smaller.

    Where none of them fits into memory, of as many schedules by least memory.
    """
    runs = min(50, budget)
    found = baselines.critical_path(problem, key, runs)
    more = min(runs, budget - runs)
    if more < 1 or fits(problem, found[1]):
        return Result(*found, runs)
    spare = baselines.best(problem, sparing(problem, baselines.generator(jax.random.fold_in(key, 1)), more))
    return Result(*min(found, spare, key=lambda one: one[1]), runs + more)


def heuristic_starts(problem: Problem, key: jax.Array, budget: int) -> tuple[list[Assignment], np.ndarray]:
    """Critical path (up to 50), HEFT, EnumerativeOptimizer and one device, with their costs: where searches start.

    Those spread time evenly. Where memory may bind, as many that spread memory instead, every second in depth-first order, and
    the first three in that order, too, and half as many schedules by least memory.
    """
    rng = baselines.generator(key)
    fixed = [baselines.heft(problem), baselines.enumerative(problem), baselines.one_device(problem)]
    paths = [baselines.list_schedule(problem, rng) for _ in range(max(0, min(50, budget // 8)))]
    if problem.memory_may_bind:
        room = [baselines.roomy(problem, rng, greedy=1.0 - i / (len(paths) + 1)) for i in range(len(paths) + 1)]
        spare = sparing(problem, rng, len(room) // 2)
        paths += [*room[::2], *frugal(problem, [*fixed, *room[1::2]]), *spare]
    starts = [*fixed, *paths][: max(1, budget)]
    return starts, baselines.evaluate(problem, starts)


def _annealed(hot: float, cold: float) -> Method:
    """The textbook searches: one task to another device a step, the run-time order stays the critical path's."""

    def method(problem: Problem, key: jax.Array, budget: int) -> Result:
        k_start, k_search = jax.random.split(key)
        starts, costs = heuristic_starts(problem, k_start, budget)
        left = budget - len(starts)
        state = search.initial(problem, starts, costs, 1)
        if left > 0:
            state, _ = search.anneal(problem, k_search, state, left, hot=hot, cold=cold, moves=search.DEVICES)
        assignment, cost = search.winner(state)
        return Result(assignment, cost, budget)

    return method


local_search = _annealed(0.0, 0.0)
annealing = _annealed(3e-3, 1e-4)


def fits(problem: Problem, cost: float) -> bool:
    """Whether an assignment with this objective fits into memory."""
    return not problem.memory_may_bind or cost < 10.0 * float(problem.one_device().max())


FITTING = 32  # simulator calls between looks at whether something fits
FIT = search.Moves(device=1.0, follow=1.0, swap=1.0, order=1.0)
GUIDED = search.Moves(device=1.0, follow=2.0, swap=1.0, order=1.0, ahead=1.0, critical=0.8)


def polish(problem: Problem, key: jax.Array, starts: list[Assignment], costs: np.ndarray, budget: int) -> Result:
    """Search from the best of some evaluated assignments, over devices *and* run-time order.

    One chain. Four moves in five begin at a task of the critical chain, and a task may be run before the one that held
    it up, as in searches for job shops (Nowicki and Smutnicki, 1996). Temperatures are 1% to 0.1% of what can still be
    gained, the best start's distance from the lower bound: where heuristics are nearly optimal, steps are fine. While
    nothing fits into memory, what is critical does not matter: any task may move, in the order too, which decides what is held
    at once.
    """
    state, calls = search.initial(problem, starts, costs, 1), budget
    while budget > FITTING and not fits(problem, float(state.best_cost.min())):
        key, k_fit = jax.random.split(key)
        state, _ = search.anneal(problem, k_fit, state, FITTING, moves=FIT)
        budget -= FITTING
    if budget > 0:
        guided = fits(problem, float(state.best_cost.min()))
        gain = max(0.0, 1.0 - problem.lower_bound() / float(state.best_cost.min())) if guided else 0.0
        state, _ = search.anneal(problem, key, state, budget, hot=1e-2 * gain, cold=1e-3 * gain,
                                 moves=GUIDED if guided else FIT)  # fmt: skip
    assignment, cost = search.winner(state)
    return Result(assignment, cost, calls)


def polished_heuristics(problem: Problem, key: jax.Array, budget: int) -> Result:
    """The search half of ``doppler`` alone, with the whole budget."""
    k_start, k_search = jax.random.split(key)
    starts, costs = heuristic_starts(problem, k_start, budget)
    return polish(problem, k_search, starts, costs, max(0, budget - len(starts)))._replace(calls=budget)


def _networks(method: str) -> None:
    for package in ("flax", "optax"):
        installed(f"method={method!r}", package, "place", PlacementError)


def doppler(
    problem: Problem, key: jax.Array, budget: int, *, params: Any = None, share: float = 0.125, policy: Any = None
) -> Result:
    """Stages I and II, then a search from the policy's best sample and the heuristics.

    Args:
      problem: what to place.
      key: used once.
      budget: simulator calls in all, training episodes included.
      params: a trained policy to continue from (transfer); stage I is skipped.
      share: of the budget that goes into training.
      policy: the networks, by default ``DualPolicy()``.

    Returns:
      The best assignment, and the trained parameters.
    """
    _networks("doppler")
    from rlfx.place import train
    from rlfx.place.policy import DualPolicy

    policy = policy or DualPolicy()
    k_start, k_init, k_imitate, k_learn, k_polish = jax.random.split(key, 5)
    starts, costs = heuristic_starts(problem, k_start, budget)
    left = max(0, budget - len(starts))
    config = train.Training()
    learner = train.start(k_init, problem, policy, params)
    if params is None:
        learner = train.imitate_critical_path(policy, learner, problem, k_imitate, steps=config.imitation_steps)
    episodes = int(share * left) // config.batch * config.batch
    if episodes:
        learner, _ = train.learn(policy, learner, problem, k_learn, episodes=episodes, config=config)
        starts.append(Assignment(np.asarray(learner.device), np.asarray(learner.order)))
        costs = np.append(costs, np.float32(learner.cost)).astype(np.float32)
    result = polish(problem, k_polish, starts, costs, left - episodes)
    return result._replace(calls=budget, params=learner.params)


def placeto(problem: Problem, key: jax.Array, budget: int) -> Result:
    """Placeto trained with the whole budget; see :mod:`rlfx.place.placeto`."""
    _networks("placeto")
    from rlfx.place.placeto import train_placeto

    assignment, cost = train_placeto(problem, key, budget)
    return Result(assignment, cost, budget)


METHODS: Mapping[str, Method] = {
    "one-device": _fixed(baselines.one_device),
    "critical-path": critical_path,
    "heft": _fixed(baselines.heft),
    "enumerate": _fixed(baselines.enumerative),
    "placeto": placeto,
    "local-search": local_search,
    "anneal": annealing,
    "polish": polished_heuristics,
    "doppler": doppler,
}


def checked_method(user: str, method: Any, budget: Any) -> tuple[str, int]:
    """The name of a method and a number of simulator calls, which ``user``, a function, was given."""
    method = expect("method", method, one_of(*METHODS), PlacementError, of=user)
    return method, expect("budget", budget, POSITIVE, PlacementError, of=user)


def solve(problem: Problem, method: str, key: jax.Array, budget: int) -> Result:
    """Place with a method by name.

    Raises:
      PlacementError: an unknown method, a budget below one, or nothing that fits into memory was found.
    """
    method, budget = checked_method("solve", method, budget)
    expect("problem", problem, PROBLEM, PlacementError, of="solve")
    result = METHODS[method](problem, expect("key", key, KEY, PlacementError, of="solve"), budget)
    worst = float(problem.one_device().max())
    if not fits(problem, result.cost):
        over = result.cost / (10.0 * worst) - 1.0
        raise PlacementError(
            located(
                f"No assignment that {method} found in {result.calls} simulator calls fits into memory: the best one "
                f"lacks {100 * over:.1f}% of a device's {size(problem.memory.min())}, devices added up.",
                fix="Split the largest operations into more parts, use more devices, or raise the budget.",
            )
        )
    return result
