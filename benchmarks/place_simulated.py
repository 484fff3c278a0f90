"""Placement in simulation: every method on the paper's four graphs, at an equal number of simulator calls.

    python benchmarks/place_simulated.py [--graphs chainmm ...] [--methods doppler ...] [--seeds 3]

One-device times are fitted to the paper's (table 2), links carry 10 or 2.5 GB/s. Results go to
benchmarks/results/place_simulated.json after every row.
"""

import argparse
import datetime
import json
import platform
import time
from pathlib import Path

import jax
import numpy as np

from rlfx.place import hardware, methods, train, workloads
from rlfx.place.policy import DualPolicy
from rlfx.place.problem import build

OUT = Path(__file__).parent / "results" / "place_simulated.json"
BUDGET = {"chainmm": 4096, "ffnn": 4096, "llama-block": 8192, "llama-layer": 8192}  # the paper's episodes
METHODS = (
    "one-device", "heft", "enumerate", "critical-path", "local-search", "anneal", "polish", "doppler", "placeto",
    "policy",
)  # fmt: skip
OWN_BUDGET = ("one-device", "heft", "enumerate", "critical-path", "placeto")  # the row's budget does not matter to them
_COLUMNS = ("one-device", "critical-path", "placeto", "enumerate", "doppler")
PAPER = {  # table 2, ms
    "chainmm": dict(zip(_COLUMNS, (439.9, 230.4, 137.1, 139.0, 122.5), strict=True)),
    "ffnn": dict(zip(_COLUMNS, (148.5, 217.8, 126.3, 50.2, 47.4), strict=True)),
    "llama-block": dict(zip(_COLUMNS, (462.8, 230.9, 411.5, 172.7, 160.3), strict=True)),
    "llama-layer": dict(zip(_COLUMNS, (483.2, 292.6, 295.1, 174.8, 150.6), strict=True)),
}


def policy_alone(problem, key, budget):
    """Stages I and II with the whole budget, no search: cost, seconds with compilation, and a compiled repetition."""
    policy = DualPolicy()
    k_init, k_imitate, k_learn = jax.random.split(key, 3)
    begin = time.perf_counter()
    learner = train.start(k_init, problem, policy)
    learner = train.imitate_critical_path(policy, learner, problem, k_imitate, steps=200)
    trained, _ = train.learn(policy, learner, problem, k_learn, episodes=budget)
    full = time.perf_counter() - begin
    return float(trained.cost), full, lambda: train.learn(policy, learner, problem, k_learn, episodes=budget)


def main():
    """Run and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", nargs="+", default=list(BUDGET))
    parser.add_argument("--links", nargs="+", type=float, default=[10.0, 2.5])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budget", type=int, help="simulator calls, instead of the paper's episodes")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--placeto-budget", type=int, default=1024)
    args = parser.parse_args()
    budgets = dict.fromkeys(BUDGET, args.budget) if args.budget else BUDGET
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "jax": jax.__version__,
        "machine": f"{platform.machine()}, {platform.processor() or 'cpu'}, shared with other work: costs are simulated",
        "rows": json.loads(args.out.read_text())["rows"] if args.out.exists() else [],
    }
    for name in args.graphs:
        work = workloads.WORKLOADS[name]()
        graph = work.graph()
        for link in args.links:
            problem = build(graph, hardware.p100_pcie(bandwidth=link * 1e9).fitted(graph, work.one_device_seconds))
            row = {
                "graph": name, "link_GB_s": link, "budget": budgets[name],
                "lower_bound_ms": 1e3 * problem.lower_bound(),
                "paper_ms": PAPER[name], "ms": {}, "seconds": {},
            }  # fmt: skip
            for old in record["rows"]:  # methods that are not run again keep their figures, if the budget is theirs
                if (old["graph"], old["link_GB_s"]) == (name, link):
                    kept = set(old["ms"] if old["budget"] == row["budget"] else OWN_BUDGET) - set(args.methods)
                    row |= {k: {m: v for m, v in old[k].items() if m in kept} for k in ("ms", "seconds")}
                    row |= {k: v for k, v in old.items() if k not in row and "policy" in kept}
            for seed in range(args.seeds):
                key = jax.random.key(seed)
                for method in args.methods:
                    if method == "policy" or (seed and method in ("one-device", "heft", "enumerate", "placeto")):
                        continue
                    budget = args.placeto_budget if method == "placeto" else row["budget"]
                    begin = time.perf_counter()
                    result = methods.METHODS[method](problem, key, budget)
                    row["seconds"].setdefault(method, []).append(round(time.perf_counter() - begin, 2))
                    row["ms"].setdefault(method, []).append(round(result.cost * 1e3, 3))
                if "policy" not in args.methods:
                    continue
                cost, seconds, again = policy_alone(problem, key, row["budget"])
                row["ms"].setdefault("policy", []).append(round(cost * 1e3, 3))
                row["seconds"].setdefault("policy", []).append(round(seconds, 2))
                if not seed:
                    begin, cpu = time.perf_counter(), time.process_time()
                    again()
                    row["episodes_per_s"] = row["budget"] / (time.perf_counter() - begin)
                    row["episodes_per_cpu_s"] = row["budget"] / (time.process_time() - cpu)
            best = {m: float(np.min(v)) for m, v in row["ms"].items()}
            print(name, f"{link} GB/s", f"bound {row['lower_bound_ms']:.2f}", best, flush=True)
            record["rows"] = [r for r in record["rows"] if (r["graph"], r["link_GB_s"]) != (name, link)] + [row]
            args.out.parent.mkdir(exist_ok=True)
            args.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
