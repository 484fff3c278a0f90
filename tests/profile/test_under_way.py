"""Programs under way at the edges of a window, and the profiler's own threads: of traces written by hand."""

import json

import pytest

from rlfx.profile import read
from rlfx.profile.rows import Row

US = 1000


def trace(made, folder, executions, calls=(), not_ready=1, threads=()):
    """A window of 10 ms: `executions` are `(start, end, run)` of one thread of XLA, `calls` starts on the main thread."""
    space = made.Space()
    host = space.plane("/host:CPU")
    host.event("python", "rlfx.capture", 0, 10_000)
    for start in calls:
        host.event("python", "PjitFunction(small)", start, 10)
    for start, end, run in executions:
        host.event("tf_XLAPjRtCpuClient/1", "dot.1", start, end - start, hlo_op="dot.1", hlo_module="jit_f", run_id=run)
    for name in threads:
        for start in range(0, 10_000, 1000):
            host.event(name, "rlfx.blocked:wait", start, 900)
    samples = [[space.start_ns + at * US, 0, 0, -1] for at in (0, 10_000)]
    main = {"line": 1, "name": "MainThread", "samples": samples}
    ours = [{"line": len(host.lines), "name": name, "samples": samples} for name in threads]
    notes = {"line": 1, "not_ready": not_ready, "threads": [main, *ours], "places": []}
    space.write(folder, notes=json.dumps(notes))
    return read(folder)


GAPS = [(2000, 2100, 7), (5000, 5050, 7), (7000, 7100, 7)]  # its thread has no processor most of the time


def test_a_program_under_way_at_both_edges_is_open_all_the_time(made, tmp_path):
    report = trace(made, tmp_path, GAPS)
    assert report.device_bound == 1
    assert report.one_call
    assert report.by("path") == {(("jit(f)",),): 10_000 * US}


def test_a_program_that_ended_in_the_window_is_open_until_its_last_instruction(made, tmp_path):
    report = trace(made, tmp_path, GAPS, not_ready=0)
    assert report.device_bound == pytest.approx(0.71)
    assert not report.one_call


@pytest.mark.parametrize(
    ("executions", "calls"),
    [([*GAPS, (3000, 3100, 8)], ()), (GAPS, (4000,))],
    ids=["another ran", "another was called"],
)
def test_a_program_beside_others_is_not_the_only_call(made, tmp_path, executions, calls):
    assert not trace(made, tmp_path, executions, calls).one_call


def test_what_the_profiler_s_own_threads_do_is_the_program_s_time(made, tmp_path):
    report = trace(made, tmp_path, [], not_ready=0, threads=["rlfx.profile.run"])
    assert set(report.processes[0].sweep.threads) == {"MainThread"}
    assert report.rows == {Row("", (), "", "blocked", "idle"): 10_000 * US}


def test_a_program_that_waits_for_what_it_started_works_for_that(made, tmp_path):
    """A large product goes on in threads that leave no event, after its own has ended."""
    space = made.Space()
    host = space.plane("/host:CPU")
    host.event("python", "rlfx.capture", 0, 10_000)
    host.event("python", "rlfx.wait:block", 0, 10_000)
    host.event("tf_XLAPjRtCpuClient/1", "dot.1", 1000, 200, hlo_op="dot.1", hlo_module="jit_f", run_id=7)
    host.event("tf_XLAPjRtCpuClient/1", "ThunkExecutor::Execute (wait for completion)", 1200, 8000, run_id=7)
    space.write(tmp_path)
    report = read(tmp_path)
    assert report.by("path") == {(("jit(f)",),): 9200 * US, ((),): 800 * US}  # under way at the begin
