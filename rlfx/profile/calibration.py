"""Measure what profiling costs on this machine: RL-Scope's appendix C.

*Delta*, the cost of an event: the paper switches one kind of book-keeping on at a time; jax's tracer is on or off as a
whole. So programs with different mixtures of events are run with and without profiling, in pairs, and the costs are
those that explain all the differences best (least squares of the relative errors, no cost below zero).
*Difference of averages*, the cost of a call of one type beyond that of its events: its average duration with profiling
and without (jitted calls, transfers, callbacks).
"""

from __future__ import annotations

import contextlib
import datetime
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
import scipy.optimize

from rlfx.profile.calibration_programs import calls, mixtures
from rlfx.profile.capture import capture, machine
from rlfx.profile.overhead import EVENTS, Overhead, held_up, total
from rlfx.profile.report import Report


class Measured(NamedTuple):
    """What profiling adds to a program: `cpu` and `wall` in ns, float[rounds], and a report of one run of it."""

    cpu: np.ndarray
    wall: np.ndarray
    report: Report

    @property
    def paid(self) -> dict[str, int]:
        """Events of each kind in one run."""
        (process,) = self.report.processes
        return {kind: len(found.times) for kind, found in process.timeline.paid.items()}


def _once(body: Callable[[], object], profiled: bool) -> np.ndarray:
    """`[process CPU ns, wall ns]` of one run, right after another: the end of a capture leaves cold caches behind."""
    body()
    with contextlib.ExitStack() as stack:
        if profiled:
            stack.enter_context(capture(stack.enter_context(tempfile.TemporaryDirectory())))
        begin = np.asarray([time.process_time_ns(), time.perf_counter_ns()])
        body()
        return np.asarray([time.process_time_ns(), time.perf_counter_ns()]) - begin


def measure(plain: Callable[[], object], profiled: Callable[[], object], rounds: int) -> Measured:
    """What profiling adds to a run, in pairs whose order turns round each time; both are compiled already."""
    found = []
    for i in range(rounds):
        first = i % 2 == 0
        a = _once(profiled, True) if first else _once(plain, False)
        b = _once(plain, False) if first else _once(profiled, True)
        found.append(a - b if first else b - a)
    with tempfile.TemporaryDirectory() as folder:
        with capture(folder) as session:
            profiled()
        cpu, wall = np.asarray(found, float).T
        return Measured(cpu, wall, session.report())


def _error(found: np.ndarray) -> float:
    """About the standard error of the median."""
    return float(np.subtract(*np.percentile(found, [75, 25]))) / len(found) ** 0.5


def calibrate(rounds: int = 15) -> Overhead:
    """Measure what one event of each kind costs on this machine, in process CPU time; about a minute.

    Args:
      rounds: pairs of runs of each program, with and without profiling; the median difference counts.

    Returns:
      An `Overhead`; `save()` it for `Report.corrected`.
    """

    def measured(plain: Callable[[], object], profiled: Callable[[], object]) -> Measured:
        plain(), profiled()  # compiles
        return measure(plain, profiled, rounds)

    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        mixed = [measured(plain, profiled) for plain, profiled in mixtures().values()]
        events = np.asarray([[m.paid.get(kind, 0) for kind in EVENTS] for m in mixed], float)
        added = np.asarray([np.median(m.cpu) for m in mixed])
        costs, spread = solve(events, added, np.asarray([_error(m.cpu) for m in mixed]))
        known: dict[str, float] = dict(zip(EVENTS, costs, strict=True))
        for kind, program in calls().items():
            found = measured(program, program)
            explained = sum(known[event] * found.paid.get(event, 0) for event in EVENTS)
            known[kind] = max(0.0, float(np.median(found.cpu)) - explained) / max(1, found.paid.get(kind, 0))
    overhead = Overhead(machine(), known, datetime.date.today().isoformat(), spread)
    return replace(overhead, contention=contention(overhead, mixed))


def contention(overhead: Overhead, measured: Sequence[Measured]) -> float:
    """The share of events' cost off the critical path that explains best what profiling added to wall times.

    Args:
      overhead: its costs explain the CPU times; its own `contention` is not read.
      measured: programs, each counted by what it pays off the critical path.

    Returns:
      0 (nothing is off it, or it costs nothing) to 1.
    """
    on, off = np.asarray([held_up(m.report, overhead) for m in measured]).T
    left = np.asarray([np.median(m.wall) for m in measured]) - on
    return float(np.clip(left.sum() / off.sum(), 0.0, 1.0)) if off.sum() else 0.0


def solve(events: np.ndarray, added: np.ndarray, errors: np.ndarray) -> tuple[list[float], float]:
    """`(ns an event of each kind, relative error)` that explain `added[p]` ± `errors[p]` ns by `events[p, kind]`.

    Every program counts the same, but those less that are known to less than a tenth. The error is the root mean square
    over the programs, of what the costs leave unexplained.

    Example:
      >>> costs, spread = solve(np.asarray([[10.0, 0.0], [4.0, 2.0]]), np.asarray([1000.0, 500.0]), np.zeros(2))
      >>> [round(c, 3) for c in costs], round(spread, 3)
      ([100.0, 50.0], 0.0)
    """
    scale = np.hypot(0.1 * added, errors) + 1.0
    costs, _ = scipy.optimize.nnls(events / scale[:, None], added / scale)
    left = (events @ costs - added) / scale * 0.1
    return [float(c) for c in costs], float(np.sqrt(np.mean(left**2)))


def fit(overhead: Overhead, workload: Callable[[], object], rounds: int = 15) -> Overhead:
    """Scale a machine's costs to one workload, as the paper calibrates: by the difference of its runs.

    The costs of an event vary with what the processor's caches hold, and with what else the machine does.

    Args:
      overhead: of this machine; the proportions between kinds of events stay.
      workload: runs a few iterations and waits for them; compiled before.
      rounds: runs with and without profiling, in turns; the median difference counts.

    Returns:
      An `Overhead` that explains the difference; the given one if the workload has no events.
    """
    return scaled(overhead, measure(workload, workload, rounds))


def scaled(overhead: Overhead, found: Measured) -> Overhead:
    """`overhead` scaled so that it explains one measurement: its costs the CPU time, its contention the wall time."""
    (process,) = found.report.processes
    predicted = total(process, overhead)
    if not predicted:
        return overhead
    factor = max(0.0, float(np.median(found.cpu))) / predicted
    costs = replace(overhead, costs={kind: factor * ns for kind, ns in overhead.costs.items()})
    spread = _error(found.wall) / (abs(float(np.median(found.wall))) or 1.0)
    return replace(costs, spread=spread, contention=contention(costs, [found]))
