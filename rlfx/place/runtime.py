"""A work-conserving runtime in threads: a worker per device and a copier per ordered pair of devices (appendix B).

Asynchronous dispatch alone is not work-conserving on XLA's CPU devices: they share one queue. Threads that wait for
their own device are, whatever the backend.
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

Value = tuple[Any, ...]
Compute = Callable[[int, int, dict[int, Value]], Value]  # task, device, its inputs by producer -> its result
Copy = Callable[[int, int, int, Value], Value]  # task, from, to, result -> copy


@dataclass(frozen=True)
class Timeline:
    """What happened in one execution. Times in seconds since its start.

    Attributes:
      makespan: until the last task ended.
      start, finish: float64 ``[V]``.
      copies: ``(task, from, to, start, end)`` of every transfer.
      peak: bytes of results and copies alive at once on each device, float64 ``[D]``.
    """

    makespan: float
    start: np.ndarray
    finish: np.ndarray
    copies: tuple[tuple[int, int, int, float, float], ...]
    peak: np.ndarray


class _Board:
    """What is where, shared by all threads. ``lock`` guards everything but the queues."""

    def __init__(self, preds: Sequence[Sequence[int]], device: np.ndarray, order: np.ndarray, devices: int,
                 nbytes: np.ndarray, keep: set[int]) -> None:  # fmt: skip
        self.device, self.order, self.nbytes, self.keep = device, order, nbytes, keep
        self.lock = threading.Lock()
        self.idle = [threading.Condition(self.lock) for _ in range(devices)]
        self.ready: list[list[tuple[int, int]]] = [[] for _ in range(devices)]
        self.left = [int(np.sum(device == d)) for d in range(devices)]
        self.missing = [len(p) for p in preds]
        self.readers: dict[tuple[int, int], list[int]] = {}
        for v, p in enumerate(preds):
            for u in p:
                self.readers.setdefault((u, int(device[v])), []).append(v)
        self.targets = [
            [d for d in range(devices) if d != device[u] and (u, d) in self.readers] for u in range(len(preds))
        ]
        self.uses = {(u, d): len(vs) for (u, d), vs in self.readers.items()}
        for u, targets in enumerate(self.targets):
            home = (u, int(device[u]))
            kept = u in keep or not (targets or self.uses.get(home))
            self.uses[home] = self.uses.get(home, 0) + len(targets) + kept
        self.values: dict[tuple[int, int], Value] = {}
        self.live, self.peak = np.zeros(devices), np.zeros(devices)
        self.failed = False

    def reserve(self, u: int, d: int) -> None:
        """Count a result or copy before it is made."""
        with self.lock:
            self.live[d] += self.nbytes[u]
            self.peak[d] = max(self.peak[d], self.live[d])

    def arrive(self, u: int, d: int, value: Value) -> None:
        """A result, or a copy of it, is on a device: its readers there may become ready."""
        with self.lock:
            self.values[u, d] = value
            for v in self.readers.get((u, d), ()):
                self.missing[v] -= 1
                if self.missing[v] == 0:
                    heapq.heappush(self.ready[d], (int(self.order[v]), v))
            self.idle[d].notify()

    def release(self, u: int, d: int) -> None:
        """One reader or transfer of a value has ended; the last one frees it."""
        with self.lock:
            self.uses[u, d] -= 1
            if self.uses[u, d] == 0:
                del self.values[u, d]
                self.live[d] -= self.nbytes[u]

    def take(self, d: int) -> int | None:
        """The next task for a device, waiting if none is ready; None when the device has no more."""
        with self.lock:
            self.idle[d].wait_for(lambda: self.ready[d] or self.left[d] == 0 or self.failed)
            if self.failed or self.left[d] == 0:
                return None
            self.left[d] -= 1
            return heapq.heappop(self.ready[d])[1]

    def fail(self) -> None:
        """Wake every worker so that the failure surfaces."""
        with self.lock:
            self.failed = True
            for condition in self.idle:
                condition.notify_all()


def run(
    preds: Sequence[Sequence[int]],
    device: np.ndarray,
    order: np.ndarray,
    devices: int,
    compute: Compute,
    copy: Copy,
    *,
    nbytes: np.ndarray | None = None,
    keep: Sequence[int] = (),
) -> tuple[Timeline, dict[int, Value]]:
    """Execute tasks as soon as their inputs are on their device and the device is free.

    Args:
      preds: for each task, the tasks that it reads.
      device: of each task, int ``[V]``.
      order: which ready task a device prefers, lowest first, int ``[V]``.
      devices: D.
      compute, copy: do the work and return when it is done; called from worker and copier threads.
      nbytes: of each task's result, for the account of memory.
      keep: tasks whose results are returned; all others are dropped after their last use.

    Returns:
      The timeline, and the kept results.
    """
    V = len(preds)
    sizes = np.zeros(V) if nbytes is None else np.asarray(nbytes, np.float64)
    board = _Board(preds, np.asarray(device), np.asarray(order), devices, sizes, set(keep))
    links = {(s, t): queue.SimpleQueue() for s in range(devices) for t in range(devices) if s != t}
    used = {(int(device[u]), t) for u in range(V) for t in board.targets[u]}
    start, finish, copies = np.zeros(V), np.zeros(V), []
    with board.lock:
        for v in range(V):
            if not preds[v]:
                heapq.heappush(board.ready[int(device[v])], (int(order[v]), v))
    gate = threading.Barrier(len(used) + devices + 1)
    origin = [0.0]

    def worker(d: int) -> None:
        gate.wait()
        done = False
        try:
            while (v := board.take(d)) is not None:
                board.reserve(v, d)
                inputs = {u: board.values[u, d] for u in preds[v]}
                start[v] = time.perf_counter() - origin[0]
                value = compute(v, d, inputs)
                finish[v] = time.perf_counter() - origin[0]
                board.arrive(v, d, value)
                for t in board.targets[v]:
                    links[d, t].put((v, value))
                del inputs, value
                for u in preds[v]:
                    board.release(u, d)
            done = True
        finally:
            if not done:
                board.fail()
                for link in links.values():
                    link.put(None)

    def copier(s: int, t: int, count: int) -> None:
        gate.wait()
        done = False
        try:
            for _ in range(count):
                item = links[s, t].get()
                if item is None:
                    break
                u, value = item
                board.reserve(u, t)
                begin = time.perf_counter() - origin[0]
                copied = copy(u, s, t, value)
                copies.append((u, s, t, begin, time.perf_counter() - origin[0]))
                del value, item
                board.arrive(u, t, copied)
                del copied
                board.release(u, s)
            done = True
        finally:
            if not done:
                board.fail()
                for link in links.values():
                    link.put(None)

    with ThreadPoolExecutor(len(used) + devices) as pool:
        futures = [pool.submit(worker, d) for d in range(devices)]
        for s, t in used:
            count = sum(t in board.targets[u] for u in range(V) if device[u] == s)
            futures.append(pool.submit(copier, s, t, count))
        origin[0] = time.perf_counter()
        gate.wait()
        for future in futures:
            future.result()
    results = {u: board.values[u, int(device[u])] for u in keep}
    return Timeline(float(finish.max(initial=0.0)), start, finish, tuple(copies), board.peak), results


def run_synchronous(
    preds: Sequence[Sequence[int]],
    device: np.ndarray,
    groups: Sequence[Sequence[int]],
    devices: int,
    compute: Compute,
    copy: Copy,
) -> Timeline:
    """Bulk-synchronous execution (table 1): per group, all transfers, a barrier, all tasks, a barrier."""
    V = len(preds)
    start, finish, copies = np.zeros(V), np.zeros(V), []
    values: dict[tuple[int, int], Value] = {}
    with ThreadPoolExecutor(devices * devices) as pool:
        origin = time.perf_counter()

        def transfer(s: int, t: int, tasks: list[int]) -> None:
            for u in tasks:
                begin = time.perf_counter() - origin
                values[u, t] = copy(u, s, t, values[u, s])
                copies.append((u, s, t, begin, time.perf_counter() - origin))

        def execute(d: int, tasks: list[int]) -> None:
            for v in tasks:
                start[v] = time.perf_counter() - origin
                values[v, d] = compute(v, d, {u: values[u, d] for u in preds[v]})
                finish[v] = time.perf_counter() - origin

        for group in groups:
            wanted: dict[tuple[int, int], list[int]] = {}
            for v in group:
                for u in preds[v]:
                    s, t = int(device[u]), int(device[v])
                    if (u, t) not in values and u not in wanted.setdefault((s, t), []):
                        wanted[s, t].append(u)
            for future in [pool.submit(transfer, s, t, tasks) for (s, t), tasks in wanted.items()]:
                future.result()
            mine = [[v for v in group if device[v] == d] for d in range(devices)]
            for future in [pool.submit(execute, d, tasks) for d, tasks in enumerate(mine)]:
                future.result()
    return Timeline(float(finish.max(initial=0.0)), start, finish, tuple(copies), np.zeros(devices))
