"""What only an accelerator can show, most valuable first, in under ten minutes; begun again, it goes on where it was.

    python -m benchmarks.gpu [--out benchmarks/results/gpu] [--only numerics kernels] [--minutes 10] [--tiny]

Each step is a process of its own, with a limit of seconds, and writes ``STEP.json``: device, versions, date, rows. A step whose
file is there, of the same versions and commit, is not run again; of one that was ended, the rows that it had are kept. The exit
status is 1 if anything was wrong: numbers that differ from the CPU's, kernels from loops, bytes over a budget. Needs nothing
from a network. On a CPU it tests itself.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import platform
import re
import subprocess
import sys
import time

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parents[1]


def about(tiny: bool) -> dict:
    """What a step's figures depend on."""
    import jax
    import jaxlib

    device = jax.devices()[0]
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
    }
    device = {"platform": device.platform, "kind": device.device_kind, "count": jax.device_count()}
    return {"device": device, "versions": versions, "commit": commit, "tiny": tiny}


def run_step(name: str, tiny: bool, out: pathlib.Path) -> None:
    """One step in this process: the rows that ``out`` lacks. It is written after each."""
    sys.path += [str(FOLDER.parent), str(ROOT / "examples")]
    from benchmarks.gpu.steps import STEPS

    step, known = STEPS[name], about(tiny)
    items = step.items(tiny)
    found = made(out, known) or {"rows": [], "wrong": [], "seconds": 0.0}
    for item in items[len(found["rows"]) :]:
        start = time.perf_counter()
        row, wrong = step.row(tiny, item)
        found = {
            "date": str(datetime.date.today()), "step": name, **known, "of": len(items),
            "seconds": round(found["seconds"] + time.perf_counter() - start, 1),
            "rows": [*found["rows"], row], "wrong": [*found["wrong"], *wrong],
        }  # fmt: skip
        written(out, found)


def written(path: pathlib.Path, found: dict) -> None:
    """A file that is whole, whenever this process is ended."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(found, indent=1) + "\n")
    new.replace(path)


def made(path: pathlib.Path, known: dict) -> dict | None:
    """The answer of an earlier run, if it is of the same device, versions and commit."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if all(found.get(k) == v for k, v in known.items()) else None


def main() -> int:
    """Run the steps that have no answer yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER.parent / "results" / "gpu")
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--tiny", action="store_true", help="sizes that only test the steps")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        run_step(args.step, args.tiny, args.out)
        return 0
    asked = "import json, benchmarks.gpu.__main__ as m; from benchmarks.gpu.steps import STEPS; " \
        f"print(json.dumps([m.about({args.tiny}), {{n: s.seconds for n, s in STEPS.items()}}]))"  # fmt: skip
    known, limits = json.loads(
        subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    )
    print(f"{known['device']['kind']}, jax {known['versions']['jax']}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + 60 * args.minutes, False
    for name in args.only or limits:
        path = (args.out / f"{name}.json").resolve()
        found = made(path, known)
        if found is None:
            found = started(name, args.tiny, path, min(limits[name], end - time.monotonic()))
        failed |= bool(found.get("wrong")) or "error" in found
        print(
            f"{name:12s} {found.get('error') or found['wrong'] or 'right'}  ({found.get('seconds', '-')} s)", flush=True
        )
    return int(failed)


def started(name: str, tiny: bool, path: pathlib.Path, seconds: float) -> dict:
    """The answer of a step in a process of its own; what went wrong, if it gave none."""
    if seconds <= 0:
        return {"error": "no time was left: run it again"}
    partial = path.with_suffix(".partial")
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--step",
        name,
        "--out",
        str(partial),
        *(["--tiny"] if tiny else []),
    ]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {seconds:.0f} s: run it again" + kept(partial)}
    if done.returncode or not partial.exists():
        return {"error": said(done.stderr) + kept(partial)}
    partial.replace(path)
    return json.loads(path.read_text())


def kept(partial: pathlib.Path) -> str:
    """How many rows are there already."""
    try:
        found = json.loads(partial.read_text())
    except (OSError, ValueError):
        return ""
    return f" ({len(found['rows'])} of {found['of']} rows are kept)"


def said(text: str) -> str:
    """The error in a traceback; jax says last that it is shortened."""
    lines = [line for line in text.strip().splitlines() if not line.startswith(("---", "For simplicity, JAX"))]
    errors = [i for i, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return "\n".join(lines[errors[-1] :] if errors else lines[-1:]) or "it said nothing"


if __name__ == "__main__":
    sys.exit(main())
