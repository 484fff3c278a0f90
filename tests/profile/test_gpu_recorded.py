"""A trace of an H200: one-epoch PPO, three calls of one program, CUDA graphs off (jax 0.11.2, `capture` at its defaults)."""

import gzip
import pathlib

import pytest

from rlfx.profile import read

RECORDED = pathlib.Path(__file__).parent / "recorded" / "h200.xplane.pb.gz"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "h200.xplane.pb").write_bytes(gzip.decompress(RECORDED.read_bytes()))
    return read(folder)


def test_every_kernel_has_its_operation(report):
    ms = {path: ns / 1e6 for (_, path, *_), ns in report.device_rows.items()}
    assert sum(ms.values()) == pytest.approx(17.08, abs=0.01)
    assert ms[("2 forward scan",)] + ms[("eval_jaxpr",)] == pytest.approx(14.84, abs=0.01)  # acting
    assert ms[("4 all t",)] == pytest.approx(1.85, abs=0.01)
    assert ms[()] < 0.01 * sum(ms.values())


def test_the_window_is_counted_once(report):
    assert sum(report.rows.values()) == report.window_ns
    assert report.verdict.startswith("dispatch-bound")
    assert sum(report.processes[0].timeline.launches.values()) == 9207  # 3,066 kernels a call, and keys


def test_nothing_is_unknown(report):
    """The device is idle when the capture ends: kernels have no run, which says nothing of those that are under way."""
    assert "unknown" not in str(report)
    assert "still busy" not in str(report)


def test_lines_of_the_program(report):
    assert "ppo_timerl.py:71" in str(report)
    assert "forward scan" in str(report)
