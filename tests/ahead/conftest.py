"""Compilations of tests are kept nowhere else, and no plugin is found that a test did not put there."""

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


@pytest.fixture(params=["cuda", "tpu"])
def plugin(request):
    """A plugin that is installed."""
    return installed(request.param)


def installed(plugin: str) -> str:
    import jax

    try:
        environment.find(plugin, jax.__version__)
    except TargetError as error:
        pytest.skip(str(error).splitlines()[0])
    return plugin
