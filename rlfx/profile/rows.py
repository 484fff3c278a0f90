"""What time is attributed to: the rows of a report, and what they say about who holds the program up."""

from __future__ import annotations

from typing import Any, NamedTuple

from rlfx.profile.rules import (
    BACKEND,
    BLOCKED,
    BUSY,
    CALLBACK,
    COMPILE,
    COPY,
    DEVICE,
    DISPATCH,
    IDLE,
    IMPORT,
    PYTHON,
    TRANSFER,
    WAIT,
)

# What holds the program up at an instant, from the states of host and device.
BOUND = {
    (PYTHON, None): "host", (CALLBACK, None): "host", (BACKEND, None): "dispatch", (DISPATCH, None): "dispatch",
    (COMPILE, None): "compile", (TRANSFER, None): "transfer", (WAIT, BUSY): "device", (DEVICE, BUSY): "device",
    (WAIT, COPY): "transfer", (DEVICE, COPY): "transfer", (WAIT, IDLE): "idle", (DEVICE, IDLE): "idle",
    (IMPORT, None): "import", (BLOCKED, BUSY): "device", (BLOCKED, COPY): "transfer", (BLOCKED, IDLE): "blocked",
}  # fmt: skip


class Row(NamedTuple):
    """What an instant is attributed to. `path` holds operations, outermost first; empty outside all of them."""

    phase: str
    path: tuple[str, ...]
    stage: str
    host: str
    device: str


class DeviceRow(NamedTuple):
    """Whose work the device did, whatever the host did meanwhile."""

    phase: str
    path: tuple[str, ...]
    stage: str


def bound_by(host: str, device: str) -> str:
    """Example:
    >>> bound_by("python", "busy"), bound_by("wait", "busy"), bound_by("wait", "idle")
    ('host', 'device', 'idle')
    """
    return BOUND.get((host, None)) or BOUND[host, device]


def named(path: tuple[str, ...]) -> bool:
    """Does a path name an operation, and not just the jitted function that stands in for one?"""
    return bool(path) and not path[0].startswith("jit(")


def key_of(row: Any, key: str) -> Any:
    """A field of a row; `operation` is its path in one string, `bound` what limits."""
    if key == "operation":
        return "/".join(row.path) or "(none)"
    if key == "bound":
        return bound_by(row.host, row.device)
    return getattr(row, key)
