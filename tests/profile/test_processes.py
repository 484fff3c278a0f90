"""Real processes that capture into one directory: merged on epoch time."""

import os
import pathlib
import subprocess
import sys

import pytest

import rlfx
from rlfx.profile import plot, read

pytestmark = pytest.mark.optimised

WORKER = """
import sys, time
import jax, jax.numpy as jnp
from rlfx.profile import capture, operation

f = jax.jit(lambda a: jnp.tanh(a @ a).sum())
a = jnp.ones((64, 64))
f(a).block_until_ready()
print("ready", flush=True)
sys.stdin.readline()
begin = time.time_ns()
with capture(sys.argv[1], process=sys.argv[2], steps=20):
    with operation("rollout"):
        for _ in range(20):
            float(f(a))
        time.sleep(0.2)
print(begin, time.time_ns(), flush=True)
"""


def test_two_processes_at_once_are_merged_on_epoch_time(tmp_path):
    path = os.pathsep.join([str(pathlib.Path(rlfx.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path), f"worker_{i}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for i in range(2)
    ]
    for w in workers:
        assert w.stdout.readline() == "ready\n"
    for w in workers:
        w.stdin.write("go\n")
        w.stdin.flush()
    said = [tuple(int(x) for x in w.communicate()[0].split()) for w in workers]
    report = read(tmp_path)
    found = {p.name: p for p in report.processes}
    assert set(found) == {"worker_0", "worker_1"}
    for i, (begin, end) in enumerate(said):
        start, stop = found[f"worker_{i}"].span
        assert begin <= start < stop <= end  # each on its own clock, and on the epoch
    first, last = min(p.span[0] for p in found.values()), max(p.span[1] for p in found.values())
    assert report.span_ns == last - first
    assert report.window_ns == sum(p.window_ns for p in found.values()) == sum(report.rows.values())
    assert report.steps == 40
    assert report.count("python", "backend", "rollout") == 40
    assert {p.pid for p in found.values()} == {w.pid for w in workers}
    assert {p.parent for p in found.values()} == {os.getpid()}
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    assert [t.get_text() for t in plot.process_tree(report).get_yticklabels()] == [p.name for p in report.processes]
    matplotlib.pyplot.close("all")
