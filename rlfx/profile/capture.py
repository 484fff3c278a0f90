"""Capture a trace: start and stop jax's profiler, and write beside the trace what jax does not record."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import platform
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from rlfx._checks import BOOLEAN, NATURAL, PATH, TEXT, expect, integer, optional
from rlfx._jaxpr import stop_trace
from rlfx._target import target, target_of
from rlfx.errors import ProfileError, located
from rlfx.profile import annotate, compilations, intercept, threads
from rlfx.profile.report import Report, read
from rlfx.profile.xspace import SIDECAR

#: How a capture is made, and what each option takes; jax's host tracer has three levels.
OPTIONS = {"process": optional(TEXT), "python_tracer": BOOLEAN, "host_level": integer(1, 3)}


class ProfileWarning(UserWarning):
    """A profile can be captured, but something in it will be missing or misleading."""


@dataclass
class Session:
    """A running or finished capture.

    Attributes:
      directory: where its trace is.
      process: the name of the process in the report.
      steps: the environment steps done inside, for steps per second: set it.
      folder: of its own trace, in the directory that others may share.
      plain_ns: how long the same work takes without a capture; 0 if unknown.
    """

    directory: pathlib.Path
    process: str
    steps: int = 0
    folder: pathlib.Path | None = None
    plain_ns: int = 0

    def report(self) -> Report:
        """Read what was captured here, also if others captured into the directory later; see `rlfx.profile.read`."""
        return read(self.folder or self.directory)


@contextlib.contextmanager
def capture(
    directory: str | os.PathLike[str] | None = None,
    *,
    steps: int = 0,
    process: str | None = None,
    python_tracer: bool = False,
    host_level: int = 2,
) -> Iterator[Session]:
    """Profile a block; 2 to 5 training iterations are enough, and keep the trace small.

    Args:
      directory: where the trace goes; processes that share one are merged by `read`. A new temporary one by default.
      steps: environment steps done in the block, if known beforehand; else set `session.steps` inside.
      process: name of this process in the report; `multiprocessing`'s name by default.
      python_tracer: also record every Python call. It inflates Python-heavy loops 1.7-2 times; off by default.
      host_level: jax's `host_tracer_level`, 1 to 3. At 1 most events that tell host states apart are missing.

    Yields:
      A `Session`; after the block, `session.report()`.

    Raises:
      ProfileError: another capture (or another trace of jax's profiler) is running in this process.

    Warns:
      ProfileWarning: compilations may come from a persistent cache with stale operation names, or a GPU runs whole
        graphs in which kernels have no names.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from rlfx.profile import capture, operation
      >>> f = jax.jit(lambda x: jnp.sum(x * 2))
      >>> x = jnp.ones(10)
      >>> with capture(steps=10) as session:
      ...     with operation("doubling"):
      ...         f(x).block_until_ready()
      Array(20., dtype=float32)
      >>> report = session.report()
      >>> sum(report.rows.values()) == report.window_ns
      True
    """
    expect("directory", directory, optional(PATH), ProfileError, of="capture")
    steps = expect("steps", steps, NATURAL, ProfileError, of="capture")
    given = {"process": process, "python_tracer": python_tracer, "host_level": host_level}
    process, python_tracer, host_level = (
        expect(name, value, OPTIONS[name], ProfileError, of="capture") for name, value in given.items()
    )
    with capturing(directory, steps, process, python_tracer, host_level, threading.get_ident()) as session:
        yield session


@contextlib.contextmanager
def capturing(
    directory: str | os.PathLike[str] | None,
    steps: int,
    process: str | None,
    python_tracer: bool,
    host_level: int,
    thread: int,
) -> Iterator[Session]:
    """`capture` of the program that `thread` runs, from any thread."""
    _warn_about_cache()
    _warn_about_command_buffers()
    root = pathlib.Path(tempfile.mkdtemp(prefix="rlfx-profile-") if directory is None else directory)
    name = process or multiprocessing.current_process().name
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = int(python_tracer)
    options.host_tracer_level = host_level
    options.session_id = f"{name.replace('/', '_')}-{os.getpid()}-{time.time_ns()}"
    folder = root / "plugins" / "profile" / options.session_id
    _writable(folder)
    session = Session(root, name, steps, folder)
    about = _about(name)
    log, watch = compilations.CompileLog(), threads.Watch()
    opened = annotate.open_annotations()
    try:
        _start(root, options)
    except ProfileError:
        shutil.rmtree(folder)
        raise
    try:
        with (
            compilations.watching(log, thread),
            intercept.intercepting(),
            threads.watching(watch),
            jax.profiler.TraceAnnotation(annotate.CAPTURE),
        ):
            yield session
    finally:
        edges = {**_edges(opened, annotate.open_annotations(), thread), "not_ready": not_ready()}
        stop_trace(folder)
        notes = {
            **about,
            **edges,
            "steps": session.steps,
            "plain_ns": session.plain_ns,
            **log.as_notes(),
            **watch.as_notes(),
        }
        (folder / SIDECAR).write_text(json.dumps(notes))


def check_writable(directory: str | pathlib.Path) -> None:
    """Whether traces can be written there, long before there is one.

    Raises:
      ProfileError: if not.
    """
    folder = pathlib.Path(directory) / "plugins" / "profile" / f"check-{os.getpid()}"
    _writable(folder)
    shutil.rmtree(folder)


def _writable(folder: pathlib.Path) -> None:
    """Make the folder of a trace now: at the end it would be too late to hear that it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SIDECAR).write_text("{}")
    except OSError as error:
        raise ProfileError(
            located(
                f"The trace cannot be written to {folder.parents[2]}: {error.strerror}.",
                fix="Give a directory that you can write to.",
            )
        ) from None


def _start(root: pathlib.Path, options: Any) -> None:
    try:
        jax.profiler.start_trace(root, profiler_options=options)
    except RuntimeError as error:
        if "already been started" not in str(error) and "Only one profile" not in str(error):
            raise
        raise ProfileError(
            located(
                "A capture, or a trace of jax.profiler, is already running in this process; it has one at a time.",
                fix="Leave the first before the second, or capture once around both and tell them apart by `phase`.",
            )
        ) from None


def _about(process: str) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "process": process,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "argv": sys.argv,
        "jax": jax.__version__,
        "machine": machine(),
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.local_device_count(),
        "rates": dataclasses.asdict(target_of(device).rates),
    }


def machine() -> str:
    """What a calibration is good for: processor, number of cores, device and version of jax."""
    return f"{_processor()}, {os.cpu_count()} cores, {jax.devices()[0].device_kind}, jax {jax.__version__}"


def _processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _edges(before: dict, after: dict, thread: int) -> dict[str, Any]:
    """Annotations open when the capture began, with the epoch time they closed, and those open when it ended; and
    each one's line of the trace."""
    early = [(a, ident) for ident, stack in before.items() for a in stack]
    late = [(a, ident) for ident, stack in after.items() for a in stack if a not in before.get(ident, [])]
    return {
        "open_at_start": [(a.name, a.stop_ns, threads.line_id(ident)) for a, ident in early],
        "open_at_stop": [(a.name, a.start_ns, threads.line_id(ident)) for a, ident in late],
        "line": threads.line_id(thread),
    }


def not_ready() -> int:
    """Arrays that are still being computed. A trace alone does not tell: of what is under way it has no event."""
    count = 0
    for array in jax.live_arrays():
        with contextlib.suppress(RuntimeError):  # another thread has just deleted it
            count += not array.is_ready()
    return count


def _warn_about_cache() -> None:
    config = jax.config
    caches = config.jax_compilation_cache_dir and config.jax_enable_compilation_cache
    if caches and not config.jax_compilation_cache_include_metadata_in_key:
        warnings.warn(
            located(
                "A persistent compilation cache is on and leaves names out of its key: a program compiled before may "
                "come back with the operation names it had then.",
                fix='jax.config.update("jax_compilation_cache_include_metadata_in_key", True) before the first jit, '
                "or profile with the cache off.",
            ),
            ProfileWarning,
            stacklevel=4,
        )


def _warn_about_command_buffers() -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if target().platform == "gpu" and "xla_gpu_enable_command_buffer=" not in flags:
        warnings.warn(
            located(
                "On a GPU, XLA runs sequences of kernels as one command buffer, and their names are not traced.",
                fix='Set XLA_FLAGS="--xla_gpu_enable_command_buffer=" before jax starts while you profile, '
                "or use `python -m rlfx.profile run`, which does.",
            ),
            ProfileWarning,
            stacklevel=4,
        )
