"""Tables and figures of docs/profile.md and profile-case-studies.md that profile_tables.py has no room for."""

from __future__ import annotations

import statistics

from benchmarks.profile_tables import part_of, rows_of
from benchmarks.tables_markdown import number, percent, read, table


def gains() -> str:
    return table(
        rows_of("gains"),
        {
            "program": lambda r: r["program"],
            "change": lambda r: r["change"],
            "predicted": lambda r: "not named" if r["predicted"] is None else f"{r['predicted']:.2f}x",
            "of single captures": lambda r: ", ".join("not named" if p is None else f"{p:.2f}x" for p in r["predictions"]),
            "measured": lambda r: f"{r['measured']:.2f}x",
        },
    )


def scripts() -> str:
    of = {o: lambda r, o=o: percent(r["shares"].get(o, 0.0)) for o in ("simulation", "inference", "backpropagation")}
    return table(
        read("profile_frameworks")["scripts"],
        {
            "script": lambda r: r["name"],
            "task": lambda r: r["task"],
            **of,
            "Python": lambda r: percent(r["host"].get("python", 0.0)),
            "device busy": lambda r: percent(r["device_busy"]) if r["device"] else "no jax",
            "limit": lambda r: r["verdict"].split("-bound")[0],
        },
    )


def of_frameworks() -> str:
    """What the scripts of each framework say about those of the paper's findings that one run can show."""
    found = read("profile_frameworks")["scripts"]
    frameworks = [*dict.fromkeys(r["framework"] for r in found)]

    def row(finding: str, measured: str, of, jax: bool = True) -> dict:
        cells = {}
        for framework in frameworks:
            values = [of(r) for r in found if r["framework"] == framework and (r["device"] or not jax)]
            shown = dict.fromkeys(percent(v) for v in (min(values), max(values))) if values else {"-": None}
            cells[framework] = " to ".join(shown)
        return {"finding": finding, "measured": measured, **cells}

    def python_in(r: dict) -> float:
        return r["cells"]["backpropagation"].get("python", 0.0) / r["shares"]["backpropagation"]

    def simulating(r: dict) -> float:
        return r["shares"].get("simulation", 0.0) / (r["shares"].get("simulation", 0.0) + r["shares"]["backpropagation"])

    def policies(measured: str) -> dict:
        cells = {}
        for framework in frameworks:
            mine = [r for r in found if r["framework"] == framework]
            kinds = [[simulating(r) for r in mine if r["on_policy"] is on] for on in (True, False)]
            cells[framework] = " / ".join(percent(statistics.mean(k)) if k else "-" for k in kinds)
        return {"finding": "F.10", "measured": measured, **cells}

    rows = [
        row("F.2", "time in Python", lambda r: r["host"].get("python", 0.0), jax=False),
        row("F.4", "Python, of the time in backpropagation", python_in, jax=False),
        row("F.7", "device busy", lambda r: r["device_busy"]),
        row("F.8", "time in dispatch, of device busy", lambda r: r["host"].get("dispatch", 0.0) / r["device_busy"]),
        row("F.9", "not device-bound", lambda r: 1 - r["device_bound"], jax=False),
        policies("simulation, of it and backpropagation: on policy / off policy"),
        row("F.11", "a sampler's utilisation", lambda r: r["naive_utilisation"]),
        row("F.12", "simulation", lambda r: r["shares"].get("simulation", 0.0), jax=False),
    ]
    return table(rows, {key: lambda r, key=key: r[key] for key in rows[0]})


def worst(key: str) -> str:
    """How far the furthest workload is from what it takes without a capture."""
    return f"{max(abs(r[key] - 1) for r in part_of('capture')['workloads']):.0%}"


def within(key: str, share: float) -> str:
    found = part_of("capture")["workloads"]
    return f"{sum(abs(r[key] - 1) <= share for r in found)} of {len(found)}"


def by_mode(key: str, mode: str) -> float:
    (found,) = [r for r in rows_of("implementations") if r["mode"] == mode]
    return found[key]


def fewer(key: str) -> str:
    """Eager over jit per step."""
    return f"{by_mode(key, 'eager') / by_mode(key, 'jit per step'):.0f}"


def nothing_jitted(key: str) -> str:
    """Under `jax.disable_jit`, over eager."""
    eager, disabled, _ = rows_of("eager")
    return f"{disabled[key] / eager[key]:.1f}"


def reading(*keys: str) -> float:
    found = read("profile_reading")
    for key in keys:
        found = found[key]
    return found  # type: ignore[return-value]


def gains_error() -> str:
    """How far the worst prediction of a single capture is off."""
    return f"{max(abs(p / r['measured'] - 1) for r in rows_of('gains') for p in r['predictions'] if p):.0%}"


def gains_within(share: float) -> str:
    found = rows_of("gains")
    return f"{sum(abs(r['error']) <= share for r in found)} of {len(found)}"


def before() -> str:
    """What a capture of two iterations costs by the profiler of an older commit, and by this one's."""
    shown = {"begin, ms": "begin", "inside, ms": "inside", "end, ms": "end", "plain run, ms": "plain"}
    shown |= {"annotation, µs": "annotation"}
    rows = sorted(rows_of("before"), key=lambda r: r["workload"])
    columns = {name: lambda r, key=key: number(r[key]) for name, key in shown.items()}
    return table(rows, {"workload": lambda r: r["workload"], "profiler": lambda r: r["version"], **columns})


TABLES = {"before": before, "gains": gains, "scripts": scripts, "scripts-findings": of_frameworks}
VALUES = {
    "profile-gains-within": lambda: gains_within(0.15),
    "profile-gains-single": lambda: gains_error(),
    "profile-truth-worst": lambda: f"{max(r['largest'] for r in rows_of('truth')):.1%}",
    "profile-most": lambda: f"{max(r['extra_cpu_seconds'] for r in part_of('run')['workloads']):.1f}",
    "profile-fitted-cpu": lambda: worst("corrected"),
    "profile-fitted-wall": lambda: worst("wall"),
    "profile-machine-wall": lambda: within("machine_wall", 0.2),
    "profile-reading-us": lambda: f"{reading('us_an_instruction'):.1f}",
    "profile-reading-bytes": lambda: f"{reading('bytes_an_instruction'):.0f}",
    "profile-reading-size": lambda: f"{reading('instructions'):,}",
    "profile-reading-before-us": lambda: f"{reading('before', 'us_an_instruction'):.0f}",
    "profile-reading-before-bytes": lambda: f"{reading('before', 'bytes_an_instruction'):,.0f}",
    "profile-fewer-calls": lambda: fewer("python_to_backend"),
    "profile-less-time": lambda: fewer("plain_us_per_step"),
    "profile-recompiling": lambda: percent(by_mode("compile_share", "eager")),
    "profile-instructions": lambda: f"{by_mode('instructions', 'rlfx') / by_mode('instructions', 'scan'):.2f}x",
    "profile-not-jitted-time": lambda: nothing_jitted("plain_us_per_step"),
    "profile-not-jitted-instructions": lambda: nothing_jitted("instructions"),
    "profile-unattributed": lambda: f"{max(r['unattributed'] for r in rows_of('survey')):.1%}",
    "profile-worker-calls": lambda: number(statistics.mean(r["calls_per_position"] for r in rows_of("selfplay"))),
    "profile-worker-busy": lambda: percent(statistics.mean(r["device_busy"] for r in rows_of("selfplay"))),
}
