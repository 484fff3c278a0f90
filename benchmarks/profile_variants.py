"""RL-Scope's F.1, F.3, F.5 and F.6 on scripts of others: one algorithm and task by several backends and execution models.

    python benchmarks/profile_variants.py --checkouts DIR --environments DIR [--rounds 3] [NAME...]

Nothing of theirs is kept here, and no script is changed: variants are other scripts, flags and environment variables
(`JAX_DISABLE_JIT`), in `profile_variants_scripts.py`. `--checkouts` holds git clones at the commits in its `COMMITS`,
`--environments` virtual environments with what its `ENVIRONMENTS` lists and rlfx' own dependencies, and a folder
`gymnasium-0.29.1` of that release alone (`pip install --no-deps --target`), which CleanRL's and LeanRL's DQN were written for.

Two things are measured of each variant. Its steady cost: the CPU time of a process of many steps less that of one of few,
a step, without a capture; medians of `--rounds`. And its shares, by `python -m rlfx.profile run`: by operation where these
are functions of packages, else by part of the script's loop, from the lines at which the main thread was seen. Run it on
one core (`taskset -c 1`), where CPU time is that of a machine without others. `--again` reads the traces in `--keep` once
more. Writes benchmarks/results/profile_variants.json.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile

import numpy as np
from profile_frameworks import ROOT, category, within
from profile_variants_scripts import COMMITS, VARIANTS, Variant

from rlfx.errors import ProfileError
from rlfx.profile import read
from rlfx.profile.capture import machine
from rlfx.profile.seen import seen

RESULT = pathlib.Path(__file__).parent / "results/profile_variants.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--checkouts", type=pathlib.Path, required=True)
    parser.add_argument("--environments", type=pathlib.Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=120.0, help="when a profiled script is ended")
    parser.add_argument("--keep", type=pathlib.Path, help="keep traces and outputs in this folder")
    parser.add_argument("--out", type=pathlib.Path, default=RESULT)
    parser.add_argument("--again", action="store_true", help="only read the traces in --keep again")
    parser.add_argument("--shares", action="store_true", help="only profile again, and keep the costs")
    parser.add_argument("--exact", action="store_true", help="names: a study and a variant, and not parts of them")
    parser.add_argument("names", nargs="*", help="parts of a study's and a variant's name")
    arguments = parser.parse_args()
    for variant in VARIANTS:
        label = f"{variant.study} {variant.name}"
        exact = arguments.names == [variant.study, variant.name]
        if not (exact if arguments.exact else all(n in label for n in arguments.names)):
            continue
        old = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
        before = next((r for r in old if (r["study"], r["name"]) == (variant.study, variant.name)), None)
        if (arguments.again or arguments.shares) and before is None:
            continue
        if arguments.again or arguments.shares:
            found = before | (again if arguments.again else shares)(variant, arguments)
        else:
            found = measured(variant, arguments)
        print(json.dumps(found, indent=1), flush=True)
        rows = [r for r in old if (r["study"], r["name"]) != (variant.study, variant.name)] + [found]
        order = [(v.study, v.name) for v in VARIANTS]
        rows.sort(key=lambda r: order.index((r["study"], r["name"])))
        result = {"date": datetime.date.today().isoformat(), "commits": COMMITS, "rows": rows}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def label_of(variant: Variant) -> str:
    return re.sub(r"\W+", "-", f"{variant.study} {variant.name}")


def again(variant: Variant, arguments: argparse.Namespace) -> dict:
    """What the trace that was kept says."""
    folder = arguments.keep / label_of(variant)
    return reported(variant, folder, command(variant, variant.lengths[1], folder, arguments)[2])


def shares(variant: Variant, arguments: argparse.Namespace) -> dict:
    """Of another run."""
    folder = (arguments.keep or pathlib.Path(tempfile.mkdtemp())) / label_of(variant)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return profiled(variant, folder, arguments)


def measured(variant: Variant, arguments: argparse.Namespace) -> dict:
    few, many = variant.lengths
    folder = (arguments.keep or pathlib.Path(tempfile.mkdtemp())) / label_of(variant)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    costs: dict[int, list[float]] = {few: [], many: []}
    for _ in range(arguments.rounds):
        for steps in costs:
            costs[steps].append(plain(variant, steps, folder, arguments))
    seconds = {steps: statistics.median(found) for steps, found in costs.items()}
    spread = [(b - a) / (many - few) * 1e3 for a, b in zip(costs[few], costs[many], strict=True)]
    out = {
        "study": variant.study, "name": variant.name, "backend": variant.backend, "model": variant.model,
        "consecutive": variant.consecutive, "machine": machine(), "load": os.getloadavg()[0], "lengths": [few, many],
        "cpu_seconds": costs, "ms_a_step": (seconds[many] - seconds[few]) / (many - few) * 1e3, "of_rounds": sorted(spread),
    }  # fmt: skip
    out |= profiled(variant, folder, arguments)
    if arguments.keep is None:
        shutil.rmtree(folder)
    return out


def command(
    variant: Variant, steps: int, folder: pathlib.Path, arguments: argparse.Namespace
) -> tuple[list[str], dict, pathlib.Path]:
    """`(script and arguments, environment variables, the script)`."""
    python = (arguments.environments / variant.environment / "bin/python").absolute()
    (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
    inside = variant.path.startswith("packages/")
    path = packages / variant.path.removeprefix("packages/") if inside else arguments.checkouts / variant.path
    of_run = {"steps": steps, "iterations": steps // variant.consecutive, "folder": folder / f"out-{steps}"}
    given = [a.format(**of_run) for a in variant.arguments]
    checkout = (arguments.checkouts / pathlib.Path(variant.path).parts[0]).absolute()
    before = [str((arguments.environments / p).absolute()) for p in variant.packages]
    paths = [str(ROOT), *before, *([str(checkout)] if variant.own else [])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu",
           "WANDB_MODE": "disabled", "CUDA_VISIBLE_DEVICES": "", "TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "2",
           "NPROC": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1",  # one thread to compute for each
           **dict(variant.variables)}  # fmt: skip
    return [str(path.absolute()), *given], env | {"RLFX_PYTHON": str(python)}, path


def plain(variant: Variant, steps: int, folder: pathlib.Path, arguments: argparse.Namespace) -> float:
    """CPU seconds of a whole run."""
    script, env, _ = command(variant, steps, folder, arguments)
    with (folder / "plain.txt").open("w") as output:
        process = subprocess.Popen([env["RLFX_PYTHON"], *script], cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        raise ProfileError(f"{variant.name} failed: {(folder / 'plain.txt').read_text()[-2000:]}")
    return used.ru_utime + used.ru_stime


def profiled(variant: Variant, folder: pathlib.Path, arguments: argparse.Namespace) -> dict:
    """One run of `rlfx.profile`: the time of a step by operation, or by part of the script's loop."""
    script, env, path = command(variant, 100 * variant.lengths[1], folder, arguments)
    options = [x for text in variant.operations for x in ("--operation", text)]
    run = [env["RLFX_PYTHON"], "-m", "rlfx.profile", "run", "--out", str(folder / "trace"), *options, *script]
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(run, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT)
        ended = within(process, arguments.seconds)
    return {"ended": ended} | reported(variant, folder, path)


def reported(variant: Variant, folder: pathlib.Path, path: pathlib.Path) -> dict:
    report = read(folder / "trace")
    (process,) = report.processes
    steps = sum(n for (_, path), n in process.timeline.operations.items() if path and path[-1] == "simulation")
    # What jax executes later belongs to what started it, and not to the line that waits.
    by_line = variant.parts and variant.backend != "JAX"
    found = by_part(process, path, variant.parts) if by_line else by_operation(report)
    calls = sum(n for (a, b, *_), n in report.transitions.items() if (a, b) == ("python", "backend"))
    if not steps:
        raise ProfileError(f"The window of {variant.name} holds no step of the simulator.")
    a_step = report.window_ns / 1e6 / steps
    return {
        "seconds": report.window_ns / 1e9, "steps": steps, "profiled_ms_a_step": a_step,
        "ms": {part: {state: share * a_step for state, share in states.items()} for part, states in found.items()},
        "calls_of_jax_a_step": calls / steps, "device_busy": report.device_busy,
        "compile_share": report.compile_share, "verdict": report.verdict,
    }  # fmt: skip


def by_operation(report) -> dict[str, dict[str, float]]:
    """Shares of the window by operation, or the jitted function, and state of the host."""
    out: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for row, ns in report.rows.items():
        out[category(list(row.path))][row.host] += ns / report.window_ns
    return {part: dict(states) for part, states in out.items()}


def by_part(process, script: pathlib.Path, parts: tuple[tuple[str, str], ...]) -> dict[str, dict[str, float]]:
    """Shares of the window by part of the script's loop in which the main thread was seen, and by what it did there.

    A part goes from the line that holds its text to the next one's; the last one is the end of the loop.
    """
    lines = script.read_text().splitlines()
    begins = [next(i for i, line in enumerate(lines, 1) if text in line) for _, text in parts]

    def part_of(line: int) -> str:
        at = int(np.searchsorted(begins, line, "right")) - 1
        return parts[at][0] if 0 <= at < len(parts) - 1 else ""

    main = next(i for i, line in enumerate(process.sweep.tracks) if line.kind == "main")
    weight: collections.Counter = collections.Counter()
    times = np.bincount(process.sweep.combo, np.diff(process.sweep.bounds), len(process.sweep.columns))
    for column, ns in zip(process.sweep.columns, times.tolist(), strict=True):
        weight[column[main]] += ns
    seen_in: dict[int, collections.Counter] = collections.defaultdict(collections.Counter)
    for sample in seen(process):
        state = process.sweep.contexts[sample.context].state
        if state and sample.thread == process.sweep.tracks[main].thread:
            frames = [f for f in (*sample.callers[::-1], sample.frame) if pathlib.Path(f.file).name == script.name]
            part = next((p for f in frames if (p := part_of(f.line))), "other")
            seen_in[sample.context][part, state] += 1
    out: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for context, ns in weight.items():
        found = seen_in.get(context) or collections.Counter([_named(process.sweep.contexts[context])])
        for (part, state), n in found.items():
            out[part][state] += n / found.total() * ns / weight.total()
    return {part: dict(states) for part, states in out.items()}


def _named(context) -> tuple[str, str]:
    """The part and state of what no sample saw: by the jitted function that was called."""
    path = context.shares[0].path if context.shares else ()
    return category(list(path)), context.state or "unseen"


if __name__ == "__main__":
    sys.exit(main())
