"""Small graphs of equations: circles, orders, what hangs together.

(networkx takes 70 ms to import, and its graphs were a tenth of tracing a learner: it is used for error messages alone.)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

Node = TypeVar("Node", bound=Hashable)


def strongly_connected(before: Mapping[Node, Iterable[Node]]) -> list[list[Node]]:
    """Strongly connected components, each after those that its nodes are ``before`` (Tarjan 1972).

    Args:
      before: of each node those that it depends on, all of them keys.

    Example:
      >>> strongly_connected({"a": ["b"], "b": ["a", "c"], "c": []})
      [['c'], ['b', 'a']]
    """
    number: dict[Node, int] = {}
    low: dict[Node, int] = {}
    found: list[list[Node]] = []
    done: set[Node] = set()
    open_: list[Node] = []
    for root in before:
        if root in number:
            continue
        way: list[tuple[Node, Iterator[Node]]] = []
        new: Node | None = root
        while new is not None or way:
            if new is not None:
                number[new] = low[new] = len(number)
                open_.append(new)
                way.append((new, iter(before[new])))
            node, rest = way[-1]
            new = None
            for other in rest:
                if other not in number:
                    new = other
                    break
                if other not in done:
                    low[node] = min(low[node], number[other])
            if new is not None:
                continue
            way.pop()
            if way:
                above = way[-1][0]
                low[above] = min(low[above], low[node])
            if low[node] == number[node]:
                component = []
                while not component or component[-1] != node:
                    component.append(open_.pop())
                done.update(component)
                found.append(component)
    return found


def topological_order(before: Mapping[Node, Iterable[Node]], key: Callable[[Node], Any]) -> list[Node]:
    """The nodes, each after those that it depends on, else by their keys, no two of which are equal.

    Args:
      before: of each node those that it depends on, all of them keys.

    Raises:
      ValueError: if there is a circle.

    Example:
      >>> topological_order({1: [3], 2: [], 3: [2]}, key=lambda node: node)
      [2, 3, 1]
    """
    waits = {node: len(set(others)) for node, others in before.items()}
    after: dict[Node, list[Node]] = {node: [] for node in before}
    for node, others in before.items():
        for other in set(others):
            after[other].append(node)
    ready = [(key(node), node) for node, n in waits.items() if not n]
    heapq.heapify(ready)
    found: list[Node] = []
    while ready:
        _, node = heapq.heappop(ready)
        found.append(node)
        for later in after[node]:
            waits[later] -= 1
            if not waits[later]:
                heapq.heappush(ready, (key(later), later))
    if len(found) < len(waits):
        raise ValueError("There is no order: some nodes depend on each other in a circle.")
    return found


def connected(near: Mapping[Node, Iterable[Node]]) -> list[set[Node]]:
    """What hangs together, whatever the direction.

    Args:
      near: of each node others that it hangs together with, all of them keys.

    Example:
      >>> [sorted(part) for part in connected({1: [2], 2: [], 3: [], 4: [2]})]
      [[1, 2, 4], [3]]
    """
    both: dict[Node, list[Node]] = {node: [] for node in near}
    for node, others in near.items():
        for other in others:
            both[node].append(other)
            both[other].append(node)
    found: list[set[Node]] = []
    seen: set[Node] = set()
    for node in near:
        if node not in seen:
            part = reached(node, both.__getitem__)
            seen |= part
            found.append(part)
    return found


def reached(start: Node, neighbours: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """The nodes that one reaches from one, itself included."""
    seen, todo = {start}, [start]
    while todo:
        new = [v for v in neighbours(todo.pop()) if v not in seen]
        seen.update(new)
        todo += new
    return seen
