"""What it takes to read a trace: CPU time, memory and bytes an instruction, of one XLA program of many short ones.

    python benchmarks/profile_reading.py --before DIR --out benchmarks/results/profile_reading.json

The trace is captured once; each reading is a fresh process, whose largest memory counts beyond that after its imports.
`--before`: a checkout of the commit in `BEFORE`, the last that read one event at a time; it reads the same trace, by turns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

BEFORE = "7e268ad"
READER = """
import json, sys, time
import jax
from rlfx.profile import read

def memory(key):
    (line,) = [x for x in open("/proc/self/status") if x.startswith(key)]
    return int(line.split()[1]) * 1024

open("/proc/self/clear_refs", "w").write("5")  # the largest memory from now on
before, begin = memory("VmRSS"), time.process_time()
report = read(sys.argv[1])
seconds = time.process_time() - begin
count = sum(k.count for k in report.kernels.values())
assert sum(report.rows.values()) == report.window_ns
print(json.dumps({"cpu_s": seconds, "bytes": memory("VmHWM") - before, "instructions": count, "busy": report.device_busy}))
"""


def captured(folder: str, instructions: int) -> int:
    """Capture a loop of short instructions; the size of the trace in bytes."""
    import jax
    import jax.numpy as jnp

    from rlfx.profile import capture, operation

    def step(c, _):
        with operation("policy"):
            c = jnp.sin(c @ c)
        with operation("environment"):
            return jnp.sort(c, axis=0) * 0.5, None

    @jax.jit
    def run(a):
        return jax.lax.scan(step, a, None, length=instructions // 8)[0]

    a = jnp.ones((4, 4))
    jax.block_until_ready(run(a))
    with capture(folder):
        jax.block_until_ready(run(a))
    return sum(p.stat().st_size for p in pathlib.Path(folder).glob("**/*.xplane.pb"))


def reading(folder: str, code: pathlib.Path) -> dict:
    """Read a trace in a process of its own, by the code in a folder."""
    env = {**os.environ, "PYTHONPATH": str(code.absolute())}
    command = [sys.executable, "-c", READER, folder]  # which looks for modules where it starts, too
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env, cwd=code)
    return json.loads(done.stdout)


def taken(found: list[dict]) -> dict:
    count = found[0]["instructions"]
    return {
        "instructions": count,
        "us_an_instruction": statistics.median(f["cpu_s"] for f in found) / count * 1e6,
        "bytes_an_instruction": statistics.median(f["bytes"] for f in found) / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instructions", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=pathlib.Path)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    import jax

    with tempfile.TemporaryDirectory() as folder:
        size = captured(folder, arguments.instructions)
        found, before = [], []
        for _ in range(arguments.rounds):
            found.append(reading(folder, pathlib.Path(__file__).parents[1]))
            if arguments.before is not None:
                before.append(reading(folder, arguments.before))
    count = found[0]["instructions"]
    result = {
        **({"before": {"commit": BEFORE, **taken(before)}} if before else {}),
        "instructions": count,
        "trace_bytes_an_instruction": size / count,
        **{k: v for k, v in taken(found).items() if k != "instructions"},
        "busy": found[0]["busy"],
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "date": datetime.date.today().isoformat(),
        "note": "process CPU time, medians; the machine was shared with other programs",
    }
    print(json.dumps(result, indent=2))
    if arguments.out:
        pathlib.Path(arguments.out).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
