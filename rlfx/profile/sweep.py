"""The overlap sweep: walk all step functions at once and attribute every nanosecond of the window, exactly once.

RL-Scope, section 3.3. Between two boundaries nothing changes, so an instant is the tuple of its threads' contexts;
equal tuples are attributed once, and their times added as integers. Sums therefore equal the window exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rlfx.profile.columns import BLOCK, firsts, numbered
from rlfx.profile.events import Line
from rlfx.profile.rows import DeviceRow, Row
from rlfx.profile.rules import (
    BACKEND,
    BLOCKED,
    BUSY,
    CALLBACK,
    COMPILE,
    COPY,
    DEVICE,
    DISPATCH,
    FETCH,
    IDLE,
    IMPORT,
    PYTHON,
    TRANSFER,
    WAIT,
)
from rlfx.profile.timeline import CONTAINER, Context, Share, Timeline

ACTING = frozenset({PYTHON, BACKEND, DISPATCH, COMPILE, TRANSFER, CALLBACK, IMPORT})


class Attribution(NamedTuple):
    """An instant: its rows with weights, the device's work with weights, and whether only the device held things up.

    `parallel` counts the threads (or instructions, if bound) that share it.
    """

    rows: tuple[tuple[Row, int], ...]
    device: tuple[tuple[DeviceRow, int], ...]
    state: str
    bound: bool
    parallel: int = 1


@dataclass
class Sweep:
    """The attributed window.

    `rows` and `device` in ns. `bounds` (n + 1 times) and `combo` (n) give back every instant: `attributions[combo[i]]`,
    and `columns[combo[i]]`, the context of each of the `tracks` (an index into `contexts`).
    """

    window: tuple[int, int]
    rows: dict[Row, int]
    device: dict[DeviceRow, int]
    bounds: np.ndarray
    combo: np.ndarray
    attributions: list[Attribution]
    columns: list[tuple[int, ...]] = field(default_factory=list)
    tracks: list[Line] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)
    threads: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def busy(self) -> np.ndarray:
        """Per segment: is the device executing or copying?"""
        return np.asarray([a.state != IDLE for a in self.attributions])[self.combo]

    @property
    def bound(self) -> np.ndarray:
        """Per segment: is the device executing while no thread of the host has anything to do?"""
        return np.asarray([a.bound for a in self.attributions])[self.combo]

    def combo_at(self, times: np.ndarray) -> np.ndarray:
        """The combination in force at each time: an index into `attributions`."""
        at = np.clip(np.searchsorted(self.bounds, times, "right") - 1, 0, len(self.combo) - 1)
        return self.combo[at]


def sweep(timeline: Timeline) -> Sweep:
    """Attribute the window of a timeline.

    Returns:
      A `Sweep` whose `rows` sum to the window, and whose `device` sums to the time the device was not idle.
    """
    start, stop = timeline.window
    tracks = [t for t in timeline.tracks if len(t.times) or t.line.kind == "main"]
    kinds = [t.line.kind for t in tracks]
    inner = [t.times[np.searchsorted(t.times, start, "right") : np.searchsorted(t.times, stop)] for t in tracks]
    bounds = np.concatenate([np.asarray([start, stop], np.int64), *inner])
    bounds.sort()
    bounds = bounds[np.append(True, bounds[1:] != bounds[:-1])]
    roots = [_root(timeline, kind) for kind in kinds]
    combo, columns = _combinations(tracks, roots, bounds[:-1])
    total = np.zeros(len(columns), np.int64)
    for at in range(0, len(combo), BLOCK):
        np.add.at(total, combo[at : at + BLOCK], np.diff(bounds[at : at + BLOCK + 1]))
    contexts = [*timeline.contexts, *_EXTRA]
    attributions = [attribute([contexts[c] for c in column], kinds) for column in columns]
    rows: dict[Row, int] = {}
    device: dict[DeviceRow, int] = {}
    for attribution, ns in zip(attributions, total.tolist(), strict=True):
        for target, shares in ((rows, attribution.rows), (device, attribution.device)):
            for key, part in split(ns, shares):
                target[key] = target.get(key, 0) + part
    threads = _threads(tracks, kinds, columns, total, contexts)
    lines = [t.line for t in tracks]
    return Sweep((start, stop), rows, device, bounds, combo, attributions, columns, lines, contexts, threads)


_EXTRA = (Context(None, "", (), ("", ())), Context(PYTHON, "", (Share("", ()),), ("", ())))


def _root(timeline: Timeline, kind: str) -> int:
    """Index of the context before the first event: the main thread runs Python, the others are not there yet."""
    return len(timeline.contexts) + (1 if kind == "main" else 0)


def _combinations(tracks, roots, at: np.ndarray) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """`(combination of each segment, context of every track in each combination)`, a block of segments at a time."""
    known: dict[tuple[int, ...], int] = {}
    combo = np.empty(len(at), np.int32)
    for begin in range(0, len(at), BLOCK):
        block = at[begin : begin + BLOCK]
        matrix = np.empty((len(tracks), len(block)), np.int32)
        code = np.zeros(len(block), np.int64)
        for row, (track, root) in enumerate(zip(tracks, roots, strict=True)):
            first = max(0, int(np.searchsorted(track.times, block[0], "right")) - 1)
            times = track.times[first : int(np.searchsorted(track.times, block[-1], "right"))]
            found = np.searchsorted(times, block, "right") - 1
            matrix[row] = np.where(found >= 0, track.context[first + found] if len(times) else root, root)
            values, index = numbered(matrix[row])
            code = code * len(values) + index
            if code.max() > 1 << 31:
                _, code = numbered(code)
        distinct, which = numbered(code)
        first = firsts(which, len(distinct))
        numbers = [known.setdefault(tuple(column), len(known)) for column in matrix[:, first].T.tolist()]
        combo[begin : begin + BLOCK] = np.asarray(numbers, np.int32)[which]
    return combo, list(known)


def attribute(contexts: list[Context], kinds: list[str]) -> Attribution:
    """Say whose an instant is.

    The threads that act share it equally; those inside an operation before those outside. If none acts, it belongs to
    the operations that the device executes, and if the device is idle too, to the operation that waits.
    """
    main = next((c for c, kind in zip(contexts, kinds, strict=True) if kind == "main"), None)
    phase = main.base[0] if main is not None else ""
    leaves = [c for c in contexts if c.device in ("leaf", COPY)]
    executing = any(c.device == "leaf" for c in leaves)
    contexts = [_fetched(c, executing) for c in contexts]
    acting = [c for c in contexts if c.state in ACTING]
    acting = [c for c in acting if any(s.path for s in c.shares)] or acting
    open_programs = [c for c in contexts if c.device == CONTAINER]
    if not leaves and not any(c.state == CALLBACK for c in acting):
        leaves = _innermost(open_programs)
    kernels = [c for c in leaves if c.device != COPY]
    state = BUSY if kernels else COPY if leaves else IDLE
    around = main.base[1] if main is not None else ()

    def owner(c: Context, s: Share) -> DeviceRow:
        # A copy without a known launch is the work of what the host does then.
        return DeviceRow(s.phase or phase, s.path or (around if c.device == COPY else ()), s.stage)

    device = _shared([(owner(c, s), s.weight) for s in c.shares] for c in leaves)
    if acting:
        rows = _shared(
            [(Row(s.phase or phase, s.path, s.stage, c.state, state), s.weight) for s in c.shares] for c in acting
        )
        return Attribution(rows, device, state, False, len(acting))
    host = DEVICE if main is not None and main.state == DEVICE else WAIT
    if host == WAIT and not any(c.state == WAIT for c in contexts) and any(c.state == BLOCKED for c in contexts):
        host = BLOCKED
    if leaves:
        rows = tuple((Row(key.phase, key.path, key.stage, host, state), weight) for key, weight in device)
        return Attribution(rows, device, state, True, len(leaves))
    waiting = [c for c in contexts if c.state is not None and any(s.path for s in c.shares)]
    waiting = waiting or ([main] if main is not None else [])
    rows = _shared(
        [(Row(s.phase or phase, s.path, s.stage, BLOCKED if c.state == BLOCKED else host, state), 1) for s in c.shares]
        for c in waiting
    )
    return Attribution(rows or ((Row(phase, (), "", host, state), 1),), device, state, False)


def _fetched(c: Context, executing: bool) -> Context:
    return c if c.state != FETCH else c._replace(state=WAIT if executing else TRANSFER)


def _innermost(containers: list[Context]) -> list[Context]:
    """Loops and programs open without an instruction in them: the most specific ones own the gap."""
    if not containers:
        return []
    depth = max(len(s.path) for c in containers for s in c.shares)
    return [c for c in containers if any(len(s.path) == depth for s in c.shares)]


def _shared(groups) -> tuple[tuple, ...]:
    """Equal parts to the groups, inside a group by weight; over a common denominator."""
    groups = [g for g in groups if g]
    merged: dict = {}
    totals = [sum(weight for _, weight in g) for g in groups]
    common = int(np.lcm.reduce(totals, dtype=object)) if totals else 1
    for group, total in zip(groups, totals, strict=True):
        for key, weight in group:
            merged[key] = merged.get(key, 0) + weight * (common // total)
    return tuple(merged.items())


def split(ns: int, shares) -> list[tuple]:
    """Divide an integer by weights without losing a nanosecond.

    Example:
      >>> split(10, (("a", 1), ("b", 2)))
      [('a', 3), ('b', 7)]
    """
    total = sum(weight for _, weight in shares)
    parts, given, so_far = [], 0, 0
    for key, weight in shares:
        so_far += weight
        upto = ns * so_far // total
        parts.append((key, upto - given))
        given = upto
    return parts


def _threads(tracks, kinds, columns, total, contexts) -> dict[str, dict[str, int]]:
    """ns by host state of every thread that runs Python, `absent` where it has nothing open."""
    out: dict[str, dict[str, int]] = {}
    for row, (track, kind) in enumerate(zip(tracks, kinds, strict=True)):
        if kind not in ("main", "program"):
            continue
        name = track.line.name if kind == "main" else f"{track.line.name} #{len(out)}"
        mine = out[name] = {}
        for column, ns in zip(columns, total.tolist(), strict=True):
            here = [contexts[c] for c in column]
            state = _fetched(here[row], any(c.device == "leaf" for c in here)).state or "absent"
            mine[state] = mine.get(state, 0) + ns
    return out


def union(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge intervals that touch.

    Example:
      >>> union([(5, 7), (0, 2), (2, 3)])
      [(0, 3), (5, 7)]
    """
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        elif stop > start:
            merged.append((start, stop))
    return merged


def spans(bounds: np.ndarray, chosen: np.ndarray, offset: int = 0) -> list[tuple[int, int]]:
    """The maximal intervals in which `chosen` holds."""
    edges = np.diff(np.concatenate([[0], chosen.astype(np.int8), [0]]))
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return [(int(bounds[a]) + offset, int(bounds[b]) + offset) for a, b in zip(starts, stops, strict=True)]


def sampled(intervals: list[tuple[int, int]], window: tuple[int, int], period: int = 10**9 // 6) -> float:
    """Naive utilisation: the share of sampling periods in which the device was busy at all, as `nvidia-smi` reports it.

    RL-Scope, F.11: with one short kernel a period this says 100%. The sampling period of nvidia-smi is 1/6 s to 1 s.

    Example:
      >>> sampled([(0, 1), (10, 11), (20, 21), (30, 31)], (0, 40), period=10)
      1.0
    """
    start, stop = window
    count = max(1, -(-(stop - start) // period))
    hit = set()
    for a, b in intervals:
        hit.update(range((a - start) // period, (max(a, b - 1) - start) // period + 1))
    return len([i for i in hit if 0 <= i < count]) / count
