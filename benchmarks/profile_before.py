"""What a capture costs by an older commit's profiler and by this one's: CPU time, by turns.

    python benchmarks/profile_before.py COMMIT [--rounds 5]

Two iterations of a workload are captured, as `profile.sampled` does by default. Each round is a process for each version, which
captures 12 times: medians. Other programs of the machine are in the second digit. Writes
benchmarks/results/profile_before.json.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks/results/profile_before.json"
WORKLOADS = (("PPO", "CartPole-v1", "jit per step"), ("DDPG", "Pendulum-v1", "scan"))
PARTS = ("begin", "inside", "end", "plain", "annotation")


def measured() -> list[dict]:
    """What the `rlfx` that is imported takes: CPU ms to begin, beyond the plain run inside, to end; µs of an annotation."""
    import jax
    from profile_workloads import ANNOTATED, PLAIN, build

    from rlfx import profile

    rows = []
    for algorithm, env, mode in WORKLOADS:
        runs = {note: build(algorithm, env, mode, note=note)[:2] for note in (PLAIN, ANNOTATED)}

        def two(note, runs=runs):
            train, iterate = runs[note]
            begin = time.process_time()
            train = jax.block_until_ready(iterate(iterate(train)))
            runs[note] = train, iterate
            return time.process_time() - begin

        found: dict[str, list[float]] = {part: [] for part in PARTS}
        for i in range(15):
            with tempfile.TemporaryDirectory() as folder:
                plain = two(PLAIN)
                clocks = [time.process_time()]
                with profile.capture(folder):
                    clocks.append(time.process_time())
                    inside = two(ANNOTATED)
                    clocks.append(time.process_time())
                clocks.append(time.process_time())
            begin = time.thread_time()
            for _ in range(2000):
                with profile.operation("step"):
                    pass
            taken = (
                clocks[1] - clocks[0],
                inside - plain,
                clocks[3] - clocks[2],
                plain,
                (time.thread_time() - begin) / 2,
            )
            for part, seconds in zip(PARTS, taken, strict=True):
                found[part] += [1e3 * seconds] if i > 2 else []
        rows.append({"workload": f"{algorithm} {env}, {mode}", **{k: statistics.median(v) for k, v in found.items()}})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.commit is None:
        print(json.dumps(measured()))
        return
    import recorded

    found: dict[str, list] = {"before": [], "now": []}
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", folder, arguments.commit], check=True)
        try:
            for i in range(arguments.rounds):
                versions = {"before": pathlib.Path(folder), "now": ROOT}
                for name in sorted(versions, reverse=bool(i % 2)):
                    path = f"{versions[name]}:{ROOT / 'benchmarks'}"
                    done = subprocess.run([sys.executable, __file__], env={**os.environ, "PYTHONPATH": path},
                                          capture_output=True, text=True, check=True)  # fmt: skip
                    found[name].append(json.loads(done.stdout.splitlines()[-1]))
                    print(name, found[name][-1], flush=True)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)
    rows = [
        {"version": name, "workload": rounds[0][i]["workload"],
         **{part: statistics.median(r[i][part] for r in rounds) for part in PARTS},
         "rounds": {part: [r[i][part] for r in rounds] for part in PARTS}}
        for i in range(len(WORKLOADS)) for name, rounds in found.items()
    ]  # fmt: skip
    recorded.write(RESULT, {**recorded.about("profile_before"), "before": arguments.commit, "rows": rows})


if __name__ == "__main__":
    main()
