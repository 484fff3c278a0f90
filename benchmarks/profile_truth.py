"""Ten programs of which is known where their time goes: how much of it the profiler gives to another operation.

    python benchmarks/profile_truth.py --busy 4 --out benchmarks/results/profile_truth.json

The programs are those of the tests (``tests/profile/truths.py``). `--busy` processes compute beside them all the time. Every run
counts: the machine's load is written beside each.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import recorded

from tests.profile.truths import PROGRAMS, error


def once(name: str, seconds: float) -> dict:
    """One run: the error, the verdict, and whether it is one of those that the program allows."""
    with tempfile.TemporaryDirectory() as folder:
        truth = PROGRAMS[name](pathlib.Path(folder), seconds)
        verdict = truth.report.verdict
        return {
            "error": error(truth),
            "right": verdict.startswith(tuple(f"{bound}-bound" for bound in truth.bounds)),
            "limit": verdict.partition(":")[0],
            "window_s": truth.report.window_ns / 1e9,
            "exact": sum(truth.report.rows.values()) == truth.report.window_ns,
            "load": os.getloadavg()[0] / (os.cpu_count() or 1),
        }


@contextlib.contextmanager
def loaded(count: int) -> Iterator[None]:
    """So many other processes compute meanwhile."""
    others = [subprocess.Popen([sys.executable, "-S", "-c", "while True: sum(range(10000))"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long a program runs")
    parser.add_argument("--busy", type=int, default=0, help="so many other processes compute meanwhile")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    runs: dict[str, list[dict]] = {name: [] for name in PROGRAMS}
    with loaded(arguments.busy):
        for _ in range(arguments.rounds):
            for name, found in runs.items():
                found.append(once(name, arguments.seconds))
                print(name, found[-1], flush=True)
    rows = [
        {
            "program": name,
            "what": (PROGRAMS[name].__doc__ or "").partition(":")[0].rstrip("."),
            "error": statistics.median(r["error"] for r in found),
            "largest": max(r["error"] for r in found),
            "right": sum(r["right"] for r in found),
            "runs": found,
        }
        for name, found in runs.items()
    ]
    result = {**recorded.about("profile_truth"), "rounds": arguments.rounds, "busy": arguments.busy, "rows": rows}
    if arguments.out:
        recorded.write(arguments.out, result)


if __name__ == "__main__":
    main()
