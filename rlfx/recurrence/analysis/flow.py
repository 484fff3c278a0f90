"""The largest flow through a graph with whole-number capacities, by shortest ways (Dinic 1970)."""

from __future__ import annotations

from rlfx.recurrence.analysis.order import reached

#: Where flow begins, and where it ends.
SOURCE, SINK = 0, 1


class Flow:
    """Nodes are numbers; ``left[u][v]`` is what an arc can still take.

    Example:
      >>> flow = Flow(4)
      >>> for u, v, capacity in ((SOURCE, 2, 3), (2, 3, 1), (3, SINK, 2)):
      ...     flow.add(u, v, capacity)
      >>> sorted(flow.filled())
      [1, 3]
    """

    def __init__(self, nodes: int) -> None:
        self.left: list[dict[int, int]] = [{} for _ in range(nodes)]

    def add(self, u: int, v: int, capacity: int) -> None:
        """More capacity from one node to another."""
        if u != v and v != SOURCE and u != SINK:  # nothing returns to the source, nor leaves the sink
            self.left[u][v] = self.left[u].get(v, 0) + capacity
            self.left[v].setdefault(u, 0)

    def filled(self) -> set[int]:
        """The sink's side of the cheapest cut, as few nodes as can be: those from which more can flow, once all that can does."""
        while SINK in (level := self._levels()):
            self._along(level)
        return reached(SINK, lambda v: (u for u in self.left[v] if self.left[u][v]))

    def _levels(self) -> dict[int, int]:
        """How far nodes are from the source by arcs that can take more, of those that are no farther than the sink."""
        level, near = {SOURCE: 0}, [SOURCE]
        while near and SINK not in level:
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
        way = [SOURCE]
        while way:
            u = way[-1]
            if u == SINK:
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
