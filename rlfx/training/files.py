"""A checkpoint as one file: a line that says what it is, and the bytes of its arrays one behind the other, with checksums.

The file has another name until it is complete: whenever the process is killed, there are only whole ones. (orbax makes
a directory, threads and an event loop for each of many steps of a save, which took fifteen times as long for small agents.)
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_PART = ".part"


def steps(directory: Path) -> list[int]:
    """Of which there are checkpoints, in order."""
    return sorted(int(name) for name in os.listdir(directory) if name.isdigit())


def prepared(directory: Path, last: float) -> list[int]:
    """Make the directory, without what is incomplete in it, and without steps after ``last``; the :func:`steps`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(directory):
        if re.fullmatch(rf"\d+{re.escape(_PART)}", name) or (name.isdigit() and int(name) > last):
            _remove(directory / name)
    return steps(directory)


def thinned(directory: Path, steps: list[int], keep: int) -> list[int]:
    """The last ``keep`` steps, the others removed."""
    for step in steps[:-keep]:
        _remove(directory / str(step))
    return steps[-keep:]


def write(path: Path, about: dict[str, Any], data: np.ndarray) -> None:
    """``about``, JSON, whose ``leaves`` say how many ``bytes`` of ``data`` each has; checksums are added."""
    parts = _parts(data, about["leaves"])
    leaves = [{**leaf, "crc": zlib.crc32(part)} for leaf, part in zip(about["leaves"], parts, strict=True)]
    line = json.dumps({**about, "leaves": leaves}).encode()
    incomplete = path.with_name(path.name + _PART)
    try:
        with incomplete.open("wb") as file:
            file.write(b"%08x %s\n" % (zlib.crc32(line), line))
            file.write(data)
        incomplete.replace(path)
    except OSError:
        incomplete.unlink(missing_ok=True)  # it takes the space that is missing
        raise


def read(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    """What a checkpoint says that it is, and the bytes behind it; raises OSError or ValueError if it can't be read."""
    if path.is_dir():  # as orbax wrote it, format 2
        return json.loads((path / "about" / "metadata").read_bytes()), np.empty(0, np.uint8)
    with path.open("rb") as file:
        crc, _, line = file.readline().rstrip(b"\n").partition(b" ")
        data = np.fromfile(file, np.uint8)
    if crc != b"%08x" % zlib.crc32(line):
        raise ValueError("its first line is not what was saved")
    return json.loads(line), data


def arrays(about: dict[str, Any], data: np.ndarray) -> list[np.ndarray]:
    """The bytes of each leaf; raises ValueError if one of them isn't what was written."""
    size = sum(leaf["bytes"] for leaf in about["leaves"])
    if data.size != size:
        raise ValueError(f"{data.size} bytes of {size}")
    parts = _parts(data, about["leaves"])
    for leaf, part in zip(about["leaves"], parts, strict=True):
        if zlib.crc32(part) != leaf["crc"]:
            raise ValueError(f"{leaf['name']} is not what was saved")
    return parts


def _remove(path: Path) -> None:
    """A checkpoint of whatever format, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _parts(data: np.ndarray, leaves: Sequence[dict[str, Any]]) -> list[np.ndarray]:
    bounds = itertools.accumulate((leaf["bytes"] for leaf in leaves), initial=0)
    return [data[begin:end] for begin, end in itertools.pairwise(bounds)]
