"""Learners of the held-out and sealed sets on another machine, against those forms by hand that were fastest on the first.

    python -m benchmarks.untuned.again [--only NAME ...] [--every N] [--forms 3] [--rounds 7] [--seconds 8] [--cores 1]
                                       [--json FILE]

What was chosen on one machine may be wrong on another. Rounds are interleaved, values and gradients compared before; ratios are
medians of paired rounds. Beside each is what ``benchmarks/results/untuned_*.json`` has (where a learner was measured again after
something was done for it: that). A form that would be the best here alone, and was not among the fastest there, is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.untuned.__main__ import RESULTS, SETS, UNTUNED, cases_of, keep_to, machine

LEVEL = 1.05


def positive(text: str) -> int:
    """A number from 1 on, of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on is expected, got {text!r}.")
    return int(text)


def parsed(argv=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.untuned.again", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts of the names of workloads")
    parser.add_argument("--every", type=positive, default=1, help="so many workloads, one")
    parser.add_argument("--forms", type=int, default=3, help="by hand, beside the plain one")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def recorded() -> dict[str, dict[str, Any]]:
    """The rows of all sets; those that were measured after something was done take the place of the first ones."""
    rows: dict[str, dict[str, Any]] = {}
    for ending in ("", "_after"):
        for name in SETS:
            file = RESULTS / f"untuned_{name.replace('-', '_')}{ending}.json"
            rows |= json.loads(file.read_text())["workloads"] if file.exists() else {}
    return rows


def chosen(args: argparse.Namespace) -> Iterator[tuple[str, str, Any, Mapping[str, Any]]]:
    """``(set, workload, make, sizes)`` of those that were asked for."""
    yield from list(cases_of(UNTUNED, args.only))[:: args.every]


def measured(make: Any, sizes: Mapping[str, Any], row: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """What a workload takes here, and there."""
    from benchmarks.untuned import measure as m

    there = row["forms"]
    workload = make(**sizes)
    by_hand = [form for form in workload.forms if form not in ("rlfx", "plain")]
    by_hand = sorted(by_hand, key=lambda form: there[form]["cpu_ms"] if form in there else float("inf"))[: args.forms]
    few = replace(workload, forms={form: workload.forms[form] for form in ("rlfx", "plain", *by_hand)})
    found = m.measure(few, args.rounds, args.seconds)
    here, best = found["forms"], found["best"]
    ratio = lambda to: statistics.median(m.ratios(found, to).tolist())  # noqa: E731
    return {
        "of_best": ratio("best"), "of_plain": ratio("plain"), "memory_of_best": m.memory_ratio(found, "best"), "best": best,
        "of_best_there": there["rlfx"]["cpu_ms"] / there[row["best"]]["cpu_ms"], "best_there": row["best"],
        "ms": {form: here[form]["cpu_ms"] for form in few.forms},
        "ms_there": {form: there[form]["cpu_ms"] for form in few.forms if form in there},
    }  # fmt: skip


def main(argv=None):
    args = parsed(argv)
    keep_to(args.cores)
    from benchmarks.recorded import about, write

    rows, known = {}, recorded()
    for name, workload, make, sizes in chosen(args):
        if workload not in known:
            print(f"not recorded: {name}: {workload}")
            continue
        rows[workload] = row = {"set": name, **measured(make, sizes, known[workload], args)}
        times = f"{row['of_best']:5.2f} of the best (there {row['of_best_there']:.2f})  {row['of_plain']:5.2f} of plain"
        print(f"{times}  {row['ms']['rlfx']:7.2f} ms  {name}: {workload}  [{row['best']}]", flush=True)
        means = {key: statistics.geometric_mean(r[key] for r in rows.values())
                 for key in ("of_best", "of_best_there", "of_plain", "memory_of_best")}  # fmt: skip
        if args.json:
            record = about("again") | {"machine": machine(), "cores": args.cores, "rounds": args.rounds, "forms": args.forms}
            record |= {"means": means, "workloads": rows}
            write(args.json, record)
    if not rows:
        raise SystemExit("No learner of that name is recorded: --only takes parts of the names of workloads.")
    above = [sum(r[key] > LEVEL for r in rows.values()) for key in ("of_best", "of_best_there")]
    print(len(rows), {k: round(v, 3) for k, v in means.items()}, "above 1.05 here, there:", *above)


if __name__ == "__main__":
    main()
