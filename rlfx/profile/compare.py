"""Two profiles side by side: what became faster or slower, where."""

from __future__ import annotations

from dataclasses import dataclass

from rlfx.errors import ProfileError
from rlfx.profile.report import Report, _key
from rlfx.profile.tables import grid


@dataclass(frozen=True)
class Difference:
    """One line of a comparison: ms before and after, per step if both runs say how many they did."""

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
    """`total` and the differences by operation, by what limits, and in transitions, the largest change first."""

    unit: str
    total: Difference
    operations: list[Difference]
    limits: list[Difference]
    transitions: list[Difference]

    def __str__(self) -> str:
        faster = self.total.ratio
        word = f"{faster:.2f}x faster" if faster >= 1 else f"{1 / faster:.2f}x slower"
        largest = max(self.operations, key=lambda d: abs(d.change))
        head = (
            f"after is {word} {self.unit}: {self.total.before:.4g} ms became {self.total.after:.4g} ms; "
            f"the largest change is in {largest.name} ({largest.change:+.4g} ms)"
        )
        parts = [head]
        for title, found, unit in (
            ("operation", self.operations, "ms"),
            ("limit", self.limits, "ms"),
            ("transition", self.transitions, "count"),
        ):
            body = [[d.name, f"{d.before:.4g}", f"{d.after:.4g}", f"{d.change:+.4g}", f"{d.ratio:.2f}x"] for d in found]
            parts += ["", grid([f"{title} ({unit} {self.unit})", "before", "after", "change", "ratio"], body)]
        return "\n".join(parts)


def compare(before: Report, after: Report) -> Comparison:
    """Compare two runs of the same task, per step if both know their steps, else in total.

    Raises:
      ProfileError: one knows its number of steps and the other does not.
    """
    if bool(before.steps) != bool(after.steps):
        raise ProfileError(
            f"One run says how many steps it did and the other does not ({before.steps} and {after.steps}): "
            "give `capture(steps=...)` in both, or in neither."
        )
    by = (before.steps or 1), (after.steps or 1)

    def ms(ns: tuple[int, int], scale: float = 1e6) -> tuple[float, float]:
        return ns[0] / scale / by[0], ns[1] / scale / by[1]

    def table(pairs: dict[str, tuple[int, int]], scale: float) -> list[Difference]:
        found = [Difference(name, *ms(pair, scale)) for name, pair in pairs.items()]
        return sorted(found, key=lambda d: -abs(d.change))

    total = Difference("total", *ms((before.span_ns, after.span_ns)))
    operations = table(_pairs(*[_named(r, "operation") for r in (before, after)]), 1e6)
    limits = table(_pairs(*[_named(r, "bound") for r in (before, after)]), 1e6)
    counts = table(_pairs(*[_counts(r) for r in (before, after)]), 1)
    return Comparison("a step" if before.steps else "in total", total, operations, limits, counts)


def _named(report: Report, key: str) -> dict[str, int]:
    out: dict[str, int] = {}
    for row, ns in report.rows.items():
        out[_key(row, key)] = out.get(_key(row, key), 0) + ns
    return out


def _counts(report: Report) -> dict[str, int]:
    out: dict[str, int] = {}
    for (source, target, _, _), n in report.transitions.items():
        name = f"{source}→{target}"
        out[name] = out.get(name, 0) + n
    return out


def _pairs(a: dict[str, int], b: dict[str, int]) -> dict[str, tuple[int, int]]:
    return {name: (a.get(name, 0), b.get(name, 0)) for name in {**a, **b}}
