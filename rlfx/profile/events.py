"""Gather the events of a trace that matter, from all planes, in one list sorted by time."""

from __future__ import annotations

import collections
import re
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from rlfx.errors import ProfileError, located
from rlfx.profile import rules
from rlfx.profile.rules import WAIT, Rule
from rlfx.profile.xspace import Trace

HOST_PLANES = ("/host:CPU", "/host:CUPTI", "/host:ROCTRACER", "/host:python-tracer")
_SIZE = re.compile(r"size:(\d+)")
_CORRELATED = re.compile(r"(cu|hip)[A-Z].*|cuda[A-Z].*")


@dataclass(frozen=True)
class Line:
    """A thread (`main`, `program`: it runs the user's Python; `pool`: XLA's) or a `stream` of a device."""

    plane: str
    name: str
    kind: str


class Event:
    """An event of the host, nanoseconds after the start of the trace."""

    __slots__ = ("correlation", "end", "line", "link", "name", "rule", "run", "start", "synthetic")

    def __init__(self, start, end, line, name, rule: Rule, link=None, correlation=None, run=None, synthetic=False):
        self.start, self.end, self.line, self.name, self.rule = start, end, line, name, rule
        self.link, self.correlation, self.run, self.synthetic = link, correlation, run, synthetic


class DeviceEvent:
    """An execution of an HLO instruction, a kernel or a copy."""

    __slots__ = ("bytes", "copy", "correlation", "end", "line", "module", "name", "op", "program", "run", "start")

    def __init__(self, start: int, end: int, line: int, name: str, stats: dict[str, Any]):
        self.start, self.end, self.line, self.name = start, end, line, name
        self.op = str(stats.get("hlo_op", ""))
        self.module = str(stats.get("hlo_module", ""))
        self.program = int(stats.get("program_id", -1))
        self.run = stats.get("run_id")
        correlation = stats.get("correlation_id")
        self.correlation = None if correlation is None else int(correlation)
        details = str(stats.get("memcpy_details", "") or stats.get("memset_details", ""))
        size = _SIZE.search(details)
        self.copy = bool(details) or (not self.op and bool(rules.MEMCPY.fullmatch(name)))
        self.bytes = int(size[1]) if size else 0


@dataclass
class Gathered:
    """All events that matter, sorted by start, enclosing ones first."""

    events: list[Any]
    lines: list[Line]
    main: int
    window: tuple[int, int]
    problems: list[str] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)  # (start, line) of host events that change nothing


def gather(trace: Trace) -> Gathered:
    """Read the planes of a trace; say what was not understood.

    Raises:
      ProfileError: there is no event to attribute.
    """
    lines: list[Line] = []
    events: list[Any] = []
    windows: dict[int, tuple[int, int]] = {}
    marks: list[tuple[int, int]] = []
    problems = [f"the profiler warns: {text}" for text in trace.warnings]
    for plane in trace.planes:
        if plane.name in HOST_PLANES:
            for line in plane.lines:
                _host_line(plane.name, line, lines, events, windows, marks)
        elif rules.DEVICE_PLANE.fullmatch(plane.name):
            for line in plane.lines:
                _device_line(plane.name, line, lines, events, problems)
        elif not rules.KNOWN_PLANES.fullmatch(plane.name):
            count = sum(1 for line in plane.lines for _ in line.events)
            problems.append(f"unknown plane {plane.name!r} with {count} events: not attributed")
    if not events and not windows:
        raise ProfileError(
            located(
                f"{trace.path} holds no event to attribute (planes: {', '.join(p.name for p in trace.planes)}).",
                fix="Run the program inside `capture`, with host_level >= 1, and wait for its results before leaving.",
            )
        )
    main = _main(lines, events, windows)
    if main is not None:
        lines[main] = Line(lines[main].plane, lines[main].name, "main")
    window = windows.get(main) if main is not None else None
    if window is None:
        window = min(e.start for e in events), max(e.end for e in events)
        if not trace.notes:
            problems.append("the trace was not made by rlfx.profile.capture: the window is the extent of its events")
    if main is not None and trace.notes:
        events.extend(_from_notes(trace, main, window))
    events.sort(key=attrgetter("end"), reverse=True)
    events.sort(key=attrgetter("start"))
    _check_regions(events, problems)
    return Gathered(events, lines, -1 if main is None else main, window, problems, marks)


def _host_line(plane: str, line: Any, lines: list[Line], events: list[Any], windows: dict, marks: list) -> None:
    if rules.COMPILER_THREADS.fullmatch(line.name):
        return
    at = len(lines)
    python = False
    kept: list[Any] = []
    passed: list[tuple[int, int]] = []
    waits: dict[int, int] = {}
    for e in line.events:
        name = e.name
        found = rules.rule(name)
        kind = found.kind
        if kind == "ignore":
            continue
        start = round(e.start_ns)
        if kind == "inherit":
            passed.append((start, at))
            continue
        end = start + round(e.duration_ns)
        if kind == "capture":
            windows[at] = (start, end)
            python = True
        elif found.value == WAIT and (ends := _wait(e, waits, start)) is not None:
            if ends < start:  # the second of the two: the wait lasted from the first to here
                kept.append(Event(ends, end, at, name, found))
        elif kind in ("annotation", "state"):
            python = python or kind == "annotation" or name.startswith("PjitFunction")
            stats = dict(e.stats) if found.value == WAIT or _CORRELATED.fullmatch(name) else {}
            correlation, run = stats.get("correlation_id"), stats.get("run_id")
            kept.append(Event(start, end, at, name, found, correlation=correlation, run=run))
        elif kind in ("record", "region", "stop"):
            stats = dict(e.stats) if kind != "stop" else {}
            kept.append(Event(start, end, at, name, found, link=stats.get("_p", stats.get("_c"))))
        else:
            stats = dict(e.stats)
            if "hlo_op" in stats:
                kept.append(DeviceEvent(start, end, at, name, stats))
            else:
                kept.append(Event(start, end, at, name, found))
    if kept or python:
        pool = line.name.startswith("tf_") or not python
        lines.append(Line(plane, line.name, "pool" if pool else "program"))
        events.extend(kept)
        marks.extend(passed)


def _wait(e: Any, open_waits: dict[int, int], start: int) -> int | None:
    """PJRT marks a blocked wait with two short events that share an id: the first gives it, the second consumes it.

    Returns the start of the wait (at the first: of itself); None for an event that spans the wait.
    """
    stats = dict(e.stats)
    if "_p" in stats and "_c" not in stats and "hlo_op" not in stats:
        open_waits[stats["_p"]] = start
        return start
    if "_c" in stats and "hlo_op" not in stats:
        return open_waits.pop(stats["_c"], None)
    return None


def _device_line(plane: str, line: Any, lines: list[Line], events: list[Any], problems: list[str]) -> None:
    if rules.DERIVED_LINES.fullmatch(line.name):
        return
    if not rules.DEVICE_LINES.fullmatch(line.name):
        problems.append(
            f"unknown line {line.name!r} of {plane} with {sum(1 for _ in line.events)} events: not attributed"
        )
        return
    at = len(lines)
    found = []
    for e in line.events:
        start = round(e.start_ns)
        found.append(DeviceEvent(start, start + round(e.duration_ns), at, e.name, dict(e.stats)))
    if found:
        lines.append(Line(plane, line.name, "stream"))
        events.extend(found)


def _main(lines: list[Line], events: list[Any], windows: dict[int, Any]) -> int | None:
    """The thread that captured; without one, the one with the most annotations and calls."""
    if windows:
        return next(iter(windows))
    weight = collections.Counter(e.line for e in events if isinstance(e, Event) and lines[e.line].kind == "program")
    return weight.most_common(1)[0][0] if weight else None


def _from_notes(trace: Trace, main: int, window: tuple[int, int]) -> list[Event]:
    """What jax does not record: annotations open at the edges of the capture, and the time spent tracing."""
    made = []
    for name, end in trace.notes.get("open_at_start", []):
        stop = window[1] if end is None else min(end - trace.start_ns, window[1])
        made.append(Event(window[0], stop, main, name, rules.rule(name), synthetic=True))
    for name, start in trace.notes.get("open_at_stop", []):
        made.append(
            Event(max(window[0], start - trace.start_ns), window[1], main, name, rules.rule(name), synthetic=True)
        )
    for c in trace.notes.get("compilations", []):
        if c.get("main") and c["stage"] in ("trace", "lower"):
            end = c["end_ns"] - trace.start_ns
            name = f"rlfx.compile:{c['stage']}"
            made.append(Event(end - round(c["seconds"] * 1e9), end, main, name, rules.rule(name), synthetic=True))
    return made


def _check_regions(events: list[Any], problems: list[str]) -> None:
    """Work handed to a pool thread must have been recorded where it was handed over: else events were dropped."""
    recorded = {e.link for e in events if isinstance(e, Event) and e.rule.kind == "record"}
    regions = [e for e in events if isinstance(e, Event) and e.rule.kind == "region"]
    lost = sum(1 for e in regions if e.link not in recorded)
    if lost:
        problems.append(
            f"{lost} of {len(regions)} tasks of XLA's threads have no recorded origin (started before the capture, or "
            "events were dropped): attributed by their own scopes alone"
        )
