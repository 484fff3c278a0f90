"""Memory while a capture runs: bytes of jax's arrays, of the device's allocator, and of the process, a few times a second."""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any, NamedTuple

import jax

PERIOD = 0.1  # s


class Held(NamedTuple):
    """At `at_ns` (epoch): bytes of arrays that the program holds, of its devices' allocators (-1: they do not say), of the
    process (0: the system does not say)."""

    at_ns: int
    arrays: int
    in_use: int
    resident: int


def resident() -> int:
    """Bytes of memory of this process; 0 where the system does not say."""
    status = pathlib.Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def held() -> Held:
    """What is held now. Of what a compiled program takes while it runs only the allocator and the process say something."""
    # A third of the time of `nbytes`, and of an array that another thread has just deleted, too: there may be 10,000s.
    arrays = sum(array.size * array.dtype.itemsize for array in jax.live_arrays())
    stats = [device.memory_stats() for device in jax.local_devices()]
    in_use = sum(int(s["bytes_in_use"]) for s in stats if s) if any(stats) else -1
    return Held(time.time_ns(), arrays, in_use, resident())


def noted(notes: dict[str, Any]) -> list[Held]:
    """From the notes of a capture."""
    return [Held(*sample) for sample in notes.get("memory", [])]
