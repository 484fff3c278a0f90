"""The tables of docs/nests.md: whole runs as one call, two roles beside a split batch."""

from __future__ import annotations

from benchmarks.tables_markdown import read, table, times


def runs() -> str:
    found = [{"name": name} | r for name, r in read("nests")["run"].items()]
    return table(
        found,
        {
            "200 iterations of": lambda r: r["name"],
            "tracing, of one iteration's": lambda r: times(r["trace_over_inner"]),
            "compiling": lambda r: times(r["compile_over_scan"]),
            "iterations a second": lambda r: times(r["speed_over_scan"]),
            "temporary bytes at 10 and at 10,000": lambda r: " and ".join(
                f"{n:,}" for n in r["temp_bytes_by_iterations"].values()
            ),
        },
    )


def roles() -> str:
    return table(
        read("nests")["roles"],
        {
            "timesteps x environments": lambda r: f"{r['timesteps']:,} x {r['environments']}",
            "acting": lambda r: f"{r['acting']:.0%}",
            "two roles": lambda r: times(r["roles_over_one"]),
            "their bound": lambda r: times(r["bound_of_roles"]),
            "batch split": lambda r: times(r["split_over_one"]) if "split_over_one" in r else "-",
            "ms an iteration, one device": lambda r: f"{r['ms_an_iteration']['one device']:.1f}",
        },
    )


def meta() -> str:
    found = read("nests")["meta"]
    kept, again = (found["rows"][name]["temp_bytes"] / 1e6 for name in ("kept", "checkpoint"))
    return f"{again:.2f} MB with it and {kept:.0f} MB without, and the time {times(found['time_over_kept'])}"


TABLES = {"nests-run": runs, "nests-roles": roles}
