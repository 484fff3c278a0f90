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
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
import scipy.optimize

from rlfx.profile.calibration_programs import calls, mixtures
from rlfx.profile.capture import capture, machine
from rlfx.profile.overhead import EVENTS, Overhead


def _once(body: Callable[[], object], profiled: bool) -> float:
    """Process CPU seconds of one run, right after another: the end of a capture leaves cold caches behind."""
    body()
    with contextlib.ExitStack() as stack:
        if profiled:
            stack.enter_context(capture(stack.enter_context(tempfile.TemporaryDirectory())))
        begin = time.process_time()
        body()
        return time.process_time() - begin


def _differences(plain: Callable[[], object], profiled: Callable[[], object], rounds: int) -> np.ndarray:
    """Process CPU ns that profiling adds to a run, in pairs whose order turns round each time."""
    found = []
    for i in range(rounds):
        first = i % 2 == 0
        a = _once(profiled, True) if first else _once(plain, False)
        b = _once(plain, False) if first else _once(profiled, True)
        found.append(a - b if first else b - a)
    return np.asarray(found) * 1e9


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
    with jax.numpy_dtype_promotion("standard"):  # optax needs it
        mixed = [_measured(plain, profiled, rounds) for plain, profiled in mixtures().values()]
        events = np.asarray([[paid.get(kind, 0) for kind in EVENTS] for paid, _, _ in mixed], float)
        costs, spread = solve(events, np.asarray([m[1] for m in mixed]), np.asarray([m[2] for m in mixed]))
        known: dict[str, float] = dict(zip(EVENTS, costs, strict=True))
        for kind, program in calls().items():
            paid, added, _ = _measured(program, program, rounds)
            explained = sum(known[event] * paid.get(event, 0) for event in EVENTS)
            known[kind] = max(0.0, added - explained) / max(1, paid.get(kind, 0))
    return Overhead(machine(), known, datetime.date.today().isoformat(), spread)


def _measured(plain: Callable, profiled: Callable, rounds: int) -> tuple[dict[str, int], float, float]:
    """`(events by kind, ns that profiling adds, its error)`."""
    plain(), profiled()  # compiles
    found = _differences(plain, profiled, rounds)
    return _paid(profiled), float(np.median(found)), _error(found)


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


def fit(overhead: Overhead, workload: Callable[[], object], rounds: int = 9) -> Overhead:
    """Scale a machine's costs to one workload, as the paper calibrates: by the difference of its runs.

    The costs of an event vary with what the processor's caches hold, and with what else the machine does.

    Args:
      overhead: of this machine; the proportions between kinds of events stay.
      workload: runs a few iterations and waits for them; compiled before.
      rounds: runs with and without profiling, in turns; the median difference counts.

    Returns:
      An `Overhead` that explains the difference; the given one if the workload has no events.
    """
    predicted = sum(overhead.costs.get(kind, 0.0) * count for kind, count in _paid(workload).items())
    if not predicted:
        return overhead
    found = _differences(workload, workload, rounds)
    factor = max(0.0, float(np.median(found))) / predicted
    spread = _error(found) / abs(float(np.median(found)))
    return replace(overhead, costs={kind: factor * ns for kind, ns in overhead.costs.items()}, spread=spread)


def _paid(body: Callable[[], object]) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        with capture(folder) as session:
            body()
        (process,) = session.report().processes
    return {kind: len(found) for kind, found in process.timeline.paid.items()}
