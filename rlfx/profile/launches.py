"""Which launch a program's instructions belong to: they run later, on other threads, than the call that started them.

XLA hands work to its threads under an id (`ThreadpoolListener`), which links a task to the call exactly, until a
program waits for an earlier one: then the earlier program's thread starts it. Its run id is new, and a launch of its
function is still without a run; launches of one function run in order. GPU kernels carry their launch's correlation id.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rlfx.profile import rules
from rlfx.profile.columns import NONE
from rlfx.profile.events import Event, Executions


class Base(NamedTuple):
    """What encloses: the phase and the operations open on the host, at a launch or in a block."""

    phase: str = ""
    path: tuple[str, ...] = ()


@dataclass
class Launch:
    """One dispatch of a program. `run` is set once an instruction of it has been seen."""

    function: str
    base: Base
    run: int | None = None


@dataclass
class Launches:
    """Fed in time order; answers with the `Base` of the launch that an instruction belongs to."""

    early: collections.Counter  # runs of each function that were launched before the capture: its first ones
    correlated: dict[int, Base] = field(default_factory=dict)
    _current: dict[int, Launch | None] = field(default_factory=dict)  # line: its latest launch, or its task's
    _tasks: dict[int, tuple[Base, Launch | None]] = field(default_factory=dict)
    _runs: dict[int, Base] = field(default_factory=dict)
    _pending: dict[str, collections.deque[Launch]] = field(
        default_factory=lambda: collections.defaultdict(collections.deque)
    )

    def dispatched(self, line: int, function: str, base: Base) -> None:
        launch = Launch(function, base)
        self._current[line] = launch
        self._pending[launch.function].append(launch)

    def handed_over(self, line: int, task: int, base: Base) -> None:
        self._tasks[task] = (base, self._current.get(line))

    def taken_up(self, line: int, task: int, otherwise: Base) -> Base:
        base, self._current[line] = self._tasks.get(task, (otherwise, None))
        return base

    def inline(self, run: int | None, line: int, base: Base) -> None:
        """An instruction on the very thread that launched it."""
        if run is not None and run not in self._runs:
            self._claim(run, self._current.get(line), base)

    def base(self, run: int | None, line: int, function: str, otherwise: Base) -> Base:
        """The base of a run, from the task's launch if it is free, else from the oldest free launch of the function."""
        if run is None:
            return otherwise
        if run in self._runs:
            return self._runs[run]
        mine = self._current.get(line)
        if mine is not None and mine.run is None and mine.function in (function, ""):
            return self._claim(run, mine, mine.base)
        if self.early[function] > 0:
            self.early[function] -= 1
            return self._claim(run, None, Base())
        queue = self._pending.get(function, ())
        while queue and queue[0].run is not None:
            queue.popleft()
        return self._claim(run, queue[0], queue[0].base) if queue else otherwise

    def __contains__(self, run: int) -> bool:
        """Is the launch of a run known?"""
        return run in self._runs

    def _claim(self, run: int, launch: Launch | None, base: Base) -> Base:
        if launch is not None and launch.run is None:
            launch.run = run
        self._runs[run] = base
        return base


def unmatched(events: list[Event], device: Executions) -> tuple[collections.Counter, collections.Counter]:
    """`(runs without a launch, launches without a run)` of each function.

    The first were under way when the capture began, the second had not finished when it ended, or have nothing to run. Of a
    function whose instructions have no run (kernels of a GPU) it is not known how often it ran: none is without one.
    """
    launches: collections.Counter = collections.Counter()
    calls: dict[int, list[tuple[int, str]]] = collections.defaultdict(list)
    until: dict[int, int] = {}
    for e in events:
        if e.rule.kind != "state":
            continue
        stack = calls[e.line]
        while stack and stack[-1][0] <= e.start:
            stack.pop()
        function = rules.function_of(e.name)
        if function:
            stack.append((e.end, function))
        elif e.rule.value == rules.DISPATCH and e.start >= until.get(e.line, 0):
            until[e.line] = e.end
            launches[stack[-1][1] if stack else ""] += 1
    functions = [rules.function_of(kind.module) for kind in device.kinds]
    distinct = sorted(set(functions))
    index = np.asarray([distinct.index(f) for f in functions], np.int64)
    known = device.run != NONE
    run, number = np.unique(device.run[known], return_inverse=True)
    pairs = np.unique(number * max(1, len(distinct)) + index[device.kind[known]]) if len(run) else np.zeros(0, np.int64)
    ran = collections.Counter(distinct[i] for i in (pairs % max(1, len(distinct))).tolist())
    unknown = {functions[kind] for kind in np.unique(device.kind[~known]).tolist()}
    late = {f: n for f, n in (launches - ran).items() if f not in unknown}
    return ran - launches, collections.Counter(late)


def extents(device: Executions, window: tuple[int, int], early: bool, late: bool) -> dict[int, tuple[int, int]]:
    """From the first to the last instruction of each run in the window, with the times when it has no processor.

    Args:
      device: instructions without a run count as one of their module.
      window: ns.
      early: a program was under way when the window began: the one that is seen first.
      late: a program was under way when the window ended: the one that is seen last.
    """
    chosen = np.flatnonzero((device.end > window[0]) & (device.start < window[1]))
    if not len(chosen):
        return {}
    modules = {module: i for i, module in enumerate(dict.fromkeys(kind.module for kind in device.kinds))}
    module = np.asarray([modules[kind.module] for kind in device.kinds], np.int64)[device.kind[chosen]]
    run, number = np.unique(np.where(device.run[chosen] == NONE, ~module, device.run[chosen]), return_inverse=True)
    first, last = np.full(len(run), window[1]), np.full(len(run), window[0])
    np.minimum.at(first, number, np.maximum(device.start[chosen], window[0]))
    np.maximum.at(last, number, np.minimum(device.end[chosen], window[1]))
    if early:
        first[np.argmin(first)] = window[0]
    if late:
        last[np.argmax(last)] = window[1]
    return dict(zip(run.tolist(), zip(first.tolist(), last.tolist(), strict=True), strict=True))


def alone(events: list[Event], runs: dict[int, tuple[int, int]]) -> int:
    """ns of the run that lasted longest; 0 if another program was called or ran meanwhile."""
    if not runs:
        return 0
    begin, end = max(runs.values(), key=lambda run: run[1] - run[0])
    others = sum(first < end and last > begin for first, last in runs.values()) > 1
    called = any(e.rule.value == rules.BACKEND and begin < e.start < end for e in events)
    return 0 if others or called else end - begin
