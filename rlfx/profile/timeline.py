"""What a walked trace is: every thread and stream as a step function from time to context, and counts.

A `Context` says what a thread does at an instant: its host state, whether it keeps the device busy, and the operations
it works for.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rlfx.profile.annotate import OPERATION, PHASE
from rlfx.profile.events import Line, Marks
from rlfx.profile.hlo import Op
from rlfx.profile.launches import Base
from rlfx.profile.rules import TOGETHER
from rlfx.profile.work import Work

CONTAINER = "container"
# What profiling pays for: an annotation of ours, an instruction of XLA, a task handed to one of its threads (recorded
# when handed over and when taken up), and any other event of the host. Calls back to Python count apart.
ANNOTATION, THUNK, TASK, HOST = "annotation", "thunk", "task", "host"


class Share(NamedTuple):
    """An operation that an instant works for, with the relative weight of its part."""

    phase: str
    path: tuple[str, ...]
    stage: str = ""
    weight: int = 1


class Context(NamedTuple):
    """`state`: host state, None when the thread is no actor. `device`: "", "leaf", "container" or "copy".

    `function` is the jitted function whose call encloses, `called_back`: inside of a callback, or a program it runs.
    """

    state: str | None
    device: str
    shares: tuple[Share, ...]
    base: Base
    function: str = ""
    called_back: bool = False

    def working_as(self, other: Context) -> Context:
        """This one, at the work of another."""
        return self._replace(shares=other.shares, function=other.function)


ABSENT = Context(None, "", (), Base())


@dataclass
class Track:
    """A thread or stream as a step function: from `times[i]` on it is in `contexts[context[i]]`."""

    line: Line
    times: np.ndarray
    context: np.ndarray


class Growing:
    """A track that is being made: what a block adds is in lists, which are fast to append to, until it is packed."""

    def __init__(self, line: Line):
        self.line = line
        self.times: list[int] = []
        self.steps: list[int] = []
        self._packed: list[tuple[np.ndarray, np.ndarray]] = []

    def pack(self) -> None:
        self._packed.append((np.asarray(self.times, np.int64), np.asarray(self.steps, np.int32)))
        self.times.clear()
        self.steps.clear()

    def track(self) -> Track:
        self.pack()
        times, steps = (np.concatenate(parts) for parts in zip(*self._packed, strict=True))
        self._packed = [(times, steps)]
        return Track(self.line, times, steps)


@dataclass
class Kernel:
    """All executions of one instruction (or callback) in the window."""

    count: int = 0
    ns: int = 0
    op: Op | None = None
    path: tuple[str, ...] = ()
    copy: bool = False


@dataclass
class Timeline:
    """A walked trace. `window` in ns after the trace's start; `events` are the costs that profiling itself paid."""

    window: tuple[int, int]
    contexts: list[Context]
    tracks: list[Track]
    main: int
    transitions: collections.Counter = field(default_factory=collections.Counter)
    operations: collections.Counter = field(default_factory=collections.Counter)
    launches: collections.Counter = field(default_factory=collections.Counter)
    bytes: collections.Counter = field(default_factory=collections.Counter)
    work: dict[tuple[str, tuple[str, ...]], Work] = field(default_factory=dict)  # by phase and path
    kernels: dict[tuple[str, str], Kernel] = field(default_factory=dict)
    unknown: dict[str, list[int]] = field(default_factory=dict)
    paid: dict[str, Marks] = field(default_factory=dict)  # kind: when, and on which track
    problems: list[str] = field(default_factory=list)
    early: dict[str, int] = field(default_factory=dict)  # programs launched before the capture
    late: dict[str, int] = field(default_factory=dict)  # programs launched that were not seen to run
    worked: int = 0  # end of the last instruction
    alone: int = 0  # ns of the program that lasted longest, if no other was called or ran meanwhile
    waited: int = 0  # end of the last time that a thread of the host waited for the device, or read from it


def of_tasks(name: str, around: Base) -> tuple[Share, ...]:
    """The operations of the tasks for which a loop of asyncio waits."""
    found = []
    for task in name.removeprefix(TOGETHER).split("//") if name.startswith(TOGETHER) else ():
        phase, path = around
        for marked in task.split("/"):
            phase = marked[len(PHASE) :] if marked.startswith(PHASE) else phase
            path = (*path, marked[len(OPERATION) :]) if marked.startswith(OPERATION) else path
        found.append(Share(phase, path))
    return tuple(dict.fromkeys(found))
