"""Compilations of tests are kept nowhere else, and no plugin is found that a test did not put there."""

import importlib
import sys
from pathlib import Path

import jax
import pytest

from rlfx.ahead import environment
from rlfx.errors import TargetError


@pytest.fixture(autouse=True)
def kept_here(tmp_path, monkeypatch, request):
    monkeypatch.setenv("RLFX_CACHE", str(tmp_path / "cache"))
    if request.node.get_closest_marker("aot") is None:
        for plugin in ("cuda", "tpu"):
            monkeypatch.delenv(environment.variable(plugin), raising=False)
            monkeypatch.setattr(environment.sys, "prefix", str(tmp_path / "nothing" / ".venv"))


@pytest.fixture
def script(monkeypatch):
    """A benchmark as a module, by its name: scripts beside each other, which count on jax's implicit promotion."""
    for folder in ("benchmarks", "examples"):
        monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / folder))
    before = list(sys.path)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield importlib.import_module
    sys.path[:] = before


@pytest.fixture(params=["cuda", "tpu"])
def plugin(request):
    """A plugin that is installed."""
    return installed(request.param)


def installed(plugin: str) -> str:
    try:
        environment.find(plugin, jax.__version__)
    except TargetError as error:
        pytest.skip(str(error).splitlines()[0])
    return plugin
