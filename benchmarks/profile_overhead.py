"""What profiling costs, and how well the correction takes it out again (RL-Scope, appendix C.3 and figure 11).

    python benchmarks/profile_overhead.py --rounds 15 --out benchmarks/results/profile_overhead.json

Every round runs each workload without instrumentation (no annotation, no capture) and with (annotated, captured), side
by side. `cpu` is process CPU time with over without; `raw` and `corrected` are the captured window, as it is and corrected,
over the uninstrumented wall time. Medians over rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import statistics
import tempfile
import time

import jax
from profile_workloads import ANNOTATED, PLAIN, build

from rlfx import profile
from rlfx.profile import overhead
from rlfx.profile.capture import machine

WORKLOADS = (
    # name, algorithm, environment, mode, iterations a run
    ("chatty", "PPO", "CartPole-v1", "jit per step", 3),
    ("chatty", "DQN", "CartPole-v1", "jit per step", 3),
    ("chatty", "A2C", "Pendulum-v1", "jit per step", 8),
    ("chatty", "DDPG", "Pendulum-v1", "jit per step", 2),
    ("jitted", "PPO", "CartPole-v1", "scan", 5),
    ("jitted", "DQN", "CartPole-v1", "scan", 5),
    ("jitted", "A2C", "brax/fast", "scan", 10),
    ("host", "A2C", "gymnasium/CartPole-v1", "scan", 10),
)


def run(train, iterate, iterations):
    for _ in range(iterations):
        train = iterate(train)
    return jax.block_until_ready(train)


def timed(train, iterate, iterations):
    wall, cpu = time.perf_counter(), time.process_time()
    train = run(train, iterate, iterations)
    return train, time.perf_counter() - wall, time.process_time() - cpu


def measure(algorithm, env, mode, iterations, rounds, calibration):
    plain, plain_it, _ = build(algorithm, env, mode, note=PLAIN)
    noted, noted_it, samples = build(algorithm, env, mode, note=ANNOTATED)
    out = {"cpu": [], "raw": [], "corrected": []}
    for _ in range(rounds):
        plain, wall0, cpu0 = timed(plain, plain_it, iterations)
        with tempfile.TemporaryDirectory() as folder:
            with profile.capture(folder, steps=samples * iterations) as session:
                noted, _, cpu1 = timed(noted, noted_it, iterations)
            report = session.report()
        out["cpu"].append(cpu1 / cpu0)
        out["raw"].append(report.window_ns / 1e9 / wall0)
        out["corrected"].append(report.corrected(calibration).window_ns / 1e9 / wall0)
    return {**{k: statistics.median(v) for k, v in out.items()}, "rounds": out, "problems": report.problems}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", default="benchmarks/results/profile_overhead.json")
    arguments = parser.parse_args()
    calibration = overhead.calibrate()
    print({k: round(v) for k, v in calibration.costs.items()}, "ns an event")
    rows = []
    for kind, algorithm, env, mode, iterations in WORKLOADS:
        found = measure(algorithm, env, mode, iterations, arguments.rounds, calibration)
        rows.append({"kind": kind, "algorithm": algorithm, "env": env, "mode": mode, **found})
        print(
            f"{kind:<8}{algorithm:<6}{env:<24}{mode:<14}cpu {found['cpu']:.2f}x  raw {found['raw']:.2f}x  "
            f"corrected {found['corrected']:.2f}x",
            flush=True,
        )
    result = {
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "rounds": arguments.rounds,
        "costs_ns": calibration.costs,
        "workloads": rows,
    }
    pathlib.Path(arguments.out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
