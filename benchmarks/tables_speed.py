"""The tables of docs/performance.md, benchmarks.md, attention.md, targets.md, training.md: what programs take beside others."""

from __future__ import annotations

import functools

from benchmarks.tables_markdown import markdown, read, rows, table, times

BY_HAND = "hand"


def results(name: str) -> list[dict]:
    return read(name)["results"]


def each_program(name: str) -> list[dict]:
    """A row for each program of each result, with what the result says of all of them."""
    return [
        {k: v for k, v in r.items() if k != "programs"} | {"program": p.replace(" on 2", ", 2")} | took
        for r in results(name)
        for p, took in r["programs"].items()
    ]


def acting_products() -> str:
    found = {(r["program"], r["B"]): r["ratio"] for r in rows("acting_products")}
    sizes = sorted({b for _, b in found}, key=lambda b: b or 0)
    names = {"actor_critic": "actor and critic", "gru": "GRU"}
    body = [[names.get(p, p), *[f"{found[p, b]:.2f}" for b in sizes]] for p in dict.fromkeys(p for p, _ in found)]
    return markdown(["environments", *["none" if b is None else str(b) for b in sizes]], body)


def ppo_timerl() -> str:
    return table(
        each_program("ppo_timerl"),
        {
            "B": lambda r: str(r["B"]),
            "program": lambda r: r["program"],
            "wall": lambda r: times(r["wall_ratio"]),
            "CPU": lambda r: times(r["cpu_ratio"]),
            "wall ms": lambda r: f"{r['wall_ms']:.1f}",
            "temp MB (a device)": lambda r: f"{r['temp_mb']:.1f}",
            "trace s": lambda r: f"{r['trace_s']:.2f}",
            "compile s": lambda r: f"{r['compile_s']:.2f} ({times(r['compile_ratio'])})",
        },
    )


CENTRE = {"T": 250, "B": 512, "units": 64, "layers": 2}


def point(r: dict) -> str:
    return ", ".join(f"{k} = {r[k]}" for k, v in CENTRE.items() if r[k] != v) or "centre"


def beside(r: dict, program: str) -> str:
    return times(r["programs"][program]["wall_ratio"])


def megabytes(r: dict, program: str, digits: int) -> str:
    """Of all devices."""
    devices = 2 if program.endswith("2 devices") else 1
    return f"{devices * r['programs'][program]['temp_mb']:.{digits}f}"


def ppo_grid() -> str:
    ratios = ("hand-chunked", "rlfx", "hand-chunked on 2 devices", "rlfx on 2 devices")
    return table(
        sorted(results("ppo_grid"), key=lambda r: point(r) != "centre"),
        {
            "point": point,
            "hand ms": lambda r: f"{r['programs']['hand']['wall_ms']:.0f}",
            **{p.replace(" on 2", ", 2"): functools.partial(beside, program=p) for p in ratios},
            "hand MB": lambda r: megabytes(r, "hand", 0),
            "rlfx MB": lambda r: megabytes(r, "rlfx", 0),
            "rlfx, 2 devices, MB": lambda r: megabytes(r, "rlfx on 2 devices", 0),
        },
    )


def returns(r: dict) -> str:
    return f"n = {r['n']}" if r["n"] else "Monte Carlo"


def nstep_speed() -> str:
    return table(
        results("nstep_speed"),
        {
            "returns": returns,
            "hand ms": lambda r: f"{r['programs']['hand']['wall_ms']:.0f}",
            "rlfx": lambda r: beside(r, "rlfx"),
            "rlfx, 2 devices": lambda r: beside(r, "rlfx on 2 devices"),
            "hand MB": lambda r: megabytes(r, "hand", 1),
            "rlfx MB": lambda r: megabytes(r, "rlfx", 1),
            "rlfx, 2 devices, MB": lambda r: megabytes(r, "rlfx on 2 devices", 1),
        },
    )


def nstep_memory() -> str:
    found = {(returns(r), r["T"]): r["temp_mb"] for r in results("nstep_memory")}
    kinds, lengths = (list(dict.fromkeys(k)) for k in zip(*found, strict=True))
    body = [[k, *[f"{found[k, t]['rlfx']:.1f}" for t in lengths]] for k in kinds]
    body.append(["any, by hand", *[f"{found[kinds[0], t]['hand']:.1f}" for t in lengths]])
    return markdown(["returns", *[f"T = {t}" for t in lengths]], body)


def random_draws() -> str:
    found = [{"environments": n} | ways for n, ways in read("random_speed")["rollout_draws"].items()]
    ways = {"jax's threefry": "jax", "unrolled": "unrolled", "`fast_prng` (other numbers)": "fast"}
    return table(
        found,
        {"environments": lambda r: r["environments"]}
        | {title: lambda r, w=w: f"{r[w]['cpu_ms']:.2f} ms" for title, w in ways.items()},
    )


def shuffle_learning() -> str:
    def two(values, digits):
        return " / ".join(f"{v:.{digits}f}" for v in values)

    return table(
        [{"environment": n} | r for n, r in read("ppo_learning_shuffle")["results"].items()],
        {
            "environment": lambda r: r["environment"],
            "seeds each": lambda r: str(r["seeds"]),
            "area": lambda r: two(r["area"], 0 if abs(r["area"][0]) > 10 else 3),
            "difference": lambda r: f"{r['difference']:+.1%} [{r['interval'][0]:+.1%}, {r['interval'][1]:+.1%}]",
            "at the end": lambda r: two(r["final"], 1 if abs(r["final"][0]) > 10 else 3),
        },
    )


def ppo_full() -> str:
    found = [
        r | {"on": on} for on in ("one core", "two cores") for r in each_program(f"ppo_full_{on.replace(' ', '_')}")
    ]
    return table(
        found,
        {
            "environments": lambda r: str(r["environments"]),
            "process on": lambda r: r["on"],
            "program": lambda r: r["program"],
            "env-steps/s per core": lambda r: f"{r['cpu_steps_per_s'] / 1e3:.0f}k ({times(r['cpu_ratio'])})",
            "by the clock": lambda r: f"{r['wall_steps_per_s'] / 1e3:.0f}k ({times(r['wall_ratio'])})",
            "trace + compile s": lambda r: f"{r['trace_s']:.2f} + {r['compile_s']:.2f} ({times(r['compile_ratio'])})",
        },
    )


def old_and_new() -> str:
    def now(r):
        new = r["new"]
        return f"{new['cpu_s'] * 1e3:.0f} ms, {new['temp_bytes'] / 1e6:.1f} MB, {new['compile_s']:.1f} s"

    return table(
        results("old_and_new"),
        {
            "program": lambda r: r["what"].rstrip("."),
            "time": lambda r: times(r["ratios"]["cpu_s"]),
            "temporary bytes": lambda r: times(r["ratios"]["temp_bytes"]),
            "tracing to compiled": lambda r: times(r["ratios"]["compile_s"]),
            "now": now,
        },
    )


def attention(what: str) -> list[dict]:
    """Milliseconds and bytes of rlfx, of it on a mesh, and of the faster program by hand."""
    found = []
    for r in rows("attention_blocks"):
        if r["what"] == what:
            ours = r["candidates"]["rlfx"]
            others = [c for n, c in r["candidates"].items() if n not in ("rlfx", "mesh", "dpa")]
            hand = min(others, key=lambda c: c["ms"])
            found.append(r | {"ours": ours, "hand": hand, "mesh": r["candidates"].get("mesh")})
    return sorted(found, key=lambda r: (r["B"] or 0, r["T"]))


SIZE = {"T": lambda r: str(r["T"]), "batch": lambda r: "none" if r["B"] is None else str(r["B"])}


def on_a_mesh(r: dict) -> str:
    return f"{r['mesh']['ms'] / r['hand']['ms']:.2f}" if r["mesh"] else ""


def attention_decode() -> str:
    return table(
        attention("decode"),
        SIZE
        | {
            "rlfx / hand-written, time": lambda r: f"{r['ours']['ms'] / r['hand']['ms']:.2f}",
            "on a mesh": on_a_mesh,
            "rlfx, temp / size of the cache": lambda r: f"{r['temp_over_cache']:.2f}",
            "rlfx": lambda r: f"{r['ours']['ms']:.1f} ms",
            "hand-written": lambda r: f"{r['hand']['ms']:.1f} ms",
        },
    )


def attention_gradient() -> str:
    def both(way):
        return f"{way['ms']:.0f} ms, {way['temp_bytes'] / 2**20:.1f} MiB"

    return table(
        attention("gradient"),
        SIZE
        | {
            "time": lambda r: f"{r['ours']['ms'] / r['hand']['ms']:.2f}",
            "on a mesh": on_a_mesh,
            "memory": lambda r: f"{r['memory_ratio']:.2f}",
            "rlfx": lambda r: both(r["ours"]),
            "`[T, T]`": lambda r: both(r["hand"]),
        },
    )


def rewrites() -> str:
    """A row for each rewrite, with the ratio at each size."""
    found: dict[str, list[str]] = {}
    for r in rows("rewrites"):
        found.setdefault(r["rewrite"], []).append(f"{r['width']} x {r['batch']}: {r['ratio']:.2f}")
    body = [[f"`{name}`", ", ".join(ratios)] for name, ratios in found.items()]
    return markdown(["rewrite", "width x environments: time with it / without"], body)


def copies() -> str:
    """Time and memory one after the other, of those at once."""
    return table(
        rows("copies"),
        {
            "copies of": lambda r: r["program"],
            "copies, T, B, units": lambda r: ", ".join(map(str, r["size"])),
            "time of all at once": lambda r: f"{r['ratio']:.2f}",
            "memory": lambda r: f"{r['in_turn_bytes'] / r['at_once_bytes']:.2f}",
            "ms": lambda r: f"{r['in_turn_ms']:.2f}, {r['at_once_ms']:.2f}",
        },
    )


def elements() -> str:
    """Time of jax's own function, of the value and with its gradient."""
    return table(
        rows("elements"),
        {
            "of": lambda r: r["of"],
            "numbers": lambda r: " x ".join(map(str, r["shape"])),
            "value": lambda r: f"{r['value'][0]:.2f}",
            "with its gradient": lambda r: f"{r['gradient'][0]:.2f}",
            "ms": lambda r: f"{r['value'][1]:.3g}, {r['gradient'][1]:.3g}",
        },
    )


TABLES = {
    "rewrites": rewrites, "copies": copies, "elements": elements,
    "acting-products": acting_products, "ppo-timerl": ppo_timerl, "ppo-grid": ppo_grid, "ppo-full": ppo_full,
    "nstep-speed": nstep_speed, "nstep-memory": nstep_memory, "random-draws": random_draws,
    "shuffle-learning": shuffle_learning, "old-and-new": old_and_new,
    "attention-decode": attention_decode, "attention-gradient": attention_gradient,
}  # fmt: skip
