"""Figures of a report (extra: `plots`): RL-Scope's stacked bars, the timeline, transitions, and the process tree."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from rlfx.errors import ProfileError, located
from rlfx.profile.report import Report
from rlfx.profile.rows import bound_by
from rlfx.profile.rules import IDLE, STATES
from rlfx.profile.tables import COLOURS

COLOUR = dict(zip(STATES, COLOURS, strict=True))
HATCH = {"idle": "", "busy": "///", "copy": "..."}


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ProfileError(
            located("Figures need matplotlib, which is not installed.", fix="pip install 'rlfx[plots]'")
        ) from None
    return plt


def bars(reports: Report | dict[str, Report], *, depth: int | None = 1, normalise: bool = False, ax: Any = None) -> Any:
    """Stacked bars of time by operation, host state (colour) and device (hatched: the device is busy), as Figure 4.

    Args:
      reports: one, or several by name; each gets a bar an operation.
      depth: operations deeper than this count for the one around them.
      normalise: percent of the window instead of milliseconds (per step, where steps are known).
      ax: matplotlib axes to draw on; new ones by default.

    Returns:
      The axes.

    Raises:
      ProfileError: matplotlib is not installed.
    """
    plt = _pyplot()
    named = {"": reports} if isinstance(reports, Report) else reports
    cells: dict[tuple[str, str], collections.Counter] = {}
    for name, report in named.items():
        scale = report.window_ns / 100 if normalise else 1e6 * (report.steps or 1)
        for row, ns in report.rows.items():
            label = "/".join(row.path[:depth]) or "(none)"
            cells.setdefault((name, label), collections.Counter())[row.host, row.device] += ns / scale
    order = sorted(
        {label for _, label in cells}, key=lambda o: -sum(c.total() for (_, l), c in cells.items() if l == o)
    )
    columns = [(name, label) for name in named for label in order if (name, label) in cells]
    if ax is None:
        ax = plt.figure(figsize=(max(4, 0.8 * len(columns) + 2), 4), layout="constrained").add_subplot()
    bottom = np.zeros(len(columns))
    for key in [(s, d) for s in STATES for d in HATCH]:
        height = np.asarray([cells[c][key] for c in columns])
        if height.any():
            label = key[0] if key[1] == IDLE else f"{key[0]} + device {key[1]}"
            ax.bar(range(len(columns)), height, bottom=bottom, color=COLOUR[key[0]], hatch=HATCH[key[1]],
                   edgecolor="white", linewidth=0.3, label=label)  # fmt: skip
            bottom += height
    ax.set_xticks(range(len(columns)), [f"{n}\n{o}" if n else o for n, o in columns], rotation=45, ha="right")
    stepped = all(r.steps for r in named.values())
    ax.set_ylabel("% of the time" if normalise else "ms a step" if stepped else "ms")
    ax.legend(fontsize="small", frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
    return ax


def timeline(report: Report, *, start: float = 0.0, stop: float | None = None, ax: Any = None) -> Any:
    """What host and device did, over seconds of the span; two lanes a process: host state, and operation.

    Args:
      report: what to draw.
      start, stop: seconds after the first process's begin.
      ax: matplotlib axes; new ones by default.
    """
    plt = _pyplot()
    if ax is None:
        ax = plt.figure(figsize=(10, 1 + 1.1 * len(report.processes)), layout="constrained").add_subplot()
    first = min(p.span[0] for p in report.processes)
    operations = sorted({"/".join(row.path[:1]) or "(none)" for row in report.rows})
    shades = {o: plt.get_cmap("tab20")(i % 20) for i, o in enumerate(operations)}
    lanes, names = [], []
    for p in report.processes:
        t = (p.sweep.bounds + p.epoch_ns - first) / 1e9
        top = [max(a.rows, key=lambda r: r[1])[0] for a in p.sweep.attributions]
        host = [COLOUR[r.host] for r in top]
        work = [shades["/".join(r.path[:1]) or "(none)"] for r in top]
        busy = ["#0072B2" if r.device != IDLE else "#FFFFFF" for r in top]
        for name, colours in (("host", host), ("operation", work), ("device", busy)):
            lanes.append((t, [colours[c] for c in p.sweep.combo]))
            names.append(f"{p.name} {name}" if len(report.processes) > 1 else name)
    for y, (t, colours) in enumerate(lanes):
        for a, b, colour in _runs(t, colours):
            if b >= start and (stop is None or a <= stop):
                ax.broken_barh([(a, b - a)], (y - 0.4, 0.8), facecolors=colour)
    ax.set_yticks(range(len(lanes)), names)
    ax.set_xlim(start, stop if stop is not None else report.span_ns / 1e9)
    ax.set_xlabel("s")
    used = [s for s in STATES if report.total(host=s)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOUR[s]) for s in used]
    handles += [plt.Rectangle((0, 0), 1, 1, color=shades[o]) for o in operations]
    ax.legend(
        handles, [*used, *operations], fontsize="small", frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left"
    )
    return ax


def _runs(t: np.ndarray, colours: list) -> list[tuple[float, float, Any]]:
    """Join neighbours until a run is 1/2000 of the width, and draw it in the colour that has most of it."""
    out: list[list] = []
    smallest = (t[-1] - t[0]) / 2000 if len(t) > 1 else 0
    begin, inside = t[0], collections.Counter()
    for a, b, colour in zip(t[:-1], t[1:], colours, strict=True):
        inside[colour] += b - a
        if b - begin < smallest and b < t[-1]:
            continue
        ((most, _),) = inside.most_common(1)
        if out and out[-1][2] == most:
            out[-1][1] = b
        else:
            out.append([begin, b, most])
        begin, inside = b, collections.Counter()
    return [tuple(run) for run in out]


def transitions(reports: Report | dict[str, Report], *, ax: Any = None) -> Any:
    """Bars of transitions between host states by operation (a step, where steps are known), as Figure 4c."""
    plt = _pyplot()
    named = {"": reports} if isinstance(reports, Report) else reports
    cells: dict[tuple[str, str], collections.Counter] = {}
    for name, report in named.items():
        for (source, target, _, path), n in report.transitions.items():
            cells.setdefault((name, "/".join(path[:1]) or "(none)"), collections.Counter())[f"{source}→{target}"] += (
                n / (report.steps or 1)
            )
    kinds = [k for k, _ in sum(cells.values(), collections.Counter()).most_common(6)]
    if ax is None:
        ax = plt.figure(figsize=(max(4, len(cells) + 2), 4), layout="constrained").add_subplot()
    width = 0.8 / max(1, len(kinds))
    for i, kind in enumerate(kinds):
        ax.bar(np.arange(len(cells)) + i * width, [c[kind] for c in cells.values()], width, label=kind)
    ax.set_xticks(
        np.arange(len(cells)) + 0.4 - width / 2, [f"{n}\n{o}" if n else o for n, o in cells], rotation=45, ha="right"
    )
    ax.set_yscale("log")
    if cells:
        smallest = min(v for c in cells.values() for v in c.values())
        ax.set_ylim(bottom=10 ** np.floor(np.log10(smallest) - 0.3))
    ax.set_ylabel("transitions a step" if all(r.steps for r in named.values()) else "transitions")
    ax.legend(fontsize="small", frameon=False)
    return ax


def process_tree(report: Report, *, ax: Any = None) -> Any:
    """Processes under the one that started them; a bar each: seconds by what limits it (Figure 8)."""
    plt = _pyplot()
    placed = _tree(report)
    if ax is None:
        ax = plt.figure(figsize=(9, 1.6 + 0.45 * len(placed)), layout="constrained").add_subplot()
    kinds = ["host", "dispatch", "compile", "transfer", "device", "idle"]
    shades = dict(zip(kinds, ("#E69F00", "#D55E00", "#CC79A7", "#56B4E9", "#0072B2", "#DDDDDD"), strict=True))
    first = min(p.span[0] for p in report.processes)
    for y, (_, p) in enumerate(placed):
        left = (p.span[0] - first) / 1e9
        for kind in kinds:
            ns = sum(v for r, v in p.sweep.rows.items() if bound_by(r.host, r.device) == kind)
            ax.barh(-y, ns / 1e9, left=left, color=shades[kind], label=kind if y == 0 else None)
            left += ns / 1e9
    ax.set_yticks([-y for y in range(len(placed))], ["    " * depth + p.name for depth, p in placed], ha="right")
    ax.set_xlabel("s")
    ax.legend(fontsize="small", frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
    return ax


def _tree(report: Report) -> list[tuple[int, Any]]:
    """`(depth, process)` in depth-first order."""
    known = {p.pid for p in report.processes}
    out: list[tuple[int, Any]] = []

    def visit(process: Any, depth: int) -> None:
        out.append((depth, process))
        for child in report.processes:
            if child.parent == process.pid and child.pid != process.pid:
                visit(child, depth + 1)

    for process in report.processes:
        if process.parent not in known or process.parent == process.pid:
            visit(process, 0)
    return out
