"""Minimum cuts: what costs least to keep, or to compute in a loop."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from rlfx._lazy import nx

_SOURCE, _SINK = 0, 1


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
        graph = nx.DiGraph()
        graph.add_nodes_from((_SOURCE, _SINK))
        for u, arcs in self._arcs.items():
            for v, capacity in arcs.items():
                i, j = number[u], number[v]
                if i in (j, _SINK) or j == _SOURCE:  # nothing returns to the source, nor leaves the sink
                    continue
                before = graph.get_edge_data(i, j, {"capacity": 0}).get("capacity")
                graph.add_edge(i, j, capacity=None if capacity is None or before is None else before + capacity)
        for _, _, arc in graph.edges(data=True):
            if arc["capacity"] is None:  # networkx: an arc that is never cut has no capacity
                del arc["capacity"]
        # Of networkx's algorithms that which is fastest here: ways are short, and most capacities infinite.
        _, (_, last) = nx.minimum_cut(graph, _SOURCE, _SINK, flow_func=nx.algorithms.flow.boykov_kolmogorov)
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
        first = _reached(source, lambda u: (v for v, c in self._arcs[u].items() if c is None))
        last = _reached(sink, back.__getitem__)
        if first & last:
            raise ValueError("The source reaches the sink by arcs without a capacity.")
        rest = (u for u in self._arcs if u not in first and u not in last)
        return dict.fromkeys(first, _SOURCE) | dict.fromkeys(last, _SINK) | {u: i for i, u in enumerate(rest, 2)}


def _reached(start: Hashable, neighbours: Callable[[Any], Iterable]) -> set:
    """The nodes that one reaches from one, itself included."""
    seen, todo = {start}, [start]
    while todo:
        new = [v for v in neighbours(todo.pop()) if v not in seen]
        seen.update(new)
        todo += new
    return seen
