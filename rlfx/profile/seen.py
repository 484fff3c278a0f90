"""At which lines threads of Python were seen, and what their processor did then: from the samples of a capture."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rlfx.profile import lines
from rlfx.profile.attributed import Process
from rlfx.profile.lines import INSTALLED, Frame
from rlfx.profile.rules import BACKEND, BLOCKED, DISPATCH, FETCH, PYTHON, TRANSFER, WAIT
from rlfx.profile.sweep import ACTING

CALL, PYTHON_KIND = "call of jax", "python"
#: What a sample of a thread says, by its state.
KINDS = {
    PYTHON: PYTHON_KIND, BACKEND: CALL, DISPATCH: CALL, TRANSFER: CALL, WAIT: WAIT, FETCH: WAIT, BLOCKED: BLOCKED,
}  # fmt: skip
#: Samples of a line without which nothing is said of it.
SAMPLES = 8
#: ns from the end of a call in C to the handler of a signal that came in it.
LATE = 4_000
#: A line whose samples are nearly all those of another that it calls says less than that.
NEARLY = 0.8
#: One that is in nearly all samples holds the program, and says nothing.
MOST = 0.95


class Sample(NamedTuple):
    """A thread was at `frame`, called by `callers`, in a context of the timeline; `kind` is empty for other states."""

    frame: Frame
    callers: tuple[Frame, ...]
    context: int
    kind: str
    thread: int = 0


def seen(process: Process) -> Iterator[Sample]:
    """Every sample in the window.

    Of a thread that was interrupted often enough, what acts is known from that, and only what rests from another thread.
    """
    tracks = {t.line.thread: t for t in process.timeline.tracks if t.line.thread and t.line.kind != "own"}
    contexts, (start, stop) = process.sweep.contexts, process.sweep.window
    known = lines.samples(process.notes, process.epoch_ns)
    ticks = collections.Counter(at.thread for at in known if at.tick)
    for one in known:
        track = tracks.get(one.thread)
        if track is None or not len(track.times) or not start <= one.at < stop:
            continue
        # A signal is handled after the call in C in which it came.
        at = int(np.searchsorted(track.times, one.at - (LATE if one.tick else 0), "right")) - 1
        if at < 0:
            continue
        context = int(track.context[at])
        state = contexts[context].state
        if one.tick == (state in ACTING) or ticks[one.thread] < SAMPLES:
            kind = KINDS.get(state or "", "")
            kind = CALL if kind == PYTHON_KIND and one.of_jax else kind
            if not (kind == BLOCKED and track.line.kind != "main" and _of_packages(one)):
                yield Sample(one.frame, one.callers, context, kind, one.thread)


def _of_packages(seen: lines.Seen) -> bool:
    """Is nothing of the user's in it? A package's own thread (a progress bar's, a writer's) that waits for work is no finding."""
    return all(INSTALLED.fullmatch(frame.file) for frame in (seen.frame, *seen.callers))


class Line(NamedTuple):
    """A line of the user's, with all that it calls: what a thread did there, for how long, by so many samples."""

    kind: str
    frame: Frame
    ns: float
    samples: int


def by_line(process: Process) -> list[Line]:
    """How long threads of Python were at which lines, the longest first; lines with few samples are left out."""
    total = collections.Counter((sample.thread, sample.context) for sample in seen(process) if sample.kind)
    weight: collections.Counter = collections.Counter()  # of a thread in a context
    tracks = process.sweep.tracks
    python = [i for i, line in enumerate(tracks) if line.kind in ("main", "program")]
    times = np.bincount(process.sweep.combo, np.diff(process.sweep.bounds), len(process.sweep.columns))
    for column, ns in zip(process.sweep.columns, times.tolist(), strict=True):
        for track in python:
            weight[tracks[track].thread, column[track]] += ns
    out = [
        Line(kind, frame, sum(n / total[c] * weight[c] for c, n in hits.items()), hits.total())
        for (kind, frame), hits in seen_at(process)
        if hits.total() >= SAMPLES
    ]
    return sorted(out, key=lambda line: -line.ns)


def seen_at(process: Process) -> list[tuple[tuple[str, Frame], collections.Counter]]:
    """By kind and line, with all that the line calls, how often which thread was there in which context: the most often first.

    Lines that only call another one of these are left out, and those that hold nearly everything.
    """
    hits: dict[tuple[str, Frame], set[int]] = collections.defaultdict(set)
    samples = [sample for sample in seen(process) if sample.kind]
    of_kind = collections.Counter(sample.kind for sample in samples)
    inner = {(sample.kind, sample.frame) for sample in samples}
    for i, sample in enumerate(samples):
        for frame in {sample.frame, *sample.callers}:
            hits[sample.kind, frame].add(i)
    often = sorted(hits.items(), key=lambda item: -len(item[1]))[:60]
    kept = []
    for (kind, frame), mine in often:
        below = [
            other
            for (k, f), other in often
            if k == kind and f != frame and other <= mine and (len(other), f) < (len(mine), frame)
        ]
        only_calls = any(len(other) >= NEARLY * len(mine) for other in below)
        holds_all = len(mine) > MOST * of_kind[kind] and (kind, frame) not in inner
        if not only_calls and not holds_all:
            kept.append(((kind, frame), collections.Counter((samples[i].thread, samples[i].context) for i in mine)))
    return kept
