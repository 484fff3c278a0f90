"""What profiling needs of private jax: whether it is tracing, and a trace without the JSON that the public way adds."""

from __future__ import annotations

import os
import pathlib
import socket

import jax
from jax._src import core as _core
from jax._src import profiler as _profiler

_state_is_clean = getattr(_core, "trace_state_clean", lambda: False)


def stop_trace(folder: pathlib.Path) -> None:
    """Stop the running trace and write its `.xplane.pb` into `folder`.

    `jax.profiler.stop_trace` converts every event to JSON as well, which takes several times as long as the rest. Where
    a jax has other internals, this is the public function, which writes to the same folder.
    """
    state = getattr(_profiler, "_profile_state", None)
    session = getattr(state, "profile_session", None)
    if session is None or not all(hasattr(o, n) for o, n in ((session, "stop"), (state, "reset"), (state, "lock"))):
        jax.profiler.stop_trace()
        return
    with state.lock:
        raw = session.stop()
        state.reset()
    clear = getattr(_profiler, "clear_metadata", None)
    if clear is not None:
        clear()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{socket.gethostname() or os.uname().nodename}.xplane.pb").write_bytes(raw)


def tracing() -> bool:
    """Is jax tracing a function in this thread? If not, a named scope would reach nothing. True where unknown."""
    return not _state_is_clean()
