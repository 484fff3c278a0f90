"""What a file of results says of where it comes from."""

from __future__ import annotations

import datetime
import json
import pathlib
import platform
from typing import Any

import jax


def about(benchmark: str, **versions: str) -> dict[str, Any]:
    """The date, the device and the versions with which a benchmark ran; ``versions``: of other libraries that it compares."""
    return {
        "benchmark": benchmark,
        "date": datetime.date.today().isoformat(),
        "device": f"{jax.devices()[0].device_kind} ({platform.processor() or platform.machine()})",
        "versions": {"jax": jax.__version__, **versions, "python": platform.python_version()},
    }


def write(path: pathlib.Path | str, record: dict[str, Any]) -> None:
    """A record as a file that people and diffs can read."""
    pathlib.Path(path).write_text(json.dumps(record, indent=1) + "\n")
