"""Figures in the running text of docs/place.md and place_replay.md."""

from __future__ import annotations

import statistics

from benchmarks.tables_markdown import read, rows, table
from benchmarks.tables_place import PANELS, found


def between(low: float, high: float, digits: int = 1, words: str = "to") -> str:
    """``1.4 to 1.6``; one number where both read the same."""
    a, b = f"{low:,.{digits}f}", f"{high:,.{digits}f}"
    return a if a == b else f"{a} {words} {b}"


def medians(method: str) -> list[float]:
    return [statistics.median(r["ms"][method]) for r in found("place_simulated")]


def ahead() -> str:
    """In how many rows doppler is at or below the textbook searches."""
    beside = list(zip(medians("doppler"), medians("local-search"), medians("anneal"), strict=True))
    return f"{sum(ours <= min(others) for ours, *others in beside)} of {len(beside)}"


def furthest_behind() -> str:
    worst = max(
        ours / min(others) - 1
        for ours, *others in zip(medians("doppler"), medians("local-search"), medians("anneal"), strict=True)
    )
    return f"{worst:.2%}"


def solved() -> str:
    """In how many rows the lower bound is reached to one in a thousand."""
    bounds = [r["lower_bound_ms"] for r in found("place_simulated")]
    return str(sum(ours <= 1.001 * bound for ours, bound in zip(medians("doppler"), bounds, strict=True)))


def below_the_paper() -> str:
    """In how many rows of fast links the ratio to a quarter of one device is below the paper's."""
    fast = [r for r in found("place_simulated") if r["link_GB_s"] == 10.0]
    paper = [4 * r["paper_ms"]["doppler"] / r["paper_ms"]["one-device"] for r in fast]
    ours = [statistics.median(r["ms"]["doppler"]) / r["lower_bound_ms"] for r in fast]
    return f"{sum(a < b for a, b in zip(ours, paper, strict=True))} of {len(fast)}"


def over_one_device(of: str, digits: int = 1) -> str:
    """Of the panels: how many times as fast as one device, or as under barriers, the best assignment is."""
    panels = [r for r in rows("place_real") if r["graph"] in PANELS]
    ratios = [r[of] / r["polish_ms"] for r in panels]
    return between(min(ratios), max(ratios), digits)


def training(key: str) -> str:
    values = [r[key] for r in rows("place_speed")]
    return between(min(values), max(values), 0)


def repeated() -> str:
    (r,) = rows("place_repeat")
    critical, enumerated, heft = (f"{r['ms'][m]:.1f}" for m in ("critical-path", "enumerate", "heft"))
    return (
        f"one block takes {r['block_ms']:.2f} ms, its placement repeated {r['repeated_ms']:.1f} ms; the lower bound is "
        f"{r['lower_bound_ms']:.1f}, and the heuristics that see the whole take {critical} (critical path), "
        f"{enumerated} (EnumerativeOptimizer) and {heft} ms (HEFT)"
    )


def repetition_costs() -> str:
    (r,) = rows("place_repeat")
    return f"{r['repeated_ms'] / min(r['ms'].values()) - 1:.0%}"


def zero_shot(start: str, with_calls: bool) -> str:
    """Zero-shot placement against a search: the ratios of makespans, search over zero-shot."""
    key = "1024_calls_ms" if with_calls else "ms"
    ratios = [r[start][key] / r["zero_shot_ms"] for r in rows("place_equal_time")]
    return between(min(ratios), max(ratios), 1)


def zero_shot_ahead(key: str) -> str:
    found_rows = rows("place_equal_time")
    wins = sum(r["zero_shot_ms"] < r["search_from_one_list_schedule"][key] for r in found_rows)
    return f"{wins} of {len(found_rows)}"


def messages(key: str) -> float:
    """Once a step over once an episode: the ratio of means."""
    of = {m: [r[key] for r in rows("place_messages") if r["messages"] == m] for m in ("per step", "per episode")}
    return statistics.mean(of["per step"]) / statistics.mean(of["per episode"])


def zero_shot_behind(target: str) -> str:
    """How far above the policy trained on the target the worst zero-shot median is."""
    seeds: dict[str, list[dict]] = {}
    for r in rows("place_transfer"):
        if r["target"] == target:
            seeds.setdefault(r["source"], []).append(r)
    zero, trained = ([statistics.median(r[k] for r in of) for of in seeds.values()] for k in ("zero_shot_ms", "full_4k_ms"))
    return f"{max(a / b - 1 for a, b in zip(zero, trained, strict=True)):.0%}"


def large() -> str:
    return table(
        rows("place_large"),
        {
            "tasks": lambda r: f"{r['tasks']:,}",
            "ms a call": lambda r: f"{r['ms a call, batches of 1']:.2f}",
            "in batches of 16": lambda r: f"{r['ms a call, batches of 16']:.2f}",
            "HEFT, s": lambda r: f"{r['heft, s']:.2f}",
            "128 calls of `polish`, s": lambda r: f"{r['polish from heft, 128 calls, s']:.2f}",
        },
    )


def emulated() -> str:
    return table(
        rows("place_emulated"),
        {
            "graph": lambda r: r["graph"],
            "assignments": lambda r: str(r["assignments"]),
            "real over simulated: least": lambda r: f"{r['real_over_simulated'][0]:.3f}",
            "median": lambda r: f"{r['real_over_simulated'][1]:.3f}",
            "most": lambda r: f"{r['real_over_simulated'][2]:.3f}",
            "Pearson": lambda r: f"{r['pearson']:.2f}",
        },
    )


def online() -> str:
    """What the policy's samples take before and after updates from measured times."""
    return table(
        [r for r in rows("place_real") if "stage_three" in r],
        {
            "graph": lambda r: r["graph"].split(",")[0],
            "executions": lambda r: str(r["stage_three"]["episodes"]),
            "policy before, ms": lambda r: f"{r['stage_three']['policy_ms_before']:.1f}",
            "after": lambda r: f"{r['stage_three']['policy_ms_after']:.1f}",
            "best of the executions": lambda r: f"{r['stage_three']['best_seen_ms']:.1f}",
        },
    )


def flat(of: str) -> str:
    """The correlation where XLA spreads kernels over all cores."""
    return " and ".join(
        f"{r['calibrated'][of]:.2f}" for g in ("chainmm", "ffnn") for r in rows("place_real") if r["graph"] == g
    )


def fitting(method: str) -> str:
    """In how many of the rows with limited memory a method finds what fits, of those where any does."""
    found = [r["ms"] for r in rows("place_memory") if any(ms is not None for ms in r["ms"].values())]
    return f"{sum(ms[method] is not None for ms in found)} of {len(found)}"


def host_gain(beside: str, cases: slice = slice(1, None)) -> str:
    """How much faster what was composed is than a program, where an actor has many environments: medians of rounds."""
    gains = [
        statistics.median(a / b for a, b in zip(r["ms"][beside], r["ms"]["composed"], strict=True))
        for r in read("place_pearl_host")["an iteration"][cases]
    ]
    return between(min(gains), max(gains), 2)


def host_in_turn() -> str:
    """By how much one thread of the runtime takes longer than the fastest program by hand: medians."""
    found = [{who: statistics.median(ms) for who, ms in r["ms"].items()} for r in read("place_pearl_host")["an iteration"]]
    return between(*sorted(100 * (r["in turn"] / r["one core, one program"] - 1) for r in found)[::5], 0)


def grid_spread() -> str:
    spreads = [max(t) / min(t) for t in ([a["median_ms"] for a in r["assignments"]] for r in rows("place_pearl_grid"))]
    return between(min(spreads), max(spreads), 1)


def grid_chosen(within: float) -> str:
    """At how many points the chosen assignment takes at most so many times as long as the fastest."""
    found = [[a["median_ms"] for a in r["assignments"]] for r in rows("place_pearl_grid")]
    chosen = [next(a["median_ms"] for a in r["assignments"] if a["chosen"]) for r in rows("place_pearl_grid")]
    return f"{sum(c <= within * min(t) for c, t in zip(chosen, found, strict=True))} of {len(found)}"


def grid_predicted(what: str, together: bool) -> tuple[str, str]:
    """How many iterations are within 20% of what is predicted, and the median of measured over predicted."""
    every = [a for r in rows("place_pearl_grid") for a in r["assignments"]]
    chosen = [a for a in every if (a["replay_on"] == a["learner_on"]) == together]
    ratios = [a["median_ms"] / a[what] for a in chosen]
    return f"{sum(0.8 <= r <= 1.2 for r in ratios)} of {len(ratios)}", f"{statistics.median(ratios):.2f}"


def grid_beside() -> str:
    """Actors alone on a device: how many are within 20%, and the median of measured / predicted."""
    every = [a for r in rows("place_pearl_grid") for a in r["assignments"]]
    ratios = [a["median_ms"] / a["predicted_ms"] for a in every if a["replay_on"] == a["learner_on"] != a["actors_on"]]
    within = sum(0.8 <= r <= 1.2 for r in ratios)
    return f"{within} of {len(ratios)} within 20%, median of measured / predicted {statistics.median(ratios):.2f}"


def grid_first() -> str:
    """At how many points the assignment with the shortest prediction, untried, is within 5% of the fastest."""
    found = rows("place_pearl_grid")
    first = [next(a["median_ms"] for a in r["assignments"] if a["first_predicted"]) for r in found]
    fastest = [min(a["median_ms"] for a in r["assignments"]) for r in found]
    return f"{sum(a <= 1.05 * b for a, b in zip(first, fastest, strict=True))} of {len(found)}"


def held_out(a: str, b: str) -> str:
    """In how many of the graphs one is ahead of the other."""
    found = rows("place_held_out")
    return f"{sum(r[a] < r[b] for r in found)} of {len(found)}"


def held_out_seconds() -> str:
    return between(*(f(r["zero_shot_seconds"] for r in rows("place_held_out")) for f in (min, max)), 1)


TABLES = {"place-large": large, "place-emulated": emulated, "place-online": online}
VALUES = {
    "place-ahead": ahead,
    "place-behind": furthest_behind,
    "place-solved": solved,
    "place-below-paper": below_the_paper,
    "place-training": lambda: training("training_seconds"),
    "place-least-rate": lambda: f"{min(r['episodes_per_s'] for r in rows('place_speed')):.0f}",
    "place-two-devices": lambda: over_one_device("one_device_ms"),
    "place-barriers": lambda: over_one_device("synchronous_ms"),
    "place-flat": lambda: flat("pearson"),
    "place-repeated": repeated,
    "place-repetition": repetition_costs,
    "place-zero-block": lambda: zero_shot_behind("llama-block"),
    "place-zero-layer": lambda: zero_shot_behind("llama-layer"),
    "place-zero-random": lambda: zero_shot("search_from_random", False),
    "place-zero-random-calls": lambda: zero_shot("search_from_random", True),
    "place-zero-list": lambda: zero_shot_ahead("ms"),
    "place-zero-list-calls": lambda: zero_shot_ahead("1024_calls_ms"),
    "place-messages": lambda: f"{messages('message_passings'):,.0f}",
    "place-messages-time": lambda: f"{messages('seconds'):.0f}",
    "place-messages-gain": lambda: f"{1 - messages('ms'):.1%}",
    "place-handover": lambda: f"{min(h['other device']['median_us'] for h in read('place_stages')['handover']):.0f}",
    "place-memory-rows": lambda: f"{len(rows('place_memory'))}",
    "place-memory-polish": lambda: fitting("polish"),
    "place-memory-doppler": lambda: fitting("doppler"),
    "place-host-one": lambda: host_gain("one core"),
    "place-host-program": lambda: host_gain("one core, one program"),
    "place-host-few": lambda: " and ".join(
        host_gain(who, slice(1)).split(" to ")[0] for who in ("one core", "one core, one program")
    ),
    "place-host-in-turn": host_in_turn,
    "place-grid-spread": grid_spread,
    "place-grid-near": lambda: grid_chosen(1.05),
    "place-grid-first": grid_first,
    "place-grid-beside": grid_beside,
    "place-grid-together": lambda: grid_predicted("predicted_ms", True)[0],
    "place-grid-apart": lambda: grid_predicted("predicted_ms", False)[0],
    "place-grid-times": lambda: grid_predicted("predicted_ms", False)[1],
    "place-grid-equation-together": lambda: grid_predicted("equation_6_ms", True)[0],
    "place-grid-equation-apart": lambda: grid_predicted("equation_6_ms", False)[0],
    "place-grid-equation-times": lambda: grid_predicted("equation_6_ms", False)[1],
    "place-grid-trial-together": lambda: grid_predicted("trial_ms", True)[0],
    "place-grid-trial-apart": lambda: grid_predicted("trial_ms", False)[0],
    "place-phi-composed": lambda: f"{read('place_pearl_portability')['portability']['composed']:.2f}",
    "place-held-zero": lambda: held_out("zero_shot_ms", "polish_ms"),
    "place-held-zero-behind": lambda: held_out("polish_ms", "zero_shot_ms"),
    "place-held-proposal": lambda: held_out("proposal_ms", "polish_more_ms"),
    "place-held-proposal-behind": lambda: held_out("polish_more_ms", "proposal_ms"),
    "place-held-seconds": held_out_seconds,
}
