"""The tables of docs/profile.md and docs/profile-case-studies.md, from benchmarks/results/profile_*.json."""

from __future__ import annotations

import statistics

from benchmarks.tables_markdown import RESULTS, markdown, number, percent, read, rows, table


def rows_of(name: str) -> list[dict]:
    return rows(f"profile_{name}")


def part_of(name: str) -> dict:
    return read("profile_overhead")[name]


#: What names a workload.
WORKLOAD = {"kind": lambda r: r["kind"], "workload": lambda r: f"{r['algorithm']} {r['env']}, {r['mode']}"}


def overhead_run() -> str:
    return table(
        part_of("run")["workloads"],
        WORKLOAD
        | {
            "run with one short capture / plain": lambda r: f"{r['cpu']:.2f}",
            "CPU seconds of a run": lambda r: f"{r['cpu_seconds']:.1f}",
            "extra CPU seconds": lambda r: f"{r['extra_cpu_seconds']:.2f}",
        },
    )


def overhead_capture() -> str:
    ratios = {
        "CPU, captured": "cpu",
        "jax's tracer alone": "tracer",
        "CPU, corrected (machine)": "machine",
        "CPU, corrected (fitted)": "corrected",
        "wall, captured": "slower",
        "wall, corrected (machine)": "machine_wall",
        "wall, corrected (fitted)": "wall",
    }
    shown = {title: lambda r, c=c: f"{r[c]:.2f}" for title, c in ratios.items()}
    return table(part_of("capture")["workloads"], WORKLOAD | shown)


def overhead_costs() -> str:
    part = part_of("capture")
    shown = {event: f"{ns:,.0f}" for event, ns in part["costs_ns"].items()}
    shown |= {"error": percent(part["calibration_error"]), "contention": percent(part["contention"])}
    return markdown(["event", *shown], [["ns", *shown.values()]])


def annotation() -> str:
    shown = {"`with`": lambda r: r["block"], "least, ns": lambda r: f"{r['least']:,.0f}"}
    return table(rows_of("annotation"), shown | {"median, ns": lambda r: f"{r['median']:,.0f}"})


def truth() -> str:
    return table(
        rows_of("truth"),
        {
            "program": lambda r: r["what"],
            "error, median": lambda r: f"{r['error']:.2%}",
            "largest": lambda r: f"{r['largest']:.2%}",
            "verdict right": lambda r: f"{r['right']} of {len(r['runs'])}",
            "load of a core": lambda r: f"{statistics.mean(x['load'] for x in r['runs']):.1f}",
        },
    )


def implementations() -> str:
    rows = rows_of("implementations")

    def line(name, cell):
        return [name, *[cell(r) for r in rows]]

    def shares(r, names, of):
        return " / ".join(percent(r[of].get(n, 0)).rstrip("%") for n in names) + "%"

    host, work = ("python", "backend", "dispatch"), ("simulation", "inference", "backpropagation")
    body = [
        line("µs an environment step, unprofiled", lambda r: number(r["plain_us_per_step"])),
        line("Python → backend calls a step", lambda r: number(r["python_to_backend"])),
        line("instructions a step", lambda r: number(r["instructions"])),
        line("device busy", lambda r: percent(r["device_busy"])),
        line("device-bound (the host has nothing to do)", lambda r: percent(r["device_bound"])),
        line("what a sampling tool shows", lambda r: percent(r["naive_utilisation"])),
        line("host: python / backend / dispatch", lambda r: shares(r, host, "host")),
        line("compiling, after warm-up", lambda r: percent(r["compile_share"])),
        line("device work: simulation / inference / backpropagation", lambda r: shares(r, work, "device_operations")),
        line("device work without an operation", lambda r: percent(r["unattributed"])),
    ]
    return markdown(["", *[r["mode"] for r in rows]], body)


def eager() -> str:
    return table(
        rows_of("eager"),
        {
            "DDPG on Pendulum": lambda r: r["mode"],
            "µs a step": lambda r: number(r["plain_us_per_step"]),
            "Python → backend a step": lambda r: number(r["python_to_backend"]),
            "dispatches a step": lambda r: number(r["backend_to_dispatch"]),
            "instructions a step": lambda r: number(r["instructions"]),
            "device busy": lambda r: percent(r["device_busy"]),
        },
    )


def consecutive() -> str:
    return table(
        rows_of("consecutive"),
        {
            "consecutive steps": lambda r: str(r["consecutive"]),
            "µs a step": lambda r: number(r["plain_us_per_step"]),
            "Python in simulation, µs a step": lambda r: number(r["simulation_python_us"]),
            "Python, backend and dispatch in it": lambda r: number(r["simulation_host_us"]),
            "calls a step": lambda r: number(r["python_to_backend"]),
            "device busy": lambda r: percent(r["device_busy"]),
        },
    )


def survey() -> str:
    of = {o: lambda r, o=o: percent(r["operations"][o]) for o in ("simulation", "inference", "backpropagation")}
    return table(
        rows_of("survey"),
        {
            "environment": lambda r: r["env"],
            "algorithm": lambda r: r["algorithm"],
            **of,
            "device-bound": lambda r: percent(r["device_bound"]),
            "callbacks a step": lambda r: number(r["callbacks"]),
            "limit": lambda r: r["verdict"].split("-bound")[0],
        },
    )


def selfplay() -> str:
    return table(
        rows_of("selfplay"),
        {
            "workers": lambda r: str(r["workers"]),
            "positions a CPU second": lambda r: number(r["positions_per_cpu_s"]),
            "search / inference": lambda r: " / ".join(percent(r["operations"][o]) for o in ("search", "inference")),
            "calls of jax a position": lambda r: number(r["calls_per_position"]),
            "device busy, all together": lambda r: percent(r["device_busy"]),
            "seconds in kernels, a worker": lambda r: f"{r['busy_s']:.2f} of {r['window_s']:.1f}",
            "sampled utilisation": lambda r: percent(r["naive_utilisation"]),
        },
    )


MODES = ("eager", "jit per step", "scan")


def findings() -> str:
    """The ratios that the statements about F.1 to F.12 rest on."""
    by = {r["mode"]: r for r in rows_of("implementations")}
    surveyed, workers = rows_of("survey"), rows_of("selfplay")
    eager_rows = rows_of("eager") if (RESULTS / "profile_eager.json").exists() else []
    few, *_, many = rows_of("consecutive")
    back, recompiled = by["eager"], by["eager"]["compiled"][:2]

    def each(cell) -> str:
        return ", ".join(cell(by[m]) for m in MODES)

    def faster(slow, fast) -> str:
        return number(slow["plain_us_per_step"] / fast["plain_us_per_step"]) + "x"

    def span(values) -> str:
        return f"{percent(min(values))} to {percent(max(values))}"

    def simulating(algorithms) -> float:
        shares = [r["operations"] for r in surveyed if r["algorithm"] in algorithms]
        return statistics.mean(o["simulation"] / (o["simulation"] + o["backpropagation"]) for o in shares)

    def simulation(on_host) -> str:
        return span([r["operations"]["simulation"] for r in surveyed if r["env"].startswith("gymnasium") == on_host])

    on, off = simulating(("PPO", "A2C")), simulating(("DQN", "DDPG"))
    of_time = back["operations"]["backpropagation"]
    worked = back["device_operations"]["backpropagation"] * back["device_busy"] / of_time
    compiled = ", ".join(f"{c['function']} {c['count']}x" for c in recompiled)
    python = few["simulation_python_us"] / max(many["simulation_python_us"], 1e-9)
    dispatchers = []
    if eager_rows:
        ddpg, nothing_jitted, ddpg_scan = eager_rows
        dispatchers = [
            ("F.3", "eager with nothing jitted / eager", faster(nothing_jitted, ddpg)),
            ("F.3", "eager / scan, DDPG", faster(ddpg, ddpg_scan)),
        ]
    lines = [
        (
            "F.1",
            "eager / jit per step, eager / scan",
            f"{faster(back, by['jit per step'])}, {faster(back, by['scan'])}",
        ),
        ("F.2", f"Python's share: {', '.join(MODES)}", each(lambda r: percent(r["host"].get("python", 0)))),
        *dispatchers,
        ("F.4", "eager backpropagation: of the time; of it, kernels", f"{percent(of_time)}; {percent(worked)}"),
        ("F.5", "Python in simulation, a step: 1 consecutive / most", f"{number(python)}x"),
        ("F.5", "time a step: 1 consecutive / most", faster(few, many)),
        ("F.6", "recompiling in eager", f"{percent(back['compile_share'])} of the time: {compiled}"),
        ("F.7", f"device busy: {', '.join(by)}", ", ".join(percent(r["device_busy"]) for r in by.values())),
        (
            "F.8",
            f"dispatch / busy: {', '.join(MODES)}",
            each(lambda r: number(r["host"]["dispatch"] / r["device_busy"])),
        ),
        ("F.9", f"device-bound: {', '.join(MODES)}", each(lambda r: percent(r["device_bound"]))),
        ("F.9", "device-bound, workers", span([r["device_bound"] for r in workers])),
        ("F.10", "simulation / (it + backpropagation): PPO and A2C", f"{on:.2f}"),
        ("F.10", "the same: DQN and DDPG; ratio", f"{off:.2f}; {on / off:.1f}x"),
        ("F.11", "1 to 8 workers: sampled", span([r["naive_utilisation"] for r in workers])),
        ("F.11", "1 to 8 workers: busy", span([r["device_busy"] for r in workers])),
        ("F.12", "simulation, compiled environments", simulation(False)),
        ("F.12", "simulation, on the host", simulation(True)),
    ]
    return markdown(["finding", "measured", "here"], [list(line) for line in lines])


TABLES = {
    "overhead-run": overhead_run, "overhead-capture": overhead_capture,
    "overhead-costs": overhead_costs, "annotation": annotation, "truth": truth,
    "implementations": implementations, "eager": eager, "consecutive": consecutive, "survey": survey, "selfplay": selfplay,
    "findings": findings,
}  # fmt: skip
