"""Minimum cuts of graphs whose capacities are bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any


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
          ValueError: if no arc with a capacity is on some way from the source to the sink.

        Example:
          >>> network = Network()
          >>> network.add("source", "a", 3)
          >>> network.add("a", "b", 2)
          >>> network.add("b", "sink")
          >>> [sorted(side) for side in network.sides("source", "sink")]
          [['a', 'source'], ['b', 'sink']]
        """
        back: dict[Hashable, list] = {u: [] for u in self._arcs}
        for u, arcs in self._arcs.items():
            for v, capacity in arcs.items():
                if capacity is None:
                    back[v].append(u)
        # What the source reaches by arcs that are never cut is on its side, and what reaches the sink so on the sink's: most
        # of the nodes. The two are one node each.
        with_source = _reached(source, lambda u: (v for v, c in self._arcs[u].items() if c is None))
        with_sink = _reached(sink, back.__getitem__)
        if with_source & with_sink:
            raise ValueError("The source reaches the sink by arcs without a capacity.")
        rest = [u for u in self._arcs if u not in with_source and u not in with_sink]
        number = dict.fromkeys(with_source, 0) | dict.fromkeys(with_sink, 1) | {u: i for i, u in enumerate(rest, 2)}
        flow = _Flow(2 + len(rest))
        endless = 1 + sum(c for arcs in self._arcs.values() for c in arcs.values() if c is not None)
        for u, arcs in self._arcs.items():
            for v, capacity in arcs.items():
                flow.add(number[u], number[v], endless if capacity is None else capacity)
        flow.fill()
        last = flow.reaching_the_sink()
        return {u for u in self._arcs if number[u] not in last}, {u for u in self._arcs if number[u] in last}


def _reached(start: Hashable, neighbours: Callable[[Any], Iterable]) -> set:
    """The nodes that one reaches from one, itself included."""
    seen, todo = {start}, [start]
    while todo:
        new = [v for v in neighbours(todo.pop()) if v not in seen]
        seen.update(new)
        todo += new
    return seen


class _Flow:
    """The largest flow from node 0 to node 1, by shortest ways (Dinic 1970): ``left[u][v]`` is what an arc can still take."""

    def __init__(self, nodes: int) -> None:
        self.left: list[dict[int, int]] = [{} for _ in range(nodes)]

    def add(self, u: int, v: int, capacity: int) -> None:
        if u != v and v != 0 and u != 1:  # nothing returns to the source, nor leaves the sink
            self.left[u][v] = self.left[u].get(v, 0) + capacity
            self.left[v].setdefault(u, 0)

    def fill(self) -> None:
        while 1 in (level := self._levels()):
            self._along(level)

    def _levels(self) -> dict[int, int]:
        """How far nodes are from the source by arcs that can take more, of those that are no farther than the sink."""
        level, near = {0: 0}, [0]
        while near and 1 not in level:
            far = []
            for u in near:
                for v, room in self.left[u].items():
                    if room and v not in level:
                        level[v] = level[u] + 1
                        far.append(v)
            near = far
        return level

    def _along(self, level: dict[int, int]) -> None:
        """Fill all ways of one length."""
        ahead: dict[int, list[int]] = {}  # of each node, which arcs may still be part of one
        way = [0]
        while way:
            u = way[-1]
            if u == 1:
                arcs = list(zip(way, way[1:], strict=False))
                room = min(self.left[a][b] for a, b in arcs)
                for a, b in arcs:
                    self.left[a][b] -= room
                    self.left[b][a] += room
                del way[next(i for i, (a, b) in enumerate(arcs) if not self.left[a][b]) + 1 :]
                continue
            if u not in ahead:
                ahead[u] = [v for v in self.left[u] if level.get(v) == level[u] + 1]
            while ahead[u] and not self.left[u][ahead[u][-1]]:
                ahead[u].pop()
            if ahead[u]:
                way.append(ahead[u][-1])
                continue
            way.pop()
            if way:
                ahead[way[-1]].pop()  # nothing goes on from there

    def reaching_the_sink(self) -> set[int]:
        return _reached(1, lambda v: (u for u in self.left[v] if self.left[u][v]))
