"""The tables of the workloads that nobody tuned for, in docs/benchmarks.md."""

from __future__ import annotations

import functools

import numpy as np

from benchmarks.tables_markdown import number, read, table
from benchmarks.untuned.measure import interval, memory_ratio, ratios, resampled_medians


def workloads(name: str) -> list[dict]:
    return [{"workload": n} | r for n, r in read(f"untuned_{name}")["workloads"].items()]


def beside(r: dict, to: str) -> str:
    found = ratios(r, to)
    low, high = interval(resampled_medians(found))
    return f"{np.median(found):.2f} [{low:.2f}, {high:.2f}]"


def compiled(r: dict) -> str:
    return f"{r['forms']['rlfx']['compile_s'] / r['forms']['plain']['compile_s']:.2f}"


TIMES = {
    "workload": lambda r: r["workload"],
    "rlfx / plain": functools.partial(beside, to="plain"),
    "rlfx / best": functools.partial(beside, to="best"),
    "the best by hand": lambda r: r["best"],
}
MEMORY = {
    "memory of plain, best": lambda r: f"{memory_ratio(r, 'plain'):.2f}, {memory_ratio(r, 'best'):.2f}",
    "compile of plain": compiled,
}


def tuning() -> str:
    return table(workloads("tuning"), TIMES | MEMORY)


def tuning_after() -> str:
    before = {r["workload"]: np.median(ratios(r, "best")) for r in workloads("tuning")}
    shown = {"rlfx / best before": lambda r: f"{before[r['workload']]:.2f}"}
    return table(workloads("tuning_after"), TIMES | shown | MEMORY)


def unseen() -> str:
    return table(workloads("unseen"), TIMES | MEMORY)


def of_plan(r: dict, plan: str) -> str:
    """In short: ``blocks of 4, kept: 41.4 ms``."""
    return f"{r[plan]}: {number(r['again_ms'][r[plan]])} ms"


def plans() -> str:
    """What the chosen plan takes of the time of the fastest, of every program of every set."""
    found = [{"set": s, "program": n} | r for s, rows in read("plan_choice")["sets"].items() for n, r in rows.items()]
    return table(
        found,
        {
            "set": lambda r: r["set"],
            "program": lambda r: r["program"],
            "plans": lambda r: str(len(r["plans"])),
            "chosen / fastest": lambda r: f"{r['lost']:.2f}",
            "chosen": functools.partial(of_plan, plan="chosen"),
            "fastest": functools.partial(of_plan, plan="best"),
        },
    )


def within() -> str:
    """How many programs run by a plan within 10% of the fastest, of how many."""
    kept = read("plan_choice")
    lost = [r["lost"] for rows in kept["sets"].values() for r in rows.values()]
    return f"{sum(x <= kept['within'] for x in lost)} of {len(lost)}"


VALUES = {"plans-within": within}
TABLES = {
    "plan-choice": plans,
    "untuned-unseen": unseen,
    "untuned-tuning": tuning,
    "untuned-tuning-after": tuning_after,
}
