"""Which launch a program's instructions belong to: they run later, on other threads, than the call that started them.

XLA hands work to its threads under an id (`ThreadpoolListener`), which links a task to the call exactly, until a
program waits for an earlier one: then the earlier program's thread starts it. Its run id is new, and a launch of its
function is still without a run; launches of one function run in order. GPU kernels carry their launch's correlation id.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import NamedTuple

from rlfx.profile import rules
from rlfx.profile.events import DeviceEvent


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

    def _claim(self, run: int, launch: Launch | None, base: Base) -> Base:
        if launch is not None and launch.run is None:
            launch.run = run
        self._runs[run] = base
        return base


def unmatched(events: list) -> tuple[collections.Counter, collections.Counter]:
    """`(runs without a launch, launches without a run)` of each function.

    The first were under way when the capture began, the second had not finished when it ended, or have nothing to run.
    """
    runs: dict[str, set] = collections.defaultdict(set)
    launches: collections.Counter = collections.Counter()
    calls: dict[int, list[tuple[int, str]]] = collections.defaultdict(list)
    until: dict[int, int] = {}
    for e in events:
        if isinstance(e, DeviceEvent):
            if e.run is not None:
                runs[rules.function_of(e.module)].add(e.run)
            continue
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
    ran = collections.Counter({f: len(ids) for f, ids in runs.items()})
    return ran - launches, launches - ran
