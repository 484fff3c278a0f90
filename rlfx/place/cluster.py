"""Tasks of a graph merged into fewer: what is one stage, and what is worth a node of its own.

Merging saves a launch, and may cost parallelism: what waits for one part now waits for the other. Two groups become one where
no path leads out of them and back (a cycle), and where the longest path through the graph grows by no more than the launch that
is saved (as in internalisation, Sarkar 1989, here with the smallest group first), or is short beside the work of each device.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SIBLINGS = 16  # groups that read the same, of which one is looked at as a partner


class _Groups:
    """A partition of tasks ``0, ..., n - 1``, numbered in topological order, whose quotient has no cycle."""

    def __init__(self, edges: Iterable[tuple[int, int]], seconds: Sequence[float], labels: Sequence[object]) -> None:
        n = len(seconds)
        self.members: list[list[int]] = [[v] for v in range(n)]
        self.seconds, self.labels = list(seconds), list(labels)
        self.preds: list[set[int]] = [set() for _ in range(n)]
        self.succs: list[set[int]] = [set() for _ in range(n)]
        self.first = list(range(n))  # the smallest task of each group
        self.alive = set(range(n))
        self.of = list(range(n))  # each task's group
        for u, v in edges:
            self.preds[v].add(u)
            self.succs[u].add(v)

    def detour(self, a: int, b: int) -> bool:
        """Whether a path leads from one group to the other through a third: as one, they would make a cycle."""
        return self._through(a, b) or self._through(b, a)

    def _through(self, a: int, b: int) -> bool:
        stack, seen = [s for s in self.succs[a] if s != b], {a}
        while stack:
            g = stack.pop()
            if g == b:
                return True
            if g not in seen:
                seen.add(g)
                stack.extend(self.succs[g])
        return False

    def merge(self, a: int, b: int) -> int:
        """Make one group of two; returns its number."""
        a, b = (a, b) if len(self.members[a]) >= len(self.members[b]) else (b, a)
        self.members[a] += self.members[b]
        for v in self.members[b]:
            self.of[v] = a
        self.seconds[a] += self.seconds[b]
        self.labels[a] = self.labels[a] if self.labels[a] is not None else self.labels[b]
        self.first[a] = min(self.first[a], self.first[b])
        for near, far in ((self.preds, self.succs), (self.succs, self.preds)):
            for g in near[b]:
                far[g].discard(b)
                if g != a:
                    far[g].add(a)
                    near[a].add(g)
            near[a].discard(b)
            near[b] = set()
        self.alive.discard(b)
        return a

    def order(self) -> list[int]:
        """The groups, each after those that it reads; of several that could come, the one whose first task is first."""
        missing = {g: len(self.preds[g]) for g in self.alive}
        ready = [(self.first[g], g) for g, count in missing.items() if not count]
        heapq.heapify(ready)
        out = []
        while ready:
            _, g = heapq.heappop(ready)
            out.append(g)
            for s in self.succs[g]:
                missing[s] -= 1
                if not missing[s]:
                    heapq.heappush(ready, (self.first[s], s))
        return out


@dataclass
class _Paths:
    """Longest paths: before a group begins, and from its end, in seconds, launches included."""

    before: dict[int, float]
    after: dict[int, float]
    longest: float


def _paths(groups: _Groups, launch: float) -> _Paths:
    order = groups.order()
    before: dict[int, float] = {}
    after: dict[int, float] = {}
    for g in order:
        before[g] = max((before[p] + groups.seconds[p] + launch for p in groups.preds[g]), default=0.0)
    for g in reversed(order):
        after[g] = max((after[s] + groups.seconds[s] + launch for s in groups.succs[g]), default=0.0)
    longest = max((before[g] + groups.seconds[g] + launch + after[g] for g in order), default=0.0)
    return _Paths(before, after, longest)


def _stretched(groups: _Groups, paths: _Paths, a: int, b: int, launch: float) -> float:
    """The longest path through two groups, once they are one."""
    before = max(
        (paths.before[p] + groups.seconds[p] + launch for g in (a, b) for p in groups.preds[g] if p not in (a, b)),
        default=0.0,
    )
    after = max(
        (paths.after[s] + groups.seconds[s] + launch for g in (a, b) for s in groups.succs[g] if s not in (a, b)),
        default=0.0,
    )
    return before + groups.seconds[a] + groups.seconds[b] + launch + after


def _partners(groups: _Groups, g: int) -> set[int]:
    """What a group may be merged with: what it reads, what reads it, and some that read the same."""
    near = groups.preds[g] | groups.succs[g]
    beside = {s for p in groups.preds[g] for s in sorted(groups.succs[p])[:SIBLINGS]}
    beside |= {p for s in groups.succs[g] for p in sorted(groups.preds[s])[:SIBLINGS]}
    return (near | beside) - {g}


def clustered(
    edges: Sequence[tuple[int, int]],
    seconds: Sequence[float],
    labels: Sequence[object],
    *,
    launch: float,
    largest: float,
    path: float = 0.0,
    at_most: int,
) -> list[list[int]]:
    """Groups of tasks, in topological order, the tasks of each ascending.

    Args:
      edges: pairs (u, v), u < v, where v reads u.
      seconds: of each task.
      labels: of each task: tasks of one label that read one another become one group, whatever that costs, and tasks of two
        labels never do; None has no say.
      launch: seconds that a group takes beside its tasks.
      largest: seconds of a group beyond which it is not merged.
      path: seconds up to which the longest path may grow, whatever is merged.
      at_most: groups; the smallest are merged, and the path may grow, until there are no more (two labels stay two).

    Example:
      >>> chains = [(0, 1), (1, 2), (3, 4), (4, 5), (2, 6), (5, 6)]  # two chains, and a sum
      >>> clustered(chains, [1.0] * 6 + [0.1], [None] * 7, launch=0.2, largest=9.0, at_most=9)
      [[0, 1, 2], [3, 4, 5], [6]]
    """
    groups = _Groups(edges, seconds, labels)
    for u, v in edges:
        a, b = groups.of[u], groups.of[v]
        if a != b and labels[u] is not None and labels[u] == labels[v] and not groups.detour(a, b):
            groups.merge(a, b)
    _coarsen(groups, launch, largest, path)
    _reduce(groups, launch, at_most)
    return [sorted(groups.members[g]) for g in groups.order()]


def _mergeable(groups: _Groups, a: int, b: int) -> bool:
    first, second = groups.labels[a], groups.labels[b]
    return (first is None or second is None or first == second) and not groups.detour(a, b)


def _coarsen(groups: _Groups, launch: float, largest: float, path: float) -> None:
    """Merge while it costs no parallelism: the smallest group first, rather with what it reads or feeds than with others."""
    paths, stale = _paths(groups, launch), 0
    heap = [(groups.seconds[g], g) for g in groups.alive]
    heapq.heapify(heap)
    while heap:
        size, g = heapq.heappop(heap)
        if g not in groups.alive or size != groups.seconds[g]:
            continue
        near, free = groups.preds[g] | groups.succs[g], max(paths.longest, path)
        stretched = {h: _stretched(groups, paths, g, h, launch) for h in _partners(groups, g)}
        ranked = sorted(
            (max(through, free), h not in near, through, groups.seconds[h], h)
            for h, through in stretched.items()
            if size + groups.seconds[h] <= largest
        )
        for through, *_, h in ranked:
            if through > free + launch:
                break
            if _mergeable(groups, g, h):
                new = groups.merge(g, h)
                heapq.heappush(heap, (groups.seconds[new], new))
                stale += 1
                # Estimates of what was merged since are exact nowhere else; they are made anew now and then.
                _patch(groups, paths, new, launch)
                if stale > len(groups.alive) // 8:
                    paths, stale = _paths(groups, launch), 0
                break


def _patch(groups: _Groups, paths: _Paths, g: int, launch: float) -> None:
    paths.before[g] = max((paths.before[p] + groups.seconds[p] + launch for p in groups.preds[g]), default=0.0)
    paths.after[g] = max((paths.after[s] + groups.seconds[s] + launch for s in groups.succs[g]), default=0.0)
    paths.longest = max(paths.longest, paths.before[g] + groups.seconds[g] + launch + paths.after[g])


def _reduce(groups: _Groups, launch: float, at_most: int) -> None:
    """Merge the smallest group with the partner that costs least, until there are few enough."""
    while len(groups.alive) > at_most:
        paths = _paths(groups, launch)
        for g in sorted(groups.alive, key=lambda g: groups.seconds[g]):
            ranked = sorted((_stretched(groups, paths, g, h, launch), h) for h in groups.alive - {g})
            partner = next((h for _, h in ranked if _mergeable(groups, g, h)), None)
            if partner is not None:
                groups.merge(g, partner)
                break
        else:
            return
