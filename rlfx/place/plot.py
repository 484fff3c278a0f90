"""Drawings: a graph coloured by device (figure 4), utilisation over time (figures 8 to 11). Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from rlfx._lazy import nx
from rlfx.errors import PlacementError, located
from rlfx.place.baselines import Assignment
from rlfx.place.graph import DataflowGraph
from rlfx.place.problem import Problem


class Drawn(Protocol):
    """What is drawn of a placement."""

    @property
    def graph(self) -> DataflowGraph: ...
    @property
    def problem(self) -> Problem: ...
    @property
    def devices(self) -> Sequence: ...
    @property
    def assignment(self) -> Assignment: ...
    @property
    def seconds(self) -> float: ...
    @property
    def method(self) -> str: ...
    @property
    def schedule(self) -> Any: ...


def _matplotlib() -> Any:
    try:
        import matplotlib.figure
    except ImportError as missing:
        raise PlacementError(located("Drawing needs matplotlib.", fix="pip install 'rlfx[plots]'")) from missing
    import matplotlib

    return matplotlib


def draw(placement: Drawn) -> Any:
    """A figure with two panels; it is not shown, and no global state is touched."""
    mpl = _matplotlib()
    figure = mpl.figure.Figure(figsize=(14, 9), layout="constrained")
    top, bottom = figure.subplots(2, 1, height_ratios=(1.2, 1))
    colours = mpl.colormaps["tab10"].colors
    draw_graph(placement, top, colours)
    draw_timeline(placement, bottom, colours)
    return figure


def draw_graph(placement: Drawn, axes: Any, colours: Any) -> None:
    """Nodes by depth, coloured by device; inputs are grey."""
    graph = placement.graph.networkx()
    device = dict(zip(placement.graph.tasks, placement.assignment.device, strict=True))
    for layer, nodes in enumerate(nx.topological_generations(graph)):
        for node in nodes:
            graph.nodes[node]["layer"] = layer
    position = nx.multipartite_layout(graph, subset_key="layer", align="horizontal")
    position = {node: (x, -y) for node, (x, y) in position.items()}
    shade = [colours[device[n] % len(colours)] if n in device else "lightgrey" for n in graph]
    nx.draw_networkx_edges(graph, position, ax=axes, width=0.3, arrows=False, alpha=0.4)
    nx.draw_networkx_nodes(graph, position, ax=axes, node_size=28, node_color=shade)
    axes.set_title(f"{placement.graph.name}, {placement.method}: {placement.seconds * 1e3:.2f} ms simulated")
    axes.set_axis_off()


def draw_timeline(placement: Drawn, axes: Any, colours: Any) -> None:
    """One row per device and per link that is used; bars are simulated tasks and transfers."""
    schedule, device = placement.schedule, placement.assignment.device
    start, finish = np.asarray(schedule.start[0]) * 1e3, np.asarray(schedule.finish[0]) * 1e3
    rows = [f"{d}" for d in placement.devices]
    for d in range(len(rows)):
        mine = device == d
        bars = list(zip(start[mine], (finish - start)[mine], strict=True))
        axes.broken_barh(bars, (d - 0.4, 0.8), facecolors=colours[d % len(colours)], edgecolor="white", linewidth=0.2)
    sent, arrived = np.asarray(schedule.sent[0]) * 1e3, np.asarray(schedule.arrived[0]) * 1e3
    for s in range(len(placement.devices)):
        for t in range(len(placement.devices)):
            used = np.isfinite(sent[:, t]) & (device == s)
            if s != t and used.any():
                duration = placement.problem.transfer_time[used, s, t] * 1e3
                bars = list(zip(arrived[used, t] - duration, duration, strict=True))
                axes.broken_barh(bars, (len(rows) - 0.3, 0.6), facecolors="firebrick", edgecolor="white", linewidth=0.2)
                rows.append(f"{s} to {t}")
    axes.set_yticks(range(len(rows)), rows, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
