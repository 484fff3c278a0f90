"""Two profiles side by side: what became faster or slower, where."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlfx.errors import ProfileError, located
from rlfx.profile.attributed import Attributed
from rlfx.profile.rows import key_of
from rlfx.profile.tables import grid

_TOTAL = "in total"
_UNKNOWN = (
    "how much work each window did is not known, so nothing here says which is faster. "
    "Give `capture(steps=...)`, or `run --steps`, in all of them."
)


@dataclass(frozen=True)
class Difference:
    """One line of a comparison: before and after, in the comparison's unit or a count."""

    name: str
    before: float
    after: float

    @property
    def change(self) -> float:
        return self.after - self.before

    @property
    def ratio(self) -> float:
        """How many times faster: before over after; infinite if it vanished."""
        return self.before / self.after if self.after else float("inf")


@dataclass(frozen=True)
class Comparison:
    """`total` and the differences by operation, by what limits, and in transitions, the largest change first.

    Times are in `unit` (ms or us), `per` step where both runs know their steps, else in total: those of windows that may
    have done different work, so that no text says which is faster.
    """

    unit: str
    per: str
    total: Difference
    operations: list[Difference]
    limits: list[Difference]
    transitions: list[Difference]

    def __str__(self) -> str:
        known, total = self.per != _TOTAL, self.total
        faster = total.ratio
        word = f"{faster:.2f}x faster" if faster >= 1 else f"{1 / faster:.2f}x slower"
        largest = max(self.operations, key=lambda d: abs(d.change))
        head = (
            f"after is {word} {self.per}: {total.before:.4g} {self.unit} became {total.after:.4g} {self.unit}; "
            f"the largest change is in {largest.name} ({largest.change:+.4g} {self.unit})"
        )
        if not known:
            head = f"the windows took {total.before:.4g} {self.unit} and {total.after:.4g} {self.unit}; {_UNKNOWN}"
        parts = [head]
        for title, found, unit in (
            ("operation", self.operations, self.unit),
            ("limit", self.limits, self.unit),
            ("transition", self.transitions, "count"),
        ):
            body = [[d.name, f"{d.before:.4g}", f"{d.after:.4g}", f"{d.change:+.4g}"] for d in found]
            header = [f"{title} ({unit} {self.per})", "before", "after", "change"]
            if known:
                body = [[*cells, f"{d.ratio:.2f}x" if d.after else "-"] for cells, d in zip(body, found, strict=True)]
                header.append("ratio")
            parts += ["", grid(header, body)]
        return "\n".join(parts)


def compare(before: Attributed, after: Attributed) -> Comparison:
    """Compare two runs of the same task, per step if both know their steps, else in total.

    Raises:
      ProfileError: one knows its number of steps and the other does not.
    """
    if bool(before.steps) != bool(after.steps):
        raise ProfileError(
            located(
                f"One run says how many steps it did and the other does not ({before.steps} and {after.steps}).",
                fix="Give `capture(steps=...)` in both, or in neither.",
            )
        )
    by = (before.steps or 1), (after.steps or 1)

    unit, size = ("us", 1e3) if before.span_ns / by[0] < 1e6 else ("ms", 1e6)

    def each(ns: tuple[int, int], scale: float) -> tuple[float, float]:
        return ns[0] / scale / by[0], ns[1] / scale / by[1]

    def table(pairs: dict[str, tuple[int, int]], scale: float) -> list[Difference]:
        found = [Difference(name, *each(pair, scale)) for name, pair in pairs.items()]
        return sorted(found, key=lambda d: -abs(d.change))

    total = Difference("total", *each((before.span_ns, after.span_ns), size))
    operations = table(_pairs(*[_named(r, "operation") for r in (before, after)]), size)
    limits = table(_pairs(*[_named(r, "bound") for r in (before, after)]), size)
    counts = table(_pairs(*[_counts(r) for r in (before, after)]), 1)
    return Comparison(unit, "a step" if before.steps else _TOTAL, total, operations, limits, counts)


#: Student's t for 95% of a mean, by the number of runs.
STUDENT = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half of its 95% confidence interval; infinite of one value.

    Example:
      >>> tuple(round(x, 2) for x in mean([1.0, 2.0, 3.0]))
      (2.0, 2.48)
    """
    n = len(values)
    if n < 2:
        return values[0], float("inf")
    return statistics.fmean(values), STUDENT.get(n, 2.26) * statistics.stdev(values) / n**0.5


def repeated(groups: Mapping[str, Sequence[Attributed]]) -> str:
    """Programs side by side of which each ran several times: means with 95% intervals, and ratios to the first.

    A ratio is left out where it may be chance: where the two intervals overlap. Without steps there is none.

    Raises:
      ProfileError: some runs know their number of steps and others do not.
    """
    steps = _steps([r for runs in groups.values() for r in runs])
    spans = [r.span_ns / (r.steps or 1) for runs in groups.values() for r in runs]
    unit, size = ("us", 1e3) if min(spans) < 1e6 else ("ms", 1e6)
    parts = []
    for key, title in (("operation", "operation"), ("bound", "limit")):
        cells: dict[str, list[tuple[float, float]]] = {}
        found = [[(_named(r, key), r) for r in runs] for runs in groups.values()]
        if key == "operation":
            cells["total"] = [mean([r.span_ns / (r.steps or 1) / size for _, r in runs]) for runs in found]
        for name in dict.fromkeys(name for runs in found for ns, _ in runs for name in ns):
            cells[name] = [mean([ns.get(name, 0) / (r.steps or 1) / size for ns, r in runs]) for runs in found]
        rows = sorted(cells.items(), key=lambda item: (item[0] != "total", -max(m for m, _ in item[1])))
        ratios = [[_ratio(values[0], v) for v in values[1:]] if steps else [] for _, values in rows]
        body = [[name, *map(_shown, values), *more] for (name, values), more in zip(rows, ratios, strict=True)]
        header = [f"{title} ({unit} {'a step' if steps else _TOTAL})", *groups]
        parts.append(grid([*header, *(f"to {name}" for name in [*groups][1:] if steps)], body))
    return "\n\n".join([*parts, *_noted(steps)])


def _shown(value: tuple[float, float]) -> str:
    return f"{value[0]:.4g}" + (f" ± {value[1]:.2g}" if value[1] < float("inf") else "")


def _ratio(first: tuple[float, float], other: tuple[float, float]) -> str:
    apart = abs(first[0] - other[0]) > first[1] + other[1]
    return f"{first[0] / other[0]:.2f}x" if apart and other[0] else "-"


def _steps(reports: Iterable[Attributed]) -> bool:
    """Do the runs know their number of steps?"""
    steps = [r.steps for r in reports]
    if any(steps) and not all(steps):
        raise ProfileError(
            located(
                f"Some runs say how many steps they did and others do not ({', '.join(map(str, steps))}).",
                fix="Give `capture(steps=...)` in all, or in none.",
            )
        )
    return any(steps)


def several(reports: Mapping[str, Attributed]) -> str:
    """Many runs side by side: time by operation and by what limits, with the median and how far the runs are apart.

    Raises:
      ProfileError: some know their number of steps and others do not.
    """
    steps = _steps(reports.values())
    per = [r.steps or 1 for r in reports.values()]
    spans = [r.span_ns / n for r, n in zip(reports.values(), per, strict=True)]
    unit, size = ("us", 1e3) if min(spans) < 1e6 else ("ms", 1e6)
    parts = []
    for key in ("operation", "bound"):
        found = [_named(r, key) for r in reports.values()]
        cells = {
            name: [f.get(name, 0) / n / size for f, n in zip(found, per, strict=True)] for f in found for name in f
        }
        cells = {"total": [span / size for span in spans], **cells} if key == "operation" else cells
        rows = sorted(cells.items(), key=lambda item: (item[0] != "total", -statistics.median(item[1])))
        title = {"operation": "operation", "bound": "limit"}[key] + f" ({unit} {'a step' if steps else _TOTAL})"
        body = [
            [name, *(f"{v:.4g}" for v in values), f"{statistics.median(values):.4g}", f"{min(values):.4g} - {max(values):.4g}"]
            for name, values in rows
        ]  # fmt: skip
        parts.append(grid([title, *reports, "median", "range"], body))
    return "\n\n".join([*parts, *_noted(steps)])


def _noted(steps: bool) -> list[str]:
    return [] if steps else [_UNKNOWN[0].upper() + _UNKNOWN[1:]]


def _named(report: Attributed, key: str) -> dict[str, int]:
    out: dict[str, int] = {}
    for row, ns in report.rows.items():
        out[key_of(row, key)] = out.get(key_of(row, key), 0) + ns
    return out


def _counts(report: Attributed) -> dict[str, int]:
    out: dict[str, int] = {}
    for (source, target, _, _), n in report.transitions.items():
        name = f"{source}→{target}"
        out[name] = out.get(name, 0) + n
    return out


def _pairs(a: dict[str, int], b: dict[str, int]) -> dict[str, tuple[int, int]]:
    return {name: (a.get(name, 0), b.get(name, 0)) for name in {**a, **b}}


def apart(names: Iterable[str]) -> list[str]:
    """What distinguishes directories, or groups of them with commas, a run a line: whole paths have no room under bars.

    Example:
      >>> apart(["/runs/old/1,/runs/old/2", "/runs/new/1"])
      ['old/1\\nold/2', 'new/1']
    """
    groups = [[os.path.abspath(one) for one in name.split(",") if one] for name in names]
    every = {one for group in groups for one in group}
    shared = os.path.commonpath(every) if len(every) > 1 else os.path.dirname(*every)
    return ["\n".join(os.path.relpath(one, shared) for one in group) for group in groups]
