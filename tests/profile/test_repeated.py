"""Repeated runs with error bars, and totals of longer runs."""

import json

import pytest

from rlfx.errors import ProfileError
from rlfx.profile import read
from rlfx.profile.__main__ import main
from rlfx.profile.compare import repeated
from rlfx.profile.tables import extrapolated


def ran(made, folder, iterations, steps=100):
    folder.mkdir()
    made.gpu_space(iterations).write(folder, json.dumps({"steps": steps}))
    return folder


def test_repeated_runs_have_intervals_and_ratios_only_where_they_are_no_chance(made, tmp_path, capsys):
    base = [ran(made, tmp_path / f"base{k}", k) for k in (9, 10, 11)]
    half = [ran(made, tmp_path / f"half{k}", k) for k in (4, 5, 6)]
    same = [ran(made, tmp_path / f"same{k}", k) for k in (10, 11, 12)]
    one, two, three = (",".join(map(str, group)) for group in (base, half, same))
    assert main(["compare", one, two, three]) == 0
    total, update = capsys.readouterr().out.splitlines()[1:3]
    # 10 ms a run of 100 steps: 100 us a step, with 9, 10 and 11: 4.30 * 10 / sqrt(3).
    assert total.split() == ["total", "100", "±", "25", "50", "±", "25", "110", "±", "25", "2.00x", "-"]
    assert update.split()[0] == "update"


def test_bars_of_repeated_runs_are_drawn(made, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    one, two = (",".join(str(ran(made, tmp_path / f"{name}{k}", k)) for k in (2, 3)) for name in "ab")
    figure = tmp_path / "bars.png"
    assert main(["compare", one, two, "--plot", str(figure)]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert main(["compare", one, two, "--plot", str(tmp_path / "nowhere/bars.png")]) == 1
    assert "Cannot write" in capsys.readouterr().err
    assert main(["compare", one, ","]) == 1
    assert "',' names no directory.\n  Fix: Give directories, repeated runs with commas" in capsys.readouterr().err


def test_runs_that_do_not_repeat_have_no_interval(made, tmp_path):
    one, two = (read(ran(made, tmp_path / str(k), k)) for k in (2, 4))
    first = repeated({"a": [one], "b": [two]}).splitlines()[1]
    assert first.split() == ["total", "20", "40", "-"]


def test_runs_without_steps_are_not_compared_with_others(made, tmp_path):
    one, two = (read(ran(made, tmp_path / str(n), 2, n)) for n in (0, 4))
    with pytest.raises(ProfileError, match=r"Some runs say how many steps they did and others do not \(0, 4\)"):
        repeated({"a": [one], "b": [two]})


def test_a_longer_run_takes_so_many_times_what_the_window_took(made, tmp_path, capsys):
    folder = ran(made, tmp_path / "run", 3, steps=300)
    assert main(["report", str(folder), "--of", "300000"]) == 0
    table = capsys.readouterr().out.split("300,000 steps")[1]
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["update", "1.86", "62.0%"],
        ["update/loss", "1.14", "38.0%"],
        ["all", "3", "100.0%"],
    ]


def test_a_total_is_of_steps(made, tmp_path, capsys):
    assert main(["report", str(ran(made, tmp_path / "run", 1)), "--of", "-3"]) == 1
    assert "--of" in capsys.readouterr().err


def test_without_steps_nothing_is_extrapolated(made, tmp_path):
    report = read(ran(made, tmp_path / "run", 1, steps=0))
    with pytest.raises(ProfileError, match="The run does not say how many steps it did") as error:
        extrapolated(report, 10)
    assert str(error.value).endswith("Give `capture(steps=...)`, or `run --steps`.")
