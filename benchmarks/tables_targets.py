"""The tables of docs/targets.md: what was compiled for machines that are not here, and not run."""

from __future__ import annotations

from benchmarks.tables_markdown import markdown, rows, table

MACHINES = ("h200", "a100", "t4", "v5e")
FORMS = ("rlfx", "one kernel", "by hand")


def launched(machines: dict[str, tuple[str, ...]]) -> str:
    """A row for each program, a column for each machine and form."""
    found: dict[str, dict] = {}
    for r in rows("launches"):
        if r["target"] in machines:
            found.setdefault(r["program"], {})[r["target"], r["form"]] = f"{r['launches']:,}"
    columns = [(machine, form) for machine, forms in machines.items() for form in forms]
    header = [form if i and columns[i - 1][0] == machine else f"{machine}: {form}" for i, (machine, form) in enumerate(columns)]
    return markdown(["program", *header], [[name, *[of.get(c, "") for c in columns]] for name, of in found.items()])


def launches() -> str:
    return launched({"h200": FORMS})


def launches_elsewhere() -> str:
    return launched({"a100": FORMS, "t4": ("rlfx", "by hand"), "v5e": ("rlfx", "by hand")})


def meshes() -> str:
    alone = {(r["program"], r["target"]): r["temp_bytes"] for r in rows("meshes") if r["devices"] == 1}

    def part(r):
        whole = alone[r["program"], r["target"].partition(":")[0]]
        return "" if r["devices"] == 1 else f"1/{whole / r['temp_bytes']:.1f}" if r["temp_bytes"] else "none"

    def met(r, inside):
        said = [f"{c['count']} {c['kind']} of {c['bytes']:,}" for c in r["collectives"] if c["in_loop"] == inside]
        return ", ".join(said) or ("-" if r["devices"] == 1 else "none")

    return table(
        rows("meshes"),
        {
            "update": lambda r: r["program"],
            "machine": lambda r: r["target"],
            "MB of a device": lambda r: f"{r['temp_bytes'] / 1e6:,.1f}",
            "of one device's": part,
            "devices meet once (bytes)": lambda r: met(r, False),
            "in the loop over minibatches": lambda r: met(r, True),
        },
    )


def gigabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e9:,.1f}" if count < 1e12 else "more"


def fits_grid() -> str:
    pairs: dict[tuple, dict] = {}
    for r in rows("fits_grid"):
        pairs.setdefault((r["T"], r["units"], r["layers"]), {})[r["form"]] = r

    def taken(r):
        return gigabytes(r["temp_bytes"]) + ("" if r["fits"] else ", does not fit")

    body = [
        [
            f"T {t:,}, {layers} layer{'s' * (layers > 1)} of {units}", taken(both["by hand"]), taken(both["rlfx"]),
            both["rlfx"]["plan"].removeprefix("the learner "),
        ]
        for (t, units, layers), both in pairs.items()
        if len(both) == 2
    ]  # fmt: skip
    return markdown(["PPO, one epoch, B 16,384", "full batch by hand, GB", "rlfx, GB", "default plan: the learner"], body)


def fits_images() -> str:
    def moved(r, kind):
        said = [
            f"{x['count']:,} of {x['bytes'] / 1e6:,.1f} MB, {x['behind']} kernels meanwhile"
            for x in r.get("host_transfers", ())
            if x["kind"] == kind
        ]
        return "; ".join(said)

    return table(
        rows("fits_images"),
        {
            "images": lambda r: r["program"],
            "machine": lambda r: r["target"],
            "plan": lambda r: r.get("plan", "").removeprefix("the learner ") or "refused",
            "device, GB": lambda r: gigabytes(r["temp_bytes"]),
            "host, GB": lambda r: gigabytes(r.get("host_bytes") or None),
            "to the host": lambda r: moved(r, "to host"),
            "to the device": lambda r: moved(r, "to device"),
        },
    )


def fits_budgets() -> str:
    """A row for each program, a column for each budget."""
    found: dict[str, dict[int, dict]] = {}
    for r in rows("fits_budgets"):
        found.setdefault(r["program"], {})[r["part"]] = r

    def met(r):
        if r is None:
            return ""
        if "refused" in r:
            return "no plan fits"
        return f"{r['temp_bytes'] / 1e6:,.1f} of {r['budget'] / 1e6:,.1f}"

    parts = sorted({r["part"] for r in rows("fits_budgets")})
    body = [
        [
            name, f"{next(iter(of.values()))['at_once_bytes'] / 1e6:,.1f}", *[met(of.get(part)) for part in parts],
            str(max(r["compiled_plans"] for r in of.values())),
        ]
        for name, of in found.items()
    ]  # fmt: skip
    return markdown(["program", "at once, MB", *[f"1/{part}" for part in parts], "plans compiled, at most"], body)


def kernel_limits() -> str:
    """A row for each network, columns for each machine."""
    found: dict[str, dict[str, dict]] = {}
    for r in rows("kernel_limits"):
        found.setdefault(r["network"], {})[r["target"]] = r
    machines = list(dict.fromkeys(r["target"] for r in rows("kernel_limits")))

    def cells(r):
        if r is None:
            return ["", "", ""]
        if "refused" in r:
            return [r["refused"], "", ""]
        return [str(r["registers"]), f"{r['shared_bytes'] / 1024:,.0f}", f"{r['spill_bytes']:,}"]

    columns = ("registers", "shared KiB", "spilled bytes")
    header = [what if i else f"{m}: {what}" for m in machines for i, what in enumerate(columns)]
    body = [[name, *[c for m in machines for c in cells(of.get(m))]] for name, of in found.items()]
    return markdown(["policy", *header], body)


def examples_ahead() -> str:
    """A row for each program, a column for each machine."""
    found: dict[str, dict[str, dict]] = {}
    for r in rows("examples_ahead"):
        found.setdefault(r["program"], {})[r["target"]] = r
    machines = [m for m in MACHINES if any(m in of for of in found.values())]

    def cell(r):
        if r is None or "error" in r or "refused" in r:
            return "" if r is None else "fails" if "error" in r else "needs jaxlib 0.11.1"
        return f"{r['launches_at_least']:,}" + (" +" if r["launches"] is None else "")

    return markdown(["program", *machines], [[name, *[cell(of.get(m)) for m in machines]] for name, of in found.items()])


TABLES = {
    "launches": launches, "launches-elsewhere": launches_elsewhere, "meshes": meshes, "fits-grid": fits_grid,
    "fits-images": fits_images, "fits-budgets": fits_budgets, "kernel-limits": kernel_limits,
    "examples-ahead": examples_ahead,
}  # fmt: skip
