"""Heuristics that place without searching: one device, critical path, HEFT, EnumerativeOptimizer."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.place.problem import Problem
from rlfx.place.simulate import objective, ranks, run_order


class Assignment(NamedTuple):
    """Where each task runs, and which ready task a device prefers.

    Attributes:
      device: int32 ``[V]``.
      order: int32 ``[V]``, a permutation; lower runs first.
    """

    device: np.ndarray
    order: np.ndarray


def evaluate(problem: Problem, candidates: list[Assignment], *, fifo: bool = False) -> np.ndarray:
    """The objective of some assignments, one simulator call each, float32 ``[B]``, seconds."""
    device = np.stack([c.device for c in candidates]).astype(np.int32)
    order = np.stack([c.order for c in candidates]).astype(np.int32)
    return np.asarray(objective(problem, device, order, fifo=fifo, limited=problem.memory_may_bind))


def best(problem: Problem, candidates: list[Assignment]) -> tuple[Assignment, float]:
    """The candidate with the lowest objective, and its value in seconds."""
    costs = evaluate(problem, candidates)
    winner = int(np.argmin(costs))
    return candidates[winner], float(costs[winner])


def one_device(problem: Problem) -> Assignment:
    """Everything on the device that is fastest alone."""
    device = np.full(problem.tasks, np.argmin(problem.one_device()), np.int32)
    return Assignment(device, run_order(problem, "critical-path"))


def generator(key: jax.Array) -> np.random.Generator:
    """NumPy's generator, by a key."""
    return np.random.default_rng(np.asarray(jax.random.bits(key, (4,), jnp.uint32)).tolist())


def _took(problem: Problem, v: int, waiting: np.ndarray, ready: set[int]) -> None:
    """A task leaves those that are ready, and those that waited for it alone join them."""
    ready.discard(v)
    for w in problem.succs[v]:
        waiting[w] -= 1
        if waiting[w] == 0:
            ready.add(int(w))


def list_schedule(problem: Problem, rng: np.random.Generator, greedy: float = 1.0) -> Assignment:
    """Critical path: repeatedly take the ready task with the longest path to an exit, put it where it starts earliest.

    Section 7.1's heuristic and the teacher of stage I. Ties are broken at random; with probability ``1 - greedy`` a
    random ready task is taken instead of the longest. The order of the result is the order of selection.
    """
    V, D = problem.tasks, problem.devices
    level = problem.to_exit[0]
    waiting = np.array([len(preds) for preds in problem.preds])
    ready = set(np.flatnonzero(waiting == 0).tolist())
    free, link = np.zeros(D), np.zeros((D, D))
    finish, device, order = np.zeros(V), np.zeros(V, np.int32), np.zeros(V, np.int32)
    present = np.full((V, D), np.inf)
    for position in range(V):
        options = sorted(ready)
        scores = level[options] if rng.random() < greedy else rng.random(len(options))
        v = options[rng.choice(np.flatnonzero(scores == scores.max()))]
        preds = problem.preds[v]
        arrival = np.zeros(D)
        for u in preds:
            sent = np.maximum(finish[u], link[device[u]]) + problem.transfer_time[u, device[u]]
            arrival = np.maximum(arrival, np.minimum(present[u], sent))
        start = np.maximum(free, arrival)
        d = int(rng.choice(np.flatnonzero(start == start.min())))
        for u in preds:
            if not np.isfinite(present[u, d]):
                link[device[u], d] = max(finish[u], link[device[u], d]) + problem.transfer_time[u, device[u], d]
                present[u, d] = link[device[u], d]
        device[v], order[v] = d, position
        finish[v] = start[d] + problem.exec_time[v, d]
        free[d] = present[v, d] = finish[v]
        _took(problem, v, waiting, ready)
    return Assignment(device, order)


def critical_path(problem: Problem, key: jax.Array, runs: int = 50) -> tuple[Assignment, float]:
    """The best of ``runs`` randomised critical-path schedules (the paper's baseline), ``runs`` simulator calls."""
    rng = generator(key)
    return best(problem, [list_schedule(problem, rng) for _ in range(runs)])


def heft(problem: Problem) -> Assignment:
    """Heterogeneous earliest finish time: upward ranks, insertion into idle gaps (Topcuoglu et al., 2002).

    Links are taken to be free at all times, as in the original. The order of the result is the upward rank, which runs
    better than first-come-first-served.
    """
    V, D = problem.tasks, problem.devices
    device, finish = np.zeros(V, np.int32), np.zeros(V)
    begins, ends = [[0.0] for _ in range(D)], [[math.inf] for _ in range(D)]  # of each device's idle gaps, ascending
    for v in np.argsort(-problem.to_exit[0], kind="stable"):
        preds = problem.preds[v]
        arrivals = (finish[preds, None] + problem.transfer_time[preds, device[preds]]).max(axis=0, initial=0.0).tolist()
        best_end, best_start, best_device, best_gap = math.inf, 0.0, 0, 0
        for d, (arrival, cost) in enumerate(zip(arrivals, problem.exec_time[v].tolist(), strict=True)):
            gap = bisect_right(ends[d], arrival)
            while max(arrival, begins[d][gap]) + cost > ends[d][gap]:
                gap += 1
            start = max(arrival, begins[d][gap])
            if start + cost < best_end:
                best_end, best_start, best_device, best_gap = start + cost, start, d, gap
        device[v], finish[v] = best_device, best_end
        gap = (begins[best_device][best_gap], best_start), (best_end, ends[best_device][best_gap])
        left = [(begin, end) for begin, end in gap if begin < end]
        begins[best_device][best_gap : best_gap + 1] = [begin for begin, _ in left]
        ends[best_device][best_gap : best_gap + 1] = [end for _, end in left]
    return Assignment(device, run_order(problem, "critical-path"))


def enumerative(problem: Problem) -> Assignment:
    """EnumerativeOptimizer (algorithm 4): meta-op by meta-op, the permutation of devices with the least transfer time.

    The enumeration's cost is a sum over tasks, so that the best permutation is a linear assignment problem, solved
    exactly instead of by trying all D! permutations. Shards beyond the number of devices are placed in rounds of D.
    """
    from scipy.optimize import linear_sum_assignment

    D = problem.devices
    device = np.zeros(problem.tasks, np.int32)
    for shards, reduces in problem.metas:
        for group in (shards, reduces):
            for begin in range(0, len(group), D):
                round_ = group[begin : begin + D]
                cost = np.stack(
                    [
                        sum(
                            (problem.transfer_time[u, device[u]] for u in problem.preds[v]),
                            np.zeros(D),
                        )
                        for v in round_
                    ]
                )
                rows, columns = linear_sum_assignment(cost)
                device[[round_[r] for r in rows]] = columns
    return Assignment(device, run_order(problem, "critical-path"))


def random_assignment(problem: Problem, rng: np.random.Generator) -> Assignment:
    """Uniform devices, critical-path order."""
    return Assignment(
        rng.integers(0, problem.devices, problem.tasks).astype(np.int32), run_order(problem, "critical-path")
    )


def roomy(problem: Problem, rng: np.random.Generator, greedy: float = 1.0) -> Assignment:
    """Task after task where the largest share of the memory stays free: where memory binds, a search begins with what fits.

    A task needs its result there, copies of what it reads, and its input blocks, each once. With probability
    ``1 - greedy``, a task goes to a random device, by free memory.
    """
    memory = problem.memory.astype(np.float64)
    free = memory - problem.held
    device, there = np.zeros(problem.tasks, np.int32), np.zeros((problem.tasks, problem.devices), bool)
    loaded = np.zeros((len(problem.input_bytes), problem.devices), bool)
    for v in range(problem.tasks):
        preds, inputs = problem.preds[v], problem.input_preds[v]
        need = problem.nbytes[v] + problem.nbytes[preds] @ ~there[preds] + problem.input_bytes[inputs] @ ~loaded[inputs]
        left = (free - need) / memory
        chance = np.maximum(free, 0.0) + 1e-9
        d = int(np.argmax(left)) if rng.random() < greedy else int(rng.choice(problem.devices, p=chance / chance.sum()))
        device[v], free[d] = d, free[d] - need[d]
        there[preds, d] = there[v, d] = loaded[inputs, d] = True
    return Assignment(device, run_order(problem, "critical-path"))


def sparing(problem: Problem, rng: np.random.Generator, spread: float = 0.0) -> Assignment:
    """A list schedule by least memory first: what frees most, and needs least, where it fits and may start earliest.

    Memory is counted in the order of selection: a result is there from its task on, on each device that reads it, until its last
    reader was selected. The order of the result is that order. ``spread`` is the standard deviation of a factor on what tasks
    need (lognormal), for schedules that differ.
    """
    V, memory = problem.tasks, problem.memory.astype(np.float64)
    held = np.broadcast_to(problem.held, memory.shape).astype(np.float64)
    nbytes, inputs = problem.nbytes.astype(np.float64), problem.input_bytes.astype(np.float64)
    device, order = np.zeros(V, np.int32), np.zeros(V, np.int32)
    there, loaded = np.zeros((V, len(memory)), bool), np.zeros((len(inputs), len(memory)), bool)
    waiting, readers = (np.array([len(near) for near in nears]) for nears in (problem.preds, problem.succs))
    free, finish, factor = np.zeros(len(memory)), np.zeros(V), np.exp(spread * rng.standard_normal(V))
    ready = set(np.flatnonzero(waiting == 0).tolist())

    def option(v: int) -> tuple[tuple, int, int, float, float]:
        """The best device for a ready task: how good it is, the task, the device, bytes it needs there, seconds it begins at."""
        preds, blocks = problem.preds[v], problem.input_preds[v]
        need = nbytes[v] + nbytes[preds] @ ~there[preds] + inputs[blocks] @ ~loaded[blocks]
        sent = problem.transfer_time[preds, device[preds]] + finish[preds, None]
        start = np.maximum(free, sent.max(axis=0, initial=0.0))
        lacks = np.maximum((held + need) / memory - 1.0, 0.0)
        d = int(np.lexsort((start, lacks))[0])
        freed = nbytes[preds[readers[preds] == 1]].sum()
        rank = lacks[d], factor[v] * (need[d] - freed), -problem.to_exit[0][v], v
        return rank, v, d, need[d], start[d]

    for position in range(V):
        _, v, d, need, begin = min(map(option, ready))
        preds = problem.preds[v]
        last = preds[readers[preds] == 1]
        device[v], order[v], finish[v] = d, position, begin + problem.exec_time[v, d]
        free[d], held[d] = finish[v], held[d] + need
        there[preds, d] = there[v, d] = loaded[problem.input_preds[v], d] = True
        readers[preds] -= 1
        held -= nbytes[last] @ there[last]
        _took(problem, v, waiting, ready)
    return Assignment(device, order)


def topological_order(problem: Problem) -> np.ndarray:
    """Tasks in the function's own order, int32 ``[V]``."""
    return ranks(np.arange(problem.tasks, dtype=np.float64))


def synchronous_seconds(problem: Problem, assignment: Assignment) -> float:
    """The same assignment executed bulk-synchronously (table 1), seconds.

    Meta-op by meta-op: all transfers that its shards need (each link serially, links in parallel), a barrier, all
    shards (each device serially), a barrier; then likewise its reductions.
    """
    device, there, total = assignment.device, set(), 0.0
    for group in (g for meta in problem.metas for g in meta):
        links, load = np.zeros((problem.devices, problem.devices)), np.zeros(problem.devices)
        for v in group:
            d = device[v]
            load[d] += problem.exec_time[v, d]
            for u in problem.preds[v]:
                if device[u] != d and (u, d) not in there:
                    there.add((u, d))
                    links[device[u], d] += problem.transfer_time[u, device[u], d]
        total += float(links.max() + load.max())
    return total
