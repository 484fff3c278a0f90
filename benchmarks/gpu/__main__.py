"""What only an accelerator can show, most valuable first, in under ten minutes; begun again, it goes on where it was.

    python -m benchmarks.gpu [--out benchmarks/results/gpu] [--only numerics kernels] [--minutes 10] [--beside 8] [--tiny]

Each step is a process of its own, with a limit of seconds, and writes ``STEP.json``: device, versions, date, rows. A step whose
file is there, of the same versions and commit, is not run again; of one that was ended, the rows that it had are kept. The exit
status is 1 if anything was wrong: numbers that differ from the CPU's, kernels from loops, bytes over a budget. Needs nothing
from a network. On a CPU it tests itself.

Most of the time is compilation. So ``--beside N`` (by default half of the cores) first runs up to N steps beside each other, only
to compile: their programs stay in a cache of jax's, their rows are thrown away (``--rehearse`` keeps them, and ends there). What
is reported is measured after that, one step at a time. PureJaxRL is compared with if ``RLFX_PUREJAXRL`` names its checkout.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parents[1]


def about(tiny: bool) -> dict:
    """What a step's figures depend on."""
    import jax
    import jaxlib

    device = jax.devices()[0]
    versions = {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
    }
    device = {"platform": device.platform, "kind": device.device_kind, "count": jax.device_count()}
    flags = os.environ.get("XLA_FLAGS", "")
    return {"device": device, "versions": versions, "xla_flags": flags, "commit": commit(), "tiny": tiny}


def commit() -> str:
    """Of the checkout; ``RLFX_COMMIT``, where files travelled without theirs."""
    if "RLFX_COMMIT" in os.environ:
        return os.environ["RLFX_COMMIT"]
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def run_step(name: str, tiny: bool, out: pathlib.Path) -> None:
    """One step in this process: the rows that ``out`` lacks. It is written after each."""
    sys.path += [str(FOLDER.parent), str(ROOT / "examples")]
    from benchmarks.gpu.steps import STEPS

    step, known = STEPS[name], about(tiny)
    items = step.items(tiny)
    found = made(out, known) or {"rows": [], "wrong": [], "seconds": 0.0}
    for item in items[len(found["rows"]) :]:
        start = time.perf_counter()
        try:
            row, wrong = step.row(tiny, item)
        except Exception as error:  # too large for this device, say: the others are still wanted
            row, wrong = failure(item, error)
        found = {
            "date": str(datetime.date.today()), "step": name, **known, "of": len(items),
            "seconds": round(found["seconds"] + time.perf_counter() - start, 1),
            "rows": [*found["rows"], row], "wrong": [*found["wrong"], *wrong],
        }  # fmt: skip
        written(out, found)


def failure(item: object, error: Exception) -> tuple[dict, list[str]]:
    """The row of an item that raised, and what is wrong."""
    said = f"{item}: {type(error).__name__}: {str(error)[:300]}"
    return {"failed": said}, [said]


def elsewhere(imports: str, expression: str) -> Any:
    """JSON that a process of its own finds: this one leaves the device to others."""
    code = f"import json; {imports}; print(json.dumps({expression}))"
    command = [sys.executable, "-c", code]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


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
    parser.add_argument(
        "--beside", type=int, default=(os.cpu_count() or 2) // 2, help="steps that compile at once; 1: none"
    )
    parser.add_argument("--cache", type=pathlib.Path, help="of compiled programs; by default of this run alone")
    parser.add_argument("--rehearse", action="store_true", help="compile and try, measure nothing")
    parser.add_argument("--tiny", action="store_true", help="sizes that only test the steps")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        import jax

        import benchmarks.gpu.steps  # noqa: F401

        jax.devices()
        sys.stdin.readline()  # begun while another step is measured: wait for the word
        run_step(args.step, args.tiny, args.out)
        return 0
    imports = "import benchmarks.gpu.__main__ as m; from benchmarks.gpu.steps import STEPS"
    known, limits = elsewhere(imports, f"[m.about({args.tiny}), {{n: s.seconds for n, s in STEPS.items()}}]")
    print(f"{known['device']['kind']}, jax {known['versions']['jax']}", flush=True)
    end = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    answers = {name: made(args.out / f"{name}.json", known) for name in args.only or limits}
    names = [name for name, found in answers.items() if found is None]
    with tempfile.TemporaryDirectory() as folder:
        temporary, failed = pathlib.Path(folder), False
        measured = Running(args.tiny, args.out, args.cache or temporary / "programs", temporary / "kept", end)
        if args.rehearse:
            failed = measured.beside(names, limits, args.beside)
        elif args.beside > 1:
            half = min(end, time.monotonic() + 30 * args.minutes)
            replace(measured, out=temporary, kept=temporary / "rehearsed", end=half).beside(names, limits, args.beside)
        if not args.rehearse:
            failed = measured.in_turn(names, limits)
    for name, found in answers.items():
        failed |= found is not None and told(name, found)
    return int(failed)


def told(name: str, found: dict) -> bool:
    """Print a step's answer: whether anything is wrong."""
    result = found.get("error") or found["wrong"] or "right"
    print(f"{name:12s} {result}  ({found.get('seconds', '-')} s)", flush=True)
    return result != "right"


@dataclass(frozen=True)
class Running:
    """How steps are run: each in a process of its own.

    Attributes:
      tiny: with sizes that only test the steps.
      out: the folder of their answers.
      cache: of compiled programs.
      kept: what kernels were found to be.
      end: when no more time is left, by the monotonic clock.
    """

    tiny: bool
    out: pathlib.Path
    cache: pathlib.Path
    kept: pathlib.Path
    end: float

    def beside(self, names: list[str], limits: dict, count: int) -> bool:
        """Steps beside each other: whether any went wrong."""
        with concurrent.futures.ThreadPoolExecutor(max(count, 1)) as pool:
            answers = {name: pool.submit(lambda n: self.ended(n, self.begun(n), 3 * limits[n]), name) for name in names}
            wrong = [told(f"({name})", answer.result()) for name, answer in answers.items()]
        return any(wrong)

    def in_turn(self, names: list[str], limits: dict) -> bool:
        """One step at a time, the next one's process waiting: whether any went wrong."""
        failed, processes = False, {name: self.begun(name) for name in names[:1]}
        for name, following in zip(names, [*names[1:], ""], strict=False):
            if following:
                processes[following] = self.begun(following)
            failed |= told(name, self.ended(name, processes.pop(name), limits[name]))
        return failed

    def begun(self, name: str) -> subprocess.Popen:
        """The process of a step, which waits for a line."""
        self.out.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.gpu", "--step", name, "--out", str(self._partial(name))]
        own = {
            "JAX_COMPILATION_CACHE_DIR": str(self.cache.resolve()), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "RLFX_CACHE": str(self.kept.resolve()),
        }  # fmt: skip
        return subprocess.Popen(
            command + ["--tiny"] * self.tiny, cwd=ROOT, text=True, env={**os.environ, **own},
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip

    def ended(self, name: str, process: subprocess.Popen, seconds: float) -> dict:
        """The answer of a step, which may begin now; what went wrong, if it gave none."""
        partial, seconds = self._partial(name), min(seconds, self.end - time.monotonic())
        try:
            if seconds <= 0:
                return {"error": "no time was left: run it again"}
            _, text = process.communicate("begin\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {seconds:.0f} s: run it again" + kept(partial)}
        finally:
            process.kill()
            process.wait()
        if process.returncode or not partial.exists():
            return {"error": said(text) + kept(partial)}
        path = self.out / f"{name}.json"
        partial.replace(path)
        return json.loads(path.read_text())

    def _partial(self, name: str) -> pathlib.Path:
        return (self.out / f"{name}.partial").resolve()


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
