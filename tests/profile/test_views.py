"""What a report looks like: text, HTML, JSON, figures, Perfetto, comparison, several processes, the command line."""

import dataclasses
import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from rlfx.errors import ProfileError
from rlfx.profile import read
from rlfx.profile.__main__ import main
from rlfx.profile.compare import Difference, mean
from rlfx.profile.perfetto import save

pytestmark = pytest.mark.optimised


@pytest.fixture
def report(made, tmp_path):
    made.gpu_space(3).write(tmp_path, notes=json.dumps({"process": "trainer", "pid": 10, "parent": 1, "steps": 30}))
    return read(tmp_path)


def test_text(report):
    text = report.text()
    assert text.splitlines()[0] == "1 process, 0.003 s, 30 steps, 10,000 steps/s"
    assert "update     1.86  62.0%    1.65     0.02      0.04      0.15     .         0.17" in text
    assert "  loss     1.14  38.0%       .        .         .         .  1.14         1.14" in text
    assert "device busy 43.5% of the span, device-bound 38.0%; a sampling tool would say 100%" in text
    assert "device work outside operations 0.0%" in text
    rows = [" ".join(row.split()) for row in text.splitlines()]
    assert "per step 0.1 0.1 0.1 0.1" in rows
    assert "per update (3 times) 1 1 1 1" in rows
    assert str(report) == text
    assert repr(report).startswith("Report(1 processes, 0.003 s, 'host-bound: 55%")


def test_depth_folds_operations_into_the_one_around_them(report):
    assert "loss" not in report.text(depth=1).split("Device work")[0]
    assert "update     3.00  100.0%" in report.text(depth=1)


def test_html_escapes_and_shows_every_operation(report):
    html = report._repr_html_()
    assert html.startswith("<div><b>host-bound")
    assert "update" in html
    assert "loss" in html
    assert html.count("<tr>") == 3


def test_json_holds_every_row(report):
    data = json.loads(json.dumps(report.as_dict()))
    assert sum(row["ns"] for row in data["rows"]) == data["window_ns"] == 3_000_000
    assert data["verdict"] == report.verdict
    assert data["device_bound"] == pytest.approx(0.38)


def test_pivots(report):
    assert report.by("operation") == {("update",): 1_860_000, ("update/loss",): 1_140_000}
    assert report.by("bound")[("host",)] == 1_650_000
    assert report.total(host="wait", device="busy") == 1_140_000
    assert report.within("update") == 3_000_000
    assert sum(report.limits().values()) == pytest.approx(1)


def test_comparison_is_per_step(made, tmp_path, report):
    made.gpu_space(3).write(tmp_path / "b", notes=json.dumps({"steps": 60}))
    text = str(report.compare(read(tmp_path / "b")))
    assert text.startswith("after is 2.00x faster a step: 100 us became 50 us; the largest change is in update")
    made.gpu_space(3).write(tmp_path / "c")
    with pytest.raises(ProfileError, match=r"One run says how many steps it did and the other does not \(30 and 0\)"):
        report.compare(read(tmp_path / "c"))


def test_windows_of_unknown_work_are_not_called_faster(made, tmp_path, capsys):
    for name, iterations in (("a", 3), ("b", 1)):
        (tmp_path / name).mkdir()
        made.gpu_space(iterations).write(tmp_path / name)
    one, two = str(tmp_path / "a"), str(tmp_path / "b")
    says = "how much work each window did is not known, so nothing here says which is faster. Give `capture(steps=...)`"
    assert main(["compare", one, two]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"the windows took 3 ms and 1 ms; {says}, or `run --steps`, in all of them.")
    assert text.splitlines()[2].split() == ["operation", "(ms", "in", "total)", "before", "after", "change"]
    assert not any(word in text for word in ("faster a", "faster in", "slower", "infx"))
    for runs in ([one, two, one], [f"{one},{one}", f"{two},{two}"]):
        assert main(["compare", *runs]) == 0
        text = capsys.readouterr().out
        assert text.rstrip().endswith(f"{says[:1].upper()}{says[1:]}, or `run --steps`, in all of them.")
        assert "x\n" not in text


def test_what_vanished_has_no_ratio(report):
    vanished = Difference("copy", 2.0, 0.0)
    assert vanished.ratio == float("inf")
    text = str(dataclasses.replace(report.compare(report), operations=[vanished]))
    assert text.splitlines()[3].split() == ["copy", "2", "0", "-2", "-"]


def test_many_runs_side_by_side(made, tmp_path, capsys):
    for name, k in (("a", 3), ("b", 2), ("c", 4)):
        (tmp_path / name).mkdir()
        made.gpu_space(k).write(tmp_path / name, notes=json.dumps({"process": "p", "pid": 1, "parent": 0, "steps": 30}))
    names = [str(tmp_path / name) for name in "abc"]
    assert main(["compare", *names]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["operation", "(us", "a", "step)", *names, "median", "range"]
    assert lines[1] == ["total", "100", "66.67", "133.3", "100", "66.67", "-", "133.3"]
    assert any(line[:2] == ["limit", "(us"] for line in lines)
    (tmp_path / "d").mkdir()
    made.gpu_space(3).write(tmp_path / "d", notes=json.dumps({"process": "p", "pid": 1, "parent": 0}))
    assert main(["compare", *names, str(tmp_path / "d")]) == 1
    assert "Some runs say how many steps they did and others do not (30, 30, 30, 0)." in capsys.readouterr().err


def test_processes_are_merged_on_epoch_time(made, tmp_path):
    for i, offset_us in enumerate((0, 1500)):
        space = made.gpu_space(2)
        space.start_ns += offset_us * 1000
        notes = {"process": f"worker_{i}", "pid": 100 + i, "parent": 10, "steps": 5}
        space.write(tmp_path, notes=json.dumps(notes))
    report = read(tmp_path)
    assert [p.name for p in report.processes] == ["worker_0", "worker_1"]
    assert report.window_ns == sum(report.rows.values()) == 4_000_000
    assert report.span_ns == 3_500_000
    assert report.steps == 10
    # The device is busy from 115 to 550 us of each 1,000; the second process's turns fall between the first one's.
    assert report.device_busy == pytest.approx(4 * 435 / 3500)
    assert "worker_1" in report.text()
    assert not any("clock" in problem for problem in report.problems)


def test_processes_whose_windows_never_meet_are_told(made, tmp_path):
    for i, offset_s in enumerate((0, 0, 3600)):  # the last is of a machine whose clock is an hour off
        space = made.gpu_space(2)
        space.start_ns += offset_s * 10**9
        space.write(tmp_path, notes=json.dumps({"process": f"worker_{i}", "pid": 100 + i, "parent": 10}))
    (said,) = [problem for problem in read(tmp_path).problems if "clock" in problem]
    assert said.startswith("worker_2: its window is 3.6e+03 s away from every other: captured at another time, or on a machine")


def test_perfetto(report, tmp_path):
    path = save(report, tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in events if e["ph"] == "M"} == {"process_name", "thread_name"}
    by_lane = {tid: sum(e["dur"] for e in spans if e["tid"] == tid) for tid in range(5)}
    assert by_lane[2] == pytest.approx(3000)  # host: every instant has a state
    assert by_lane[3] == pytest.approx(3 * 435)  # device
    assert json.loads(save(report, tmp_path / "trace.json").read_text())["traceEvents"] == events


def test_figures(report, tmp_path, made):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from rlfx.profile import plot

    ax = plot.bars(report, depth=None)
    assert sum(patch.get_height() for patch in ax.patches) == pytest.approx(3000 / 30)  # a step
    assert ax.get_ylabel() == "µs a step"
    assert ax.get_ylim()[1] > max(patch.get_y() + patch.get_height() for patch in ax.patches)
    whole = dataclasses.replace(report, steps=1)  # the unit is that of the tallest bar
    assert plot.bars(whole, depth=None).get_ylabel() == "ms a step"
    assert ax.get_title("left") == "Where the time goes, by operation: host and device"
    assert [t.get_text() for t in ax.get_xticklabels()] == ["update", "update/loss"]
    assert sum(p.get_height() for p in plot.bars({"a": report, "b": report}, normalise=True).patches) == pytest.approx(
        200
    )
    assert len(plot.timeline(report).get_yticklabels()) == 3
    assert plot.transitions(report).get_ylabel() == "transitions a step"
    made.gpu_space(2).write(tmp_path, notes=json.dumps({"process": "worker", "pid": 11, "parent": 10}))
    tree = plot.process_tree(read(tmp_path))
    assert [t.get_text() for t in tree.get_yticklabels()] == ["trainer", "└ worker"]
    assert tree.get_title("left") == "Processes over time, by what limits them"
    assert len(tree.lines) == 2  # from the trainer to its worker, and the arrow's head
    deep = plot.timeline(report, depth=None).get_legend().get_texts()
    assert {"update", "update/loss", "device works"} <= {t.get_text() for t in deep}
    assert plot.WORKING not in plot.COLOUR.values()
    assert len(set(plot.LIMIT.values())) == len(plot.LIMIT)
    matplotlib.pyplot.close("all")


def test_bars_of_repeated_runs_have_intervals(made, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from rlfx.profile import plot

    runs = []
    for i in range(3):
        made.gpu_space(1 + i).write(tmp_path / str(i), notes=json.dumps({"process": "trainer", "steps": 10}))
        runs.append(read(tmp_path / str(i)))
    ax = plot.bars({"a": runs, "b": runs[0]}, depth=1)
    (interval,) = ax.containers[-1:]
    low, high = interval.lines[2][0].get_segments()[0][:, 1]
    spans = [run.window_ns / 10 / 1e3 for run in runs]  # all of it is in one operation
    assert (low + high) / 2 == pytest.approx(np.mean(spans))
    assert (high - low) / 2 == pytest.approx(mean(spans)[1])
    assert ax.get_legend().get_texts()[-1].get_text() == "95% interval"
    assert [t.get_text() for t in ax.get_xticklabels()] == ["update", "update"]
    assert [t.get_text() for t in ax.texts] == ["a", "b"]  # once above its bars, not under each of them
    first, second = ax.get_xticks()
    assert second - first > 1.5  # runs stand apart
    matplotlib.pyplot.close("all")


def test_figures_open_an_operation_that_holds_most(report):
    from rlfx.profile import plot

    update, loss = (
        sum(ns for row, ns in report.rows.items() if row.path[-1:] == (name,)) for name in ("update", "loss")
    )
    assert update
    assert loss
    assert plot._depth([report], plot.AUTOMATIC) is None  # all is in `update`, and two bars are few
    assert plot._depth([report], 1) == 1


def test_figures_without_matplotlib_name_the_extra(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    from rlfx.profile import plot

    with pytest.raises(ProfileError, match=r"Figures need matplotlib.*\n  Fix: pip install 'rlfx\[plots\]'"):
        plot.bars(report)


SCRIPT = """
import sys
import jax, jax.numpy as jnp
from rlfx.profile import operation
f = jax.jit(lambda a: jnp.tanh(a @ a))
x = jnp.ones((32, 32))
with operation("training"):
    for _ in range(int(sys.argv[1])):
        x = f(x)
    jax.block_until_ready(x)
"""


def test_run_report_and_compare(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for name in ("a", "b"):
        assert main(["run", "--out", str(tmp_path / name), "--steps", "5", str(script), "5"]) == 0
    text = capsys.readouterr().out
    assert "training" in text
    assert "5 steps" in text
    assert sys.argv[0] != str(script)
    figures = tmp_path / "figures"
    command = ["report", str(tmp_path / "a"), "--json", "--html", str(tmp_path / "a.html")]
    assert main([*command, "--perfetto", str(tmp_path / "a.json"), "--plot", str(figures)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["steps"] == 5
    assert sorted(p.name for p in figures.iterdir()) == [
        "bars.png",
        "memory.png",
        "process_tree.png",
        "timeline.png",
        "transitions.png",
    ]
    assert (tmp_path / "a.html").read_text().startswith("<div>")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.startswith("after is ")


def test_run_of_a_window(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    script = tmp_path / "train.py"
    script.write_text(
        "import time\nfrom rlfx.profile import operation\nend = time.time() + 1.2\n"
        "with operation('loop'):\n    while time.time() < end:\n        time.sleep(0.001)\n"
    )
    assert main(["run", "--out", str(tmp_path / "a"), "--start", "0.3", "--duration", "0.2", str(script)]) == 0
    report = read(tmp_path / "a")
    assert "the capture ended after 0.2 s, and the script went on" in capsys.readouterr().err
    assert report.window_ns >= 0.2e9
    assert report.within("loop") > 0.95 * report.window_ns
    assert main(["run", "--out", str(tmp_path / "b"), "--start", "60", str(script)]) == 1
    assert "ended before the capture began: it ran for less than --start 60.0 seconds" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(report, tmp_path, capsys):
    for option in ("--html", "--perfetto"):
        assert main(["report", str(tmp_path), option, str(tmp_path / "none" / "x")]) == 1
        assert f"rlfx.profile: Cannot write {tmp_path}/none/x: No such file or directory.\n  Fix: Name a file in" in (
            capsys.readouterr().err
        )


def test_errors_are_one_message_and_status_1(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("rlfx.profile: ")
    assert main(["run", str(tmp_path / "none.py")]) == 1
    assert "none.py' does not exist" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error(made, tmp_path):
    made.gpu_space().write(tmp_path)
    command = [sys.executable, "-m", "rlfx.profile", "report", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()  # as `| head` does
        assert "Traceback" not in process.stderr.read()
        assert process.wait(60) == 0


def test_calibrate_stores_a_file(tmp_path, capsys, monkeypatch):
    from rlfx.profile import calibration, overhead

    fake = overhead.Overhead("this machine", {"annotation": 1234.5}, "2026-01-01")
    monkeypatch.setattr(calibration, "calibrate", lambda rounds: fake)
    assert main(["calibrate", "--out", str(tmp_path / "costs.json")]) == 0
    assert "annotation         1,234" in capsys.readouterr().out
    assert overhead.load(tmp_path / "costs.json") == fake
