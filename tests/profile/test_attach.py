"""A process that runs already, seen from outside by py-spy; and what is said where that cannot be."""

import os
import shutil
import subprocess
import sys

import pytest

from rlfx.errors import ProfileError
from rlfx.profile import __main__ as command
from rlfx.profile import attach

RAW = """\
thread (0x1): MainThread;<module> (/home/me/train.py:9);learn (/lib/site-packages/agent/learn.py:5);loss (/home/me/loss.py:4) 30
thread (0x1): MainThread;<module> (/home/me/train.py:9);step (/home/me/train.py:4) 50
thread (0x2): actor;run (/home/me/actor.py:7) 20
"""


def test_lines_count_with_what_they_call_and_alone():
    found = attach.read(7, 100, RAW)
    assert found.threads == {"MainThread": 80, "actor": 20}
    assert {str(f): n for f, n in found.within.items()} == {"train.py:9": 80, "train.py:4": 50, "loss.py:4": 30, "actor.py:7": 20}
    assert {str(f): n for f, n in found.alone.items()} == {"train.py:4": 50, "loss.py:4": 30, "actor.py:7": 20}
    assert "MainThread 80%, actor 20%" in str(found)
    assert "train.py:9" in str(found).splitlines()[3]


def test_without_py_spy_the_error_has_the_line_that_installs_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.main(["attach", "1"]) == 1
    assert "attach needs py-spy, which is not installed" in (said := capsys.readouterr().err)
    assert "pip install 'rlfx[attach]'" in said


def spying(monkeypatch, tmp_path, message):
    """A py-spy that refuses."""
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))


@pytest.mark.parametrize(
    ("message", "pid", "said"),
    [
        ("Permission Denied: Try running again with elevated permissions", None, "--cap-add SYS_PTRACE"),
        ("Error: Failed to find python version from target process", None, "py-spy cannot read process"),
        ("Error: no such process", 2**30, "There is no process 1073741824"),
    ],
)
def test_refusals_are_in_our_words(monkeypatch, tmp_path, message, pid, said):
    spying(monkeypatch, tmp_path, message)
    with pytest.raises(ProfileError, match=said):
        attach.spy(pid or os.getpid(), 1)


@pytest.mark.parametrize(("pid", "seconds"), [(0, 1), (1, 0)])
def test_numbers_are_checked(pid, seconds):
    with pytest.raises(ProfileError, match=r"spy: (pid|seconds) must be a"):
        attach.spy(pid, seconds)


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="needs py-spy")
def test_the_line_of_a_process_that_computes(tmp_path):
    script = tmp_path / "busy.py"
    script.write_text("import sys\nprint('on', flush=True)\nn = 0\nwhile True:\n    n += sum(range(1000))\n")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        try:
            process.stdout.readline()
            try:
                found = attach.spy(process.pid, 2)
            except ProfileError as error:
                if "does not allow" not in str(error):
                    raise
                pytest.skip("ptrace is refused here")
        finally:
            process.kill()
    (frame, _), *_ = found.alone.most_common(1)
    assert (frame.file, frame.line) == (str(script), 5)
    assert found.threads["MainThread"] > 0.5 * found.asked
