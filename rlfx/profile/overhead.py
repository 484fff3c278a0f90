"""What profiling itself costs: calibrated once a machine, and taken out of reports where it was paid.

RL-Scope, section 3.4 and appendix C, with both kinds of calibration. *Delta*: run a loop with and without a kind of
book-keeping; the difference over its number of events is the cost of one (annotations, instructions of XLA).
*Difference of averages*: where book-keeping cannot be switched on alone, compare the average duration of a call with
and without profiling (jitted calls, waits, transfers, callbacks, compilations). The paper calibrates a workload; we
calibrate a machine, because the costs depend on the kind of event only, and we subtract on the critical path alone: an
event on a thread that held nothing up costs nothing.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.errors import ProfileError, located
from rlfx.profile.annotate import operation
from rlfx.profile.capture import capture, machine
from rlfx.profile.report import Process, Report
from rlfx.profile.rules import BACKEND, CALLBACK, COMPILE, TRANSFER, WAIT
from rlfx.profile.sweep import split

ANNOTATION, THUNK = "annotation", "thunk"


@dataclass(frozen=True)
class Overhead:
    """`costs`: ns of one event of a kind (annotation, thunk, wait, backend, transfer, ...) on `machine`."""

    machine: str
    costs: dict[str, float]
    date: str

    def save(self, path: str | os.PathLike | None = None) -> pathlib.Path:
        """Store as JSON, by default in the user's cache directory."""
        target = pathlib.Path(path) if path else stored_at()
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(dataclasses.asdict(self), indent=2))
        return target


def stored_at() -> pathlib.Path:
    """Where calibrations of this user live (`$XDG_CACHE_HOME`, else `~/.cache`); one file, the newest calibration."""
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(root) / "rlfx" / "profile-overhead.json"


def load(path: str | os.PathLike | None = None) -> Overhead:
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
        return Overhead(**json.loads(source.read_text()))
    except (json.JSONDecodeError, TypeError):
        raise ProfileError(
            located(f"{source} is not a calibration.", fix="Run `python -m rlfx.profile calibrate` again.")
        ) from None


# Calibration.


def _seconds(body: Callable[[], object], rounds: int, profiled: bool) -> float:
    """Process CPU seconds of the cheapest of `rounds` runs: the one that others on the machine disturbed least."""
    best = np.inf
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            manager = capture(folder) if profiled else None
            if manager:
                manager.__enter__()
            begin = time.process_time()
            body()
            best = min(best, time.process_time() - begin)
            if manager:
                manager.__exit__(None, None, None)
    return best


def _difference(plain: Callable[[], object], profiled: Callable[[], object], count: int, rounds: int) -> float:
    """ns an event: `(time of profiled under capture - time of plain without) / count`, not below zero."""
    plain()
    return max(0.0, (_seconds(profiled, rounds, True) - _seconds(plain, rounds, False)) / count * 1e9)


def _annotations(count: int) -> Callable[[], None]:
    def loop() -> None:
        for _ in range(count):
            with operation("calibration"):
                pass

    return loop


def _empty(count: int) -> Callable[[], None]:
    def loop() -> None:
        for _ in range(count):
            pass

    return loop


def _scan(body: Callable, carry: object, length: int) -> Callable[[], object]:
    program = jax.jit(lambda c: jax.lax.scan(body, c, None, length=length))
    return lambda: jax.block_until_ready(program(carry))


def _keys(count: int) -> Callable[[], object]:
    """Very many short instructions: random numbers, `count` times."""

    def body(key, _):
        key, noise = jax.random.split(key)
        return key, jax.random.normal(noise, (16,)).sum()

    return _scan(body, jax.random.key(0), count)


def _calls(function: Callable[[object], object], argument: object, count: int) -> Callable[[], None]:
    def loop() -> None:
        for _ in range(count):
            jax.block_until_ready(function(argument))

    return loop


def _compilations(count: int) -> Callable[[], None]:
    def loop() -> None:
        for i in range(count):
            jax.block_until_ready(jax.jit(lambda a: jnp.sin(a) + i)(jnp.zeros(3)))

    return loop


def calibrate(rounds: int = 7) -> Overhead:
    """Measure what one event of each kind costs on this machine, in process CPU time; about 10 s.

    Args:
      rounds: runs of each loop; the fastest with and the fastest without profiling are compared.

    Returns:
      An `Overhead`; `save()` it for `Report.corrected`.
    """
    x = jnp.zeros(8)
    small = np.zeros(8, np.float32)
    call = jax.jit(lambda a: a + 1)
    back = jax.jit(lambda a: jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(a.shape, a.dtype), a))
    costs = {ANNOTATION: _difference(_empty(20_000), _annotations(20_000), 20_000, rounds)}
    for kind, body, count in (
        (THUNK, _keys(1_000), None),
        (WAIT, _calls(lambda a: a, x, 3_000), 3_000),
        (BACKEND, _calls(call, x, 3_000), 3_000),
        (TRANSFER, _calls(jax.device_put, small, 3_000), 3_000),
        (CALLBACK, _calls(back, x, 1_000), 1_000),
        (COMPILE, _compilations(8), 8),
    ):
        body()
        events = _paid(body)
        count = count or events.get(kind, 0)
        if not count:
            continue  # this device has no such events
        known = sum(costs.get(k, 0.0) * n for k, n in events.items() if k != kind) / count
        costs[kind] = max(0.0, _difference(body, body, count, rounds) - known)
    return Overhead(machine(), costs, datetime.date.today().isoformat())


def _paid(body: Callable[[], object]) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        with capture(folder) as session:
            body()
        (process,) = session.report().processes
    return {kind: len(found) for kind, found in process.timeline.paid.items()}


# Correction.


def correct(report: Report, overhead: Overhead) -> Report:
    """Take the cost of profiling out of a report, at the instants where it was paid.

    Raises:
      ProfileError: the report was captured on another machine, or is corrected already.
    """
    if report.corrected_ns:
        raise ProfileError("The report is corrected already: correct the one that `read` returned.")
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
    return dataclasses.replace(report, rows=rows, device_rows=device, corrected_ns=taken)


def total(process: Process, overhead: Overhead) -> float:
    """CPU ns that profiling cost a process in its window, on all threads, on the critical path or not."""
    return sum(overhead.costs.get(kind, 0.0) * len(events) for kind, events in process.timeline.paid.items())


def _owed(process: Process, overhead: Overhead) -> dict[int, float]:
    """ns of book-keeping on the critical path, by combination."""
    owed: dict[int, float] = {}
    lines = [track.line.kind for track in process.timeline.tracks]
    for kind, events in process.timeline.paid.items():
        cost = overhead.costs.get(kind, 0.0)
        if not cost or not events:
            continue
        combos = process.sweep.combo_at(np.asarray([time for time, _ in events], np.int64))
        for (_, line), combo in zip(events, combos.tolist(), strict=True):
            found = process.sweep.attributions[combo]
            if found.bound or lines[line] in ("main", "program") or kind == CALLBACK:
                owed[combo] = owed.get(combo, 0.0) + cost / found.parallel
    return owed


def _subtract(rows: dict, shares, ns: int) -> int:
    taken = 0
    for row, part in split(ns, shares) if shares else ():
        part = min(part, rows.get(row, 0))
        if part:
            rows[row] -= part
            taken += part
    return taken
