"""A GPU trace, synthetic but in the profiler's own format: every microsecond of it is known beforehand."""

import pytest

from rlfx.profile import read
from rlfx.profile.rows import DeviceRow, Row


@pytest.fixture
def report(made, tmp_path):
    made.gpu_space(3).write(tmp_path)
    return read(tmp_path)


def test_every_row_is_exact(report):
    us = {key: ns / 1000 for key, ns in report.rows.items()}
    update, loss = ("update",), ("update", "loss")
    assert us == {
        Row("", update, "", "python", "idle"): 3 * (100 + 450),
        Row("", update, "", "backend", "idle"): 3 * 5,  # until the dispatch at 105
        Row("", update, "", "dispatch", "idle"): 3 * 10,
        Row("", update, "", "dispatch", "busy"): 3 * 4,
        Row("", update, "", "backend", "busy"): 3 * 1,  # the kernel runs from 115, the call returns at 120
        Row("", loss, "", "wait", "busy"): 3 * 380,
        Row("", update, "", "transfer", "copy"): 3 * 50,
    }
    assert sum(report.rows.values()) == report.window_ns == 3_000_000


def test_the_device_is_attributed_through_correlation_ids_and_inheritance(report):
    assert {k: ns / 1000 for k, ns in report.device_rows.items()} == {
        DeviceRow("", ("update", "loss"), ""): 3 * 385,  # the kernel, and the copy that XLA made of its result
        DeviceRow("", ("update",), ""): 3 * 50,  # a memcpy whose launch was not recorded: what the host was doing
    }
    assert report.kernels["jit_train", "copy.2"].path == ("update", "loss")
    assert report.kernels["jit_train", "copy.2"].op.inherited


def test_launches_transitions_and_bytes_are_exact(report):
    timeline = report.processes[0].timeline
    assert sum(timeline.launches.values()) == 2 * 3
    assert sum(timeline.bytes.values()) == 3 * 4096
    assert report.count("python", "backend") == 3
    assert report.count("backend", "dispatch") == 3
    assert report.count("python", "transfer", "update") == 3


def test_device_bound_time_against_naive_utilisation(report):
    assert report.device_busy == pytest.approx(0.435)
    assert report.device_bound == pytest.approx(0.380)
    assert report.naive_utilisation == 1.0  # F.11: every sampling period holds a kernel
    assert report.verdict.startswith("host-bound: 55% of the time, most of it in update (55%)")


def test_derived_lines_of_trace_viewers_are_not_counted_twice(report):
    assert not [p for p in report.problems if "unknown" in p]


def test_unknown_planes_lines_and_events_are_reported(made, tmp_path):
    space = made.gpu_space(1)
    space.plane("/device:QPU:0 Custom").event("q", "entangle", 0, 1)
    space.plane("/host:gremlin").event("g", "nibble", 0, 1)
    space.planes[2].event("Mystery", "hum", 0, 5)
    space.planes[1].event("python", "Sim::Physics", 600, 40)
    space.warnings.append("3 events dropped")
    space.write(tmp_path)
    problems = "\n".join(read(tmp_path).problems)
    assert "unknown plane '/host:gremlin' with 1 events: not attributed" in problems
    assert "unknown line 'q' of /device:QPU:0 Custom with 1 events: not attributed" in problems
    assert "unknown line 'Mystery' of /device:GPU:0 with 1 events: not attributed" in problems
    assert "unknown event 'Sim::Physics', 1 times, 0.04 ms: counted with what encloses it" in problems
    assert "the profiler warns: 3 events dropped" in problems


def test_kernels_without_metadata_keep_the_operation_of_their_launch(made, tmp_path):
    space = made.gpu_space(2)
    del space.planes[0]
    space.write(tmp_path)
    report = read(tmp_path)
    assert report.rows[Row("", ("update",), "", "wait", "busy")] == 2 * 380_000
    assert "no HLO metadata for jit_train: their instructions keep only the launch's operation" in report.problems
