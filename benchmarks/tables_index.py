"""The table of docs/appendix/index.md: every file of results, and where it comes from."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.tables_markdown import RESULTS, read, table

NOT_RECORDED = "not recorded"
#: What a file calls the versions of libraries that are not in its ``versions``.
LIBRARIES = ("jax", "gymnax", "flashbax", "purejaxrl")


def dates(record: object) -> Iterator[str]:
    """Every day that a file, or a row of it, says."""
    if isinstance(record, dict):
        if isinstance(record.get("date"), str):
            yield record["date"][:10]
        for value in record.values():
            yield from dates(value)
    elif isinstance(record, list):
        for value in record:
            yield from dates(value)


def days(r: dict) -> str:
    found = sorted(set(dates(r)))
    return " to ".join(dict.fromkeys([found[0], found[-1]])) if found else NOT_RECORDED


def device(r: dict) -> str:
    """The device, or the machine; ``nothing: compiled ahead of time`` where nothing was run."""
    said = [r[k] for k in ("device", "cpu", "machine", "run") if isinstance(r.get(k), str)]
    return ", ".join(said) or NOT_RECORDED


def versions(r: dict) -> str:
    known = {k: r[k] for k in LIBRARIES if isinstance(r.get(k), str)} | r.get("versions", {})
    return ", ".join(f"{k} {v[:12]}" for k, v in known.items()) or NOT_RECORDED


def command(r: dict) -> str:
    return f"`{r['command']}`" if "command" in r else NOT_RECORDED


def results() -> str:
    return table(
        [{"file": path.name, **read(path.stem)} for path in sorted(RESULTS.glob("*.json"))],
        {
            "file": lambda r: f"`{r['file']}`",
            "date": days,
            "device": device,
            "versions": versions,
            "command": command,
        },
    )


TABLES = {"results": results}
