"""What an annotation costs outside of a capture: CPU ns of a `with` block, in rounds that take turns.

    python benchmarks/profile_annotation.py

The least and the median over the rounds: on a machine shared with others the median is theirs as well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
import time

import jax

from rlfx.profile import operation
from rlfx.profile.capture import machine

BLOCKS = {
    "an empty context manager": contextlib.nullcontext,
    "jax.profiler.TraceAnnotation": jax.profiler.TraceAnnotation,
    "rlfx.profile.operation": operation,
}
COUNT = 3000


def ns(make) -> float:
    """CPU ns of a block."""
    begin = time.thread_time_ns()
    for _ in range(COUNT):
        with make("step"):
            pass
    return (time.thread_time_ns() - begin) / COUNT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", default="benchmarks/results/profile_annotation.json")
    arguments = parser.parse_args()
    found = {name: [] for name in BLOCKS}
    for _ in range(arguments.rounds):
        for name, make in BLOCKS.items():
            found[name].append(ns(make))
    rows = [{"block": k, "least": min(v), "median": statistics.median(v)} for k, v in found.items()]
    stored = {"machine": machine(), "rounds": arguments.rounds, "rows": rows}
    pathlib.Path(arguments.out).write_text(json.dumps(stored, indent=1) + "\n")
    for row in rows:
        print(f"{row['block']:<32}{row['least']:>8,.0f}{row['median']:>8,.0f}")


if __name__ == "__main__":
    main()
