"""``python -m rlfx``: the report and what it says of a failure."""

import pytest

from rlfx import __main__ as report


def test_versions_and_extras(monkeypatch):
    lines = list(report.versions())
    assert lines[0].startswith("rlfx ")
    assert any("jax 0." in line and "jaxlib 0." in line for line in lines)
    assert any("cpu device" in line for line in lines)
    assert any(line.startswith("place: flax ") for line in report.extras())
    monkeypatch.setattr(report, "version", lambda package: None if package == "brax" else "1.0")
    assert any("no brax; pip install 'rlfx[envs]'" in line for line in report.extras())


def test_a_failure_is_said(monkeypatch, capsys):
    def wrong():
        raise AssertionError("0 is not 1")

    monkeypatch.setattr(report, "CHECKS", {"one": lambda: None, "two": wrong})
    assert report.main() == 1
    out = capsys.readouterr().out
    assert "ok     one" in out
    assert "FAILED two" in out
    assert "AssertionError: 0 is not 1" in out


@pytest.mark.parametrize("what", report.CHECKS)
def test_the_self_test(what):
    report.CHECKS[what]()
