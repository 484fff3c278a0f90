"""The tables of docs/memory.md, plans.md, targets.md: bytes of plans, and what they cost in time."""

from __future__ import annotations

from functools import partial

from benchmarks.tables_markdown import read, rows, table, times

WAYS = {
    "whole": "whole batch", "rlfx": "**incrementalize**", "optax.microbatch": "`optax.microbatch`",
    "lax.map": "`lax.map` + `checkpoint`", "by hand": "by hand",
}  # fmt: skip


def losses() -> str:
    found = []
    for r in read("memory_losses")["results"]:
        whole, of = r["ways"]["whole"]["temp"]["1"], str(r["blocks"])
        for way, took in r["ways"].items():
            temp = took["temp"].get(of, whole)
            first = f"{r['model']}, {r['batch']}" if way == "whole" else ""
            found.append(took | {"first": first, "way": WAYS[way], "bytes": temp, "share": temp / whole})
    return table(
        found,
        {
            "model, batch": lambda r: r["first"],
            "way": lambda r: r["way"],
            "temp": lambda r: f"{r['share']:.3f}x",
            "time": lambda r: times(r["time_ratio"]),
            "error": lambda r: f"{r['error']:.0e}" if "error" in r else "",
            "temp MB": lambda r: f"{r['bytes'] / 1e6:.2f}",
            "ms": lambda r: f"{r['ms']:.1f}",
        },
    )


def blocks() -> str:
    counts = ("2", "4", "8", "16")

    def less(n):
        return lambda r: f"{r['ways']['whole']['temp']['1'] / r['ways']['rlfx']['temp'][n]:.1f}x"

    return table(read("memory_losses")["results"], {"model": lambda r: r["model"]} | {n: less(n) for n in counts})


SHOWN = ("default", "budget 1/16", "budget 1/32", "two pass", "one pass", "checkpointed", "at once")


def through_time(name: str = "through_time", shown: tuple[str, ...] = SHOWN) -> str:
    return table(
        [{"cell": r["cell"], "program": p} | r["programs"][p] for r in rows(name) for p in shown],
        {
            "cell": lambda r: r["cell"],
            "program": lambda r: r["program"],
            "time of the best by hand": lambda r: f"{r['of_best_by_hand']:.2f}",
            "of at once": lambda r: f"{r['of_at_once']:.2f}",
            "memory of at once": lambda r: f"{r['memory_of_at_once']:.3f}",
            "temp MiB": lambda r: f"{r['temp_mib']:.1f}",
            "ms": lambda r: f"{r['ms']:.0f}",
            "compile s": lambda r: f"{r['compile_s']:.1f}",
        },
    )


def plan(r: dict) -> str:
    """``replay (16, 4)`` of ``replay 16 4``: timesteps and environments of a block."""
    form, *sizes = r["plan"].rsplit(" ", 2)
    known = [n for n in sizes if n != "None"]
    return f"{form} ({', '.join(known)})" if known else form


def images() -> str:
    return table(
        read("memory_images")["figures"],
        {
            "program": lambda r: r["program"],
            "image, T x B": lambda r: f"3x{r['size']}x{r['size']}, {r['T']} x {r['B']}",
            "budget": lambda r: r["budget"],
            "plan (timesteps, environments)": plan,
            "time": lambda r: times(r["time_ratio"]),
            "temp MB": lambda r: f"{r['temp_bytes'] / 1e6:.1f}",
            "of plain": lambda r: f"{r['of_plain']:.3f}",
            "of stacked observations": lambda r: f"{r['of_stacked_observations']:.2f}",
            "gradient error": lambda r: f"{r['gradient_error']:.0e}",
        },
    )


def megabytes(count: int | None) -> str:
    if count is None:
        return "-"
    return f"{count / 1e6:,.0f}" if count >= 99.5e6 else f"{count / 1e6:.3g}"


def targets() -> str:
    at_once = {r["program"]: r["temp_bytes"] for r in rows("targets") if r.get("plan") == "at once"}

    def share(r):
        return f"{r['temp_bytes'] / at_once[r['program']]:.2f}" if "plan" in r and "refused" not in r else ""

    def launched(r):
        return "" if "refused" in r else "on data" if r["launches"] is None else f"{r['launches']:,}"

    return table(
        rows("targets"),
        {
            "program": lambda r: r["program"],
            "machine": lambda r: r["target"],
            "plan": lambda r: r.get("plan", ""),
            "estimate MB": lambda r: megabytes(r.get("estimated_bytes")),
            "XLA MB": lambda r: "no plan fits" if "refused" in r else megabytes(r["temp_bytes"]),
            "of at once": share,
            "launches": launched,
        },
    )


TABLES = {
    "memory-losses": losses, "memory-blocks": blocks, "through-time": through_time,
    "through-time-two": partial(through_time, "through_time_two", (SHOWN[0], "budget 1/8", *SHOWN[1:])), "memory-images": images,
    "targets": targets,
}  # fmt: skip
