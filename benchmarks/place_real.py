"""Simulated against real execution of real kernels on CPU devices (figure 18), and stage III.

    python benchmarks/place_real.py [--size 768] [--assignments 60] [--devices 2]

Devices are XLA's host devices, one thread each, so that they do not share a kernel's threads; there should be no more
of them than cores. The machine model is measured on the spot. Results: benchmarks/results/place_real.json.
"""

import argparse
import datetime
import json
import os
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--size", type=int, default=768)
parser.add_argument("--assignments", type=int, default=60)
parser.add_argument("--devices", type=int, default=2)
parser.add_argument("--repeats", type=int, default=7)
args = parser.parse_args()
os.environ["XLA_FLAGS"] = (
    f"--xla_force_host_platform_device_count={args.devices} --xla_cpu_multi_thread_eigen=false "
    "intra_op_parallelism_threads=1"
)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from scipy import stats  # noqa: E402

from rlfx.place import baselines, hardware, methods, workloads  # noqa: E402
from rlfx.place.execute import Executor  # noqa: E402
from rlfx.place.problem import build  # noqa: E402


def biased(problem, rng):
    """A random assignment that prefers one device by a random amount: from balanced to everything on one."""
    share = rng.dirichlet(np.full(problem.devices, 0.7))
    device = rng.choice(problem.devices, problem.tasks, p=share).astype(np.int32)
    return baselines.Assignment(device, baselines.topological_order(problem))


def main():
    """Run and write JSON."""
    devices = jax.devices()
    rows = []
    for work in (workloads.chainmm(args.size), workloads.ffnn(2048, 32, 2048)):
        graph = work.graph()
        problem = build(graph, hardware.measured(devices))
        executor = Executor(graph, devices)
        flat = jax.tree.leaves(work.arguments(jax.random.key(0)))
        rng = np.random.default_rng(0)
        found = methods.solve(problem, "polish", jax.random.key(0), 512).assignment
        pool = [found, baselines.enumerative(problem), baselines.heft(problem), baselines.one_device(problem)]
        pool += [biased(problem, rng) for _ in range(args.assignments - len(pool))]
        simulated = baselines.evaluate(problem, pool).astype(float)
        for a in pool[:3]:
            executor.load(flat, a)
            executor.run(a)  # compiles
        real = []
        for a in pool:
            executor.load(flat, a)
            executor.run(a)
            real.append([executor.run(a)[0].makespan for _ in range(args.repeats)])
        groups = [g for meta in problem.metas for g in meta if g]
        executor.load(flat, found)
        executor.run_synchronous(found, groups)
        barrier = min(executor.run_synchronous(found, groups).makespan for _ in range(args.repeats))
        best = np.array(real).min(axis=1)
        row = {
            "graph": work.name, "devices": args.devices, "assignments": len(pool), "kernels": executor.programs,
            "pearson": float(stats.pearsonr(simulated, best).statistic),
            "spearman": float(stats.spearmanr(simulated, best).statistic),
            "polish_ms": best[0] * 1e3, "one_device_ms": best[3] * 1e3, "synchronous_ms": barrier * 1e3,
            "simulated_s": simulated.tolist(), "real_s": real,
        }  # fmt: skip
        print({k: v for k, v in row.items() if not isinstance(v, list)}, flush=True)
        rows.append(row)
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "device": f"{args.devices} XLA host devices, two cores shared with other work; fastest of {args.repeats} runs",
        "rows": rows,
    }
    (Path(__file__).parent / "results" / "place_real.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
