"""The report: attributed time of one or several processes, and the questions to ask of it."""

from __future__ import annotations

import collections
import os
from dataclasses import dataclass, field
from typing import Any

from rlfx._checks import NATURAL, PATH, TEXT, expect, instance, one_of, optional
from rlfx.errors import ProfileError
from rlfx.profile import compilations, hlo, rules, xspace
from rlfx.profile.compare import Comparison, compare
from rlfx.profile.compilations import Compiled
from rlfx.profile.overhead import Overhead, correct, load
from rlfx.profile.rows import DeviceRow, Row, bound_by, key_of, named
from rlfx.profile.rules import COMPILE, IDLE
from rlfx.profile.sweep import Sweep, sampled, spans, sweep, union
from rlfx.profile.tables import as_dict, html, text
from rlfx.profile.timeline import Kernel, Timeline, walk

ADVICE = {
    "host": "move the loop, or the environment, into one jitted program",
    "dispatch": "do more in a call: put the loop into `lax.scan`, or batch more environments",
    "device": "the device itself is the limit: make its work smaller",
    "transfer": "keep data on the device between steps",
    "compile": "warm up before the capture, or keep argument shapes and functions the same",
    "idle": "nothing works: look at locks, sleeps, input, and other programs on this machine",
}


@dataclass
class Process:
    """One captured process: its attributed window, and the walk it came from. Times in ns, epoch ns where said."""

    name: str
    pid: int
    parent: int
    epoch_ns: int
    sweep: Sweep
    timeline: Timeline
    compiled: list[Compiled]
    notes: dict[str, Any]
    path: str

    @property
    def window_ns(self) -> int:
        return self.sweep.window[1] - self.sweep.window[0]

    @property
    def span(self) -> tuple[int, int]:
        """The window in epoch ns."""
        return self.epoch_ns + self.sweep.window[0], self.epoch_ns + self.sweep.window[1]


@dataclass(repr=False)
class Report:
    """Where the time went.

    Attributes:
      rows: `Row(phase, path, stage, host, device)` to ns; sums to `window_ns`, the windows of all processes together.
      device_rows: `DeviceRow(phase, path, stage)` to ns: whose work the device did, overlapped or not.
      transitions: `(from state, to state, phase, path)` to count.
      kernels: `(module, instruction)` to count, ns and operation.
      compiled: functions compiled in the window, with causes.
      problems: everything that was dropped, unknown or doubtful, in words.
    """

    processes: list[Process]
    rows: dict[Row, int]
    device_rows: dict[DeviceRow, int]
    transitions: collections.Counter
    kernels: dict[tuple[str, str], Kernel]
    compiled: list[Compiled]
    problems: list[str]
    steps: int = 0
    corrected_ns: int = 0  # profiling overhead taken out of `rows`
    correction_error: float = 0.0  # about its relative error
    extra: dict[str, Any] = field(default_factory=dict)

    # Sizes.

    @property
    def window_ns(self) -> int:
        """ns of the windows of all processes, after correction."""
        return sum(p.window_ns for p in self.processes) - self.corrected_ns

    @property
    def span_ns(self) -> int:
        """ns from the first process's begin to the last one's end, after correction of a single process."""
        first, last = min(p.span[0] for p in self.processes), max(p.span[1] for p in self.processes)
        return last - first - (self.corrected_ns if len(self.processes) == 1 else 0)

    @property
    def steps_per_second(self) -> float:
        """Environment steps a second of the span; 0 if the number of steps is unknown."""
        return self.steps / self.span_ns * 1e9 if self.span_ns else 0.0

    # Pivots.

    def total(self, **where: Any) -> int:
        """ns of the rows that match, for example `total(host="python")` or `total(path=("simulation",))`.

        Raises:
          ProfileError: a row has no such field.
        """
        for key in where:
            expect("A field", key, one_of(*Row._fields), ProfileError, of="Report.total", fix='total(host="python").')
        return sum(ns for row, ns in self.rows.items() if all(getattr(row, k) == v for k, v in where.items()))

    def by(self, *keys: str) -> dict[tuple, int]:
        """ns grouped by fields of `Row`, largest first. `operation` is the path in one string, `bound` what limits.

        Raises:
          ProfileError: a row has no such field.
        """
        for key in keys:
            expect(
                "A field",
                key,
                one_of(*Row._fields, "operation", "bound"),
                ProfileError,
                of="Report.by",
                fix='by("host").',
            )
        out: collections.Counter = collections.Counter()
        for row, ns in self.rows.items():
            out[tuple(key_of(row, k) for k in keys)] += ns
        return dict(out.most_common())

    def within(self, operation: str) -> int:
        """ns in an operation and everything nested in it."""
        expect("operation", operation, TEXT, ProfileError, of="Report.within")
        return sum(ns for row, ns in self.rows.items() if operation in row.path)

    def device_within(self, operation: str) -> int:
        """ns that the device worked for an operation and everything nested in it."""
        expect("operation", operation, TEXT, ProfileError, of="Report.device_within")
        return sum(ns for row, ns in self.device_rows.items() if operation in row.path)

    def stages(self) -> dict[str, int]:
        """ns of device work by stage of programs compiled by rlfx (`rlfx.stage/<n> <kind>`)."""
        out: collections.Counter = collections.Counter()
        for row, ns in self.device_rows.items():
            out[row.stage] += ns
        return dict(out.most_common())

    def count(self, source: str, target: str, operation: str | None = None) -> int:
        """Transitions from one host state to another, inside one operation if given.

        Raises:
          ProfileError: there is no such state.
        """
        for name, value in (("source", source), ("target", target)):
            expect(name, value, one_of(*rules.STATES, IDLE), ProfileError, of="Report.count")
        expect("operation", operation, optional(TEXT), ProfileError, of="Report.count")
        return sum(
            n
            for (a, b, _, path), n in self.transitions.items()
            if (a, b) == (source, target) and (operation is None or operation in path)
        )

    # The device.

    def busy_spans(self) -> list[tuple[int, int]]:
        """Epoch intervals in which the device executed or copied for any of the processes."""
        return union([i for p in self.processes for i in spans(p.sweep.bounds, p.sweep.busy, p.epoch_ns)])

    @property
    def device_busy(self) -> float:
        """Share of the span in which the device executed or copied, for any process."""
        span = max(p.span[1] for p in self.processes) - min(p.span[0] for p in self.processes)
        return sum(b - a for a, b in self.busy_spans()) / span if span else 0.0

    @property
    def device_bound(self) -> float:
        """Share of the windows in which the device executed while no thread of the host had anything to do."""
        return sum(ns for row, ns in self.rows.items() if bound_by(row.host, row.device) == "device") / self.window_ns

    @property
    def naive_utilisation(self) -> float:
        """What a sampler reports: the share of 1/6 s periods with any kernel at all (RL-Scope, F.11)."""
        span = min(p.span[0] for p in self.processes), max(p.span[1] for p in self.processes)
        return sampled(self.busy_spans(), span)

    @property
    def unattributed(self) -> float:
        """Share of kernel time whose instructions belong to no operation, by their scopes or around their launch."""
        leaves = self._leaves()
        total = sum(k.ns for k in leaves)
        return sum(k.ns for k in leaves if not named(k.path)) / total if total else 0.0

    def _leaves(self) -> list[Kernel]:
        return [k for k in self.kernels.values() if not k.copy and (k.op is None or k.op.kind == hlo.LEAF)]

    def _kernel_share(self, chosen) -> float:
        leaves = self._leaves()
        total = sum(k.ns for k in leaves)
        return sum(k.ns for k in leaves if k.op is not None and chosen(k.op)) / total if total else 0.0

    @property
    def mixed(self) -> float:
        """Share of kernel time in fusions that serve several operations; divided by the work of each."""
        return self._kernel_share(lambda op: op.mixed)

    @property
    def inherited(self) -> float:
        """Share of kernel time in instructions without a name of their own (copies that XLA inserts)."""
        return self._kernel_share(lambda op: op.inherited)

    # Compilation and verdict.

    @property
    def compile_share(self) -> float:
        """Share of the windows spent tracing, lowering and compiling."""
        return self.total(host=COMPILE) / self.window_ns

    def limits(self) -> dict[str, float]:
        """Share of the windows by what limits: host, dispatch, device, transfer, compile, idle."""
        return {key[0]: ns / self.window_ns for key, ns in self.by("bound").items()}

    @property
    def verdict(self) -> str:
        """One line: what limits the program, where, and what to do."""
        kind, share = next(iter(self.limits().items()))
        places: collections.Counter = collections.Counter()
        for row, ns in self.rows.items():
            if bound_by(row.host, row.device) == kind:
                places[key_of(row, "operation")] += ns
        place, ns = places.most_common(1)[0]
        return (
            f"{kind}-bound: {share:.0%} of the time, most of it in {place} ({ns / self.window_ns:.0%}); {ADVICE[kind]}"
        )

    # Presentation lives in its own modules.

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
    if process.notes.get("open_elsewhere"):
        count = process.notes["open_elsewhere"]
        out.append(f"{count} annotations of other threads crossed the capture's edges: not counted")
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


def read(directory: str | os.PathLike) -> Report:
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
    return merge(kept, said)


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
