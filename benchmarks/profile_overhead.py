"""What profiling costs, and how well the correction takes it out again (RL-Scope, appendix C.3 and figure 11).

    python benchmarks/profile_overhead.py --rounds 15 --out benchmarks/results/profile_overhead.json

Each round runs a workload without instrumentation (no annotation, no capture) and with (annotated, captured), side by
side; medians over rounds. On a shared machine process CPU time is what can be compared:
  cpu        CPU time of the instrumented run over the uninstrumented one
  machine    the same after taking out the cost of every event as calibrated for the machine
  corrected  the same with the costs fitted to the workload, in 5 rounds before those that count (as the paper does)
  wall       the captured window, corrected on the critical path, over the uninstrumented wall time
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
from rlfx.profile import calibration as calibrations
from rlfx.profile import overhead
from rlfx.profile.capture import machine

WORKLOADS = (
    # name, algorithm, environment, mode, iterations a run
    ("chatty", "PPO", "CartPole-v1", "jit per step", 3),
    ("chatty", "DQN", "CartPole-v1", "jit per step", 3),
    ("chatty", "A2C", "Pendulum-v1", "jit per step", 8),
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
    out = {"cpu": [], "machine": [], "corrected": [], "wall": []}
    fitted = calibrations.fit(calibration, lambda: run(noted, noted_it, iterations))
    for _ in range(rounds):
        plain, wall0, cpu0 = timed(plain, plain_it, iterations)
        with tempfile.TemporaryDirectory() as folder:
            with profile.capture(folder, steps=samples * iterations) as session:
                noted, _, cpu1 = timed(noted, noted_it, iterations)
            report = session.report()
        out["cpu"].append(cpu1 / cpu0)
        out["machine"].append((cpu1 - overhead.total(report.processes[0], calibration) / 1e9) / cpu0)
        out["corrected"].append((cpu1 - overhead.total(report.processes[0], fitted) / 1e9) / cpu0)
        out["wall"].append(report.corrected(fitted).window_ns / 1e9 / wall0)
    exact = sum(report.rows.values()) == report.window_ns
    return {
        **{k: statistics.median(v) for k, v in out.items()},
        "rounds": out,
        "events": sum(len(v) for v in report.processes[0].timeline.paid.values()),
        "sums_to_window": exact,
        "unattributed": report.unattributed,
        "problems": report.problems,
        "fitted_costs_ns": fitted.costs,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", default="benchmarks/results/profile_overhead.json")
    arguments = parser.parse_args()
    calibration = calibrations.calibrate()
    print({k: round(v) for k, v in calibration.costs.items()}, "ns an event")
    rows = []
    for kind, algorithm, env, mode, iterations in WORKLOADS:
        found = measure(algorithm, env, mode, iterations, arguments.rounds, calibration)
        rows.append({"kind": kind, "algorithm": algorithm, "env": env, "mode": mode, **found})
        print(
            f"{kind:<8}{algorithm:<6}{env:<24}{mode:<14}cpu {found['cpu']:.2f}x  "
            f"machine {found['machine']:.2f}x  corrected {found['corrected']:.2f}x  wall {found['wall']:.2f}x  "
            f"unattributed {found['unattributed']:.1%}  exact {found['sums_to_window']}",
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
