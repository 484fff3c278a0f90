"""Counting executions: columns of them, added up by what is the same of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlfx.profile.events import Executions, Kind, Marks
from rlfx.profile.hlo import LEAF, Op
from rlfx.profile.rules import CALLBACK, DEVICE, PYTHON
from rlfx.profile.timeline import THUNK, Kernel, Share, Timeline
from rlfx.profile.work import Work


def pay(out: Timeline, kind: str, marks: Marks) -> None:
    """Add events that profiling paid for."""
    if len(marks.times):
        out.paid[kind] = Marks.join([out.paid.get(kind, Marks()), marks])


def executions(
    out: Timeline,
    device: Executions,
    cases: list[tuple[int, int, int]],
    case: np.ndarray,
    op: Callable[[Kind], Op | None],
    lines: list[str],
) -> None:
    """Add what the executions in the window count for: transitions, kernels, launches, and events that were paid.

    Args:
      out: the timeline that is added to.
      device: all executions.
      cases: indices of the context around, of the own one, and of the kind.
      case: which of the cases each execution is.
      op: the HLO instruction of a kind.
      lines: the kind of each line.
    """
    start, stop = out.window
    inside = np.flatnonzero((device.start >= start) & (device.start < stop))
    if not len(inside):
        return
    which = case[inside]
    counts = np.bincount(which, minlength=len(cases)).tolist()
    ns = np.bincount(which, (device.end - device.start)[inside], len(cases))
    streams = np.asarray([kind == "stream" for kind in lines])
    called = np.zeros(len(cases), bool)
    for i, (before, after, kind) in enumerate(cases):
        if not counts[i]:
            continue
        old, new, what = out.contexts[before], out.contexts[after], device.kinds[kind]
        share = new.shares[0] if new.shares else Share("", ())
        if new.state not in (None, old.state) or new.state == CALLBACK:
            source = old.state or (DEVICE if new.state == CALLBACK else PYTHON)
            out.transitions[source, new.state, share.phase, share.path] += counts[i]
        if not what.copy and new.device == LEAF:
            out.launches[share.phase, share.path] += counts[i]
        kernel = out.kernels.setdefault((what.module, what.op or what.name), Kernel())
        kernel.count += counts[i]
        kernel.ns += int(ns[i])
        kernel.op, kernel.path, kernel.copy = op(what), share.path, what.copy
        called[i] = new.state == CALLBACK
        if kernel.op is not None and any(kernel.op.work):
            done = kernel.op.work.times(counts[i] / sum(s.weight for s in new.shares or (share,)))
            for s in new.shares or (share,):
                key = s.phase, s.path
                out.work[key] = out.work.get(key, Work()).plus(done.times(s.weight))
    for at, size in device.bytes.items():
        if start <= device.start[at] < stop:
            out.bytes[device.kinds[device.kind[at]].name] += size
    out.worked = int(device.end[inside].max())
    host = ~streams[device.line[inside]]
    for kind, chosen in ((CALLBACK, host & called[which]), (THUNK, host & ~called[which])):
        at = inside[chosen]
        pay(out, kind, Marks(device.start[at], device.line[at]))
