"""Compilations kept in files: the same program for the same machine by the same versions is compiled once."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from rlfx.ahead.environment import Environment, cache_folder
from rlfx.ahead.process import WORKER
from rlfx.ahead.program import Exported

#: How many compilations are kept; the one that was not asked for longest goes first.
AT_MOST = 512


#: What an answer of a compiler has.
COMPILED = frozenset({"hlo", "memory", "versions"})


def key_of(program: Exported, request: dict[str, Any], environment: Environment) -> str:
    """What tells compilations apart: the program, the machine, the versions, and what is asked of the compiler."""
    asked = json.dumps([request, program.donated, environment.versions], sort_keys=True)
    return digest(program.text, asked, WORKER.read_text())


def digest(*parts: str) -> str:
    """A name for some texts."""
    return hashlib.sha256(b"".join(hashlib.sha256(part.encode()).digest() for part in parts)).hexdigest()


def _folder() -> Path:
    return cache_folder() / "compilations"


def read(key: str, has: frozenset[str] = COMPILED) -> dict[str, Any] | None:
    """The answer that is kept, with some entries; None if there is none, or it can't be read."""
    path = _folder() / f"{key}.json.gz"
    try:
        with gzip.open(path, "rt") as file:
            answer = json.load(file)
        os.utime(path)
    except (OSError, EOFError, ValueError):
        return None
    return answer if isinstance(answer, dict) and has <= answer.keys() else None


def write(key: str, answer: dict[str, Any]) -> None:
    """Keep an answer, whole or not at all. Where nothing can be written, nothing is kept."""
    with contextlib.suppress(OSError):
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as raw, gzip.open(raw, "wt") as file:
                json.dump(answer, file)
            os.replace(name, folder / f"{key}.json.gz")
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        kept = sorted(folder.glob("*.json.gz"), key=lambda path: path.stat().st_mtime)
        for path in kept[:-AT_MOST]:
            path.unlink(missing_ok=True)
