"""The case studies of RL-Scope's section 4, for JAX, on this machine.

    python benchmarks/profile_cases.py implementations   # 4.1: one PPO, four ways to run it
    python benchmarks/profile_cases.py eager             # F.3: two eager execution models
    python benchmarks/profile_cases.py consecutive       # F.5: a hyperparameter, and Python time
    python benchmarks/profile_cases.py survey            # 4.2 and B.1: algorithms x simulators

Each prints a table and writes benchmarks/results/profile_<name>.json; `benchmarks/tables.py` makes the tables of
docs/profile-case-studies.md from them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import time

import jax
import numpy as np
from profile_collected import build as build_collected
from profile_rlfx_ppo import build as build_rlfx
from profile_workloads import ALGORITHMS, build, profiled

from rlfx import profile
from rlfx.profile.capture import machine
from rlfx.profile.tables import grid

RESULTS = pathlib.Path(__file__).parent / "results"
OPERATIONS = ("simulation", "inference", "backpropagation")


def save(name: str, rows: list[dict]) -> None:
    result = {"machine": machine(), "date": datetime.date.today().isoformat(), "rows": rows}
    (RESULTS / f"profile_{name}.json").write_text(json.dumps(result, indent=1))


def figures(report: profile.Report) -> dict:
    """What the tables of the case studies need from a report, per environment step where it counts something."""
    steps = report.steps or 1
    busy_ns = sum(report.device_rows.values()) or 1
    return {
        "steps_per_s": report.steps_per_second,
        "us_per_step": report.span_ns / 1e3 / steps,
        "verdict": report.verdict,
        "limits": report.limits(),
        "host": {row[0]: ns / report.window_ns for row, ns in report.by("host").items()},
        "operations": {o: report.within(o) / report.window_ns for o in OPERATIONS},
        "device_operations": {o: report.device_within(o) / busy_ns for o in OPERATIONS},
        "device_busy": report.device_busy,
        "device_bound": report.device_bound,
        "naive_utilisation": report.naive_utilisation,
        "compile_share": report.compile_share,
        "unattributed": report.unattributed,
        "python_to_backend": report.count("python", "backend") / steps,
        "backend_to_dispatch": report.count("backend", "dispatch") / steps,
        "instructions": sum(sum(p.timeline.launches.values()) for p in report.processes) / steps,
        "callbacks": sum(n for (_, b, _, _), n in report.transitions.items() if b == "callback") / steps,
        "compiled": [vars(c) for c in report.compiled],
        "sums_to_window": sum(report.rows.values()) == report.window_ns,
    }


def measured(train, iterate, samples: int, iterations: int, plain_runs: int = 5, captures: int = 3):
    """Figures of the best of some captures, and the fastest of some runs without: the machine is shared."""
    plain = np.inf
    for _ in range(plain_runs):
        begin = time.perf_counter()
        for _ in range(iterations):
            train = iterate(train)
        jax.block_until_ready(train)
        plain = min(plain, (time.perf_counter() - begin) / (samples * iterations) * 1e6)
    captured = []
    for _ in range(captures):
        train, found = profiled(train, iterate, samples, iterations)
        captured.append(found)
    report = min(captured, key=lambda r: r.window_ns)
    return {"plain_us_per_step": plain, **figures(report)}, report


def eager(arguments: argparse.Namespace) -> None:
    """DDPG on Pendulum, no jit of its own: jax's eager mode, and that with the jits inside jax.numpy off as well."""
    rows = []
    for mode, nothing_jitted in (("eager", False), ("eager, jax.disable_jit", True)):
        with jax.disable_jit(nothing_jitted):
            row, report = measured(*build("DDPG", "Pendulum-v1", "eager"), iterations=1, plain_runs=2, captures=1)
        rows.append({"mode": mode, **row})
        print(report.text(depth=2), "\n", flush=True)
    row, _ = measured(*build("DDPG", "Pendulum-v1", "scan"), iterations=4)
    rows.append({"mode": "scan", **row})
    save("eager", rows)


def consecutive(arguments: argparse.Namespace) -> None:
    """DDPG with 1 to 1,000 consecutive simulator steps in a call of the compiled collection loop."""
    rows = []
    for count in (1, 10, 100, 1000):
        row, report = measured(*build_collected(count), iterations=max(1, 200 // count))
        python = sum(ns for r, ns in report.rows.items() if r.host == "python" and "simulation" in r.path)
        host = sum(
            ns
            for r, ns in report.rows.items()
            if r.host in ("python", "backend", "dispatch") and "simulation" in r.path
        )
        row |= {"simulation_python_us": python / 1e3 / report.steps, "simulation_host_us": host / 1e3 / report.steps}
        rows.append({"consecutive": count, **row})
        print(f"{count:>5}", {k: v for k, v in rows[-1].items() if isinstance(v, float)}, flush=True)
    save("consecutive", rows)


def implementations(arguments: argparse.Namespace) -> None:
    """PPO on CartPole, 16 environments, 32 steps, 4 epochs of 4 minibatches: the same text, run in several ways."""
    rows, reports = [], {}
    for mode, iterations in (("eager", 2), ("jit per step", 4), ("scan", 8), ("rlfx", 8)):
        made = build_rlfx() if mode == "rlfx" else build("PPO", "CartPole-v1", mode)
        row, reports[mode] = measured(*made, iterations)
        rows.append({"mode": mode, **row})
        print(reports[mode].text(depth=2), "\n", flush=True)
    save("implementations", rows)
    body = [
        [r["mode"], f"{r['plain_us_per_step']:.1f}", f"{r['us_per_step']:.1f}", f"{r['python_to_backend']:.3f}",
         f"{r['device_busy']:.0%}", f"{r['device_bound']:.0%}", f"{r['naive_utilisation']:.0%}",
         f"{r['compile_share']:.0%}", r["verdict"].split(";")[0]]
        for r in rows
    ]  # fmt: skip
    header = ["mode", "us/step", "captured", "py→backend", "busy", "bound", "sampled", "compile", "verdict"]
    print(grid(header, body))
    print(reports["eager"].compare(reports["scan"]))
    if arguments.plot:
        from rlfx.profile import plot

        plot.bars(reports, normalise=True).figure.savefig(arguments.plot, dpi=120)


ENVIRONMENTS = ("CartPole-v1", "Pendulum-v1", "brax/fast", "gymnasium/CartPole-v1")


def survey(arguments: argparse.Namespace) -> None:
    """Four algorithms on four environments, each wholly inside one jitted iteration."""
    rows = []
    for env in ENVIRONMENTS:
        for algorithm in ALGORITHMS:
            train, iterate, samples = build(algorithm, env, "scan")
            iterations = max(2, 1024 // samples)
            _, report = profiled(train, iterate, samples, iterations)
            found = figures(report)
            rows.append({"algorithm": algorithm, "env": env, **found})
            shares = " ".join(f"{o} {share:.0%}" for o, share in found["operations"].items())
            print(f"{algorithm:<6}{env:<24}{found['steps_per_s']:>10,.0f}/s  {shares}  {report.verdict}", flush=True)
            jax.clear_caches()
    save("survey", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=("implementations", "eager", "consecutive", "survey"))
    parser.add_argument("--plot", help="implementations: write stacked bars here")
    arguments = parser.parse_args()
    globals()[arguments.case](arguments)


if __name__ == "__main__":
    main()
