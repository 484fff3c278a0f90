"""The report: attributed time, presented, corrected, compared; and how traces become one."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator
from typing import Any

from rlfx._checks import NATURAL, PATH, POSITIVE, expect, instance, number, optional
from rlfx.errors import ProfileError
from rlfx.profile import blocked, compilations, hlo, rules, xspace
from rlfx.profile.attributed import Attributed, Process
from rlfx.profile.compare import Comparison, compare
from rlfx.profile.gains import Gain, gains, paid_in
from rlfx.profile.overhead import Overhead, correct, load
from rlfx.profile.rows import named
from rlfx.profile.rules import IDLE
from rlfx.profile.sweep import sweep
from rlfx.profile.tables import as_dict, html, text
from rlfx.profile.timeline import Kernel
from rlfx.profile.walk import walk

__all__ = ["Process", "Report", "read"]


class Report(Attributed):
    """Where the time went; its fields and questions are those of `Attributed`."""

    def text(self, depth: int | None = None) -> str:
        """The whole report as text; operations deeper than `depth` count for the one around them."""
        return text(self, expect("depth", depth, optional(NATURAL), ProfileError, of="Report.text"))

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"Report({len(self.processes)} processes, {self.span_ns / 1e9:.3f} s, {self.verdict!r})"

    def _repr_html_(self) -> str:
        return html(self)

    def corrected(self, overhead: Overhead | None = None) -> Report:
        """Without the cost of profiling; by the calibration stored for this machine unless one is given.

        Raises:
          ProfileError: no calibration is stored, or it is of another machine.
        """
        kind = optional(instance(Overhead, "an Overhead", "rlfx.profile.overhead.load()"))
        return correct(self, expect("overhead", overhead, kind, ProfileError, of="Report.corrected") or load())

    def gains(self, count: int = 3, plain_ns: float | None = None) -> list[Gain]:
        """What to change, and how much faster the window would be without it: the largest gain first.

        Every cost (a line, a callback, a jitted function, what is compiled again, an operation) is left out of the
        window, which is then replayed: work that overlaps with other work gains nothing.

        Args:
          count: how many at most.
          plain_ns: how long the same work takes when it is not captured; by default what `sampled` has measured. What
            profiling cost is taken out then; else programs of very short instructions seem to spend more on the device
            than they do.

        Example:
          >>> import time
          >>> from rlfx.profile import capture, operation
          >>> with capture() as session:
          ...     with operation("simulation"):
          ...         time.sleep(0.06)
          ...     with operation("learning"):
          ...         time.sleep(0.02)
          >>> gain = session.report().gains()[0]
          >>> gain.speedup > 2, "simulation" in gain.what
          (True, True)

        Raises:
          ProfileError: `count` or `plain_ns` is not positive.
        """
        count = expect("count", count, POSITIVE, ProfileError, of="Report.gains")
        plain_ns = expect("plain_ns", plain_ns, optional(number(above=0)), ProfileError, of="Report.gains")
        return gains(self, count, None if plain_ns is None else paid_in(self, plain_ns))

    def compare(self, after: Report) -> Comparison:
        """This run against a later one of the same task."""
        kind = instance(Report, "a Report", "rlfx.profile.read(directory)")
        return compare(self, expect("after", after, kind, ProfileError, of="Report.compare"))

    def as_dict(self) -> dict[str, Any]:
        """Everything in JSON types, as `python -m rlfx.profile report --json` prints it."""
        return as_dict(self)


def profile_trace(trace: xspace.Trace) -> tuple[Process, list[str]]:
    """Attribute one trace: the process, and what was wrong with it."""
    timeline = walk(trace)
    blocked.mark(timeline, trace.notes, trace.start_ns)
    swept = sweep(timeline)
    notes = trace.notes
    name = notes.get("process", trace.path.stem.removesuffix(".xplane"))
    process = Process(
        name, notes.get("pid", 0), notes.get("parent", 0), trace.start_ns, swept, timeline,
        compilations.summarize(notes), notes, str(trace.path),
    )  # fmt: skip
    return process, [*timeline.problems, *_doubts(process, trace)]


def _doubts(process: Process, trace: xspace.Trace) -> list[str]:
    out = []
    for name, (count, ns) in sorted(process.timeline.unknown.items(), key=lambda item: -item[1][1]):
        out.append(f"unknown event {name!r}, {count} times, {ns / 1e6:.2f} ms: counted with what encloses it")
    if not any(named(row.path) for row in (*process.sweep.rows, *process.sweep.device)):
        out.append(
            "no operation is annotated: time is shown by jitted function; wrap parts of the program in "
            "rlfx.profile.operation"
        )
    missing = {m for (m, _), k in process.timeline.kernels.items() if k.op is None and m}
    if missing:
        some = ", ".join(sorted(missing)[:5])
        out.append(f"no HLO metadata for {some}: their instructions keep only the launch's operation")
    if process.notes.get("cache_hits"):
        out.append(
            f"{process.notes['cache_hits']} programs came from the persistent compilation cache: unless its key "
            "includes metadata, their operation names may be stale"
        )
    if process.timeline.early:
        some = ", ".join(f"{n}× {f}" for f, n in sorted(process.timeline.early.items()))
        out.append(f"programs launched before the capture ran in it ({some}): attributed by their own scopes alone")
    late = {f: n for f, n in process.timeline.late.items() if _computes(f, trace)}
    # The end of a task of XLA's threads is not always recorded: a wait that returned after it says that it has ended.
    open_end = process.sweep.attributions[process.sweep.combo[-1]].state != IDLE
    not_ready = process.notes.get("not_ready", 0)
    if late or not_ready or (open_end and process.timeline.waited < process.timeline.worked):
        programs = [f"{n}× {f}" for f, n in sorted(late.items())]
        some = ", ".join(programs + [f"arrays not ready: {not_ready}"] * (not_ready > 0)) or "a program"
        out.append(f"the device was still busy when the capture ended ({some}): wait for results inside it")
    return out


def _computes(function: str, trace: xspace.Trace) -> bool:
    """Does any program of the function have an instruction that executes?"""
    found = [m for m in trace.modules.values() if rules.function_of(m.name) == function]
    return any(op.opcode not in hlo.FREE for m in found for op in m.ops.values())


def read(directory: str | os.PathLike[str]) -> Report:
    """Read the traces under a directory (or one `.xplane.pb`) into a report.

    Traces of several processes are merged on epoch time. Of two captures by one process name that do not overlap, the
    newer one counts.

    Raises:
      ProfileError: there is no trace, or one is truncated or empty.
    """
    found, problems = [], []
    expect("directory", directory, PATH, ProfileError, of="read")
    for path in xspace.find(directory):
        process, doubts = profile_trace(xspace.read_trace(path))
        found.append(process)
        problems.append(doubts)
    kept, dropped = _newest(found)
    said = [f"{p.path}: an older capture of process {p.name!r}: ignored" for p in dropped]
    several = len(kept) > 1
    for process, doubts in zip(found, problems, strict=True):
        if process in kept:
            said += [f"{process.name}: {d}" if several else d for d in doubts]
    return merge(kept, [*said, *_apart(kept)])


def _apart(processes: list[Process]) -> Iterator[str]:
    """Processes whose windows meet no other's: what is said of all of them together is doubtful."""
    for p in processes:
        others = [q for q in processes if q is not p]
        if others and not any(p.span[0] < q.span[1] and q.span[0] < p.span[1] for q in others):
            off = min(max(p.span[0] - q.span[1], q.span[0] - p.span[1]) for q in others) / 1e9
            yield (
                f"{p.name}: its window is {off:.3g} s away from every other: captured at another time, or on a machine whose "
                "clock differs; what is busy of the span is not comparable"
            )


def _newest(found: list[Process]) -> tuple[list[Process], list[Process]]:
    kept: list[Process] = []
    dropped: list[Process] = []
    for p in sorted(found, key=lambda p: -p.span[1]):
        older = any(k.name == p.name and p.span[1] <= k.span[0] for k in kept)
        (dropped if older else kept).append(p)
    return kept[::-1], dropped


def merge(processes: list[Process], problems: list[str]) -> Report:
    """Add up processes into one report."""
    rows: collections.Counter = collections.Counter()
    device: collections.Counter = collections.Counter()
    transitions: collections.Counter = collections.Counter()
    kernels: dict[tuple[str, str], Kernel] = {}
    for p in processes:
        rows.update(p.sweep.rows)
        device.update(p.sweep.device)
        transitions.update(p.timeline.transitions)
        for key, k in p.timeline.kernels.items():
            old = kernels.get(key, Kernel())
            kernels[key] = Kernel(old.count + k.count, old.ns + k.ns, k.op or old.op, k.path, k.copy)
    compiled = sorted((c for p in processes for c in p.compiled), key=lambda c: -c.seconds)
    steps = sum(int(p.notes.get("steps", 0)) for p in processes)
    return Report(processes, dict(rows), dict(device), transitions, kernels, compiled, problems, steps)
