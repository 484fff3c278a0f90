"""The tables in the documentation are those that the committed results give."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def test_the_tables_of_the_pages_are_made_from_the_results():
    command = [sys.executable, "-m", "benchmarks.tables", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
