"""What profiling itself costs: calibrated once a machine, and taken out of reports where it was paid.

RL-Scope, section 3.4 and appendix C. The paper calibrates a workload; we calibrate a machine (`calibrate`), because the
costs depend on the kind of event only, and subtract on the critical path: an event on a thread that held nothing up
costs only what it takes away from the others, where threads share cores (`Overhead.contention`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rlfx.ahead.environment import cache_folder
from rlfx.errors import ProfileError, located
from rlfx.profile.attributed import Attributed, Process
from rlfx.profile.rules import BACKEND, CALLBACK, TRANSFER
from rlfx.profile.sweep import split
from rlfx.profile.timeline import ANNOTATION, HOST, TASK, THUNK

A = TypeVar("A", bound=Attributed)
EVENTS = (ANNOTATION, THUNK, TASK, HOST)
CALLS = (BACKEND, TRANSFER, CALLBACK)


@dataclass(frozen=True)
class Overhead:
    """What one event of each kind (`EVENTS`) costs on `machine`, and a call (`CALLS`) beyond its events: `costs` in ns.

    `spread` is the relative error (root mean square) of these costs on the programs that they were measured on.
    `contention`, 0 to 1, is the share of an event's cost that holds a program up where the event's own thread does not:
    threads that share cores slow each other down.
    """

    machine: str
    costs: dict[str, float]
    date: str
    spread: float = 0.0
    contention: float = 0.0

    def save(self, path: str | os.PathLike[str] | None = None) -> pathlib.Path:
        """Store as JSON, by default in the user's cache directory."""
        target = pathlib.Path(path) if path else stored_at()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(dataclasses.asdict(self), indent=2))
        return target


def stored_at() -> pathlib.Path:
    """Where calibrations of this user live (`$RLFX_CACHE`, else in the user's cache); one file, the newest calibration."""
    return cache_folder() / "profile-overhead.json"


def load(path: str | os.PathLike[str] | None = None) -> Overhead:
    """Read a calibration.

    Raises:
      ProfileError: there is none.
    """
    source = pathlib.Path(path) if path else stored_at()
    if not source.exists():
        raise ProfileError(
            located(
                f"No calibration of profiling overhead at {source}.",
                fix="Run `python -m rlfx.profile calibrate` once on this machine.",
            )
        )
    try:
        found = Overhead(**json.loads(source.read_text()))
        if not set(found.costs) <= {*EVENTS, *CALLS}:
            raise TypeError(f"kinds of events of another version: {', '.join(found.costs)}")
        return found
    except (json.JSONDecodeError, TypeError):
        raise ProfileError(
            located(
                f"{source} is not a calibration of this version.", fix="Run `python -m rlfx.profile calibrate` again."
            )
        ) from None


def correct(report: A, overhead: Overhead) -> A:
    """Take the cost of profiling out of a report, at the instants where it was paid.

    Raises:
      ProfileError: the report was captured on another machine, or is corrected already.
    """
    if report.corrected_ns:
        raise ProfileError(located("The report is corrected already.", fix="Correct the one that `read` returned."))
    rows, device = dict(report.rows), dict(report.device_rows)
    taken = 0
    for process in report.processes:
        there = process.notes.get("machine", overhead.machine)
        if there != overhead.machine:
            raise ProfileError(
                located(
                    f"The calibration is of another machine ({overhead.machine}) than the trace ({there}).",
                    fix="Run `python -m rlfx.profile calibrate` where you capture.",
                )
            )
        for attribution, ns in _owed(process, overhead).items():
            found = process.sweep.attributions[attribution]
            taken += _subtract(rows, found.rows, round(ns))
            if found.bound:
                _subtract(device, found.device, round(ns))
    return dataclasses.replace(
        report, rows=rows, device_rows=device, corrected_ns=taken, correction_error=overhead.spread
    )


def total(process: Process, overhead: Overhead) -> float:
    """CPU ns that profiling cost a process in its window, on all threads, on the critical path or not."""
    return sum(overhead.costs.get(kind, 0.0) * len(marks.times) for kind, marks in process.timeline.paid.items())


def held_up(report: Attributed, overhead: Overhead) -> tuple[float, float]:
    """ns that the events of a report cost `(on the critical path, off it)`, in wall time if they held everything up."""
    free, shared = (dataclasses.replace(overhead, contention=share) for share in (0.0, 1.0))
    on, all_of_it = (sum(sum(_owed(p, costs).values()) for p in report.processes) for costs in (free, shared))
    return on, all_of_it - on


def _owed(process: Process, overhead: Overhead) -> dict[int, float]:
    """ns by which book-keeping held a process up, by combination."""
    owed: dict[int, float] = {}
    lines = [track.line.kind for track in process.timeline.tracks]
    for kind, marks in process.timeline.paid.items():
        cost = overhead.costs.get(kind, 0.0)
        if not cost:
            continue
        pairs = process.sweep.combo_at(marks.times).astype(np.int64) * len(lines) + marks.lines
        for pair, count in zip(*(x.tolist() for x in np.unique(pairs, return_counts=True)), strict=True):
            combo, line = divmod(pair, len(lines))
            found = process.sweep.attributions[combo]
            critical = found.bound or lines[line] in ("main", "program") or kind == CALLBACK
            share = 1.0 if critical else overhead.contention
            owed[combo] = owed.get(combo, 0.0) + count * share * cost / found.parallel
    return owed


def _subtract(rows: dict, shares, ns: int) -> int:
    taken = 0
    for row, part in split(ns, shares) if shares else ():
        part = min(part, rows.get(row, 0))
        if part:
            rows[row] -= part
            taken += part
    return taken
