"""Export to the trace-event format that https://ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
from typing import Any

from rlfx.profile.report import Report
from rlfx.profile.rows import bound_by
from rlfx.profile.rules import IDLE

LANES = ("phase", "operation", "host", "device", "limit")


def events(report: Report) -> list[dict[str, Any]]:
    """Five lanes a process (phase, operation, host state, device, what limits), microseconds after the first begin."""
    first = min(p.span[0] for p in report.processes)
    out: list[dict[str, Any]] = []
    for number, p in enumerate(report.processes):
        pid = p.pid or number
        out.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": p.name}})
        for tid, lane in enumerate(LANES):
            out.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}})
        tops = [max(a.rows, key=lambda r: r[1])[0] for a in p.sweep.attributions]
        labels = [
            (r.phase, "/".join(r.path), r.host, "" if r.device == IDLE else r.device, bound_by(r.host, r.device))
            for r in tops
        ]
        times = (p.sweep.bounds + p.epoch_ns - first) / 1e3
        for tid in range(len(LANES)):
            begin = 0
            combo = p.sweep.combo
            for i in range(1, len(combo) + 1):
                if i < len(combo) and labels[combo[i]][tid] == labels[combo[begin]][tid]:
                    continue
                if labels[combo[begin]][tid]:
                    start, stop = float(times[begin]), float(times[i])
                    name = labels[combo[begin]][tid]
                    out.append({"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start, "dur": stop - start})
                begin = i
    return out


def save(report: Report, path: str | os.PathLike[str]) -> pathlib.Path:
    """Write the attributed timeline as JSON; gzipped if the name ends in `.gz`.

    Returns:
      The path written.
    """
    target = pathlib.Path(path)
    raw = json.dumps({"traceEvents": events(report), "displayTimeUnit": "ms"}).encode()
    target.write_bytes(gzip.compress(raw) if target.suffix == ".gz" else raw)
    return target
