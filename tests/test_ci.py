"""`.ci/ahead`: what it says, and whether it fails, where the plugin can't be installed."""

import os
import subprocess
from pathlib import Path

import pytest

LANE = Path(__file__).parents[1] / ".ci" / "ahead"

#: Whether `make aot-cuda` works, whether the index answers, whether the tests pass; then the exit status and the summary.
CASES = {
    "all is well": (0, 0, 0, 0, "ahead lane: passed"),
    "no network": (2, 1, 0, 0, "ahead lane: NOT RUN: the package index can't be reached"),
    "a broken installation": (2, 0, 0, 1, "ahead lane: FAILED: the package index is there"),
    "tests fail": (0, 0, 2, 1, "ahead lane: FAILED"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_lane_says_what_became_of_it(case, tmp_path):
    installed, reached, tested, status, said = CASES[case]
    make, probe = tmp_path / "make", tmp_path / "probe"
    make.write_text(f"#!/bin/sh\n[ $1 = aot-cuda ] && exit {installed}\nexit {tested}\n")
    probe.write_text(f"#!/bin/sh\n[ -d $1 ] && exit {reached}\nexit 9\n")
    for script in (make, probe):
        script.chmod(0o755)
    summary = tmp_path / "summary"
    given = {**os.environ, "MAKE": str(make), "PROBE": str(probe), "CI_SUMMARY": str(summary)}
    done = subprocess.run(["bash", str(LANE)], env=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stdout + done.stderr
    assert summary.read_text().startswith(said)
    assert summary.read_text().strip() in done.stdout
