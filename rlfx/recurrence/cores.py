"""All the cores of a CPU as devices."""

from __future__ import annotations

import os

import jax
from jax.sharding import Mesh

from rlfx import _jaxpr as J
from rlfx.errors import ScheduleError, located


def available_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_all_cores(count: int | None = None) -> Mesh:
    """Make each CPU core a device of its own, and return the mesh over all devices, axis ``"b"``.

    XLA does not spread programs like these over the cores of a CPU; environments split over one device a core run in
    parallel. Call it before the first computation, and give the mesh to :func:`compile`. On a GPU or TPU it changes
    nothing and returns the mesh over its devices.

    Args:
      count: how many cores; by default all that this process may use.

    Returns:
      A mesh with one axis, ``"b"``.

    Raises:
      ScheduleError: if jax has started with fewer devices already.
    """
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise ScheduleError(
            located(f"count must be a positive integer, got {count!r}.", fix="Give the number of cores.")
        )
    cores = count or available_cores()
    if not J.backend_has_started():
        jax.config.update("jax_num_cpu_devices", cores)
    if jax.default_backend() == "cpu" and jax.device_count() < cores:
        raise ScheduleError(
            located(
                f"jax has started with {jax.device_count()} CPU device(s) already; {cores} were asked for.",
                where=J.here(),
                fix="Call rlfx.use_all_cores() before the first jax computation of the process (also before "
                "jax.devices(), and before making arrays or keys).",
            )
        )
    devices = jax.devices()[:cores] if jax.default_backend() == "cpu" else jax.devices()
    return jax.make_mesh((len(devices),), ("b",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)
