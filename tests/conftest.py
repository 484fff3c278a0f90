"""Strict numerics for every test: no implicit dtype or rank promotion; warnings are errors (pyproject.toml).

Tests compile thousands of small programs, and compile time is what they pay for. ``RLFX_TESTS`` chooses how:

* unset: every test, as XLA compiles for users.
* ``quick``: without the passes of XLA and LLVM that take long, in about half the CPU time. Tests marked ``optimised`` look at
  what these passes make of a program (its memory, its HLO, its speed), and are left out.
* ``optimised``: those alone, as XLA compiles for users.

``make test`` runs ``quick`` and then ``optimised``.
"""

import gc
import os
import shutil
import tempfile

from tests.lanes import QUICK, flags

# Four host devices let the multi-device tests run; programs that do not ask for a mesh stay on the first one. Examples
# ask for all the cores.
os.environ.setdefault("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in os.environ["XLA_FLAGS"]:
    devices = max(4, os.cpu_count() or 1)
    os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
if os.environ.get("RLFX_TESTS") == "quick":
    os.environ["XLA_FLAGS"] += f" {flags(QUICK)}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["RLFX_CACHE"] = tempfile.mkdtemp(
    prefix="rlfx-tests-"
)  # what was measured before is not what a test looks at

import jax
import pytest

from rlfx._frames import with_room
from tests.contexts import share

share()
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Traces are millions of live objects, which every full collection walks again.
gc.set_threshold(200_000, 20, 50)


_CACHE = os.environ["RLFX_CACHE"]


def pytest_unconfigure():
    """Remove the folder of this process."""
    shutil.rmtree(_CACHE, ignore_errors=True)


def pytest_ignore_collect(collection_path):
    """The lane ``optimised`` imports those files alone that name the mark: most have no such test, and many compile at once."""
    of_tests = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    if os.environ.get("RLFX_TESTS") == "optimised" and of_tests and "mark.optimised" not in collection_path.read_text("utf-8"):
        return True
    return None  # as pytest has it


def pytest_collection_modifyitems(config, items):
    """Leave out what the lane does not run; the profiler first: a capture holds every program of its process.

    Each test has room for its frames: pytest's lie below those of traces, which are deep themselves.
    """
    for item in items:
        item.runtest = with_room(item.runtest)
    items.sort(key=lambda item: "profile" not in item.path.parts)
    lane = os.environ.get("RLFX_TESTS", "")
    if lane not in ("", "quick", "optimised"):
        raise pytest.UsageError(f'RLFX_TESTS is "quick", "optimised" or unset, got {lane!r}.')
    if not lane:
        return
    mine = {True: [], False: []}
    for item in items:
        optimised = item.get_closest_marker("optimised") is not None
        mine[optimised == (lane == "optimised")].append(item)
    config.hook.pytest_deselected(items=mine[False])
    items[:] = mine[True]
