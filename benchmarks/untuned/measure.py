"""Forms of one workload, compared and then timed in interleaved rounds; ratios with their intervals."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from rlfx.threefry import threefry

RESAMPLES = 2000
#: One measurement takes at least this long, by as many calls as that needs.
SECONDS_A_MEASUREMENT, MOST_CALLS = 0.02, 500


@dataclass(frozen=True)
class Workload:
    """One computation in several forms, all with equal results.

    Attributes:
      forms: functions by name; ``rlfx`` is the program as a user writes it, ``plain`` the usual one by hand, any other a
        better one by hand.
      arguments: what each is called with.
      own_arguments: of the forms whose arguments are others.
      compared: what of a result must be equal, a pytree of arrays of one structure for all forms.
      tolerance: the largest difference in a leaf, relative to the largest number there.
    """

    forms: Mapping[str, Callable]
    arguments: tuple
    own_arguments: Mapping[str, tuple] = field(default_factory=dict)
    compared: Callable[[Any], Any] = lambda result: result
    tolerance: float = 1e-4

    def arguments_of(self, form: str) -> tuple:
        return self.own_arguments.get(form, self.arguments)


def drawing(forms: Mapping[str, Callable], given: tuple, **how: Any) -> Workload:
    """A workload whose forms take a key behind what is ``given``: one of rlfx's own if their names end so."""
    own = {name: (*given, jax.random.key(2, impl=threefry)) for name in forms if name.endswith("threefry unrolled")}
    return Workload(forms, (*given, jax.random.key(2)), own, **how)


def difference(result: Any, expected: Any) -> float:
    """The largest difference in a leaf relative to the largest number there; infinite for NaN, and for nothing but zeros."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if a.shape != b.shape or not np.isfinite(a).all():
            return float("inf")
        worst = max(worst, float(np.abs(a - b).max() / (np.abs(b).max() + 1e-12)))
    return worst


def check(workload: Workload, programs: Mapping[str, Callable] | None = None) -> dict[str, float]:
    """The difference of each form's result from the plain one's.

    Raises:
      AssertionError: if one is larger than the tolerance, or if every number of the plain form's result is zero.
    """
    programs = workload.forms if programs is None else programs
    run = lambda form: workload.compared(programs[form](*workload.arguments_of(form)))  # noqa: E731
    expected = jax.device_get(run("plain"))
    assert any(np.any(leaf) for leaf in jax.tree.leaves(expected)), "the result is zero everywhere: nothing is compared"
    found = {form: difference(jax.device_get(run(form)), expected) for form in programs}
    for form, distance in found.items():
        assert distance <= workload.tolerance, f"{form} differs from plain by {distance:.2e} > {workload.tolerance:.0e}"
    return found


def build(fn: Callable, arguments: tuple) -> tuple[Callable, dict[str, float]]:
    """The compiled program, CPU seconds to trace (and lower) and to compile it, and XLA's temporary bytes."""
    jax.clear_caches()
    began = time.process_time()
    lowered = jax.jit(fn).lower(*arguments)
    traced = time.process_time()
    program = lowered.compile()
    compiled = time.process_time()
    row = {"trace_s": traced - began, "compile_s": compiled - traced}
    return program, row | {"temp_bytes": program.memory_analysis().temp_size_in_bytes}


def once(program: Callable, arguments: tuple, calls: int = 1) -> tuple[float, float]:
    """CPU and wall seconds of a call."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(calls):
        result = program(*arguments)
    jax.block_until_ready(result)
    return (time.process_time() - cpu) / calls, (time.perf_counter() - wall) / calls


def interleaved(programs: Mapping[str, tuple[Callable, tuple]], rounds: int, seconds: float) -> dict[str, np.ndarray]:
    """``float64[rounds, 2]`` of each program: CPU and wall seconds of a call; every round begins with another program.

    After five rounds no more begin once ``seconds`` have passed.
    """
    fastest = min(once(*p)[0] for p in programs.values())
    calls = int(np.clip(SECONDS_A_MEASUREMENT / max(fastest, 1e-6), 1, MOST_CALLS))
    names, times = list(programs), {name: [] for name in programs}
    gc.collect()
    gc.disable()
    began = time.perf_counter()
    for i in range(rounds):
        if i >= 5 and time.perf_counter() - began > seconds:
            break
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(once(*programs[name], calls))
    gc.enable()
    return {name: np.array(t) for name, t in times.items()}


def resampled_medians(ratios: np.ndarray, seed: int = 0) -> np.ndarray:
    """Medians of paired rounds drawn again with replacement, ``float64[RESAMPLES]``."""
    drawn = np.random.default_rng(seed).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    return np.median(ratios[drawn], axis=1)


def interval(values: np.ndarray) -> list[float]:
    """The middle 95%."""
    return [float(x) for x in np.quantile(values, (0.025, 0.975))]


def measure(workload: Workload, rounds: int, seconds: float) -> dict[str, Any]:
    """All forms of a workload: ``{"best": name, "forms": {name: row}, "cpu_s": {name: seconds of each round}}``.

    The best is the form by hand whose median is least, in these same rounds: where two are level, that favours them.

    Raises:
      AssertionError: if the forms' results differ; then nothing is timed.
    """
    rows, programs = {}, {}
    for name, fn in workload.forms.items():
        program, rows[name] = build(fn, workload.arguments_of(name))
        programs[name] = program, workload.arguments_of(name)
    for name, distance in check(workload, {name: program for name, (program, _) in programs.items()}).items():
        rows[name]["difference"] = distance
    times = interleaved(programs, rounds, seconds)
    for name, row in rows.items():
        row["cpu_ms"], row["wall_ms"] = (1e3 * float(x) for x in np.median(times[name], axis=0))
    best = min((name for name in rows if name != "rlfx"), key=lambda name: rows[name]["cpu_ms"])
    return {"best": best, "forms": rows, "cpu_s": {name: t[:, 0].tolist() for name, t in times.items()}}


def ratios(row: Mapping[str, Any], to: str) -> np.ndarray:
    """rlfx's CPU time as a ratio to that of ``plain`` or ``best``, round by round."""
    name = row["best"] if to == "best" else to
    return np.array(row["cpu_s"]["rlfx"]) / np.array(row["cpu_s"][name])


def memory_ratio(row: Mapping[str, Any], to: str) -> float:
    """rlfx's temporary bytes as a ratio to those of ``plain``, ``best`` (the fastest) or ``least`` (the smallest form)."""
    bytes_of = {name: max(form["temp_bytes"], 1) for name, form in row["forms"].items()}
    by_hand = {name: n for name, n in bytes_of.items() if name != "rlfx"}
    theirs = min(by_hand.values()) if to == "least" else by_hand[row["best"] if to == "best" else to]
    return bytes_of["rlfx"] / theirs


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Geometric means over the workloads, with the 95% intervals of the times' ratios."""
    means: dict[str, Any] = {"workloads": len(rows)}
    for to in ("plain", "best"):
        logs = [np.log(np.median(ratios(row, to))) for row in rows.values()]
        drawn = [np.log(resampled_medians(ratios(row, to), seed)) for seed, row in enumerate(rows.values())]
        means[f"time_of_{to}"] = float(np.exp(np.mean(logs)))
        means[f"time_of_{to}_interval"] = interval(np.exp(np.mean(drawn, axis=0)))
        means[f"worst_of_{to}"] = float(np.exp(np.max(logs)))
    for to in ("plain", "best", "least"):
        means[f"memory_of_{to}"] = float(np.exp(np.mean([np.log(memory_ratio(row, to)) for row in rows.values()])))
    for what in ("trace_s", "compile_s"):
        logs = [np.log(row["forms"]["rlfx"][what] / row["forms"]["plain"][what]) for row in rows.values()]
        means[f"{what[:-2]}_of_plain"] = float(np.exp(np.mean(logs)))
    return means


def line(name: str, row: Mapping[str, Any]) -> str:
    """A workload as a row of a table."""
    parts = []
    for to in ("plain", "best"):
        r = ratios(row, to)
        low, high = interval(resampled_medians(r))
        parts.append(f"{np.median(r):.2f} [{low:.2f}, {high:.2f}]")
    ours, plain = row["forms"]["rlfx"], row["forms"]["plain"]
    memory = " / ".join(f"{memory_ratio(row, to):.2f}" for to in ("plain", "best", "least"))
    built = " / ".join(f"{ours[w]:.2f} ({plain[w]:.2f})" for w in ("trace_s", "compile_s"))
    return f"| {name} | {parts[0]} | {parts[1]} ({row['best']}) | {memory} | {ours['cpu_ms']:.2f} | {built} |"


def details(row: Mapping[str, Any]) -> str:
    """A line for each form."""

    def told(name, form):
        times = f"{form['cpu_ms']:10.2f} ms  trace {form['trace_s']:.2f} compile {form['compile_s']:.2f} s"
        return f"    {name:32}{times}  {form['temp_bytes'] / 2**20:8.2f} MiB  differs {form['difference']:.0e}"

    return "\n".join(told(name, form) for name, form in row["forms"].items())


HEADER = (
    "| workload | rlfx / plain | rlfx / best (which) | memory of plain / best / least | rlfx, ms | trace / compile, s (plain) |\n"
    "| --- | --- | --- | --- | --- | --- |"
)
