"""What profiling costs, and how well the correction takes it out again (RL-Scope, appendix C.3 and figure 11).

    python benchmarks/profile_overhead.py --rounds 15                  # inside a capture, and the correction
    python benchmarks/profile_overhead.py --rounds 15 --part run       # whole runs with one short capture

Each round runs a workload without instrumentation (no annotation, no capture) and with it (annotated, captured), in an
order that changes from round to round, each right after an unmeasured run of itself; medians over rounds. Process CPU
time, because wall time on a shared machine is the others' as well.

capture  all measured iterations lie inside a capture:
  cpu        CPU time of the instrumented iterations over the uninstrumented ones
  machine    the same after taking out the cost of every event as calibrated for the machine
  corrected  the same with the costs fitted to the workload, in rounds before those that count (as the paper does)
  wall       the captured window, corrected on the critical path, over the uninstrumented wall time
run      a run of about `--seconds`, in which `profile.sampled` captures 3 iterations:
  cpu        CPU time of the whole run, beginning and ending the capture included, over that of the plain run
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
    # name, algorithm, environment, mode, iterations inside a capture
    ("chatty", "PPO", "CartPole-v1", "jit per step", 3),
    ("chatty", "DQN", "CartPole-v1", "jit per step", 3),
    ("chatty", "A2C", "Pendulum-v1", "jit per step", 8),
    ("jitted", "PPO", "CartPole-v1", "scan", 5),
    ("jitted", "DQN", "CartPole-v1", "scan", 5),
    ("jitted", "DDPG", "Pendulum-v1", "scan", 5),
    ("jitted", "A2C", "brax/fast", "scan", 40),
    ("host", "A2C", "gymnasium/CartPole-v1", "scan", 10),
)


class Run:
    """A workload that keeps its training state from one call to the next."""

    def __init__(self, algorithm, env, mode, note):
        self.train, self.iterate, self.samples = build(algorithm, env, mode, note=note)

    def __call__(self, iterations):
        for _ in range(iterations):
            self.train = self.iterate(self.train)
        return jax.block_until_ready(self.train)


def seconds(body):
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    body()
    return time.perf_counter() - wall, time.process_time() - cpu


def alternating(rounds, *measurements):
    """Rows of results, every measurement once a round, in an order that turns round each time."""
    for i in range(rounds):
        turn = range(len(measurements)) if i % 2 else reversed(range(len(measurements)))
        found = {j: measurements[j]() for j in turn}
        yield [found[j] for j in range(len(measurements))]


def inside_a_capture(algorithm, env, mode, iterations, arguments, calibration):
    plain, noted = Run(algorithm, env, mode, PLAIN), Run(algorithm, env, mode, ANNOTATED)
    fitted = calibrations.fit(calibration, lambda: noted(iterations))

    def without():
        plain(iterations)
        return seconds(lambda: plain(iterations))

    def captured():
        noted(iterations)
        with tempfile.TemporaryDirectory() as folder:
            with profile.capture(folder, steps=noted.samples * iterations) as session:
                found = seconds(lambda: noted(iterations))
            return *found, session.report()

    out = {"cpu": [], "machine": [], "corrected": [], "wall": []}
    for (wall0, cpu0), (_, cpu1, report) in alternating(arguments.rounds, without, captured):
        out["cpu"].append(cpu1 / cpu0)
        out["machine"].append((cpu1 - overhead.total(report.processes[0], calibration) / 1e9) / cpu0)
        out["corrected"].append((cpu1 - overhead.total(report.processes[0], fitted) / 1e9) / cpu0)
        out["wall"].append(report.corrected(fitted).window_ns / 1e9 / wall0)
    return {
        **{k: statistics.median(v) for k, v in out.items()},
        "rounds": out,
        "events": sum(len(v) for v in report.processes[0].timeline.paid.values()),
        "sums_to_window": sum(report.rows.values()) == report.window_ns,
        "unattributed": report.unattributed,
        "problems": report.problems,
        "fitted_costs_ns": fitted.costs,
    }


def whole_run(algorithm, env, mode, _, arguments, calibration):
    plain, noted = Run(algorithm, env, mode, PLAIN), Run(algorithm, env, mode, ANNOTATED)
    plain(20)
    iterations = max(10, round(20 * arguments.seconds / seconds(lambda: plain(20))[1]))
    bare = noted.iterate

    def sampled():
        with tempfile.TemporaryDirectory() as folder:
            noted.iterate = profile.sampled(bare, folder, calls=3, steps=noted.samples)
            found = seconds(lambda: noted(iterations))
            assert noted.iterate.report().steps == 3 * noted.samples
            return found

    pairs = list(alternating(arguments.rounds, lambda: seconds(lambda: plain(iterations)), sampled))
    ratios = [cpu1 / cpu0 for (_, cpu0), (_, cpu1) in pairs]
    return {
        "cpu": statistics.median(ratios),
        "rounds": {"cpu": ratios},
        "iterations": iterations,
        "cpu_seconds": statistics.median(cpu0 for (_, cpu0), _ in pairs),
        "extra_cpu_seconds": statistics.median(cpu1 - cpu0 for (_, cpu0), (_, cpu1) in pairs),
    }


PARTS = {"capture": inside_a_capture, "run": whole_run}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, default="capture")
    parser.add_argument(
        "--kinds", nargs="+", choices=("chatty", "jitted", "host"), default=("chatty", "jitted", "host")
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=4.0, help="CPU seconds of a whole run")
    parser.add_argument("--out", default="benchmarks/results/profile_overhead.json")
    arguments = parser.parse_args()
    calibration = calibrations.calibrate() if arguments.part == "capture" else None
    out = pathlib.Path(arguments.out)
    rows = []
    for kind, algorithm, env, mode, iterations in WORKLOADS:
        if kind not in arguments.kinds:
            continue
        found = PARTS[arguments.part](algorithm, env, mode, iterations, arguments, calibration)
        rows.append({"kind": kind, "algorithm": algorithm, "env": env, "mode": mode, **found})
        shown = " ".join(f"{k} {v:.3f}" for k, v in found.items() if isinstance(v, float))
        print(f"{kind:<8}{algorithm:<6}{env:<24}{mode:<14}{shown}", flush=True)
        stored = json.loads(out.read_text()) if out.exists() else {}
        stored["machine"] = machine()
        stored[arguments.part] = {
            "date": datetime.date.today().isoformat(),
            "rounds": arguments.rounds,
            "costs_ns": calibration.costs if calibration else None,
            "workloads": rows,
        }
        out.write_text(json.dumps(stored, indent=1))
        jax.clear_caches()


if __name__ == "__main__":
    main()
