"""Read a trace: its planes and lines, warnings, HLO modules, and the notes beside it; its events are decoded later."""

from __future__ import annotations

import json
import mmap
import os
import pathlib
from dataclasses import dataclass, field
from typing import Any

from rlfx.errors import ProfileError, located
from rlfx.profile import columns, wire
from rlfx.profile.hlo import Module

METADATA_PLANE = "/host:metadata"
ENVIRONMENT_PLANE = "Task Environment"
SIDECAR = "rlfx.json"


@dataclass
class Trace:
    """One capture of one process. Times of events are nanoseconds after `start_ns` (epoch).

    `notes` is what `capture` wrote beside the trace (process, compilations, annotations open at its edges); empty for
    traces made by other means. `warnings` are the profiler's own.
    """

    path: pathlib.Path
    planes: list[columns.Plane]
    modules: dict[int, Module]
    start_ns: int
    notes: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    file: mmap.mmap | None = field(default=None, repr=False)

    def forget(self) -> None:
        """Give back the memory of what was read of the file; it is read again if it is looked at again."""
        if self.file is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.file.madvise(mmap.MADV_DONTNEED)


def find(directory: str | pathlib.Path) -> list[pathlib.Path]:
    """The `.xplane.pb` files under a directory (or the file itself), oldest first.

    Raises:
      ProfileError: there is none.
    """
    root = pathlib.Path(directory)
    files = [root] if root.is_file() else sorted(root.glob("**/*.xplane.pb"), key=lambda p: p.stat().st_mtime_ns)
    if not files:
        what = "is a directory without a trace (no .xplane.pb in it)" if root.is_dir() else "does not exist"
        raise ProfileError(
            located(
                f"{str(directory)!r} {what}.",
                fix="Capture one first: `with rlfx.profile.capture(directory): ...`, or "
                "`python -m rlfx.profile run script.py`.",
            )
        )
    return files


def read_trace(path: str | pathlib.Path) -> Trace:
    """Read one `.xplane.pb` with the notes beside it.

    Raises:
      ProfileError: the file is empty, truncated, or not a trace.
    """
    path = pathlib.Path(path)
    try:
        return parse_trace(_mapped(path), path, _notes(path))
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def _mapped(path: pathlib.Path) -> memoryview:
    """The bytes of a file, which the system reads when they are looked at."""
    with path.open("rb") as file:
        empty = not os.fstat(file.fileno()).st_size
        return memoryview(b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def parse_trace(raw: memoryview, path: pathlib.Path, notes: dict[str, Any]) -> Trace:
    """Read a serialized XSpace."""
    if not raw:
        raise ProfileError(wire.truncated("it is empty"))
    space = wire.message(raw)
    if 1 not in space:
        raise ProfileError(wire.truncated("it holds no plane"))
    modules: dict[int, Module] = {}
    planes = []
    start = 0
    for data in space[1]:
        plane = columns.plane(data)
        planes.append(plane)
        if plane.name == METADATA_PLANE:
            modules = _modules(wire.message(data))
        elif plane.name == ENVIRONMENT_PLANE:
            start = _start(plane, wire.message(data))
    warnings = [bytes(text).decode("utf-8", "replace") for number in (2, 3) for text in space.get(number, [])]
    file = raw.obj if isinstance(raw.obj, mmap.mmap) else None
    return Trace(path, planes, modules, start, notes, warnings, file)


def _start(plane: columns.Plane, found: dict) -> int:
    """Epoch ns at which the trace began."""
    for raw in found.get(6, []):
        stat = wire.message(raw)
        if plane.stats.get(wire.integer(stat, 1)) == "profile_start_time":
            return wire.integer(stat, 3) or wire.integer(stat, 4)
    return 0


def _modules(plane: dict) -> dict[int, Module]:
    """HLO modules by program id: a stat of each event's metadata holds an HloProto, whose field 1 is the module."""
    modules = {}
    for entry in plane.get(4, []):
        metadata = wire.message(wire.message(entry)[2][-1])
        for stat in metadata.get(5, []):
            proto = wire.message(stat)
            if 6 not in proto:
                continue
            module = wire.message(proto[6][-1]).get(1)
            if module:
                label = wire.text(metadata, 2)  # jit_f(4)
                name, _, number = label.rpartition("(")
                program = int(number.rstrip(")")) if number.rstrip(")").isdigit() else wire.integer(metadata, 1)
                modules[program] = Module(name or label, program, module[-1])
    return modules


def _notes(path: pathlib.Path) -> dict[str, Any]:
    sidecar = path.parent / SIDECAR
    if not sidecar.exists():
        return {}
    try:
        notes = json.loads(sidecar.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError):
        notes = None
    if not isinstance(notes, dict):
        raise ProfileError(
            located(
                f"{SIDECAR} beside the trace is not a JSON object.",
                fix="Capture again, or delete it to read the trace alone.",
            )
        )
    return notes
