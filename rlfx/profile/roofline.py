"""Work against what the device can do in a second: which of its limits an operation is near.

Williams, Waterman and Patterson, Roofline, CACM 2009; the rates are those of `rlfx.target`, written down by the capture.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlfx.profile.rows import DeviceRow
from rlfx.profile.timeline import Timeline
from rlfx.profile.work import Work

#: A share of a limit from which an operation is said to be bound by it.
NEAR = 0.5
LIMITS = ("arithmetic", "memory", "starts")


@dataclass(frozen=True)
class Roof:
    """What an operation did on the device.

    Attributes:
      operation: its path, in one string.
      seconds: that the device worked for it.
      flops: of products, two a multiply-add, and one an element of other operations.
      bytes: read and written by its instructions, also where a cache held them.
      instructions: executed.
      arithmetic: share of its time that the arithmetic takes at the device's rates; None: the rates are not known.
      bandwidth: share that the bytes take. More than 1: they came out of caches.
      starts: share that starting the instructions takes.
    """

    operation: str
    seconds: float
    flops: float
    bytes: float
    instructions: int
    arithmetic: float | None = None
    bandwidth: float | None = None
    starts: float | None = None

    @property
    def limit(self) -> str:
        """Which limit it is near, the nearest: "arithmetic", "memory" or "starts"; empty if none, or not known."""
        shares = zip(LIMITS, (self.arithmetic, self.bandwidth, self.starts), strict=True)
        found = {name: share for name, share in shares if share is not None and share >= NEAR}
        return max(found, key=lambda name: found[name]) if found else ""

    def __str__(self) -> str:
        """What to do about the limit, in words; empty if there is none."""
        if not self.limit:
            return ""
        each = self.seconds / max(1, self.instructions) * 1e6
        return WORDS[self.limit].format(
            self, each=each, caches=", partly out of caches" if (self.bandwidth or 0) > 1 else ""
        )


WORDS = {
    "arithmetic": "arithmetic-bound: {0.arithmetic:.2g} of the rate that rlfx.target has; smaller or fewer products, fewer bits",
    "memory": "memory-bound: {0.bandwidth:.2g} of the bandwidth{caches}; move less: fewer bits, smaller batches, fused loops",
    "starts": "bound by starting {0.instructions:,} instructions of {each:.3g} us; do more in each: batch more environments",
}


def roofline(
    device_rows: Mapping[DeviceRow, int], captured: Sequence[tuple[Timeline, Mapping[str, Any]]]
) -> list[Roof]:
    """Of every operation, the one with most of the device's time first.

    Args:
      device_rows: ns that the device worked.
      captured: of every process its timeline and the notes of its capture, with the device's rates.
    """
    ns: collections.Counter = collections.Counter()
    counts: collections.Counter = collections.Counter()
    works: dict[str, Work] = {}
    least: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for row, taken in device_rows.items():
        ns[_name(row.path)] += taken
    for timeline, notes in captured:
        for (_, path), n in timeline.launches.items():
            counts[_name(path)] += n
        for (_, path), work in timeline.work.items():
            works[_name(path)] = works.get(_name(path), Work()).plus(work)
        for name, limit, seconds in _least(timeline, notes):
            least[name][limit] += seconds
    known = all("rates" in notes for _, notes in captured)
    out = []
    for name, taken in ns.most_common():
        work, seconds = works.get(name, Work()), taken / 1e9
        shares = [least[name][limit] / seconds if known and taken else None for limit in LIMITS]
        out.append(Roof(name, seconds, work.products + work.elements, work.bytes, counts[name], *shares))
    return out


def _name(path: tuple[str, ...]) -> str:
    return "/".join(path) or "(none)"


def _least(timeline: Timeline, notes: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Operation, limit of the device, and the seconds that it takes at least."""
    rates = notes.get("rates")
    if rates is None:
        return
    for (_, path), work in timeline.work.items():
        yield _name(path), "arithmetic", work.products / rates["flops"] + work.elements / rates["elements"]
        yield _name(path), "memory", work.bytes / rates["bandwidth"]
    for (_, path), n in timeline.launches.items():
        yield _name(path), "starts", n * rates["overhead"]
