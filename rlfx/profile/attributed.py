"""Attributed time of one or several processes, and the questions to ask of it."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlfx._checks import TEXT, expect, one_of, optional
from rlfx.errors import ProfileError
from rlfx.profile import hlo, rules
from rlfx.profile.compilations import Compiled
from rlfx.profile.lines import Frame, completed, computed, own
from rlfx.profile.memory import Held, noted
from rlfx.profile.roofline import Roof, roofline
from rlfx.profile.rows import DeviceRow, Row, bound_by, key_of, named
from rlfx.profile.rules import COMPILE, IDLE
from rlfx.profile.sweep import Sweep, sampled, spans, union
from rlfx.profile.threads import ENOUGH, OURS
from rlfx.profile.timeline import Kernel, Timeline
from rlfx.profile.verdict import verdict


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


class DeviceLine(NamedTuple):
    """A line of the program: ns that the device worked for it with all that it calls, and `alone` without."""

    frame: Frame
    ns: float
    alone: float


@dataclass(repr=False)
class Attributed:
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
    transitions: collections.Counter[tuple[str, str, str, tuple[str, ...]]]
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

    def by(self, *keys: str) -> dict[tuple[Any, ...], int]:
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
        """ns of device work by stage of programs compiled by rlfx (`<n> <kind>`), with the numbers of `explain`."""
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

    @property
    def one_call(self) -> bool:
        """Was the program inside one call of a compiled function nearly all the time that it did not compile?"""
        rest = self.window_ns - self.total(host=COMPILE)
        lasted = sum(p.timeline.alone for p in self.processes)
        return lasted > 0.9 * rest and self.device_bound * self.window_ns > 0.5 * rest

    def device_lines(self) -> list[DeviceLine]:
        """How long the device worked for lines of the program: the longest first.

        XLA's instructions know the lines that they come from, of packages as well; the user's count where there are any.
        """
        worked: collections.Counter = collections.Counter()
        alone: collections.Counter = collections.Counter()
        within: collections.Counter = collections.Counter()
        for kernel in self._leaves():
            sources = kernel.op.sources if kernel.op is not None else ()
            total = sum(weight for _, weight in sources)
            for stack, weight in sources:
                worked[stack] += kernel.ns * weight / total
        for stack, ns in completed(worked).items():
            frames = [f._replace(function="") for f in own(stack)]
            alone.update({frames[0]: ns} if frames else {})
            within.update(dict.fromkeys(frames, ns))
        return [DeviceLine(f, ns, alone[f]) for f, ns in within.most_common()]

    @property
    def iterations(self) -> tuple[str, int]:
        """The operation that began least often, twice at least, of those outermost ones that hold a tenth of the time;
        and how often: one of them is an iteration of the program. An empty name and 0 where there is none."""
        began: collections.Counter = collections.Counter()
        for process in self.processes:
            for (_, path), n in process.timeline.operations.items():
                began[path[0]] += n * (len(path) == 1)
        long = {name: n for name, n in began.items() if n > 1 and self.within(name) >= 0.1 * self.window_ns}
        return min(long.items(), key=lambda item: item[1], default=("", 0))

    @property
    def memory(self) -> list[list[Held]]:
        """For every process, what memory it held, about ten times a second."""
        return [noted(process.notes) for process in self.processes]

    def roofline(self) -> list[Roof]:
        """Of every operation the flops and bytes, and how near it is to what the device can do: the longest first.

        Counted from the instructions' shapes, as XLA's cost analysis does, and against the rates of `rlfx.target`.
        """
        return roofline(self.device_rows, [(p.timeline, p.notes) for p in self.processes])

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
        """One line: what limits the program, where, and what to do; or what is missing to say so."""
        busiest: collections.Counter = collections.Counter()
        for process in self.processes:
            busiest.update(computed(process.notes, OURS, ENOUGH))
        return verdict(self.rows, self.window_ns, busiest, {roof.operation: str(roof) for roof in self.roofline()})
