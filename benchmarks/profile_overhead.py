"""What profiling costs, and how well the correction takes it out again (RL-Scope, appendix C.3 and figure 11).

    python benchmarks/profile_overhead.py --rounds 15                  # inside a capture, and the correction
    python benchmarks/profile_overhead.py --rounds 15 --part run       # whole runs with one short capture

Each round runs a workload without instrumentation (no annotation, no capture) and with it (annotated, captured), in an
order that changes from round to round, each right after an unmeasured run of itself; medians over rounds. Process CPU
time, because wall time on a shared machine is the others' as well. `--only` measures some of the workloads and keeps
the results of the others.

capture  all measured iterations lie inside a capture:
  cpu        CPU time of the instrumented iterations over the uninstrumented ones
  tracer     the same of jax's own tracer alone: no annotation, no `rlfx.profile`
  machine    cpu after taking out the cost of every event as calibrated for the machine
  corrected  the same with the costs fitted to the workload (as the paper does), each round with those of the rounds
             of the other half: what an instruction costs drifts within minutes, and no round corrects itself
  slower     wall time of the instrumented iterations over that of the uninstrumented ones
  machine_wall, wall   the same, corrected as `Report.corrected` does, with the costs of the machine and the fitted ones
run      a run of about `--seconds`, in which `profile.sampled` with its default settings captures once:
  cpu        CPU time of the whole run, beginning and ending the capture included, over that of the plain run
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import pathlib
import statistics
import tempfile
import time

import jax
import numpy as np
from profile_workloads import ANNOTATED, PLAIN, build

from rlfx import profile
from rlfx._jaxpr import stop_trace
from rlfx.profile import calibration as calibrations
from rlfx.profile import overhead
from rlfx.profile.capture import machine

WORKLOADS = (
    # name, algorithm, environment, mode, iterations inside a capture
    ("chatty", "PPO", "CartPole-v1", "jit per step", 5),
    ("chatty", "DQN", "CartPole-v1", "jit per step", 5),
    ("chatty", "A2C", "Pendulum-v1", "jit per step", 20),
    ("jitted", "PPO", "CartPole-v1", "scan", 20),
    ("jitted", "DQN", "CartPole-v1", "scan", 10),
    ("jitted", "DDPG", "Pendulum-v1", "scan", 10),
    ("jitted", "A2C", "brax/fast", "scan", 60),
    ("host", "A2C", "gymnasium/CartPole-v1", "scan", 30),
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


@contextlib.contextmanager
def tracer_alone(folder):
    """jax's profiler with the levels that `profile.capture` asks for, and nothing of ours."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level, options.session_id = 0, 2, "alone"
    jax.profiler.start_trace(folder, profiler_options=options)
    try:
        yield
    finally:
        stop_trace(pathlib.Path(folder) / "alone")


def inside_a_capture(algorithm, env, mode, iterations, arguments, calibration):
    plain, noted = Run(algorithm, env, mode, PLAIN), Run(algorithm, env, mode, ANNOTATED)
    reports = []

    def without():
        plain(iterations)
        return seconds(lambda: plain(iterations))

    def traced():
        plain(iterations)
        with tempfile.TemporaryDirectory() as folder, tracer_alone(folder):
            return seconds(lambda: plain(iterations))

    def captured():
        noted(iterations)
        with tempfile.TemporaryDirectory() as folder:
            with profile.capture(folder, steps=noted.samples * iterations) as session:
                found = seconds(lambda: noted(iterations))
            if len(reports) < 2:  # the events of a run are the same each time
                reports.append(session.report())
            return found

    rounds = np.asarray(list(alternating(arguments.rounds, without, traced, captured)))
    (wall0, cpu0), (_, cpu_traced), (wall1, cpu1) = rounds.transpose(1, 2, 0)
    half = np.arange(len(rounds)) // 2 % 2  # both orders of a round are in both halves
    found = calibrations.Measured(1e9 * (cpu1 - cpu0), 1e9 * (wall1 - wall0), reports[-1])
    fitted = [
        calibrations.scaled(calibration, found._replace(cpu=found.cpu[half != h], wall=found.wall[half != h]))
        for h in (0, 1)
    ]

    def owed(costs):
        """Seconds of CPU time, and of wall time, that profiling took."""
        cpu = statistics.mean(overhead.total(r.processes[0], costs) for r in reports)
        return np.asarray([cpu, statistics.mean(r.corrected(costs).corrected_ns for r in reports)]) / 1e9

    machine_cpu, machine_wall = owed(calibration)
    fitted_cpu, fitted_wall = np.asarray([owed(costs) for costs in fitted])[half].T
    out = {
        "cpu": cpu1 / cpu0,
        "tracer": cpu_traced / cpu0,
        "machine": (cpu1 - machine_cpu) / cpu0,
        "corrected": (cpu1 - fitted_cpu) / cpu0,
        "slower": wall1 / wall0,
        "machine_wall": (wall1 - machine_wall) / wall0,
        "wall": (wall1 - fitted_wall) / wall0,
    }
    last = reports[-1]
    return {
        **{k: float(np.median(v)) for k, v in out.items()},
        "rounds": {k: v.tolist() for k, v in out.items()},
        "events": found.paid,
        "sums_to_window": all(sum(r.rows.values()) == r.window_ns for r in reports),
        "unattributed": last.unattributed,
        "problems": last.problems,
        "costs_ns": calibration.costs,
        "fitted": [{"costs_ns": f.costs, "contention": f.contention} for f in fitted],
    }


def whole_run(algorithm, env, mode, _, arguments, calibration):
    plain, noted = Run(algorithm, env, mode, PLAIN), Run(algorithm, env, mode, ANNOTATED)
    plain(20)
    iterations = max(10, round(60 * arguments.seconds / seconds(lambda: plain(60))[1]))
    bare = noted.iterate

    def sampled():
        with tempfile.TemporaryDirectory() as folder:
            noted.iterate = profile.sampled(bare, folder, steps=noted.samples)
            found = seconds(lambda: noted(iterations))
            assert noted.iterate.session.steps == 2 * noted.samples
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
    parser.add_argument("--only", type=int, nargs="+", help="these of the workloads, by number from 0")
    parser.add_argument(
        "--calibration", help="a file of `python -m rlfx.profile calibrate --out` (default: measured first)"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=4.0, help="CPU seconds of a whole run")
    parser.add_argument("--out", default="benchmarks/results/profile_overhead.json")
    arguments = parser.parse_args()
    calibration = None
    if arguments.part == "capture":
        given = arguments.calibration
        calibration = overhead.load(given) if given and pathlib.Path(given).exists() else calibrations.calibrate()
        if given:
            calibration.save(given)
    out = pathlib.Path(arguments.out)
    chosen = range(len(WORKLOADS)) if arguments.only is None else arguments.only
    for kind, algorithm, env, mode, iterations in [WORKLOADS[i] for i in chosen]:
        found = PARTS[arguments.part](algorithm, env, mode, iterations, arguments, calibration)
        key = {"kind": kind, "algorithm": algorithm, "env": env, "mode": mode}
        shown = " ".join(f"{k} {v:.3f}" for k, v in found.items() if isinstance(v, float))
        print(f"{kind:<8}{algorithm:<6}{env:<24}{mode:<14}{shown}", flush=True)
        stored = json.loads(out.read_text()) if out.exists() else {}
        part = stored.get(arguments.part, {})
        others = [r for r in part.get("workloads", []) if any(r[k] != v for k, v in key.items())]
        row = {**key, "date": datetime.date.today().isoformat(), "machine": machine(), **found}
        rows = sorted([*others, row], key=lambda r: [w[:4] for w in WORKLOADS].index(tuple(r[k] for k in key)))
        shared = {"rounds": arguments.rounds, "seconds": arguments.seconds}
        if calibration:
            shared = {
                "rounds": arguments.rounds,
                "costs_ns": calibration.costs,
                "calibration_error": calibration.spread,
                "contention": calibration.contention,
            }
        stored[arguments.part] = {**shared, "workloads": rows}
        stored["machine"] = machine()
        out.write_text(json.dumps(stored, indent=1))
        jax.clear_caches()


if __name__ == "__main__":
    main()
