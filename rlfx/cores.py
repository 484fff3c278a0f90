"""All the cores of a CPU as devices."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import jax
from jax.sharding import Mesh

from rlfx import _jaxpr as J
from rlfx._checks import POSITIVE, expect, optional
from rlfx.errors import ScheduleError, located


def available_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


#: Bytes of a core's own cache where it is not known, and between which it counts.
CORE_CACHE, LEAST_CACHE, MOST_CACHE = 2 << 20, 1 << 20, 4 << 20


@functools.cache
def core_cache() -> int:
    """Bytes of the second-level cache that a core has for itself, as far as the system tells it."""
    for cache in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        level, size = cache / "level", cache / "size"
        if level.is_file() and size.is_file() and level.read_text().strip() == "2":
            kib = size.read_text().strip().removesuffix("K")
            return min(max(int(kib) << 10, LEAST_CACHE), MOST_CACHE) if kib.isdigit() else CORE_CACHE
    return CORE_CACHE


def use_all_cores(count: int | None = None, *, batch: int | None = None) -> Mesh:
    """Make each CPU core a device of its own, and return the mesh over all devices, axis ``"b"``.

    XLA does not spread programs like these over the cores of a CPU; environments split over one device a core run in
    parallel. Call it before the first computation, and give the mesh to :func:`compile`. On a GPU or TPU it changes
    nothing and returns the mesh over its devices.

    Args:
      count: how many cores; by default all that this process may use.
      batch: the number of environments that the mesh will split: it then has as many devices as divide it, on any machine.

    Returns:
      A mesh with one axis, ``"b"``.

    Raises:
      ScheduleError: if jax has started with fewer devices already; if a number is not a positive integer.

    Example:
      >>> mesh = use_all_cores(1, batch=512)  # without the 1 all of them, where nothing was computed before
      >>> mesh.axis_names, 512 % mesh.size
      (('b',), 0)
    """
    fix = "Give the number of {}, or leave it out."
    count = expect("count", count, optional(POSITIVE), ScheduleError, fix=fix.format("cores"))
    batch = expect("batch", batch, optional(POSITIVE), ScheduleError, fix=fix.format("environments"))
    cores = count or available_cores()
    if not J.backend_has_started():
        jax.config.update("jax_num_cpu_devices", cores)
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and jax.device_count() < cores:
        raise ScheduleError(
            located(
                f"jax has started with {jax.device_count()} CPU device(s) already; {cores} were asked for.",
                where=J.here(),
                fix="Call rlfx.use_all_cores() before the first jax computation of the process (also before "
                "jax.devices(), and before making arrays or keys).",
            )
        )
    present = jax.devices()[:cores] if on_cpu else jax.devices()
    size = len(present) if batch is None else max(n for n in range(1, len(present) + 1) if batch % n == 0)
    return jax.make_mesh((size,), ("b",), axis_types=(jax.sharding.AxisType.Auto,), devices=present[:size])
