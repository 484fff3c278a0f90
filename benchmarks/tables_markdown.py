"""What the tables of the documentation are made of: results read, numbers written, rows put into Markdown."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"


@functools.cache
def read(name: str) -> dict[str, Any]:
    """``benchmarks/results/NAME.json``."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows(name: str) -> list[dict]:
    """Its rows."""
    return read(name)["rows"]


def markdown(header: list[str], body: Iterable[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def table(rows: Iterable[dict], columns: dict[str, Callable[[dict], str]]) -> str:
    """One line for each row: what each column's function says of it."""
    return markdown([*columns], [[cell(r) for cell in columns.values()] for r in rows])


def percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 or share < 0.0005 else f"{share:.1%}"


def number(value: float) -> str:
    """Three digits: 2,987; 55.1; 6.3; 0.395."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def listed(values: Iterable[float], digits: int = 1) -> str:
    """``153.1, 146.1``: one number for each seed or round."""
    return ", ".join(f"{v:.{digits}f}" for v in values)
