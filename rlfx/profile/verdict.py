"""What limits a program, in one line: where, and what to do about it."""

from __future__ import annotations

import collections
import os
from collections.abc import Mapping

from rlfx.profile.rows import Row, bound_by, key_of
from rlfx.profile.rules import BACKEND, COMPILE, DISPATCH, IDLE

ADVICE = {
    "host": "move the loop, or the environment, into one jitted program",
    "dispatch": "do more in a call: put the loop into `lax.scan`, or batch more environments",
    "device": "the device itself is the limit: make its work smaller",
    "transfer": "keep data on the device between steps",
    "import": "packages are imported once: begin the capture later (`run` does where the script goes on; else `--start`)",
    "compile": "warm up before the capture, or keep argument shapes and functions the same",
    "blocked": "it waits for a queue, lock, pipe, sleep or another process: make what it waits for faster, or overlap it",
    "idle": "nothing works: look at locks, sleeps, input, and other programs on this machine",
}


#: Of a program without jax.
ELSEWHERE = "make it cheaper, or do it for more environments at a time"
OUTSIDE = "(none)"


def verdict(
    rows: Mapping[Row, int], window_ns: int, lines: collections.Counter, roofs: Mapping[str, str] | None = None
) -> str:
    """Say what limits most of the time.

    Args:
      rows: ns of the window.
      window_ns: their sum.
      lines: ns that threads of Python were at work, by `(file, line)`; may be empty.
      roofs: what limits an operation on the device, and what to do about it; without an entry that is not known.

    Returns:
      One line. Where most of what limits the program is outside of every operation, and the lines are not known
      either, it says what is missing.

    Example:
      >>> verdict({Row("", (), "", "python", "idle"): 90, Row("", ("a",), "", "wait", "busy"): 10}, 100, collections.Counter())
      'no verdict: 90% of the time is outside of every operation (host-bound); wrap its parts in rlfx.profile.operation'
    """
    kinds: collections.Counter = collections.Counter()
    places: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for row, ns in rows.items():
        kind = bound_by(row.host, row.device)
        kinds[kind] += ns
        places[kind][key_of(row, "operation")] += ns
    ((kind, total),) = kinds.most_common(1)
    ((place, ns),) = places[kind].most_common(1)
    uses_jax = any(row.device != IDLE or row.host in (BACKEND, DISPATCH, COMPILE) for row in rows)
    advice = ADVICE[kind] if uses_jax or kind != "host" else ELSEWHERE
    if place != OUTSIDE or kind in ("compile", "import", "idle"):
        near = (roofs or {}).get(place) if kind == "device" else ""
        where = f"most of it in {place} ({ns / window_ns:.0%})"
        return f"{kind}-bound: {total / window_ns:.0%} of the time, {where}; {near or advice}"
    if kind == "host" and lines:
        (((file, line), at),) = lines.most_common(1)
        where = f"{os.path.basename(file)}:{line} ({at / max(1, lines.total()):.0%} of Python's time)"
        return (
            f"host-bound: {total / window_ns:.0%} of the time, most of it outside of every operation, at {where}; "
            f"{advice}"
        )
    return (
        f"no verdict: {ns / window_ns:.0%} of the time is outside of every operation ({kind}-bound); "
        "wrap its parts in rlfx.profile.operation"
    )
