"""Room for the frames of Python functions.

CPython keeps frames in pieces of 16 KiB, about a hundred frames each. A call that begins a piece asks the system for it, and
gives it back on return, so that a loop of calls just there takes two system calls and a page fault a call: 7 us instead of
0.03 on a virtual machine. Traces are deep enough to meet the end of several pieces, each inside of loops over equations.

A frame that is larger than a piece gets a larger one, a power of two in size, and what it calls is kept in the rest of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

#: Slots of 8 bytes, never touched: a piece of 1 MiB, of which 464 KiB are left, about 3,000 frames.
SLOTS = 70_000


def _call(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)


_call.__code__ = _call.__code__.replace(co_stacksize=SLOTS)


def with_room(fn: F) -> F:
    """``fn``, whose calls have a piece of their own for the frames of what they call: for what traces.

    Example:
      >>> with_room(sum)([1, 2])
      3
    """

    @functools.wraps(fn)
    def roomy(*args: Any, **kwargs: Any) -> Any:
        return _call(fn, args, kwargs)

    return roomy  # type: ignore[return-value]
