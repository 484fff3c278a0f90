"""Compiled programs kept in files, so that a run that is started again compiles nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from rlfx._checks import PATH, expect
from rlfx.errors import TrainingError, located

_SETTINGS = {
    # Without it, a program would be found under the names and lines of another one that computes the same, in profiles too.
    "jax_compilation_cache_include_metadata_in_key": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@contextmanager
def kept_programs(directory: str | os.PathLike[str]) -> Iterator[None]:
    """What is compiled inside is read from, and written to, files of ``directory``; jax's settings are as before afterwards.

    Raises:
      TrainingError: the directory can't be written.
    """
    path = Path(expect("cache_dir", directory, PATH, TrainingError)).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError as error:
        fact = f"cache_dir {path} can't be made: {type(error).__name__}: {error}."
        raise TrainingError(located(fact, fix="Give a directory that can be written.")) from error
    if not writable:
        raise TrainingError(located(f"cache_dir {path} can't be written.", fix="Give a directory that can be written."))
    settings = {**_SETTINGS, "jax_compilation_cache_dir": str(path)}
    before = {name: getattr(jax.config, name) for name in settings}
    _use(settings)
    try:
        yield
    finally:
        _use(before)


def _use(settings: dict) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # jax opens a directory once
