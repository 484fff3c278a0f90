"""``python -m tests.mutation COUNT --reach FILE``: sampled mutants of the compiler against the tests that run their lines.

Each is one small change (``mutants.py``) in a copy of the tree. A mutant is killed by a test that fails, or by the limit on
processor time. FILE says which test runs which lines (``reach.py`` writes it, once for a tree). Of the tests that run the
statement of a mutant one of each file comes first, cheapest first, then the second of each, until they take ``--seconds``
together; the first failure ends it. Survivors are printed with their change, and all are appended to ``--record``, one JSON
object a line. ``sampled.json`` is the judgement of a sample.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.mutation import mutants

ROOT = Path(__file__).parents[2]
#: Files that decide no result, only its cost or its description: other tests look at those.
APART = (
    "estimate",
    "timeline",
    "explain",
    "predict",
    "tune",
    "cost",
    "trial",
    "reasons",
    "python_use",
    "host",
    "tiling",
)


def files() -> list[Path]:
    whole = sorted((ROOT / "rlfx" / "recurrence").rglob("*.py"))
    return [f for f in whole if not any(part in f.stem for part in APART)]


def sample(number: int, seed: int) -> list[tuple[Path, int]]:
    """Mutants chosen evenly among all of them."""
    every = [(f, i) for f in files() for i in range(mutants.count(f.read_text()))]
    return random.Random(seed).sample(every, min(number, len(every)))


def statement(source: str, line: int) -> range | None:
    """The lines of the innermost statement around a line, without its body; None outside of functions."""
    functions = [f for f in ast.walk(ast.parse(source)) if isinstance(f, ast.FunctionDef)]
    inside = [s for f in functions for top in f.body for s in ast.walk(top) if isinstance(s, ast.stmt)]
    around = [head for s in inside if line in (head := _head(s))]
    return min(around, key=len, default=None)


def _head(node: ast.stmt) -> range:
    body = getattr(node, "body", None)
    return range(node.lineno, body[0].lineno if body else (node.end_lineno or node.lineno) + 1)


def reaching(reach: list[dict], file: str, lines: range | None, seconds: float) -> list[str]:
    """Tests that run any of the lines (any of the file, if they are none), in the order of the docstring above."""
    hits = [r for r in reach if r["passed"] and file in r["lines"]]
    if lines is not None:
        hits = [r for r in hits if not set(lines).isdisjoint(r["lines"][file])]
    seen: Counter[str] = Counter()
    ranked = []
    for row in sorted(hits, key=lambda r: r["seconds"]):
        module = row["test"].split("::")[0]
        ranked.append((seen[module], row["seconds"], row["test"]))
        seen[module] += 1
    chosen, total = [], 0.0
    for _, cost, name in sorted(ranked):
        if total + cost <= seconds:
            chosen.append(name)
            total += cost
    return chosen


def judge(tree: Path, limit: int, tests: list[str]) -> str:
    """ "killed", "timed out" or "survived"; "not run" where there is no test."""
    if not tests:
        return "not run"
    environment = os.environ | {"PYTHONPATH": str(tree), "RLFX_TESTS": "quick", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", *tests]
    command = ["bash", "-c", f'ulimit -t {limit}; exec "$@"', "bash", *command]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, check=False)
    if done.returncode < 0:
        return "timed out"
    # 1: a test failed; 2: a test's module did; more: what asked for them is wrong
    assert done.returncode <= 2, f"pytest returned {done.returncode}:\n{done.stdout.decode()[-2000:]}"
    return "survived" if done.returncode == 0 else "killed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--reach", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="go on with this one of the sample")
    parser.add_argument("--seconds", type=float, default=40, help="of tests for one mutant")
    parser.add_argument("--limit", type=int, default=240, help="seconds of processor time for the tests of one mutant")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    reach = [json.loads(line) for line in args.reach.read_text().splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("rlfx", "tests"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        for i, (file, index) in list(enumerate(sample(args.count, args.seed)))[args.first :]:
            name, source = str(file.relative_to(ROOT)), file.read_text()
            made = mutants.mutant(source, index)
            tests = reaching(reach, name, statement(source, made.line), args.seconds)
            (tree / name).write_text(made.source)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            outcome = judge(tree, args.limit, tests)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            (tree / name).write_text(source)
            spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            row = {"mutant": i, "file": name, "line": made.line, "change": made.change, "outcome": outcome}
            row |= {"tests": len(tests), "seconds": round(spent, 1)}
            print(json.dumps(row), flush=True)
            if args.record:
                with args.record.open("a") as record:
                    record.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
