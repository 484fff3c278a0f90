"""The profiler, and where jax waits."""

from __future__ import annotations

import os
import pathlib
import socket

import jax
from jax._src import dispatch, profiler
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]


def stop_trace(folder: pathlib.Path) -> None:
    """Stop the running trace and write its `.xplane.pb` into `folder`.

    `jax.profiler.stop_trace` converts every event to JSON as well, which takes several times as long as the rest. Where
    a jax has other internals, this is the public function, which writes to the same folder.
    """
    state = getattr(profiler, "_profile_state", None)
    session = getattr(state, "profile_session", None)
    if session is None or not all(hasattr(o, n) for o, n in ((session, "stop"), (state, "reset"), (state, "lock"))):
        jax.profiler.stop_trace()
        return
    with state.lock:
        raw = session.stop()
        state.reset()
    clear = getattr(profiler, "clear_metadata", None)
    if clear is not None:
        clear()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{socket.gethostname() or os.uname().nodename}.xplane.pb").write_bytes(raw)


#: Where jax waits without leaving an event in a trace: `(owner, attribute)`.
waits = tuple(
    (owner, name)
    for owner, name in (
        (xla_client, "batched_block_until_ready"),  # of `jax.block_until_ready`, if there are several arrays
        (getattr(dispatch, "RuntimeTokenSet", None), "block_until_ready"),  # of `jax.effects_barrier`
    )
    if hasattr(owner, name)
)
