"""Calibration and correction: exact on a made trace, sane on this machine, refused where it does not apply."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlfx.errors import ProfileError
from rlfx.profile import capture, operation, read
from rlfx.profile.calibration import Measured, calibrate, contention, fit, scaled
from rlfx.profile.capture import machine
from rlfx.profile.overhead import Overhead, held_up, load, stored_at, total
from rlfx.profile.rows import Row

pytestmark = pytest.mark.optimised

COSTS = {"annotation": 10_000.0, "host": 2_000.0}


def test_costs_are_taken_out_where_they_were_paid(made, tmp_path):
    made.gpu_space(3).write(tmp_path)
    report = read(tmp_path)
    corrected = report.corrected(Overhead("anywhere", COSTS, "2026-01-01", 0.09))
    update, loss = ("update",), ("update", "loss")
    taken = {row: ns - corrected.rows[row] for row, ns in report.rows.items() if ns != corrected.rows[row]}
    # An iteration: the annotation; the call; its execution and two launches; the wait; the read.
    assert taken == {
        Row("", update, "", "python", "idle"): 3 * 10_000,
        Row("", update, "", "backend", "idle"): 3 * 2_000,
        Row("", update, "", "dispatch", "idle"): 3 * 3 * 2_000,
        Row("", loss, "", "wait", "busy"): 3 * 2_000,
        Row("", update, "", "transfer", "copy"): 3 * 2_000,
    }
    assert corrected.corrected_ns == 66_000
    assert sum(corrected.rows.values()) == corrected.window_ns == 3_000_000 - 66_000
    assert corrected.device_rows != report.device_rows
    assert "after taking out 0.1 ms of profiling overhead (± 9%)" in corrected.text()
    assert total(report.processes[0], Overhead("", COSTS, "")) == 66_000


def test_events_off_the_critical_path_cost_what_contention_says(tmp_path):
    """A loop that launches much faster than the device works: the pool's events hold nothing up, on enough cores."""
    x, y = jnp.ones((256, 256)), jnp.ones(8)
    heavy, light = jax.jit(lambda a: jnp.tanh(a @ a)), jax.jit(lambda a: a + 1)
    jax.block_until_ready([heavy(x), light(y)])
    with capture(tmp_path) as session:
        out = heavy(x)
        for _ in range(200):
            y = light(y)
        jax.block_until_ready([out, y])
    report = session.report()
    costs = {"task": 12.0, "thunk": 12.0}  # so little that no row is used up; whole ns for 2, 3 or 4 that share it
    on, off = held_up(report, Overhead("", costs, ""))
    assert off > 0
    taken = [
        report.corrected(Overhead(machine(), costs, "", contention=share)).corrected_ns for share in (0.0, 0.5, 1.0)
    ]
    assert taken[0] == pytest.approx(on, rel=1e-3)
    assert taken[2] == pytest.approx(on + off, rel=1e-3)
    assert taken[1] == pytest.approx(sum(taken[::2]) / 2, rel=1e-3)


def test_contention_explains_wall_times(made, tmp_path):
    made.gpu_space(1).write(tmp_path)
    report = read(tmp_path)
    on, off = held_up(report, Overhead("", COSTS, ""))
    assert off == 0  # every event of that trace is on the main thread
    assert contention(Overhead("", COSTS, ""), [Measured(np.ones(3), np.full(3, 2 * on), report)]) == 0.0
    doubled = scaled(Overhead("", COSTS, ""), Measured(np.asarray([40e3, 44e3, 900e3]), np.full(3, 40e3), report))
    assert doubled.costs == pytest.approx({kind: 2 * ns for kind, ns in COSTS.items()})
    assert scaled(Overhead("", {}, ""), Measured(np.ones(3), np.ones(3), report)).costs == {}


def test_no_row_becomes_negative(made, tmp_path):
    made.gpu_space(1).write(tmp_path)
    corrected = read(tmp_path).corrected(Overhead("anywhere", {"annotation": 1e12}, ""))
    assert min(corrected.rows.values()) == 0
    assert sum(corrected.rows.values()) == corrected.window_ns


def test_a_report_is_corrected_once(made, tmp_path):
    made.gpu_space(1).write(tmp_path)
    corrected = read(tmp_path).corrected(Overhead("anywhere", COSTS, ""))
    with pytest.raises(ProfileError, match=r"corrected already\.\n  Fix: Correct the one that `read` returned"):
        corrected.corrected(Overhead("anywhere", COSTS, ""))


def test_a_calibration_of_another_machine_is_refused(made, tmp_path):
    made.gpu_space(1).write(tmp_path, notes=json.dumps({"machine": "this one"}))
    with pytest.raises(ProfileError, match=r"of another machine \(that one\) than the trace \(this one\)"):
        read(tmp_path).corrected(Overhead("that one", COSTS, ""))


def test_calibrations_are_stored_in_the_user_s_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("RLFX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ProfileError, match=r"No calibration .*\n  Fix: Run `python -m rlfx.profile calibrate` once"):
        load()
    overhead = Overhead("this one", COSTS, "2026-01-01")
    assert overhead.save() == stored_at() == tmp_path / "rlfx" / "profile-overhead.json"
    assert load() == overhead
    old = Overhead("this one", {"annotation": 1.0, "wait": 1.0}, "2026-01-01")
    for text in ("[1", "[1]", json.dumps(dataclasses.asdict(old))):
        stored_at().write_text(text)
        with pytest.raises(ProfileError, match=r"is not a calibration of this version\.\n  Fix: Run `python -m rlfx"):
            load()
    monkeypatch.setenv("RLFX_CACHE", str(tmp_path / "kept"))
    assert stored_at() == tmp_path / "kept" / "profile-overhead.json"


def test_costs_are_fitted_to_a_workload_in_proportion():
    x = jnp.ones(8)
    f = jax.jit(lambda a: a + 1)

    def workload():
        for _ in range(200):
            with operation("step"):
                f(x).block_until_ready()

    workload()
    machine = Overhead("this one", {"annotation": 1000.0, "host": 3000.0}, "2026-01-01")
    fitted = fit(machine, workload, rounds=3)
    assert fitted.costs["host"] == pytest.approx(3 * fitted.costs["annotation"])
    assert fit(machine, lambda: None, rounds=1) == machine


@pytest.mark.slow
def test_calibration_on_this_machine_explains_most_of_what_annotations_cost(tmp_path):
    overhead = calibrate(rounds=3)
    assert 0.2e3 < overhead.costs["annotation"] < 50e3
    assert 50 < overhead.costs["thunk"] < 20e3
    x = jnp.ones(8)
    f = jax.jit(lambda a: a + 1)
    jax.block_until_ready(f(x))
    with capture(tmp_path) as session:
        for _ in range(2000):
            with operation("step"):
                f(x)
    report = session.report()
    corrected = report.corrected(overhead)
    assert 2000 * overhead.costs["annotation"] * 0.9 <= corrected.corrected_ns < report.window_ns
    assert sum(corrected.rows.values()) == corrected.window_ns
    assert dataclasses.asdict(load(overhead.save(tmp_path / "costs.json"))) == dataclasses.asdict(overhead)
