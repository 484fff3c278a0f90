"""How long the learners of all held-out and sealed sets take to trace and to compile, as rlfx has them and as plain ones.

    python -m benchmarks.untuned.building [--set SET ...] [--only NAME ...] [--rounds 3] [--cores 1] [--json FILE]

CPU seconds, medians of rounds, each with caches cleared and the learner written anew, both in turns in one process. What a
process imports and starts once (networkx, 0.05 s) is no learner's: tiny ones are built before.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.untuned.__main__ import SETS, UNTUNED, cases_of, keep_to, module_of

FORMS = ("rlfx", "plain")
STAGES = ("trace_s", "compile_s")


def parsed(argv=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.untuned.building", description=__doc__.splitlines()[0])
    parser.add_argument("--set", nargs="+", choices=SETS, default=UNTUNED)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts of the names of workloads")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def built(make: Callable, sizes: Mapping[str, Any], rounds: int) -> dict[str, dict[str, float]]:
    """``{form: {stage: seconds}}`` of a workload."""
    from benchmarks.untuned import measure as m

    found = {form: {stage: [] for stage in STAGES} for form in FORMS}
    for i in range(rounds):
        for form in FORMS if i % 2 == 0 else FORMS[::-1]:
            workload = make(**sizes)
            _, row = m.build(workload.forms[form], workload.arguments_of(form))
            for stage in STAGES:
                found[form][stage].append(row[stage])
    return {form: {s: round(statistics.median(x), 4) for s, x in stages.items()} for form, stages in found.items()}


def mean(rows: list[dict], of: Callable[[dict], float]) -> float:
    """The geometric mean of rlfx's seconds to plain's."""
    return statistics.geometric_mean(of(row["rlfx"]) / of(row["plain"]) for row in rows)


def main(argv=None):
    args = parsed(argv)
    keep_to(args.cores)
    from benchmarks import recorded

    rows, warm = [], False
    for name, workload, make, sizes in cases_of(args.set, args.only):
        if not warm:
            built(make, module_of(name).TINY[make], 1)
            warm = True
        row = {"set": name, "workload": workload, **built(make, sizes, args.rounds)}
        rows.append(row)
        ratio = {s: row["rlfx"][s] / row["plain"][s] for s in STAGES}
        both = sum(row["rlfx"].values()) / sum(row["plain"].values())
        parts = f"trace {ratio['trace_s']:5.2f}  compile {ratio['compile_s']:5.2f}"
        print(f"{both:5.2f}  {parts}  {name}: {workload}", flush=True)
    means = {
        "trace and compile": mean(rows, lambda form: sum(form.values())),
        **{stage[:-2]: mean(rows, lambda form, stage=stage: form[stage]) for stage in STAGES},
    }
    print(len(rows), {k: round(v, 3) for k, v in means.items()})
    if args.json:
        recorded.write(args.json, recorded.about("building") | {"rounds": args.rounds, "means": means, "rows": rows})


if __name__ == "__main__":
    main()
