"""Where threads of Python were blocked: their processor clocks laid over what the trace knows of them.

Between two samples a thread was on a processor, or ready for one, for a known time; the rest it was blocked. What the
trace calls a wait accounts for part of it. What is left lies where other threads act, which hand over work, or hold
Python's global lock; and otherwise in the longest stretches without an event.
"""

from __future__ import annotations

import bisect
import collections
import itertools
from typing import Any, NamedTuple

import numpy as np

from rlfx.profile.rules import BACKEND, BLOCKED, CALLBACK, COMPILE, DISPATCH, FETCH, IMPORT, PYTHON, TRANSFER, WAIT
from rlfx.profile.timeline import Context, Timeline, Track

# Less than this between two samples, as a part of the time between them, is the clocks' own error.
NOISE = 0.03
# A thread that blocks in a call of jax waits for the device; elsewhere for others.
BECOMES = {PYTHON: BLOCKED, BACKEND: WAIT, DISPATCH: WAIT}
ACTS = frozenset({PYTHON, BACKEND, DISPATCH, COMPILE, TRANSFER, CALLBACK, IMPORT})
RESTS = frozenset({WAIT, BLOCKED, FETCH})

Span = tuple[int, int]


class Stretch(NamedTuple):
    """Part of a track between two samples."""

    start: int
    stop: int
    context: int


class Clocked(NamedTuple):
    """A thread between two readings of its clocks: ns on no processor, ns ready for one, in a call of jax?

    It was in one at both readings, or at one of them and for most of the time that it was blocked in otherwise.
    """

    start: int
    stop: int
    track: int
    free: int
    queued: int
    of_jax: bool

    @property
    def doubt(self) -> int:
        """How much of the interval it takes to say where in it the thread was blocked."""
        return min(self.free + self.queued, self.stop - self.start - self.free)

    @property
    def ran(self) -> float:
        """The share of the interval on a processor."""
        return 1.0 - (self.free + self.queued) / (self.stop - self.start)


def mark(timeline: Timeline, notes: dict[str, Any], start_ns: int) -> None:
    """Put what the clocks say into the tracks of a timeline: what is certain first.

    Args:
      timeline: its tracks are replaced, the contexts are added to.
      notes: of a capture, with the samples of `threads.Watch`.
      start_ns: epoch ns of the trace's time 0.
    """
    contexts = timeline.contexts
    ids = {context: i for i, context in enumerate(contexts)}
    cuts: dict[int, list[Stretch]] = collections.defaultdict(list)

    def cut(c: Clocked, new: list[Stretch]) -> list[Span]:
        for s in new:
            old = contexts[s.context]
            after = old._replace(state=WAIT if c.of_jax else BECOMES[old.state or PYTHON])
            if after not in ids:
                ids[after] = len(contexts)
                contexts.append(after)
            cuts[c.track].append(s._replace(context=ids[after]))
        return [(s.start, s.stop) for s in new]

    taken, acts = Spans(), []  # when some thread acts
    for c in sorted(_clocked(timeline, notes, start_ns), key=lambda c: c.doubt):
        steps = between(timeline.tracks[c.track], c.start, c.stop)
        left = c.free - int((steps.stop - steps.start)[_in(contexts, steps, RESTS)].sum())
        gone: list[Span] = []
        if left >= NOISE * (c.stop - c.start):
            gone = cut(c, place(_could(contexts, steps), left, taken.between(c.start, c.stop)))
        acting = _without(_joined(steps, _in(contexts, steps, ACTS)), gone)
        acts.append((c, acting, gone))
        for span in acting:
            taken.add(*span)
    # A thread that is ready and has no processor acts only where no other does, who has one.
    taken = Spans()
    for c, acting, gone in sorted(acts, key=lambda found: -found[0].ran):
        others = _without(taken.between(c.start, c.stop), gone)
        if others and c.queued >= NOISE * (c.stop - c.start):
            could = _could(contexts, between(timeline.tracks[c.track], c.start, c.stop))
            acting = _without(acting, cut(c, place(_within(could, others), c.queued, [])))
        for span in acting:
            taken.add(*span)
    for at, new in cuts.items():
        timeline.tracks[at] = spliced(timeline.tracks[at], new)


def _clocked(timeline: Timeline, notes: dict[str, Any], start_ns: int) -> list[Clocked]:
    waits = [bool(of_jax) for _, _, of_jax, *_ in notes.get("places", [])]
    tracks = {t.line.thread: at for at, t in enumerate(timeline.tracks) if t.line.thread}
    out = []
    for thread in notes.get("threads", []):
        if thread["line"] not in tracks:
            continue
        track, first = timeline.tracks[tracks[thread["line"]]], next((s[3] for s in thread["samples"]), -1)
        early = first >= 0 and waits[first]  # a call of jax that was open at the start leaves no event
        unsure: list[int] = []  # where `out` has an interval with a call of jax at one end
        blocked = {True: 0, False: 0}  # ns, of jax or not, in the others
        for (begin, run, queued, place_), (end, run_, queued_, place__) in itertools.pairwise(thread["samples"]):
            known = [waits[p] for p in (place_, place__) if p >= 0]
            ready, open_at_begin = queued_ - queued, early
            early = early and place__ == first and len(between(track, timeline.window[0], end - start_ns).start) <= 1
            if early:  # in it, a thread that wakes up and hardly runs waits on, however long it is ready
                ready = 0
            free = max(0, min(end - begin, end - begin - (run_ - run) - ready))
            of_jax = open_at_begin or (bool(known) and all(known))
            if end > begin:
                if any(known) and not of_jax:
                    unsure.append(len(out))
                else:
                    blocked[of_jax] += free
                at = begin - start_ns, end - start_ns, tracks[thread["line"]]
                out.append(Clocked(*at, free, ready, of_jax))
        for at in unsure if blocked[True] > blocked[False] else ():
            out[at] = out[at]._replace(of_jax=True)
    return out


class Spans:
    """A set of instants, as intervals that are sorted and apart.

    Example:
      >>> s = Spans()
      >>> s.add(5, 9), s.add(1, 3), s.add(2, 6), s.add(20, 30)
      (None, None, None, None)
      >>> s.between(8, 25)
      [(1, 9), (20, 30)]
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> None:
        first, last = bisect.bisect_left(self._stops, start), bisect.bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last], self._stops[first:last] = [start], [stop]

    def between(self, start: int, stop: int) -> list[Span]:
        """The intervals that begin before `stop` and end after `start`."""
        first, last = bisect.bisect_right(self._stops, start), bisect.bisect_left(self._starts, stop)
        return list(zip(self._starts[first:last], self._stops[first:last], strict=True))


class Steps(NamedTuple):
    """Steps of a track: int64[n] each."""

    start: np.ndarray
    stop: np.ndarray
    context: np.ndarray


def between(track: Track, start: int, stop: int) -> Steps:
    """The steps of a track in an interval."""
    first = max(0, int(np.searchsorted(track.times, start, "right")) - 1)
    last = int(np.searchsorted(track.times, stop, "left"))
    times = np.clip(np.append(track.times[first:last], stop), start, stop)
    return Steps(times[:-1], times[1:], track.context[first:last])


def _in(contexts: list[Context], steps: Steps, states: frozenset[str]) -> np.ndarray:
    """Which steps are in one of the states."""
    return np.asarray([c.state in states for c in contexts], bool)[steps.context]


def _could(contexts: list[Context], steps: Steps) -> list[Stretch]:
    """The stretches in which a thread may have been blocked."""
    chosen = _in(contexts, steps, frozenset(BECOMES))
    cells = zip(*(cell[chosen].tolist() for cell in steps), strict=True)
    return [Stretch(*cell) for cell in cells if not contexts[cell[2]].device]


def _joined(steps: Steps, chosen: np.ndarray) -> list[Span]:
    """The intervals that the chosen steps make up together."""
    edges = np.diff(np.concatenate([[0], chosen.astype(np.int8), [0]]))
    begin, end = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1
    return list(zip(steps.start[begin].tolist(), steps.stop[end].tolist(), strict=True))


def place(stretches: list[Stretch], left: int, taken: list[Span]) -> list[Stretch]:
    """Lay `left` ns into stretches: first where others act, then at the end of the longest of what remains.

    Example:
      >>> place([Stretch(0, 10, 5), Stretch(20, 50, 6)], 15, [(8, 25)])
      [Stretch(start=8, stop=10, context=5), Stretch(start=20, stop=25, context=6), Stretch(start=42, stop=50, context=6)]
    """
    others, rest = [], []
    for s in stretches:
        alone = _without([(s.start, s.stop)], taken)
        rest += [Stretch(a, b, s.context) for a, b in alone]
        others += _within([s], taken)
    out: list[Stretch] = []
    for group in (others, rest):
        for s in sorted(group, key=lambda s: s.start - s.stop):
            part = min(left, s.stop - s.start)
            if part > 0:
                out.append(s._replace(start=s.stop - part))
                left -= part
    return sorted(out)


def _within(stretches: list[Stretch], spans: list[Span]) -> list[Stretch]:
    """The parts of stretches that lie in `spans`."""
    return [
        s._replace(start=max(a, s.start), stop=min(b, s.stop))
        for s in stretches
        for a, b in spans
        if a < s.stop and s.start < b
    ]


def _without(spans: list[Span], others: list[Span]) -> list[Span]:
    """`spans` without `others`, both sorted and apart."""
    out, at = [], 0
    for start, stop in spans:
        while at < len(others) and others[at][1] <= start:
            at += 1
        i, now = at, start
        while i < len(others) and others[i][0] < stop:
            if others[i][0] > now:
                out.append((now, others[i][0]))
            now = max(now, others[i][1])
            i += 1
        if now < stop:
            out.append((now, stop))
    return out


def spliced(track: Track, cuts: list[Stretch]) -> Track:
    """A track with other contexts in some intervals, which are apart.

    Example:
      >>> from rlfx.profile.events import Line
      >>> track = Track(Line("", "", ""), np.asarray([0, 10]), np.asarray([1, 2]))
      >>> t = spliced(track, [Stretch(3, 5, 7), Stretch(8, 12, 9)])
      >>> t.times.tolist(), t.context.tolist()
      ([0, 3, 5, 8, 12], [1, 7, 1, 9, 2])
    """
    starts, stops, inside = (np.asarray(x, np.int64) for x in zip(*sorted(cuts), strict=True))
    after = track.context[np.maximum(np.searchsorted(track.times, stops, "right") - 1, 0)]
    within = np.searchsorted(starts, track.times, "right") - 1
    kept = (within < 0) | (track.times >= stops[np.maximum(within, 0)])
    times = np.concatenate([track.times[kept], starts, stops])
    context = np.concatenate([track.context[kept], inside, after])
    # Of several at one time the last one counts: an interval's end, then a step of the track, then a begin.
    rank = np.concatenate([np.full(kept.sum(), 1), np.full(len(starts), 2), np.zeros(len(stops))])
    order = np.lexsort([rank, times])
    times, context = times[order], context[order]
    last = np.append(times[1:] != times[:-1], True)
    times, context = times[last], context[last].astype(np.int32)
    changed = np.append(True, context[1:] != context[:-1])
    return Track(track.line, times[changed], context[changed])
