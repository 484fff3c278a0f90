"""A report as text, as HTML for notebooks, and as JSON."""

from __future__ import annotations

import collections
import html as escape
from typing import Any

from rlfx.errors import ProfileError, located
from rlfx.profile.attributed import Attributed
from rlfx.profile.gains import gains
from rlfx.profile.rows import bound_by, key_of, named
from rlfx.profile.rules import COMPILE, IDLE, STATES
from rlfx.profile.seen import by_line


def operation_rows(report: Attributed, depth: int | None = None) -> tuple[list[str], list[tuple]]:
    """`(host states in use, [(phase, operation, ms, share, ms by host state..., ms device)])`, in the order of paths.

    Operations deeper than `depth` count for the one around them.
    """
    cells: dict[tuple, collections.Counter] = {}
    for row, ns in report.rows.items():
        cell = cells.setdefault((row.phase, row.path[:depth]), collections.Counter())
        cell[row.host] += ns
        cell["total"] += ns
        cell["device+"] += ns if row.device != IDLE else 0
    states = [s for s in STATES if any(c[s] for c in cells.values())]
    table = []
    for (phase, path), c in sorted(cells.items(), key=lambda item: _order(item[0], cells)):
        shares = [c[s] / 1e6 for s in states]
        share = c["total"] / report.window_ns
        table.append((phase, path, c["total"] / 1e6, share, *shares, c["device+"] / 1e6))
    return states, table


def _order(key: tuple, cells: dict) -> tuple:
    """Trees in order of their weight: the largest top-level operation first, its children under it."""
    phase, path = key
    weights = []
    for size in range(1, len(path) + 1):
        weights.append(-sum(c["total"] for (ph, p), c in cells.items() if ph == phase and p[:size] == path[:size]))
    phase_weight = -sum(c["total"] for (ph, _), c in cells.items() if ph == phase)
    return phase_weight, phase, not path, [x for pair in zip(weights, path, strict=True) for x in pair]


def grid(header: list[str], body: list[list[str]], left: int = 1) -> str:
    """Align columns: the first `left` to the left, the others to the right.

    Example:
      >>> print(grid(["a", "n"], [["x", "10"], ["longer", "2"]]))
      a        n
      x       10
      longer   2
    """
    widths = [max(len(r[i]) for r in [header, *body]) for i in range(len(header))]
    lines = []
    for r in [header, *body]:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def text(report: Attributed, depth: int | None = None) -> str:
    """The whole report as text."""
    parts = [_title(report), report.verdict, "", _operations(report, depth), "", _device(report)]
    for title, body in (
        ("Gains", "\n".join(f"- {gain}" for gain in gains(report))),
        ("Lines of Python, with what they call", _lines(report)),
        ("Device work by operation", _device_rows(report, depth)),
        ("Device work by line", _device_lines(report)),
        ("Roofline", _roofline(report)),
        ("Transitions", _transitions(report)),
        ("Compiled", _compiled(report)),
        ("Stages of compiled programs", _stages(report)),
        ("Memory, MB", _memory(report)),
        ("Processes", _processes(report)),
        ("Threads", _threads(report)),
        ("Note", "\n".join(f"- {p}" for p in report.problems)),
    ):
        if body:
            parts += ["", f"{title}:", body]
    return "\n".join(parts)


def extrapolated(report: Attributed, steps: int) -> str:
    """What so many steps of the environments would take, by operation, if they went on as in the window.

    What was compiled in the window is not compiled again: it counts once.

    Raises:
      ProfileError: the report does not know how many steps it saw.
    """
    if not report.steps:
        raise ProfileError(
            located("The run does not say how many steps it did.", fix="Give `capture(steps=...)`, or `run --steps`.")
        )
    factor = steps / report.steps
    cells: collections.Counter = collections.Counter()
    for row, ns in report.rows.items():
        cells["(compilation)" if row.host == COMPILE else key_of(row, "operation")] += ns
    seconds = {name: ns / 1e9 * (1 if name == "(compilation)" else factor) for name, ns in cells.most_common()}
    total = sum(seconds.values())
    body = [[name, f"{s:.4g}", f"{s / total:.1%}"] for name, s in sorted(seconds.items(), key=lambda item: -item[1])]
    return grid([f"{steps:,} steps", "seconds", "share"], [*body, ["all", f"{total:.4g}", "100.0%"]])


def _title(report: Attributed) -> str:
    count = len(report.processes)
    head = f"{count} process{'es' if count > 1 else ''}, {report.span_ns / 1e9:.3f} s"
    if report.corrected_ns:
        head += f" after taking out {report.corrected_ns / 1e6:.1f} ms of profiling overhead"
        head += f" (± {report.correction_error:.0%})" if report.correction_error else ""
    if report.steps:
        head += f", {report.steps:,} steps, {report.steps_per_second:,.0f} steps/s"
    return head


def _operations(report: Attributed, depth: int | None) -> str:
    states, table = operation_rows(report, depth)
    phases = any(row[0] for row in table)
    header = (["phase"] if phases else []) + ["operation", "ms", "share", *states, "device busy"]
    body = []
    for phase, path, ms, share, *cells in table:
        label = "  " * max(0, len(path) - 1) + (path[-1] if path else "(none)")
        body.append(([phase or "-"] if phases else []) + [label, f"{ms:.2f}", f"{share:.1%}", *[_ms(c) for c in cells]])
    note = "(ms of the window by host state; `device busy` says how much of it the device worked)"
    return f"{grid(header, body, left=1 + phases)}\n{note}"


def _ms(value: float) -> str:
    return f"{value:.2f}" if value >= 0.005 else "."


def _device(report: Attributed) -> str:
    lines = [
        f"device busy {report.device_busy:.1%} of the span, device-bound {report.device_bound:.1%}; "
        f"a sampling tool would say {report.naive_utilisation:.0%}",
        f"compilation {report.compile_share:.1%}; device work outside operations {report.unattributed:.1%}, "
        f"in fusions of several {report.mixed:.1%}, with inherited names {report.inherited:.1%}",
    ]
    return "\n".join(lines)


def _device_rows(report: Attributed, depth: int | None) -> str:
    work: collections.Counter = collections.Counter()
    count: collections.Counter = collections.Counter()
    for row, ns in report.device_rows.items():
        work["/".join(row.path[:depth]) or "(none)"] += ns
    for process in report.processes:
        for (_, path), n in process.timeline.launches.items():
            count["/".join(path[:depth]) or "(none)"] += n
    total = sum(work.values()) or 1
    body = [[k, f"{ns / 1e6:.2f}", f"{ns / total:.1%}", str(count[k])] for k, ns in work.most_common(20)]
    return grid(["operation", "ms", "share", "instructions"], body) if body else ""


def _roofline(report: Attributed) -> str:
    found = [roof for roof in report.roofline()[:20] if roof.flops or roof.bytes]
    body = [
        [
            r.operation, f"{r.flops / 1e6:.4g}", f"{r.bytes / 1e6:.4g}", f"{r.flops / max(r.bytes, 1):.2g}",
            f"{r.flops / r.seconds / 1e9:.3g}" if r.seconds else ".", f"{r.bytes / r.seconds / 1e9:.3g}" if r.seconds else ".",
            *("?" if share is None else f"{share:.2g}" for share in (r.arithmetic, r.bandwidth, r.starts)), r.limit or "-",
        ]
        for r in found
    ]  # fmt: skip
    header = [
        "operation",
        "Mflop",
        "MB",
        "flop/B",
        "Gflop/s",
        "GB/s",
        "of arithmetic",
        "of bandwidth",
        "of starts",
        "near",
    ]
    return grid(header, body) if body else ""


def _transitions(report: Attributed) -> str:
    kinds: collections.Counter = collections.Counter()
    cells: dict[str, collections.Counter] = {}
    for (source, target, _, path), n in report.transitions.items():
        kinds[source, target] += n
        cells.setdefault("/".join(path) or "(none)", collections.Counter())[source, target] += n
    columns = [k for k, _ in kinds.most_common(6)]
    rows = sorted(cells.items(), key=lambda item: -item[1].total())[:15]
    body = [[name, *[str(c[k] or ".") for k in columns]] for name, c in rows]
    body.append(["all", *[str(kinds[k]) for k in columns]])
    name, count = report.iterations
    if count:
        body.append([f"per {name} ({count} times)", *[f"{kinds[k] / count:.3g}" for k in columns]])
    if report.steps:
        body.append(["per step", *[f"{kinds[k] / report.steps:.3g}" for k in columns]])
    return grid(["operation", *[f"{a}→{b}" for a, b in columns]], body) if columns else ""


def _compiled(report: Attributed) -> str:
    body = []
    for c in report.compiled[:15]:
        causes = collections.Counter(c.causes)
        why = "; ".join(f"{n}× {cause}" if n > 1 else cause for cause, n in causes.items())
        body.append([c.function, why, str(c.count), f"{c.seconds * 1e3:.1f}"])
    return grid(["function", "cause", "count", "ms"], body, left=2) if body else ""


def _lines(report: Attributed) -> str:
    body = [
        [str(line.frame), line.kind, f"{line.ns / 1e6:.2f}", f"{line.ns / report.window_ns:.1%}", str(line.samples)]
        for process in report.processes
        for line in by_line(process)[:10]
    ]
    return grid(["line", "what the thread does", "ms", "of the window", "samples"], body, left=2) if body else ""


def _device_lines(report: Attributed) -> str:
    found = report.device_lines()
    total = sum(line.alone for line in found) or 1
    rows = [line for line in found if line.ns >= 0.02 * total and line.alone >= 0.001 * total][:12]
    body = [[str(r.frame), f"{r.ns / 1e6:.2f}", f"{r.ns / total:.1%}", f"{r.alone / 1e6:.2f}"] for r in rows]
    return grid(["line", "ms with what it calls", "share", "ms alone"], body) if body else ""


def _memory(report: Attributed) -> str:
    body = []
    for process, samples in zip(report.processes, report.memory, strict=True):
        for i, name in enumerate(MEMORY, 1):
            values = [sample[i] for sample in samples]
            if values and max(values) > 0:
                at = (samples[values.index(max(values))].at_ns - process.span[0]) / 1e9
                shown = [f"{v / 1e6:.1f}" for v in (values[0], values[-1], max(values))]
                body.append([process.name, name, *shown, f"{max(0.0, at):.2f}"])
    return grid(["process", "of", "at the begin", "at the end", "most", "at s"], body, left=2) if body else ""


#: What the fields of `Held` are called.
MEMORY = ("jax's arrays", "the devices' allocators", "the process")


def _stages(report: Attributed) -> str:
    inside: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for row, ns in report.device_rows.items():
        inside[row.stage][row.path[-1] if row.path else "(none)"] += ns
    body = []
    for stage, ns in report.stages().items():
        named = [
            f"{name} {part / ns:.0%}"
            for name, part in inside[stage].most_common(4)
            if name != stage and part > 0.01 * ns
        ]
        body += [[stage, f"{ns / 1e6:.2f}", ", ".join(named)]] if stage else []
    return grid(["stage", "ms", "of it, operations"], body) if body else ""


def _processes(report: Attributed) -> str:
    if len(report.processes) < 2:
        return ""
    first = min(p.span[0] for p in report.processes)
    body = []
    for p in report.processes:
        busy = sum(ns for r, ns in p.sweep.rows.items() if r.device != IDLE) / p.window_ns
        bound = sum(ns for r, ns in p.sweep.rows.items() if bound_by(r.host, r.device) == "device") / p.window_ns
        start = (p.span[0] - first) / 1e9
        body.append([p.name, str(p.pid), f"{start:.2f}", f"{p.window_ns / 1e9:.3f}", f"{busy:.1%}", f"{bound:.1%}"])
    return grid(["process", "pid", "start s", "seconds", "device busy", "device-bound"], body)


def _threads(report: Attributed) -> str:
    body = []
    for p in report.processes:
        if len(p.sweep.threads) < 2:
            continue
        for name, states in p.sweep.threads.items():
            shown = ", ".join(f"{k} {v / 1e6:.1f}" for k, v in sorted(states.items(), key=lambda x: -x[1]) if v)
            body.append([p.name, name, shown])
    return grid(["process", "thread", "ms"], body, left=3) if body else ""


def html(report: Attributed) -> str:
    """A table for notebooks, with a bar of host states in every row."""
    states, table = operation_rows(report)
    colours = dict(zip(STATES, COLOURS, strict=True))
    rows = []
    for phase, path, ms, share, *cells in table:
        bar = "".join(
            f'<span style="display:inline-block;height:0.9em;background:{colours[s]};'
            f'width:{200 * value / (report.window_ns / 1e6):.1f}px" title="{s} {value:.2f} ms"></span>'
            for s, value in zip(states, cells[:-1], strict=True)
        )
        label = "&nbsp;" * 3 * max(0, len(path) - 1) + escape.escape(path[-1] if path else "(none)")
        rows.append(
            f"<tr><td>{escape.escape(phase)}</td><td style='text-align:left'>{label}</td><td>{ms:.2f}</td>"
            f"<td>{share:.1%}</td><td style='text-align:left;white-space:nowrap'>{bar}</td>"
            f"<td>{cells[-1]:.2f}</td></tr>"
        )
    legend = " ".join(f'<span style="color:{colours[s]}">■</span> {s}' for s in states)
    notes = "".join(f"<li>{escape.escape(p)}</li>" for p in report.problems)
    return (
        f"<div><b>{escape.escape(report.verdict)}</b><br>{escape.escape(_title(report))}<br>"
        f"{escape.escape(_device(report))}<br>{legend}<table><tr><th>phase</th><th>operation</th><th>ms</th>"
        f"<th>share</th><th>host</th><th>device ms</th></tr>{''.join(rows)}</table>"
        f"<ul>{notes}</ul></div>"
    )


# Okabe and Ito's palette, which colour-blind readers can tell apart: one colour a host state.
COLOURS = ("#E69F00", "#F0E442", "#D55E00", "#CC79A7", "#56B4E9", "#999999", "#009E73", "#0072B2", "#DDDDDD", "#A6761D")


def as_dict(report: Attributed) -> dict[str, Any]:
    """Everything in JSON types."""
    return {
        "seconds": report.span_ns / 1e9,
        "window_ns": report.window_ns,
        "corrected_ns": report.corrected_ns,
        "correction_error": report.correction_error,
        "steps": report.steps,
        "steps_per_second": report.steps_per_second,
        "verdict": report.verdict,
        "limits": report.limits(),
        "device_busy": report.device_busy,
        "device_bound": report.device_bound,
        "naive_utilisation": report.naive_utilisation,
        "compile_share": report.compile_share,
        "one_call": report.one_call,
        "unattributed": report.unattributed,
        "mixed": report.mixed,
        "inherited": report.inherited,
        "gains": [vars(gain) for gain in gains(report)],
        "rows": [{**row._asdict(), "ns": ns} for row, ns in report.rows.items()],
        "device_rows": [
            {**row._asdict(), "ns": ns, "named": named(row.path)} for row, ns in report.device_rows.items()
        ],
        "lines": [
            {
                "file": line.frame.file,
                "line": line.frame.line,
                "kind": line.kind,
                "ns": line.ns,
                "samples": line.samples,
            }
            for p in report.processes
            for line in by_line(p)
        ],
        "device_lines": [
            {"file": r.frame.file, "line": r.frame.line, "ns": r.ns, "alone": r.alone} for r in report.device_lines()[:50]
        ],
        "iterations": dict(zip(("operation", "count"), report.iterations, strict=True)),
        "memory": [[sample._asdict() for sample in samples] for samples in report.memory],
        "roofline": [{**vars(roof), "near": roof.limit} for roof in report.roofline()],
        "transitions": [
            {"from": a, "to": b, "phase": phase, "path": path, "count": n}
            for (a, b, phase, path), n in report.transitions.items()
        ],
        "compiled": [vars(c) for c in report.compiled],
        "processes": [
            {"name": p.name, "pid": p.pid, "parent": p.parent, "start_ns": p.span[0], "seconds": p.window_ns / 1e9}
            for p in report.processes
        ],
        "problems": report.problems,
    }
