"""Learners that no GPU was tuned on, in one go: processes beside each other compile them, then one at a time measures.

    python -m benchmarks.gpu.unseen [--out DIR] [--only MuZero R2D2] [--variants unroll=1] [--processes 8] [--minutes 6] [--tiny]

Writes ``unseen.json``, as the steps of ``python -m benchmarks.gpu`` do, after each learner. What was not compiled in the time
that there was is left out. The exit status is 1 if anything was wrong. With XLA's own kernels of products among those that it
tries, compiling takes hours of processors; ``XLA_FLAGS`` may leave them out (docs/gpu.md), and is written beside the rows.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from benchmarks.gpu.__main__ import FOLDER, ROOT, elsewhere, failure, written
from benchmarks.gpu.workloads import CASES, UNSEEN, built, measured


def names(only: list[str] | None, workloads: bool) -> list[str]:
    """Of the learners, most recent first."""
    found = [*reversed(UNSEEN), *(CASES if workloads else ())]
    return [name for name in found if not only or any(part.lower() in name.lower() for part in only)]


def share(args: argparse.Namespace) -> None:
    """What one process does: its learners compiled; after all others have, measured while no other does."""
    sys.path += [str(FOLDER.parent), str(ROOT / "examples")]
    mine = names(args.only, args.workloads)[args.share :: args.processes]
    folder, programs = pathlib.Path(args.folder), []
    for name in mine:
        if time.time() > args.until:
            break
        try:
            programs.append(built(args.tiny, name, args.variants))
        except Exception as error:  # too large for this device, say: the others are still wanted
            told(args, *failure(name, error))
    (folder / f"{args.share}.compiled").touch()
    while len(list(folder.glob("*.compiled"))) < args.processes and time.time() < args.until + 30:
        time.sleep(0.1)
    for program in programs:
        with (folder / "turn").open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            told(args, *measured(program, 3 if args.tiny else 15))


def told(args: argparse.Namespace, row: dict, wrong: list[str]) -> None:
    """Add a row to the file."""
    path = args.out / "unseen.json"
    with (pathlib.Path(args.folder) / "file").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        found = json.loads(path.read_text())
        written(path, found | {"rows": [*found["rows"], row], "wrong": [*found["wrong"], *wrong]})
    print({k: row[k] for k in ("workload", "of plain", "of best", "best") if k in row} or row, flush=True)


def main() -> int:
    """Run all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER.parent / "results" / "gpu")
    parser.add_argument("--only", nargs="+", help="parts of names")
    parser.add_argument("--workloads", action="store_true", help="those of `make gpu` as well")
    parser.add_argument("--variants", nargs="+", default=[], help="rewrites of the target: unroll=1 deferred_rows=0")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--minutes", type=float, default=6.0, help="to compile in")
    parser.add_argument("--tiny", action="store_true", help="sizes that only test this")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.share is not None:
        share(args)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    known = elsewhere("import benchmarks.gpu.__main__ as m", f"m.about({args.tiny})")
    chosen = names(args.only, args.workloads)
    path = args.out / "unseen.json"
    head = {"date": str(datetime.date.today()), "step": "unseen", **known, "of": len(chosen)}
    written(path, head | {"rows": [], "wrong": []})
    with tempfile.TemporaryDirectory() as folder:
        own = ["--folder", folder, "--until", str(time.time() + 60 * args.minutes), "--out", str(args.out.resolve())]
        command = [sys.executable, "-m", "benchmarks.gpu.unseen", *sys.argv[1:], *own, "--processes", str(args.processes)]
        env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        shares = [subprocess.Popen([*command, "--share", str(i)], cwd=ROOT, env=env) for i in range(args.processes)]
        ended = [process.wait() for process in shares]
    found = json.loads(path.read_text())
    for text in found["wrong"]:
        print(text)
    return int(bool(found["wrong"]) or any(ended))


if __name__ == "__main__":
    sys.exit(main())
