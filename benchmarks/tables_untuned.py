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


PARTS = "trace_s", "compile_s"
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


def with_later(name: str, others: dict[str, str]) -> str:
    """A set as it was at first, and its ratios to the best in other measurements, of what was measured again."""

    def shown(of: str):
        ratios_of = {r["workload"]: beside(r, "best") for r in workloads(of)}
        return lambda r: ratios_of.get(r["workload"], "")

    return table(workloads(name), TIMES | {f"rlfx / best, {k}": shown(of) for k, of in others.items()} | MEMORY)


def ordinary(name: str) -> str:
    """Learners beside plain programs alone, as they were at first and are."""
    after = {r["workload"]: r for r in workloads(f"{name}_after")}
    built = lambda r: sum(r["forms"]["rlfx"][k] for k in PARTS) / sum(r["forms"]["plain"][k] for k in PARTS)  # noqa: E731
    return table(
        workloads(name),
        {
            "workload": lambda r: r["workload"],
            "rlfx / plain at first": functools.partial(beside, to="plain"),
            "rlfx / plain": lambda r: beside(after[r["workload"]], "plain"),
            "memory of plain": lambda r: f"{memory_ratio(after[r['workload']], 'plain'):.2f}",
            "trace and compile of plain": lambda r: f"{built(after[r['workload']]):.2f}",
        },
    )


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


def within(sets: tuple[str, ...]) -> str:
    """How many programs run by a plan within 10% of the fastest, of how many."""
    kept = read("plan_choice")
    lost = [r["lost"] for name in sets for r in kept["sets"][name].values()]
    return f"{sum(x <= kept['within'] for x in lost)} of {len(lost)}"


VALUES = {
    "plans-within": functools.partial(within, ("fresh",)),
    "plans-elsewhere": functools.partial(within, ("held-out", "unseen")),
}
TABLES = {
    "plan-choice": plans,
    "untuned-unseen": functools.partial(
        with_later, "unseen", {"after": "unseen_after", "pages kept": "unseen_pages_kept", "both": "unseen_after_pages_kept"}
    ),
    "untuned-sealed": functools.partial(with_later, "sealed", {"after": "sealed_after", "pages kept": "sealed_pages_kept"}),
    "untuned-sealed-again": functools.partial(
        with_later, "sealed_again", {"after": "sealed_again_after", "pages kept": "sealed_again_pages_kept"}
    ),
    "untuned-sealed-third": functools.partial(
        with_later, "sealed_third", {"after": "sealed_third_after", "pages kept": "sealed_third_pages_kept"}
    ),
    "untuned-sealed-fourth": functools.partial(with_later, "sealed_fourth", {"after": "sealed_fourth_after"}),
    "untuned-sealed-fifth": functools.partial(with_later, "sealed_fifth", {"after": "sealed_fifth_after"}),
    "untuned-sealed-sixth": functools.partial(with_later, "sealed_sixth", {"after": "sealed_sixth_after"}),
    "untuned-sealed-seventh": functools.partial(with_later, "sealed_seventh", {"after": "sealed_seventh_after"}),
    "untuned-sealed-eighth": functools.partial(with_later, "sealed_eighth", {"after": "sealed_eighth_after"}),
    "untuned-sealed-ninth": functools.partial(with_later, "sealed_ninth", {"after": "sealed_ninth_after"}),
    "untuned-sealed-tenth": functools.partial(with_later, "sealed_tenth", {"after": "sealed_tenth_after"}),
    "untuned-sealed-eleventh": functools.partial(with_later, "sealed_eleventh", {"after": "sealed_eleventh_after"}),
    "untuned-sealed-twelfth": functools.partial(with_later, "sealed_twelfth", {"after": "sealed_twelfth_after"}),
    "untuned-sealed-thirteenth": functools.partial(with_later, "sealed_thirteenth", {"after": "sealed_thirteenth_after"}),
    "untuned-sealed-fourteenth": functools.partial(with_later, "sealed_fourteenth", {"after": "sealed_fourteenth_after"}),
    "untuned-sealed-fifteenth": functools.partial(with_later, "sealed_fifteenth", {"after": "sealed_fifteenth_after"}),
    "untuned-sealed-sixteenth": functools.partial(with_later, "sealed_sixteenth", {"after": "sealed_sixteenth_after"}),
    "untuned-sealed-seventeenth": functools.partial(with_later, "sealed_seventeenth", {"after": "sealed_seventeenth_after"}),
    "untuned-sealed-eighteenth": functools.partial(with_later, "sealed_eighteenth", {"after": "sealed_eighteenth_after"}),
    "untuned-sealed-nineteenth": functools.partial(with_later, "sealed_nineteenth", {"after": "sealed_nineteenth_after"}),
    "untuned-sealed-twentieth": functools.partial(with_later, "sealed_twentieth", {"after": "sealed_twentieth_after"}),
    "untuned-sealed-twenty-first": functools.partial(with_later, "sealed_twenty_first", {"after": "sealed_twenty_first_after"}),
    "untuned-sealed-twenty-second": functools.partial(
        with_later, "sealed_twenty_second", {"after": "sealed_twenty_second_after"}
    ),
    "untuned-looked-at": functools.partial(with_later, "looked_at", {"later": "looked_at_after"}),
    "untuned-ordinary": functools.partial(ordinary, "ordinary"),
    "untuned-ordinary-more": functools.partial(ordinary, "ordinary_more"),
    "untuned-tuning": tuning,
    "untuned-tuning-after": tuning_after,
}
