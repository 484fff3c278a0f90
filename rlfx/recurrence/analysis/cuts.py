"""Minimum cuts: what costs least to keep, or to compute in a loop."""

from __future__ import annotations

from collections.abc import Hashable

from rlfx.recurrence.analysis.flow import SINK, SOURCE, Flow
from rlfx.recurrence.analysis.order import reached


def units(cost: float) -> int:
    """A capacity in millionths of a byte, so that sums are exact and a cut does not depend on the order of additions."""
    return round(1e6 * cost)


class Network:
    """A graph with capacities, to which arcs are added; an arc without a capacity is never cut."""

    def __init__(self) -> None:
        self._arcs: dict[Hashable, dict[Hashable, int | None]] = {}

    def __contains__(self, node: Hashable) -> bool:
        return node in self._arcs

    def add(self, u: Hashable, v: Hashable, capacity: int | None = None) -> None:
        """An arc from ``u`` to ``v``; it replaces one that was there."""
        self._arcs.setdefault(u, {})[v] = capacity
        self._arcs.setdefault(v, {})

    def sides(self, source: Hashable, sink: Hashable) -> tuple[set, set]:
        """The nodes on both sides of the cheapest cut; as few as can be on the sink's.

        Raises:
          ValueError: if the source reaches the sink by arcs that are never cut.

        Example:
          >>> network = Network()
          >>> network.add("source", "a", 3)
          >>> network.add("a", "b", 2)
          >>> network.add("b", "sink")
          >>> [sorted(side) for side in network.sides("source", "sink")]
          [['a', 'source'], ['b', 'sink']]
        """
        number = self._numbered(source, sink)
        flow = Flow(max(number.values()) + 1)
        endless = 1 + sum(c for arcs in self._arcs.values() for c in arcs.values() if c is not None)
        for u, arcs in self._arcs.items():
            for v, capacity in arcs.items():
                flow.add(number[u], number[v], endless if capacity is None else capacity)
        last = flow.filled()
        return {u for u in self._arcs if number[u] not in last}, {u for u in self._arcs if number[u] in last}

    def _numbered(self, source: Hashable, sink: Hashable) -> dict[Hashable, int]:
        """Nodes of a smaller graph with the same cuts.

        What the source reaches by arcs that are never cut is on its side, and what reaches the sink so on the sink's: most of the
        nodes. The two are one node each.
        """
        back: dict[Hashable, list] = {u: [] for u in self._arcs}
        for u, arcs in self._arcs.items():
            for v, capacity in arcs.items():
                if capacity is None:
                    back[v].append(u)
        first = reached(source, lambda u: (v for v, c in self._arcs[u].items() if c is None))
        last = reached(sink, back.__getitem__)
        if first & last:
            raise ValueError("The source reaches the sink by arcs without a capacity.")
        rest = (u for u in self._arcs if u not in first and u not in last)
        return dict.fromkeys(first, SOURCE) | dict.fromkeys(last, SINK) | {u: i for i, u in enumerate(rest, 2)}
