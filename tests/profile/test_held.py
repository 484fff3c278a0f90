"""Memory over time, device work by source line, and what an iteration is."""

import gc
import json
import linecache
import time

import jax
import jax.numpy as jnp
import pytest

from rlfx.profile import capture, operation, plot

pytestmark = pytest.mark.optimised


@jax.jit
def work(a):
    for _ in range(3):
        a = jnp.tanh(a @ a)  # the product
    return a + 1  # the sum


def test_memory_is_that_of_the_arrays_that_the_program_holds(tmp_path):
    gc.collect()  # arrays of other tests that are in cycles would go in the course of this one
    before = sum(a.nbytes for a in jax.live_arrays())
    with capture(tmp_path) as session:
        time.sleep(0.3)
        big = jnp.ones((1 << 20,)).block_until_ready()  # 4 MiB
        time.sleep(0.4)
        del big
        time.sleep(0.3)
    report = session.report()
    (samples,) = report.memory
    assert [s.arrays - before for s in (samples[0], samples[-1])] == pytest.approx([0, 0], abs=1 << 16)
    held = [s for s in samples if s.arrays - before > 4 << 20 or s.arrays - before == 4 << 20]
    assert held  # a sampler on a loaded machine may see it once
    start = report.processes[0].span[0]
    assert all(0.25e9 < s.at_ns - start < 5e9 for s in held)
    assert all(a.at_ns < b.at_ns for a, b in zip(samples, samples[1:], strict=False))
    assert "jax's arrays" in report.text().split("Memory, MB:")[1]
    assert len(report.as_dict()["memory"][0]) == len(samples)
    json.dumps(report.as_dict())
    arrays, process = plot.memory(report).figure.axes  # the process has a hundred times as much
    assert process.get_xlabel() == "s"
    assert [[line.get_label() for line in axes.lines] for axes in (arrays, process)] == [["jax's arrays"], ["the process"]]
    assert arrays.get_ylim()[1] < 0.5 * process.get_ylim()[1]
    (one,) = {axes.figure for axes in (plot.memory(report, ax=plot.pyplot().figure().add_subplot()),)}
    assert len(one.axes[0].lines) == 2


def test_device_work_is_known_by_line(tmp_path):
    a = jnp.ones((256, 256)) / 256
    work(a).block_until_ready()
    with capture(tmp_path) as session:
        for _ in range(5):
            work(a).block_until_ready()
    report = session.report()
    found = report.device_lines()
    total = sum(line.alone for line in found)
    texts = {linecache.getline(line.frame.file, line.frame.line).strip(): line for line in found}
    (product,) = [line for text, line in texts.items() if text.endswith("# the product")]
    assert product.alone > 0.5 * total
    (call,) = [line for text, line in texts.items() if text == "work(a).block_until_ready()" and line.ns > 0.9 * total]
    assert call.alone < 0.1 * total  # it is in what it calls
    assert "Device work by line:" in report.text()


def test_an_iteration_is_the_outermost_operation_that_begins_least_often(tmp_path):
    with capture(tmp_path) as session:
        for _ in range(4):
            with operation("iteration"):
                for _ in range(5):
                    with operation("step"):
                        time.sleep(0.005)
            for _ in range(2):
                with operation("log"):  # little of the time
                    pass
        with operation("end"):
            time.sleep(0.02)
    report = session.report()
    assert report.iterations == ("iteration", 4)
    x = jnp.ones(3)
    with capture(tmp_path / "calls") as session:
        for _ in range(4):
            with operation("iteration"):
                for _ in range(5):
                    work(jnp.ones((8, 8)))
            x.block_until_ready()
    row = next(r for r in session.report().text().splitlines() if r.startswith("per iteration (4 times)"))
    assert row.split()[4:]
