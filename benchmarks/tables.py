"""Write the tables of the documentation from benchmarks/results/*.json.

    python -m benchmarks.tables            # rewrites what stands between the markers
    python -m benchmarks.tables --check    # says whether the pages are up to date, with status 1 if not

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, a figure in running text between `<!-- value: NAME -->`
and `<!-- end -->` (``VALUES`` of the modules below).
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import re
import sys

from benchmarks.tables_markdown import ROOT

SUBJECTS = ("profile_tables", "tables_envs", "tables_gpu", "tables_index", "tables_learning", "tables_memory", "tables_nests",
            "tables_place", "tables_speed", "tables_targets", "tables_training", "tables_untuned", "tables_values",
            "tables_variants", "values_compiled", "values_place", "values_profile")  # fmt: skip
MODULES = [importlib.import_module(f"benchmarks.{s}") for s in SUBJECTS]
TABLES = {name: made for module in MODULES for name, made in module.TABLES.items()}
VALUES = {name: made for module in MODULES for name, made in getattr(module, "VALUES", {}).items()}
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value: ([\w-]+) -->).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[pathlib.Path]:
    """The pages that have tables or values."""
    found = [p for p in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in p.parts]
    return [p for p in found if MARKED.search(text := p.read_text()) or VALUE.search(text)]


def page(text: str) -> str:
    """The page with all its tables and values made anew."""

    def made(name: str) -> str:
        try:
            return TABLES[name]()
        except FileNotFoundError as missing:
            return f"Not measured yet: no {pathlib.Path(missing.filename).name}.\n"

    text = MARKED.sub(lambda found: f"{found[1]}\n{made(found[2])}\n{found[3]}", text)
    return VALUE.sub(lambda found: f"{found[1]}{VALUES[found[2]]()}{found[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    stale = []
    for path in pages():
        old = path.read_text()
        new = page(old)
        if new != old:
            stale.append(str(path.relative_to(ROOT)))
            if not arguments.check:
                path.write_text(new)
    if arguments.check and stale:
        sys.exit(f"{', '.join(stale)}: not what `python -m benchmarks.tables` writes; run it")


if __name__ == "__main__":
    main()
