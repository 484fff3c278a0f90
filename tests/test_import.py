"""What ``import rlfx`` gives, in a process of its own."""

import subprocess
import sys

import pytest

import rlfx


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_packages_are_imported_where_they_are_named():
    program = """
import sys, rlfx
heavy = {"flax", "optax", "chex", "brax", "gymnax", "scipy.optimize", "networkx", "matplotlib", "orbax"}
heavy |= {"rlfx.envs", "rlfx.place", "rlfx.profile", "rlfx.training", "rlfx.transforms.fuse_steps", "rlfx.transforms.blocks"}
print(sorted(heavy & set(sys.modules)), rlfx.profile.read.__name__, rlfx.place.assign.__name__, callable(rlfx.envs.make))
from rlfx import fuse_steps, incrementalize
print(fuse_steps is rlfx.fuse_steps, incrementalize.__module__, rlfx.offload.__name__)
"""
    assert run(program).splitlines() == ["[] read assign True", "True rlfx.transforms.incrementalize offload"]


@pytest.mark.parametrize("name", [
    "profile.plot.process_tree", "profile.calibration.fit", "profile.attach.spy", "place.pearl.run", "place.replay.insert",
    "transforms.fuse_steps.supported",
])  # fmt: skip
def test_modules_are_imported_where_the_pages_name_them(name):
    if name.startswith("profile.plot"):
        pytest.importorskip("matplotlib")
    assert run(f"import rlfx; print(rlfx.{name}.__name__)") == name.rsplit(".", 1)[1]


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'rlfx' has no attribute 'enws'"):
        rlfx.enws  # noqa: B018
    with pytest.raises(AttributeError, match=r"module 'rlfx.profile' has no attribute 'plots'"):
        rlfx.profile.plots  # noqa: B018
    assert {"compile", "envs", "place", "profile", "training"} <= set(dir(rlfx))
