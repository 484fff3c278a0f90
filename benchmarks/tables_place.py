"""The tables of docs/place.md and place_replay.md: simulated and measured makespans, replay, the composed learner."""

from __future__ import annotations

import statistics
from functools import partial

from benchmarks.tables_markdown import listed, markdown, read, rows, table

GRAPHS = ("chainmm", "ffnn", "llama-block", "llama-layer")
TITLES = {"chainmm": "ChainMM", "ffnn": "FFNN", "llama-block": "Llama-block", "llama-layer": "Llama-layer"}


def linked(r: dict) -> str:
    return f"{r['graph']}, {r['link_GB_s']:g} GB/s"


def found(name: str) -> list[dict]:
    """The simulated rows, the faster links first; a policy's makespans of the ablation where it was not run again."""
    ablation = {(r["graph"], r["link_GB_s"]): r["ms"]["both"] for r in rows("place_ablation")}
    made = []
    for r in sorted(rows(name), key=lambda r: (-r["link_GB_s"], GRAPHS.index(r["graph"]))):
        policy = r["ms"].get("policy") or ablation.get((r["graph"], r["link_GB_s"]))
        made.append(r | {"ms": r["ms"] | ({"policy": policy} if policy else {})})
    return made


METHODS = ("critical-path", "heft", "enumerate", "placeto", "local-search", "anneal", "policy", "polish")


def simulated() -> str:
    def median(m):
        return lambda r: f"{statistics.median(r['ms'][m]):.2f}" if m in r["ms"] else "-"

    return table(
        found("place_simulated"),
        {
            "graph, links": linked,
            "calls": lambda r: str(r["budget"]),
            "bound": lambda r: f"{r['lower_bound_ms']:.1f}",
            **{m: median(m) for m in METHODS},
            "doppler": lambda r: f"**{statistics.median(r['ms']['doppler']):.2f}**",
            "doppler / bound": lambda r: f"{statistics.median(r['ms']['doppler']) / r['lower_bound_ms']:.3f}",
            "best seed / bound": lambda r: f"{min(r['ms']['doppler']) / r['lower_bound_ms']:.3f}",
            "paper": lambda r: f"{4 * r['paper_ms']['doppler'] / r['paper_ms']['one-device']:.2f}",
        },
    )


def speed() -> str:
    return table(
        rows("place_speed"),
        {
            "graph": lambda r: r["graph"],
            "episodes": lambda r: str(r["episodes"]),
            "training, s": lambda r: f"{r['training_seconds']:.1f}",
            "CPU s": lambda r: f"{r['training_cpu_seconds']:.1f}",
            "episodes/s, compiled": lambda r: f"{r['episodes_per_s']:.0f}",
            "per CPU second": lambda r: f"{r['episodes_per_cpu_s']:.0f}",
        },
    )


def synchronous() -> str:
    return table(
        rows("place_synchronous"),
        {
            "graph, links": linked,
            "assignment": lambda r: r["method"],
            "work-conserving": lambda r: f"{r['work_conserving_ms']:.1f}",
            "synchronous": lambda r: f"{r['synchronous_ms']:.1f}",
            "ratio": lambda r: f"{r['ratio']:.2f}",
        },
    )


PANELS = {"panels": "panels, [2048, 256] x [256, 256]", "panels, another run": "the same, an earlier run"}


def real() -> str:
    def spread(r):
        low, median, high = r["calibrated"]["real_over_simulated"]
        return f"{low:.2f} to {high:.2f}, median {median:.2f}"

    return table(
        [r for r in rows("place_real") if r["graph"] in PANELS],
        {
            "graph": lambda r: PANELS[r["graph"]],
            "Pearson, kernels": lambda r: f"**{r['calibrated']['pearson']:.2f}**",
            "Spearman, kernels": lambda r: f"**{r['calibrated']['spearman']:.2f}**",
            "Pearson, roofline": lambda r: f"{r['roofline']['pearson']:.2f}",
            "real over simulated, kernels": spread,
            "one device, ms": lambda r: f"{r['one_device_ms']:.1f}",
            "best found, ms": lambda r: f"{r['polish_ms']:.1f}",
            "under barriers, ms": lambda r: f"{r['synchronous_ms']:.1f}",
        },
    )


COMPARED = {
    "one device": "one-device", "critical path": "critical-path", "heft": "heft", "enumerate": "enumerate",
    "local-search": "local-search", "doppler": "doppler",
}  # fmt: skip


def compared(digits: int, methods: dict = COMPARED) -> dict:
    def cell(m):
        return lambda r: "does not fit" if r["ms"][m] is None else f"{r['ms'][m]:.{digits}f}"

    return {title: cell(m) for title, m in methods.items()}


#: The paper's table 9, in ms: critical path, EnumerativeOptimizer, Doppler. Of the paper, and not measured here.
PAPER_V100 = {
    "chainmm": (69.6, 33.5, 32.1), "ffnn": (50.0, 20.0, 16.2), "llama-block": (117.6, 109.6, 109.7),
    "llama-layer": (105.4, 97.5, 90.6),
}  # fmt: skip


def v100() -> str:
    named = {"graph": lambda r: r["graph"], "bound": lambda r: f"{r['lower_bound_ms']:.1f}"}
    paper = {"paper: critical path, enumerate, doppler": lambda r: listed(PAPER_V100[r["graph"]])}
    return table(rows("place_v100"), named | compared(2) | paper)


def memory() -> str:
    columns = {
        "graph, links": lambda r: f"{r['graph']}, {r['link_GB_s']:g} GB/s",
        "limit, GB": lambda r: f"{r['limit_GB']:.2f} ({100 * r['share']:.0f}%)",
        "no limit": lambda r: f"{r['unlimited_ms']:.1f}",
    }
    found = sorted(rows("place_memory"), key=lambda r: (-r["link_GB_s"], GRAPHS.index(r["graph"]), -r["share"]))
    return table(found, columns | compared(1, {m: m for m in found[0]["ms"]}))


def shared() -> str:
    """One lane for all that a device sends, beside what the search finds where each target has its own."""
    methods = {m: lambda r, m=m: f"{r['ms'][m]:.1f}" for m in ("critical-path", "heft", "enumerate", "local-search", "polish")}
    return table(
        sorted(rows("place_shared"), key=lambda r: (-r["link_GB_s"], GRAPHS.index(r["graph"]))),
        {
            "graph, links": linked,
            "bound": lambda r: f"{r['lower_bound_ms']:.1f}",
            "own lanes, polish": lambda r: f"{r['own_lanes_ms']:.1f}",
            "the same on one lane": lambda r: f"{r['the_same_on_one_lane_ms']:.1f}",
        }
        | methods,
    )


def transfer() -> str:
    seeds: dict[tuple[str, str], list[dict]] = {}
    for r in rows("place_transfer"):
        seeds.setdefault((r["target"], r["source"]), []).append(r)
    times = {
        "zero-shot": "zero_shot_ms", "2k episodes": "2k_ms", "4k episodes": "4k_ms", "from scratch": "full_4k_ms",
    }  # fmt: skip
    shown = {title: lambda of, k=k: listed(r[k] for r in of) for title, k in times.items()}
    heuristic = {"critical path": "critical-path", "enumerate": "enumerate"}
    shown |= {title: lambda of, m=m: f"{of[0]['heuristics_ms'][m]:.1f}" for title, m in heuristic.items()}
    body = [[TITLES[s], TITLES[t], *[cell(of) for cell in shown.values()]] for (t, s), of in seeds.items()]
    return markdown(["from", "to", *shown], body)


def equal_time() -> str:
    def search(k):
        return lambda r: f"{r[k]['ms']:.1f} ({r[k]['calls']}, {1e3 * r[k]['seconds']:.0f} ms)"

    starts = {
        "search from random": "search_from_random",
        "search from a list schedule": "search_from_one_list_schedule",
    }
    columns = {}
    for title, k in starts.items():
        columns[f"{title} (calls, time)"] = search(k)
        columns[f"{title}, 1024 calls"] = lambda r, k=k: f"{r[k]['1024_calls_ms']:.1f}"
    return table(
        rows("place_equal_time"),
        {
            "graph, seed": lambda r: f"{r['target']}, {r['seed']}",
            "zero-shot, ms (time)": lambda r: f"{r['zero_shot_ms']:.1f} ({1e3 * r['zero_shot_seconds']:.0f} ms)",
        }
        | columns,
    )


def ablation() -> str:
    medians = {(r["graph"], r["link_GB_s"]): r["ms"] for r in rows("place_simulated")}

    def search(m):
        return lambda r: f"{statistics.median(medians[r['graph'], r['link_GB_s']][m]):.1f}"

    return table(
        sorted(rows("place_ablation"), key=lambda r: GRAPHS.index(r["graph"])),
        {
            "graph": lambda r: TITLES[r["graph"]],
            "episodes": lambda r: str(r["episodes"]),
            **{m: lambda r, m=m: listed(r["ms"][m]) for m in ("both", "SEL only", "PLC only")},
            "critical path": lambda r: f"{r['heuristics_ms']['critical-path']:.1f}",
            "search alone": search("polish"),
            "policy and search": search("doppler"),
        },
    )


def messages() -> str:
    titles = {"per episode": "once an episode (ours: once a batch of 32)", "per step": "once a step"}
    of = {m: [r for r in rows("place_messages") if r["messages"] == m] for m in titles}
    columns = {
        "best, ms": ("ms", 1), "found after episodes": ("found_after_episodes", 0),
        "message passings until then": ("message_passings", 0), "seconds (the first compiles)": ("seconds", 1),
    }  # fmt: skip
    body = [[titles[m], *[listed((r[k] for r in of[m]), d) for k, d in columns.values()]] for m in titles]
    return markdown(["messages", *columns], body)


def held_out() -> str:
    times = {
        "heuristics": "heuristics_ms", "zero-shot": "zero_shot_ms", "search, as long": "polish_ms",
        "search, 3 s more": "polish_more_ms", "with the samples, as long": "proposal_ms",
    }  # fmt: skip
    return table(
        rows("place_held_out"),
        {"graph": lambda r: r["graph"], "tasks": lambda r: str(r["tasks"]), "bound": lambda r: f"{r['bound_ms']:.1f}"}
        | {title: lambda r, k=k: f"{r[k]:.2f}" for title, k in times.items()},
    )


def replay() -> str:
    """Rings that are full, on one core; and the geometric mean and the least of all ratios."""
    record = read("replay_peer")
    ours, full = f"rlfx {record['fanout']}", [r for r in record["rows"] if r["filled"] == "full" and r["cores"] == 1]
    whole = table(
        full,
        {
            "capacity": lambda r: f"{r['capacity']:,}",
            "drawn": lambda r: str(r["drawn"]),
            "how": lambda r: r["how"],
            "rlfx, CPU µs": lambda r: f"{r['cpu_us'][ours]:.0f}",
            "flashbax, CPU µs": lambda r: f"{r['cpu_us']['flashbax']:.0f}",
            "ratio, CPU": lambda r: f"{r['ratio_cpu']:.2f}",
            "wall": lambda r: f"{r['ratio_wall']:.2f}",
        },
    )
    every = [r["ratio_cpu"] for r in record["rows"]]
    mean = statistics.geometric_mean(every)
    all_of_them = f"Of all {len(every)} ratios, of rings that hold a sixteenth and on two cores, too:"
    return f"{whole}\n{all_of_them} geometric mean {mean:.2f}, least {min(every):.2f}."


def composed(name: str = "place_pearl_learning") -> str:
    r = read(name)
    both = zip(r["steps"], r["returns"], r["recipe_returns"], strict=True)
    body = [[f"{n:,}", listed(ours, 0), listed(theirs, 0)] for n, ours, theirs in both]
    return markdown(["timesteps", "composed, seeds 0 to 4", "recipe, seeds 0 to 2"], body)


def host() -> str:
    """Medians over rounds, ratios of rounds, and what two cores cannot beat: the longer of acting and the rest, on one."""

    def median(who):
        return lambda r: f"{statistics.median(r['ms'][who]):.1f}"

    def ratios(who):
        return lambda r: listed((a / b for a, b in zip(r["ms"][who], r["ms"]["composed"], strict=True)), 2)

    def most(r):
        whole, acting = (statistics.median(r[k]["one core, one program"]) for k in ("ms", "acting_ms"))
        return f"{whole / max(acting, whole - acting):.2f}"

    def chosen(r):
        c = r["chosen"]["3 trials"]
        return "in turn" if c["in_turn"] else f"{c['actors']}, {c['replay']}, {c['learner']}"

    return table(
        read("place_pearl_host")["an iteration"],
        {
            "": lambda r: f"{r['case']}, {r['updates']} updates for {r['steps']} steps",
            "one core, a call each": median("one core"),
            "one core, one program": median("one core, one program"),
            "both cores": median("both cores"),
            "in turn": median("in turn"),
            "composed": median("composed"),
            "actors, replay, learner on": chosen,
            "a call each / composed": ratios("one core"),
            "one program / composed": ratios("one core, one program"),
            "at most": most,
            "load": lambda r: f"{r['load']:.0f}",
        },
    )


def composed_grid(name: str = "place_pearl_grid") -> str:
    """Each point of the grid: what was chosen, beside the best and the worst of all assignments."""

    def chosen(r):
        return next(a for a in r["assignments"] if a["chosen"])

    def where(a):
        return ", ".join(str(a[k]) for k in ("actors_on", "replay_on", "learner_on"))

    def times(r):
        return [a["median_ms"] for a in r["assignments"]]

    def over(what):
        return lambda r: listed(sorted(a["median_ms"] / a[what] for a in r["assignments"]), 1)

    sizes = {"batch": "batch", "actors": "actors", "fan-out": "fanout", "": "machine"}
    return table(
        rows(name),
        {title: lambda r, k=k: str(r[k]) for title, k in sizes.items() if k in rows(name)[0]}
        | {
            "chosen: actors, replay, learner on": lambda r: where(chosen(r)),
            "predicted, ms": lambda r: f"{chosen(r)['predicted_ms']:.1f}",
            "measured": lambda r: f"{chosen(r)['median_ms']:.1f}",
            "fastest": lambda r: f"{min(times(r)):.1f}",
            "slowest": lambda r: f"{max(times(r)):.1f}",
            "chosen / fastest": lambda r: f"{chosen(r)['median_ms'] / min(times(r)):.2f}",
            "slowest / fastest": lambda r: f"{max(times(r)) / min(times(r)):.1f}",
            "measured / predicted of all": over("predicted_ms"),
            "measured / in the trial": over("trial_ms"),
        },
    )


def stages_of_training() -> str:
    """Figure 3: the best assignment and the policy after each combination of stages, and stage III on its way."""

    def along(i):
        return lambda r: f"{statistics.mean(x[i] for x in r['along_ms']):.0f}" if r["along_ms"] else "-"

    return table(
        rows("place_training_stages"),
        {
            "stages": lambda r: r["stages"],
            "best assignment, seeds 0 to 2": lambda r: listed(r["best_ms"], 1),
            "the policy's samples": lambda r: listed(r["policy_ms"], 1),
            "stage III: first 64 executions": along(0),
            "executions 449 to 512": along(7),
            "last 64": along(-1),
        },
    )


def pretrained() -> str:
    """Table 7: Placeto after imitation, beside Placeto and the dual policy."""
    methods = ("Placeto", "Placeto, pre-trained", "dual policy, stages I and II")
    return table(
        rows("place_training_pretrained"),
        {"graph": lambda r: TITLES[r["graph"]], "bound": lambda r: f"{r['lower_bound_ms']:.1f}"}
        | {m: lambda r, m=m: listed(r["ms"][m], 1) for m in methods}
        | {"best teacher": lambda r: listed(r["teachers_ms"], 1)},
    )


def lines() -> str:
    """Lines of code of composed programs, of the same one after another, and of what is below."""
    return markdown(["", "lines of code"], [[what, str(n)] for what, n in read("place_pearl_portability")["lines"].items()])


def portable() -> str:
    """What each way to place reaches of the fastest assignment: the harmonic mean over machines."""
    found = read("place_pearl_portability")["portability"]
    fixed = sorted(found["fixed"].items(), key=lambda item: -item[1])
    shown = [["composed", found["composed"]], *([", ".join(where), phi] for where, phi in fixed)]
    return markdown(["actors, replay, learner on", "Φ"], [[where, f"{phi:.2f}"] for where, phi in shown])


def stages() -> str:
    def time(who):
        return lambda r: f"{r['ms'][who]:.1f}"

    return table(
        rows("place_stages"),
        {
            "update": lambda r: r["update"],
            "stages": lambda r: str(r["stages"]),
            "one core": time("one core"),
            "placed on two": time("placed"),
            "one program on both": time("one program on both"),
            "one core / placed": lambda r: f"{r['ms']['one core'] / r['ms']['placed']:.2f}",
            "measured / predicted": lambda r: f"{r['ms']['placed'] / r['predicted_ms']:.2f}",
        },
    )


TABLES = {
    "place-stages": stages,
    "place-simulated": simulated, "place-speed": speed, "place-synchronous": synchronous, "place-real": real,
    "place-shared": shared,
    "place-memory": memory, "place-transfer": transfer, "place-equal-time": equal_time, "place-ablation": ablation,
    "place-messages": messages, "replay-peer": replay, "place-composed": composed, "place-grid": composed_grid,
    "place-machines": partial(composed_grid, "place_pearl_portability"), "place-phi": portable, "place-lines": lines,
    "place-composed-sac": partial(composed, "place_pearl_learning_sac"),
    "place-training": stages_of_training, "place-pretrained": pretrained,
    "place-held-out": held_out, "place-v100": v100, "place-host": host,
}  # fmt: skip
