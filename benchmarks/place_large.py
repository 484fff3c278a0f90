"""Placement of large graphs: what a simulator call and an assignment by HEFT take.

Run: ``python benchmarks/place_large.py [--tasks 1000 10000]``. CPU seconds of the process, compilation apart.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx.place import search
from rlfx.place import simulate as sim
from rlfx.place.baselines import evaluate, heft, random_assignment
from rlfx.place.methods import GUIDED
from rlfx.place.problem import Problem, checked

DEVICES = 4
CALLS = 128


def layered(tasks: int, seed: int = 0) -> Problem:
    """A random graph of two edges a task to one of the 200 tasks after it, on unequal links."""
    rng = np.random.default_rng(seed)
    u = rng.integers(0, tasks - 1, 2 * tasks)
    edges = np.unique(np.stack([u, np.minimum(tasks - 1, u + rng.integers(1, 200, len(u)))], 1), axis=0)
    transfer = rng.uniform(0.1, 1.0, (tasks, DEVICES, DEVICES)) * ~np.eye(DEVICES, dtype=bool)
    return checked(
        Problem(
            rng.uniform(0.1, 1.0, (tasks, DEVICES)).astype(np.float32),
            transfer.astype(np.float32),
            edges.astype(np.int32),
            np.ones(tasks, np.float32),
            np.zeros(0, np.float32),
            np.zeros((0, 2), np.int32),
            np.full(DEVICES, 1e9, np.float32),
        )
    )


def cpu(run: Callable[[], Any], repeats: int = 3) -> float:
    """The least CPU seconds of a few runs, after one that compiles."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(repeats):
        begin = time.process_time()
        jax.block_until_ready(run())
        taken.append(time.process_time() - begin)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    arguments = parser.parse_args()
    rows = []
    for tasks in arguments.tasks:
        problem = layered(tasks)
        rng = np.random.default_rng(1)
        row: dict[str, Any] = {"tasks": tasks, "edges": len(problem.edges)}
        for batch in arguments.batches:
            chosen = [random_assignment(problem, rng) for _ in range(batch)]
            device, order = (jnp.asarray(np.stack([a[i] for a in chosen])) for i in (0, 1))
            taken = cpu(lambda device=device, order=order: sim.makespan(problem, device, order))
            row[f"ms a call, batches of {batch}"] = round(1e3 * taken / batch, 3)
            kept = cpu(lambda device=device, order=order: sim.simulate(problem, device, order))
            row[f"ms a call, all times kept, batches of {batch}"] = round(1e3 * kept / batch, 3)
        begin = time.process_time()
        start = heft(problem)
        row["heft, s"] = round(time.process_time() - begin, 2)
        costs = evaluate(problem, [start])
        state = search.initial(problem, [start], costs, 1)
        key = jax.random.key(0)
        taken = cpu(lambda: search.anneal(problem, key, state, CALLS, hot=1e-3, cold=1e-4, moves=GUIDED), 1)
        row[f"polish from heft, {CALLS} calls, s"] = round(taken, 2)
        rows.append(row)
        print(row, flush=True)
    path = Path(__file__).parent / "results" / "place_large.json"
    path.write_text(json.dumps({"device": "CPU, one process among others", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
