"""Minimum cuts of graphs whose capacities are bytes."""

from __future__ import annotations

from typing import Any

from rlfx._lazy import nx


def units(cost: float) -> int:
    """A capacity in millionths of a byte, so that sums are exact and a cut does not depend on the order of additions."""
    return round(1e6 * cost)


def sides(graph: nx.DiGraph, source: Any, sink: Any) -> tuple[set, set]:
    """The nodes on both sides of the cheapest cut; as few as can be on the sink's."""
    # Of networkx's algorithms that which is fastest here: paths are short, and most capacities infinite.
    _, found = nx.minimum_cut(graph, source, sink, flow_func=nx.algorithms.flow.boykov_kolmogorov)
    return found
