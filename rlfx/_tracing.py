"""Functions that trace: with room for their frames, and few collections of garbage meanwhile.

CPython looks for garbage in circles whenever 700 more objects were made than were freed. A trace makes hundreds of thousands that
live as long as it does, next to those of jax: looking at all of them again and again takes a sixth to a third of a trace's time.
While one runs, the youngest generation may have :data:`OBJECTS` before somebody looks. The threshold is the process's; it is as
it was when the last trace ends, and where collections are off they stay off.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from rlfx._frames import with_room

F = TypeVar("F", bound=Callable[..., Any])

#: What Python and NumPy get where they ask a traced array for its value.
ASKED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)

#: A few megabytes' worth.
OBJECTS = 50_000


class _Rarely:
    """Entered once for every trace, of any thread."""

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._before: tuple[int, int, int] = gc.get_threshold()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = gc.get_threshold()
                young, *older = self._before
                if young:  # 0: nothing is collected
                    gc.set_threshold(max(young, OBJECTS), *older)

    def __exit__(self, *_: Any) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and gc.get_threshold()[0] == max(self._before[0], OBJECTS):  # nobody has set another one
                gc.set_threshold(*self._before)


_RARELY = _Rarely()


def traces(fn: F) -> F:
    """``fn``, which traces.

    Example:
      >>> traces(sum)([1, 2])
      3
    """

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _RARELY:
            return fn(*args, **kwargs)

    return with_room(call)  # type: ignore[return-value]
