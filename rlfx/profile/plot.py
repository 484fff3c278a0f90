"""Figures of a report (extra: `plots`): RL-Scope's stacked bars, the timeline, transitions, and the process tree."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlfx.errors import ProfileError, located
from rlfx.profile.compare import mean
from rlfx.profile.report import Report
from rlfx.profile.rows import bound_by
from rlfx.profile.rules import IDLE, STATES
from rlfx.profile.tables import COLOURS, MEMORY

COLOUR = dict(zip(STATES, COLOURS, strict=True))
HATCH = {"idle": "", "busy": "///", "copy": "..."}
PHASES = "#4C4C99"
WORKING = "#333333"  # the device; no state of the host has this colour
LIMIT = {
    "host": "#E69F00", "dispatch": "#D55E00", "compile": "#CC79A7", "transfer": "#56B4E9", "device": WORKING,
    "blocked": "#DDDDDD", "import": "#A6761D", "idle": "#FFFFFF",
}  # fmt: skip


def pyplot() -> Any:
    """matplotlib's `pyplot`, or an error that names the extra."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ProfileError(
            located("Figures need matplotlib, which is not installed.", fix="pip install 'rlfx[plots]'")
        ) from None
    return plt


Reports = Report | Mapping[str, Report | Sequence[Report]]
AUTOMATIC = -1
#: An operation that holds more than this is opened where the depth is not given, while there are so few bars.
HOLDS, FEW = 0.5, 10
#: Operations with less of the time have one bar together.
SMALL, OTHER = 0.005, "(other)"


def bars(reports: Reports, *, depth: int | None = AUTOMATIC, normalise: bool = False, ax: Any = None) -> Any:
    """Stacked bars of time by operation, host state (colour) and device (hatched: the device is busy), as Figure 4.

    Args:
      reports: one, or several by name; each gets a bar an operation. Several runs of a program are a list: their means, with
        95% intervals.
      depth: operations deeper than this count for the one around them; None: none. By default as deep as it takes, so that no
        operation holds half of the time while there are few.
      normalise: percent of the window instead of milliseconds (per step, where steps are known).
      ax: matplotlib axes to draw on; new ones by default.

    Returns:
      The axes.

    Raises:
      ProfileError: matplotlib is not installed.
    """
    plt = pyplot()
    runs = _runs_by_name(reports)
    every = [report for several in runs.values() for report in several]
    depth = _depth(every, depth)
    shown = {path for path, _ in _held(every, depth)}
    stepped = all(r.steps for r in every)
    cells: dict[tuple[str, str], list[collections.Counter]] = {}
    for name, several in runs.items():
        for i, report in enumerate(several):
            scale = report.window_ns / 100 if normalise else report.steps if stepped else 1
            for row, ns in report.rows.items():
                label = _label(row.path, depth) if row.path[:depth] in shown else OTHER
                found = cells.setdefault((name, label), [collections.Counter() for _ in several])
                found[i][row.host, row.device] += ns / scale
    total = {key: mean([run.total() for run in found]) for key, found in cells.items()}
    order = sorted({label for _, label in cells}, key=lambda o: -sum(m for (_, l), (m, _) in total.items() if l == o))
    columns = [(name, label) for name in runs for label in order if (name, label) in cells]
    if ax is None:
        ax = plt.figure(figsize=(max(7, 0.8 * len(columns) + 4.5), 4), layout="constrained").add_subplot()
    tallest = max(m for m, _ in total.values())
    unit, size = ("%", 1.0) if normalise else _unit(tallest)
    bottom = np.zeros(len(columns))
    places = np.arange(len(columns)) + 0.8 * np.asarray([[*runs].index(name) for name, _ in columns])  # runs stand apart
    for key in [(s, d) for s in STATES for d in HATCH]:
        height = np.asarray([mean([run[key] for run in cells[c]])[0] / size for c in columns])
        if height.any():
            label = key[0] if key[1] == IDLE else f"{key[0]} + device {key[1]}"
            seen = height.max() * size > 0.002 * tallest  # what cannot be seen has no place in the legend
            ax.bar(places, height, bottom=bottom, color=COLOUR[key[0]], hatch=HATCH[key[1]],
                   edgecolor="white", linewidth=0.3, label=label if seen else None)  # fmt: skip
            bottom += height
    spread = np.asarray([total[c][1] / size for c in columns])
    several = np.flatnonzero(np.isfinite(spread))
    if len(several):
        ax.errorbar(places[several], bottom[several], spread[several], fmt="none", color="black", capsize=3, linewidth=0.8,
                    label="95% interval")  # fmt: skip
        bottom[several] += spread[several]
    ax.set_xticks(places, [o for _, o in columns], rotation=45, ha="right")
    most = max((name.count("\n") + 1 for name in runs if name), default=0)  # lines above the bars
    ax.set_ylim(0, (1.05 + 0.07 * most) * bottom.max())
    for name in filter(None, runs):
        middle = float(np.mean([at for at, (n, _) in zip(places, columns, strict=True) if n == name]))
        ax.text(middle, 0.99, name, transform=ax.get_xaxis_transform(), ha="center", va="top", fontsize="small")
    ax.set_ylabel("% of the time" if normalise else f"{unit} a step" if stepped else unit)
    ax.set_title("Where the time goes, by operation" + (": host and device" if len(runs) == 1 else ""), loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(fontsize="small", frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
    return ax


def _runs_by_name(reports: Reports) -> dict[str, Sequence[Report]]:
    if isinstance(reports, Report):
        return {"": [reports]}
    return {name: [found] if isinstance(found, Report) else found for name, found in reports.items()}


def _label(path: tuple[str, ...], depth: int | None) -> str:
    return "/".join(path[:depth]) or "(none)"


def _held(reports: Iterable[Report], depth: int | None) -> list[tuple[tuple[str, ...], float]]:
    """The operations of a depth with their shares of the time, the largest first; those that are too small are left out."""
    held: collections.Counter = collections.Counter()
    for report in reports:
        for row, ns in report.rows.items():
            held[row.path[:depth]] += ns
    return [(path, ns / held.total()) for path, ns in held.most_common() if ns >= SMALL * held.total()]


def _depth(reports: Sequence[Report], given: int | None) -> int | None:
    """The depth to which operations are drawn."""
    if given != AUTOMATIC:
        return given
    for depth in range(1, max(len(row.path) for report in reports for row in report.rows)):
        if _held(reports, depth)[0][1] <= HOLDS or len(_held(reports, depth + 1)) > FEW:
            return depth
    return None


def _unit(ns: float) -> tuple[str, float]:
    """The unit in which so many ns have one to three digits before the point, and its ns.

    Example:
      >>> _unit(30_000), _unit(2e6), _unit(5e10)
      (('µs', 1000.0), ('ms', 1000000.0), ('s', 1000000000.0))
    """
    return next(((unit, size) for unit, size in (("s", 1e9), ("ms", 1e6)) if ns >= size), ("µs", 1e3))


def timeline(
    report: Report, *, start: float = 0.0, stop: float | None = None, depth: int | None = AUTOMATIC, ax: Any = None
) -> Any:
    """What host and device did, over seconds of the span; two lanes a process: host state, and operation.

    Args:
      report: what to draw.
      start, stop: seconds after the first process's begin.
      depth: operations deeper than this count for the one around them; None: none. By default as in `bars`.
      ax: matplotlib axes; new ones by default.
    """
    plt = pyplot()
    depth = _depth([report], depth)
    if ax is None:
        entries = len({r.host for r in report.rows}) + len({r.path[:depth] for r in report.rows}) + 1
        height = max(1 + 1.1 * len(report.processes), 0.6 + 0.2 * entries)
        ax = plt.figure(figsize=(11, height), layout="constrained").add_subplot()
    first = min(p.span[0] for p in report.processes)
    shown = {path for path, _ in _held([report], depth)}

    def label(row: Any) -> str:
        return _label(row.path, depth) if row.path[:depth] in shown else OTHER

    operations = sorted({label(row) for row in report.rows})
    shades = {o: plt.get_cmap("Set3")(i % 12) for i, o in enumerate(operations)}
    lanes, names = [], []
    for p in report.processes:
        t = (p.sweep.bounds + p.epoch_ns - first) / 1e9
        top = [max(a.rows, key=lambda r: r[1])[0] for a in p.sweep.attributions]
        host = [COLOUR[r.host] for r in top]
        work = [shades[label(r)] for r in top]
        busy = [WORKING if r.device != IDLE else "#FFFFFF" for r in top]
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
    works = any(r.device != IDLE for r in report.rows)
    handles += [plt.Rectangle((0, 0), 1, 1, color=WORKING)] * works
    names = [*(f"host: {s}" for s in used), *operations, *["device works"] * works]
    ax.legend(handles, names, fontsize="small", frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
    ax.set_title("Host, operation and device over time", loc="left")
    ax.spines[["top", "right"]].set_visible(False)
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


def transitions(reports: Reports, *, depth: int | None = AUTOMATIC, ax: Any = None) -> Any:
    """Bars of transitions between host states by operation (a step, where steps are known), as Figure 4c.

    Args:
      reports: one, or several by name; of several runs of a program the mean.
      depth: operations deeper than this count for the one around them; None: none. By default as in `bars`.
      ax: matplotlib axes; new ones by default.
    """
    plt = pyplot()
    runs = _runs_by_name(reports)
    every = [report for several in runs.values() for report in several]
    depth = _depth(every, depth)
    cells: dict[tuple[str, str], collections.Counter] = {}
    for name, several in runs.items():
        for report in several:
            for (source, target, _, path), n in report.transitions.items():
                found = cells.setdefault((name, _label(path, depth)), collections.Counter())
                found[f"{source}→{target}"] += n / (report.steps or 1) / len(several)
    kinds = [k for k, _ in sum(cells.values(), collections.Counter()).most_common(6)]
    if ax is None:
        ax = plt.figure(figsize=(max(7, len(cells) + 4), 4), layout="constrained").add_subplot()
    width = 0.8 / max(1, len(kinds))
    for i, kind in enumerate(kinds):
        ax.bar(np.arange(len(cells)) + i * width, [c[kind] for c in cells.values()], width, label=kind)
    ax.set_xticks(
        np.arange(len(cells)) + 0.4 - width / 2, [f"{n}\n{o}" if n else o for n, o in cells], rotation=45, ha="right"
    )
    if not cells:
        ax.text(0.5, 0.5, "no calls of jax from Python", transform=ax.transAxes, ha="center", color="#666666")
        ax.set_yticks([])
    else:
        from matplotlib.ticker import LogLocator

        ax.set_yscale("log")
        counts = [v for c in cells.values() for v in c.values()]
        ax.set_ylim(10 ** np.floor(np.log10(min(counts)) - 0.3), 1.3 * max(counts))
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.yaxis.set_minor_formatter(lambda value, _: "")
    ax.set_ylabel("transitions a step" if all(r.steps for r in every) else "transitions")
    ax.set_title("Transitions between states of the host", loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    if kinds:
        ax.legend(fontsize="small", frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
    return ax


def memory(report: Report, *, ax: Any = None) -> Any:
    """Memory over seconds of the span: of jax's arrays, of the devices' allocators where they say, and of the process.

    Args:
      report: what to draw.
      ax: matplotlib axes for all of them; by default new ones, and others below them for the process, which holds much more.
    """
    plt = pyplot()
    upper, lower = ax, None
    if ax is None:
        upper, lower = plt.figure(figsize=(9, 5), layout="constrained").subplots(2, sharex=True)
    held = range(1, 1 + len(MEMORY))
    parts = [(upper, held)] if lower is None else [(upper, held[:-1]), (lower, held[-1:])]
    for axes, kinds in parts:
        _amounts(axes, report, kinds)
    last = parts[-1][0]
    last.set_xlim(0, report.span_ns / 1e9)
    last.set_xlabel("s")
    upper.set_title("Memory over time", loc="left")
    return upper


def _amounts(ax: Any, report: Report, kinds: range) -> None:
    """Some kinds of memory, of every process."""
    first = min(p.span[0] for p in report.processes)
    most = max((s[i] for samples in report.memory for s in samples for i in kinds), default=1)
    unit, size = ("GB", 1e9) if most > 2e9 else ("MB", 1e6)
    colours = (COLOUR["device"], COLOUR["wait"], COLOUR["callback"])
    for p, samples, style in zip(report.processes, report.memory, itertools.cycle(("-", "--", ":", "-."))):
        for i in kinds:
            if any(s[i] > 0 for s in samples):
                label = f"{p.name}: {MEMORY[i - 1]}" if len(report.processes) > 1 else MEMORY[i - 1]
                at = [(s.at_ns - first) / 1e9 for s in samples]
                ax.plot(at, [s[i] / size for s in samples], style, color=colours[i - 1], label=label)
    ax.set_ylim(0, 1.1 * most / size or 1)
    ax.set_ylabel(unit)
    ax.spines[["top", "right"]].set_visible(False)
    if ax.lines:
        ax.legend(fontsize="small", frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")


def process_tree(report: Report, *, ax: Any = None) -> Any:
    """Processes and their phases over time, each process under the one that started it, by what limits it (Figure 8).

    A line leads to a process from the phase in which it was started, or from the process that did.
    """
    plt = pyplot()
    placed = [(depth, p, phase) for depth, p in _tree(report) for phase in ("", *_phases(p))]
    if ax is None:
        ax = plt.figure(figsize=(9, 1.6 + 0.35 * len(placed)), layout="constrained").add_subplot()
    first = min(p.span[0] for p in report.processes)
    unit, size = _unit(report.span_ns)
    margin = 0.015 * report.span_ns / size
    rows = {(p.pid, phase): y for y, (_, p, phase) in enumerate(placed)}
    known = {p.pid: p for p in report.processes}
    used = [k for k in LIMIT if any(bound_by(r.host, r.device) == k for r in report.rows)]
    for y, (_, p, phase) in enumerate(placed):
        begin, lasts = (p.span[0] - first) / size, p.window_ns / size
        if phase:
            runs = [(begin + a / size, (b - a) / size) for a, b in _phases(p)[phase]]
            ax.broken_barh(runs, (-y - 0.15, 0.3), facecolors=PHASES)
            end, total = runs[-1][0] + runs[-1][1], sum(length for _, length in runs)
            ax.text(end + margin / 2, -y, f"{total:.3g} {unit}", va="center", fontsize="small")
            continue
        for a, b, kind in _over_time(p, lambda row: bound_by(row.host, row.device)):
            ax.broken_barh([(begin + a / size, (b - a) / size)], (-y - 0.25, 0.5), facecolors=LIMIT[kind])
        ax.broken_barh([(begin, lasts)], (-y - 0.25, 0.5), facecolors="none", edgecolor="#888888", linewidth=0.3)
        if p.parent in known and p.parent != p.pid:
            above = rows[p.parent, _phase_at(known[p.parent], p.span[0])]
            ax.plot([begin - margin, begin - margin, begin], [-above, -y, -y], color="black", linewidth=0.8)
            ax.plot([begin], [-y], marker=">", color="black", markersize=4)
        ax.text(begin + lasts + margin / 2, -y, f"{lasts:.3g} {unit}", va="center", fontsize="small")
    names = ["└ " * depth + p.name if not phase else f"phase: {phase}" for depth, p, phase in placed]
    ax.set_yticks([-y for y in range(len(placed))], names)
    ax.set_ylim(0.6 - len(placed), 0.6)
    ax.set_xlim(-3 * margin, 1.1 * report.span_ns / size)
    ax.set_xlabel(f"{unit} after the first process's begin")
    ax.set_title("Processes over time, by what limits them", loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor=LIMIT[k], edgecolor="#888888", linewidth=0.3) for k in used]
    ax.legend(handles, used, fontsize="small", frameon=False, bbox_to_anchor=(1.01, 1), loc="upper left")
    return ax


def _over_time(process: Any, of: Callable[[Any], str]) -> list[tuple[float, float, str]]:
    """What holds of a process from when to when, ns after its begin: of the row that has most of each instant."""
    sweep = process.sweep
    found = [of(max(a.rows, key=lambda r: r[1])[0]) for a in sweep.attributions]
    return _runs(sweep.bounds - sweep.bounds[0], [found[c] for c in sweep.combo])


def _phases(process: Any) -> dict[str, list[tuple[float, float]]]:
    """When each phase of a process was open: ns after its begin."""
    out: dict[str, list[tuple[float, float]]] = {}
    for a, b, phase in _over_time(process, lambda row: row.phase):
        if phase:
            out.setdefault(phase, []).append((a, b))
    return out


def _phase_at(process: Any, at_ns: int) -> str:
    """The phase of a process that was open at an epoch time; empty if none was."""
    at = at_ns - process.span[0]
    return next((phase for phase, runs in _phases(process).items() if any(a <= at < b for a, b in runs)), "")


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
