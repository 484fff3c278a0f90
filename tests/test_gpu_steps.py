"""``make gpu``, with a CPU as the device: it finds what is wrong, goes on where it was, and says what it did not do."""

import json
import pathlib
import subprocess
import sys

import pytest

from benchmarks.gpu import __main__ as runner
from benchmarks.gpu import measures, steps

ROOT = pathlib.Path(__file__).parents[1]


def gpu(out, *options):
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--out", str(out), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_step_is_written_once_and_found_again(tmp_path):
    done = gpu(tmp_path, "--only", "recurrences")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "recurrences.json"
    found = json.loads(path.read_text())
    assert found["wrong"] == []
    assert found["rows"][0]["difference"] < steps.EXACT
    assert found["versions"]["jax"]
    assert found["device"]["platform"] == "cpu"
    path.write_text(json.dumps({**found, "wrong": ["a number"]}))
    again = gpu(tmp_path, "--only", "recurrences")
    assert again.returncode == 1
    assert "['a number']" in again.stdout  # it was not run again
    path.write_text(json.dumps({**found, "commit": "another"}))
    assert gpu(tmp_path, "--only", "recurrences", "--minutes", "0").stdout.count("no time was left: run it again") == 1


def test_steps_beside_each_other_are_rehearsed_and_then_measured(tmp_path):
    done = gpu(tmp_path, "--only", "recurrences", "epochs", "--beside", "2")
    assert done.returncode == 0, done.stderr
    said = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    assert said == ["(recurrences)", "(epochs)", "recurrences", "epochs"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epochs.json", "recurrences.json"]


def test_an_item_that_fails_leaves_the_others(tmp_path, monkeypatch):
    def row(tiny, item):
        if item == "second":
            raise MemoryError("too large for this device")
        return {"item": item}, []

    monkeypatch.setitem(steps.STEPS, "three", steps.Step(lambda tiny: ["first", "second", "third"], row, 1))
    runner.run_step("three", True, tmp_path / "three.json")
    found = json.loads((tmp_path / "three.json").read_text())
    said = "second: MemoryError: too large for this device"
    assert found["rows"] == [{"item": "first"}, {"failed": said}, {"item": "third"}]
    assert found["wrong"] == [said]


def test_learners_beside_each_other(tmp_path):
    """Two processes compile one each, and measure in turns."""
    options = ("--tiny", "--only", "TDC", "Retrace", "--processes", "2", "--variants", "unroll=2", "--out", tmp_path)
    command = [sys.executable, "-m", "benchmarks.gpu.unseen", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "unseen.json").read_text())
    assert (found["of"], found["wrong"]) == (2, [])
    assert {row["workload"].split()[0] for row in found["rows"]} == {"TDC(lambda)", "Retrace"}
    for row in found["rows"]:
        assert row["of best"] == row["ms"]["rlfx"] / row["ms"][row["best"]]
        assert max(row["difference"].values()) < 1e-4
        assert {"rlfx", "rlfx, unroll=2", "plain"} < row["ms"].keys()
        assert not row["best"].startswith("rlfx")


def test_a_step_that_fails_says_why(tmp_path):
    done = gpu(tmp_path, "--only", "recurrences", "--minutes", "0.001")
    assert done.returncode == 1
    assert "took more than" in done.stdout or "no time was left" in done.stdout
    assert not list(tmp_path.glob("*.json"))


def test_a_step_that_was_ended_goes_on_after_the_rows_that_it_had(tmp_path, monkeypatch):
    ran = []

    def row(tiny, item):
        ran.append(item)
        if item == "third" and len(ran) == 3:
            raise KeyboardInterrupt
        return {"item": item}, ["it differs"] if item == "second" else []

    monkeypatch.setattr(runner, "about", lambda tiny: {"commit": "c", "tiny": tiny})
    monkeypatch.setitem(steps.STEPS, "three", steps.Step(lambda tiny: ["first", "second", "third"], row, 1))
    path = tmp_path / "three.partial"
    with pytest.raises(KeyboardInterrupt):
        runner.run_step("three", True, path)
    assert runner.kept(path) == " (2 of 3 rows are kept)"
    runner.run_step("three", True, path)
    assert ran == ["first", "second", "third", "third"]
    found = json.loads(path.read_text())
    assert [r["item"] for r in found["rows"]] == ["first", "second", "third"]
    assert found["wrong"] == ["it differs"]
    monkeypatch.setattr(runner, "about", lambda tiny: {"commit": "another", "tiny": tiny})
    runner.run_step("three", True, path)
    assert ran[4:] == ["first", "second", "third"]


def test_distances():
    assert measures.distance([1.0, [2.0, 4.0]], [1.0, [2.0, 5.0]]) == pytest.approx(0.2)
    assert measures.distance([float("nan")], [1.0]) == float("inf")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in steps.STEPS if n != "recurrences"])
def test_every_step(name, tmp_path):
    done = gpu(tmp_path, "--only", name)
    assert done.returncode == 0, done.stdout + done.stderr
