"""The main thread interrupted now and then while it computes, so that the lines are known at which it does.

A thread that looks at others needs Python's lock, and gets it where they let go of it: so it sees where they wait, and
hardly where they compute. A signal needs no lock. It goes to the main thread alone, by a timer on that thread's own
processor clock (Linux): with signals to the process, which any thread gets, programs of XLA:CPU corrupted the heap.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

TICK = 4 * 10**6  # ns of the thread's processor time
TO_THREAD = 4  # SIGEV_THREAD_ID
See = Callable[[FrameType], None]

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class _Event(ctypes.Structure):
    """`struct sigevent` for a thread."""

    _fields_ = [
        ("value", ctypes.c_void_p), ("number", ctypes.c_int), ("notify", ctypes.c_int), ("thread", ctypes.c_int),
        ("_pad", ctypes.c_char * 44),
    ]  # fmt: skip


class _Times(ctypes.Structure):
    """`struct itimerspec`."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


class Handler:
    """Of SIGPROF, asked for in the main thread; it passes what it sees on to who wants to know."""

    see: See | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.see is not None and frame is not None:
            self.see(frame)


@contextlib.contextmanager
def handling() -> Iterator[None]:
    """Handle SIGPROF, if this is the main thread and nobody else does; captures inside use it, those of other threads, too."""
    main = _libc is not None and threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGPROF) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGPROF, Handler())
    signal.siginterrupt(signal.SIGPROF, False)
    try:
        yield
    finally:
        # The default ends the process: a signal that is still under way is to be ignored first.
        signal.signal(signal.SIGPROF, signal.SIG_IGN)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)


@contextlib.contextmanager
def ticking(see: See) -> Iterator[None]:
    """Show `see` the frame of the main thread, every `TICK` ns that it computes; nothing where SIGPROF is taken."""
    with handling():
        handler = signal.getsignal(signal.SIGPROF) if _libc is not None else None
        timer = ctypes.c_void_p()
        if not isinstance(handler, Handler) or handler.see is not None or not _made(timer):
            yield
            return
        handler.see = see
        _libc.timer_settime(timer, 0, ctypes.byref(_Times(0, TICK, 0, TICK)), None)
        try:
            yield
        finally:
            _libc.timer_delete(timer)
            handler.see = None


def _made(timer: ctypes.c_void_p) -> bool:
    main = threading.main_thread()
    clock = time.pthread_getcpuclockid(main.ident or 0)
    event = _Event(None, signal.SIGPROF, TO_THREAD, main.native_id or 0)
    return _libc is not None and _libc.timer_create(clock, ctypes.byref(event), ctypes.byref(timer)) == 0
