"""Gather the events of a trace that matter, from all planes, in one list sorted by time."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from rlfx.errors import ProfileError, located
from rlfx.profile import columns, rules, threads
from rlfx.profile.lines import places
from rlfx.profile.rules import WAIT, Rule
from rlfx.profile.xspace import Trace

HOST_PLANES = ("/host:CPU", "/host:CUPTI", "/host:ROCTRACER", "/host:python-tracer")
ALIVE = 10**8  # ns; a thread that was sampled so shortly before the last sample of all is still there
_SIZE = re.compile(r"size:(\d+)")
_CORRELATED = re.compile(r"(cu|hip)[A-Z].*|cuda[A-Z].*")


@dataclass(frozen=True)
class Line:
    """A thread (`main`, `program`: it runs the user's Python; `pool`: XLA's; `own`: the profiler's) or a `stream`."""

    plane: str
    name: str
    kind: str
    thread: int = 0  # `threads.line_id` of it


class Event:
    """An event of the host, nanoseconds after the start of the trace."""

    __slots__ = ("correlation", "end", "line", "link", "name", "rule", "run", "start", "synthetic")

    def __init__(self, start, end, line, name, rule: Rule, link=None, correlation=None, run=None, synthetic=False):
        self.start, self.end, self.line, self.name, self.rule = start, end, line, name, rule
        self.link, self.correlation, self.run, self.synthetic = link, correlation, run, synthetic


class Kind(NamedTuple):
    """What the executions of one HLO instruction, kernel or copy have in common."""

    name: str
    op: str
    module: str
    program: int
    copy: bool


@dataclass
class Executions:
    """Executions of HLO instructions, kernels and copies, as columns; `run` and `correlation` are `NONE` if unknown."""

    start: np.ndarray
    end: np.ndarray
    line: np.ndarray
    kind: np.ndarray  # index into `kinds`
    run: np.ndarray
    correlation: np.ndarray
    bytes: dict[int, int]  # index of the execution: bytes copied
    kinds: list[Kind]


@dataclass
class Gathered:
    """All events that matter: those of the host, sorted by start, enclosing ones first, and the executions."""

    events: list[Event]
    device: Executions
    lines: list[Line]
    main: int
    window: tuple[int, int]
    problems: list[str] = field(default_factory=list)
    marks: Marks = field(default_factory=lambda: Marks())
    lives: dict[int, tuple[int, int]] = field(default_factory=dict)  # line: when the capture saw its thread alive


class Marks(NamedTuple):
    """Instants on lines."""

    times: np.ndarray = np.zeros(0, np.int64)
    lines: np.ndarray = np.zeros(0, np.int32)

    @classmethod
    def join(cls, parts: list[Marks]) -> Marks:
        return cls(*(np.concatenate(x) for x in zip(*parts, strict=True))) if parts else cls()


def gather(trace: Trace) -> Gathered:
    """Read the planes of a trace; say what was not understood.

    Raises:
      ProfileError: there is no event to attribute.
    """
    found = _Gathering()
    problems = [f"the profiler warns: {text}" for text in trace.warnings]
    for plane in trace.planes:
        if plane.name in HOST_PLANES:
            for line in plane.lines:
                found.host(plane, line)
        elif rules.DEVICE_PLANE.fullmatch(plane.name):
            for line in plane.lines:
                found.stream(plane, line, problems)
        elif not rules.KNOWN_PLANES.fullmatch(plane.name):
            problems.append(f"unknown plane {plane.name!r} with {_count(plane, *plane.lines)} events: not attributed")
    device = found.device()
    trace.forget()
    lines, events, windows = found.lines, found.events, found.windows
    if not events and not len(device.start) and not windows:
        raise ProfileError(
            located(
                f"{trace.path} holds no event to attribute (planes: {', '.join(p.name for p in trace.planes)}).",
                fix="Run the program inside `capture`, with host_level >= 1, and wait for its results before leaving.",
            )
        )
    window = next(iter(windows.values()), None)
    lives: dict[int, tuple[int, int]] = {}
    if trace.notes and window is not None:
        lives = _watched(trace, lines, window)
    events[:] = [e for e in events if lines[e.line].kind != "own"]
    main = _main(trace, lines, events, windows)
    if main is not None:
        lines[main] = dataclasses.replace(lines[main], kind="main")
    if window is None:
        starts, ends = [e.start for e in events], [e.end for e in events]
        if len(device.start):
            starts.append(int(device.start.min()))
            ends.append(int(device.end.max()))
        window = min(starts), max(ends)
        if not trace.notes:
            problems.append("the trace was not made by rlfx.profile.capture: the window is the extent of its events")
    if main is not None and trace.notes:
        events.extend(_from_notes(trace, main, lines, window, events))
    events.sort(key=attrgetter("end"), reverse=True)
    events.sort(key=attrgetter("start"))
    _check_regions(events, problems)
    return Gathered(
        events, device, lines, -1 if main is None else main, window, problems, Marks.join(found.marks), lives
    )


def _count(plane: columns.Plane, *lines: columns.Line) -> int:
    return sum(len(b.start) for line in lines for b in columns.blocks(plane, line, lambda name: True, ()))


STATS = (
    "hlo_op",
    "hlo_module",
    "program_id",
    "run_id",
    "correlation_id",
    "memcpy_details",
    "memset_details",
    "_p",
    "_c",
)


class _Gathering:
    """Lines, and what is on them, as they are read."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.events: list[Event] = []
        self.windows: dict[int, tuple[int, int]] = {}
        self.marks: list[Marks] = []
        self.kinds: dict[Kind, int] = {}
        self.parts: list[tuple[np.ndarray, ...]] = []
        self.bytes: dict[int, int] = {}
        self.count = 0

    def device(self) -> Executions:
        """All executions that were read; the parts are given up."""
        parts, self.parts = self.parts, []
        if not parts:
            parts = [(np.zeros(0, np.int64),) * 6]
        cells = [list(column) for column in zip(*parts, strict=True)]
        parts.clear()
        joined = []
        while cells:  # one after the other, so that not all are there twice
            joined.append(_joined(cells.pop(0)))
        start, end, line, kind, run, correlation = joined
        return Executions(start, end, line, kind, run, correlation, self.bytes, [*self.kinds])

    def host(self, plane: columns.Plane, line: columns.Line) -> None:
        """A thread."""
        if rules.COMPILER_THREADS.fullmatch(line.name):
            return
        at, python = len(self.lines), False
        meanings = {i: rules.rule(name) for i, name in plane.events.items()}
        events: list[Event] = []
        marks: list[Marks] = []
        executed = self.count
        waits: dict[int, int] = {}
        for b in columns.blocks(plane, line, lambda name: rules.rule(name).kind != "ignore", STATS):
            passed = np.isin(b.name, [i for i, r in meanings.items() if r.kind == "inherit"])
            if passed.any():
                marks.append(Marks(b.start[passed], np.full(passed.sum(), at, np.int32)))
            unknown = np.isin(b.name, [i for i, r in meanings.items() if r.kind == "unknown"])
            kernels = unknown & (b.stats["hlo_op"] != columns.NONE)
            if kernels.any():
                self.executions(plane, b, np.flatnonzero(kernels), at)
            rest = np.flatnonzero(~passed & ~kernels)
            cells = (b.name, b.start, b.end, *(b.stats[k] for k in ("_p", "_c", "run_id", "correlation_id")))
            for name, start, end, *stats in zip(*(c[rest].tolist() for c in cells), strict=True):
                rule = meanings.get(name) or rules.rule("")
                label = plane.events.get(name, "")
                if rule.kind == "capture":
                    self.windows[at] = (start, end)
                    python = True
                    continue
                gives, takes, run, correlation = (None if s == columns.NONE else s for s in stats)
                if rule.value == WAIT and (gives is not None or takes is not None):
                    # PJRT marks a blocked wait with two short events that share an id, the first and the second.
                    if takes is None:
                        waits[gives] = start
                    elif takes in waits:
                        events.append(Event(waits.pop(takes), end, at, label, rule))
                    continue
                python = python or rule.kind in ("annotation", "again") or label.startswith("PjitFunction")
                link = (gives if gives is not None else takes) if rule.kind in ("record", "region") else None
                asked = rule.kind in ("annotation", "state") and (rule.value == WAIT or _CORRELATED.fullmatch(label))
                known = {"correlation": correlation, "run": run} if asked else {}
                events.append(Event(start, end, at, label, rule, link=link, **known))
        if events or python or self.count > executed:
            pool = line.name.startswith("tf_") or not python
            self.lines.append(Line(plane.name, line.name, "pool" if pool else "program", line.number % (1 << 64)))
            self.events.extend(events)
            self.marks.extend(marks)

    def stream(self, plane: columns.Plane, line: columns.Line, problems: list[str]) -> None:
        """A line of a device."""
        if rules.DERIVED_LINES.fullmatch(line.name):
            return
        if not rules.DEVICE_LINES.fullmatch(line.name):
            problems.append(
                f"unknown line {line.name!r} of {plane.name} with {_count(plane, line)} events: not attributed"
            )
            return
        executed = self.count
        for b in columns.blocks(plane, line, lambda name: True, STATS):
            self.executions(plane, b, np.arange(len(b.start)), len(self.lines))
        if self.count > executed:
            self.lines.append(Line(plane.name, line.name, "stream"))

    def executions(self, plane: columns.Plane, b: columns.Block, chosen: np.ndarray, line: int) -> None:
        """Executions on a line, and the kinds that they are of."""
        cells = [
            b.name,
            *(b.stats[k] for k in ("hlo_op", "hlo_module", "program_id", "memcpy_details", "memset_details")),
        ]
        code = np.zeros(len(chosen), np.int64)
        for cell in cells:  # numbers the distinct rows
            values, index = columns.numbered(cell[chosen])
            if len(values) > 1:
                _, code = columns.numbered(code * len(values) + index)
        distinct, code = columns.numbered(code)
        first = columns.firsts(code, len(distinct))
        numbers = []
        for at in first.tolist():
            name, *stats = (int(cell[chosen[at]]) for cell in cells)
            kind, size = _kind(plane.events.get(name, ""), stats, b.texts)
            numbers.append(self.kinds.setdefault(kind, len(self.kinds)))
            if size:
                self.bytes.update(dict.fromkeys((self.count + np.flatnonzero(code == len(numbers) - 1)).tolist(), size))
        run, correlation = b.stats["run_id"][chosen], b.stats["correlation_id"][chosen]
        where = np.full(len(chosen), line, np.int32)
        kinds = np.asarray(numbers, np.int32)[code]
        self.parts.append((b.start[chosen], b.end[chosen], where, kinds, _compact(run), _compact(correlation)))
        self.count += len(chosen)


def _compact(column: np.ndarray) -> np.ndarray:
    """One number in place of many that are the same."""
    return np.broadcast_to(column[0], column.shape) if (column == column[0]).all() else column


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    values = {int(part[0]) if len(part) and part.strides == (0,) else None for part in parts}
    if len(values) == 1 and None not in values:
        return np.broadcast_to(parts[0][0], sum(len(part) for part in parts))
    return np.concatenate(parts)


def _kind(name: str, stats: list[int], texts: list[str]) -> tuple[Kind, int]:
    """`(kind, bytes)` of an execution, from its name and its other cells."""
    op, module, program, copied, set_ = stats
    details = next((texts[i] for i in (copied, set_) if i != columns.NONE), "")
    size = _SIZE.search(details)
    named = texts[op] if op != columns.NONE else ""
    copy = bool(details) or (not named and bool(rules.MEMCPY.fullmatch(name)))
    label = texts[module] if module != columns.NONE else ""
    return Kind(name, named, label, -1 if program == columns.NONE else program, copy), int(size[1]) if size else 0


def _main(trace: Trace, lines: list[Line], events: list[Event], windows: dict[int, Any]) -> int | None:
    """The thread that the capture is of; without one, the one with the most annotations and calls."""
    said = [at for at, line in enumerate(lines) if line.thread and line.thread == trace.notes.get("line")]
    if said or windows:
        return [*said, *windows][0]
    weight = collections.Counter(e.line for e in events if lines[e.line].kind == "program")
    return weight.most_common(1)[0][0] if weight else None


def _watched(trace: Trace, lines: list[Line], window: tuple[int, int]) -> dict[int, tuple[int, int]]:
    """A line for every thread that the capture watched, also for those of which the trace has no event.

    The profiler's own threads are no part of the program: what they do goes to what the program does meanwhile.

    Returns:
      When each of them was alive: until the end, if it was at the last sample of all.
    """
    known = {line.thread: at for at, line in enumerate(lines) if line.thread}
    watched = [t for t in trace.notes.get("threads", []) if t["samples"]]
    last = max((t["samples"][-1][0] for t in watched), default=0)
    lives = {}
    for thread in watched:
        if thread["name"].startswith(threads.OURS):
            if thread["line"] in known:
                at = known[thread["line"]]
                lines[at] = dataclasses.replace(lines[at], kind="own")
            continue
        at = known.setdefault(thread["line"], len(lines))
        if at == len(lines):
            lines.append(Line(HOST_PLANES[0], thread["name"], "program", thread["line"]))
        elif not lines[at].name.startswith("tf_"):
            kind = "main" if lines[at].kind == "main" else "program"
            lines[at] = dataclasses.replace(lines[at], name=thread["name"], kind=kind)
        begin, end = (thread["samples"][i][0] for i in (0, -1))
        span = begin - trace.start_ns, window[1] if last - end < ALIVE else end - trace.start_ns
        lives[at] = (min(span[0], lives[at][0]), max(span[1], lives[at][1])) if at in lives else span
    return lives


def _from_notes(
    trace: Trace, main: int, lines: list[Line], window: tuple[int, int], events: list[Event]
) -> list[Event]:
    """What jax does not record: annotations open at the edges of the capture, and the time spent tracing."""
    known = {line.thread: at for at, line in enumerate(lines) if line.thread}
    made = []
    first: dict[int, int] = {}
    for e in events:  # another thread may be inside a call that jax records when the capture begins
        first[e.line] = min(e.start, first.get(e.line, window[0]))
    for name, end, thread in trace.notes.get("open_at_start", []):
        stop, at = window[1] if end is None else min(end - trace.start_ns, window[1]), known.get(thread, main)
        made.append(Event(first.get(at, window[0]), stop, at, name, rules.rule(name), synthetic=True))
    for name, start, thread in trace.notes.get("open_at_stop", []):
        begin = max(window[0], start - trace.start_ns)
        made.append(Event(begin, window[1], known.get(thread, main), name, rules.rule(name), synthetic=True))
    made += _setting_up(trace, known, window)
    for c in trace.notes.get("compilations", []):
        if c.get("main") and c["stage"] in ("trace", "lower"):
            end = c["end_ns"] - trace.start_ns
            name = f"rlfx.compile:{c['stage']}"
            made.append(Event(end - round(c["seconds"] * 1e9), end, main, name, rules.rule(name), synthetic=True))
    return made


_SET_UP = {"compile": "rlfx.compile:under way", "import": f"{rules.IMPORTING}under way"}


def _setting_up(trace: Trace, known: dict[int, int], window: tuple[int, int]) -> list[Event]:
    """An import or a compilation that was under way when the capture began leaves no event; samples say how long it was."""
    found = places(trace.notes)
    made = []
    for thread in trace.notes.get("threads", []):
        states = [(when, found[place].sets_up if place >= 0 else "") for when, _, _, place in thread["samples"]]
        at, name = known.get(thread["line"]), _SET_UP.get(states[0][1] if states else "")
        if at is not None and name:
            *_, (stop, _) = itertools.takewhile(lambda sample: sample[1], states)
            made.append(Event(window[0], min(stop - trace.start_ns, window[1]), at, name, rules.rule(name), synthetic=True))
    return made


def _check_regions(events: list[Any], problems: list[str]) -> None:
    """Work handed to a pool thread must have been recorded where it was handed over: else events were dropped."""
    recorded = {e.link for e in events if e.rule.kind == "record"}
    regions = [e for e in events if e.rule.kind == "region"]
    lost = sum(1 for e in regions if e.link not in recorded)
    if lost:
        problems.append(
            f"{lost} of {len(regions)} tasks of XLA's threads have no recorded origin (started before the capture, or "
            "events were dropped): attributed by their own scopes alone"
        )
