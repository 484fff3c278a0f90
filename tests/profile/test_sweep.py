"""The sweep against a reference that walks every nanosecond."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from rlfx.profile.events import Line
from rlfx.profile.launches import Base
from rlfx.profile.rows import Row
from rlfx.profile.sweep import attribute, sampled, split, sweep, union
from rlfx.profile.timeline import ABSENT, Context, Share, Timeline, Track

MAIN = Context("python", "", (Share("", ()),), Base())
CONTEXTS = [
    ABSENT,
    MAIN,
    Context("python", "", (Share("", ("a",)),), Base("", ("a",))),
    Context("backend", "", (Share("p", ("b",)),), Base("p", ("b",))),
    Context("wait", "", (Share("", ("b",)),), Base("", ("b",))),
    Context("fetch", "", (Share("", ("b",)),), Base("", ("b",))),
    Context(None, "leaf", (Share("", ("c",)),), Base()),
    Context(None, "leaf", (Share("", ("c",), weight=3), Share("", ("d",), weight=4)), Base()),
    Context(None, "container", (Share("", ("e",)),), Base()),
    Context(None, "copy", (Share("", ()),), Base()),
    Context("callback", "", (Share("", ("f",)),), Base()),
    Context("device", "leaf", (Share("", ("c",)),), Base()),
]
STOP = 60


@st.composite
def timelines(draw):
    tracks = []
    for kind in ("main", "program", "pool", "stream"):
        times = sorted(draw(st.sets(st.integers(-5, STOP + 5), max_size=12)))
        steps = draw(st.lists(st.integers(0, len(CONTEXTS) - 1), min_size=len(times), max_size=len(times)))
        tracks.append(Track(Line("", kind, kind), np.asarray(times, np.int64), np.asarray(steps, np.int32)))
    return Timeline((0, STOP), CONTEXTS, tracks, 0)


def at(track, now):
    index = np.searchsorted(track.times, now, "right") - 1
    return CONTEXTS[track.context[index]] if index >= 0 else MAIN if track.line.kind == "main" else ABSENT


@settings(max_examples=200, deadline=None)
@given(timelines())
def test_the_sweep_is_exact_and_agrees_with_a_walk_over_every_nanosecond(timeline):
    result = sweep(timeline)
    assert sum(result.rows.values()) == STOP
    kinds = [t.line.kind for t in timeline.tracks]
    expected: dict[Row, float] = {}
    busy = 0
    for now in range(STOP):
        found = attribute([at(t, now) for t in timeline.tracks], kinds)
        busy += found.state != "idle"
        total = sum(w for _, w in found.rows)
        for row, weight in found.rows:
            expected[row] = expected.get(row, 0) + weight / total
    assert set(result.rows) >= {row for row, ns in expected.items() if ns >= 1}
    for row, ns in result.rows.items():
        assert abs(ns - expected[row]) <= len(result.attributions)  # whole nanoseconds of each combination
    assert sum(result.device.values()) == busy
    assert (np.diff(result.bounds)[result.busy]).sum() == busy
    for states in result.threads.values():
        assert sum(states.values()) == STOP


@given(st.integers(0, 10**15), st.lists(st.tuples(st.text(max_size=1), st.integers(1, 10**6)), min_size=1, max_size=6))
def test_splitting_loses_nothing(ns, shares):
    parts = split(ns, shares)
    assert sum(part for _, part in parts) == ns
    total = sum(w for _, w in shares)
    assert all(abs(part - ns * w / total) < 1.01 for (_, part), (_, w) in zip(parts, shares, strict=True))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)).map(lambda p: (p[0], p[0] + p[1])), max_size=8))
def test_union_covers_the_same_points(intervals):
    merged = union(intervals)
    points = {x for a, b in intervals for x in range(a, b)}
    assert {x for a, b in merged for x in range(a, b)} == points
    assert all(b < c for (_, b), (c, _) in zip(merged, merged[1:], strict=False))
    assert sampled(merged, (0, 60), period=1) == len(points) / 60


def test_annotated_threads_come_before_idle_ones():
    python = CONTEXTS[2]
    found = attribute([MAIN, python], ["main", "program"])
    assert found.rows == ((Row("", ("a",), "", "python", "idle"), 1),)


def test_reading_back_is_a_wait_while_the_device_executes():
    fetch, leaf = CONTEXTS[5], CONTEXTS[6]
    assert attribute([fetch, leaf], ["main", "pool"]).rows == ((Row("", ("c",), "", "wait", "busy"), 1),)
    assert attribute([fetch], ["main"]).rows == ((Row("", ("b",), "", "transfer", "idle"), 1),)


def test_a_program_open_without_an_instruction_keeps_the_device_busy_unless_a_callback_runs():
    wait, program, callback = CONTEXTS[4], CONTEXTS[8], CONTEXTS[10]
    assert attribute([wait, program], ["main", "pool"]).rows[0][0] == Row("", ("e",), "", "wait", "busy")
    assert attribute([wait, program, callback], ["main", "pool", "pool"]).rows[0][0] == Row(
        "", ("f",), "", "callback", "idle"
    )
