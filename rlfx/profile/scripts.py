"""Run a user's script in this process, and capture a window of it."""

from __future__ import annotations

import contextlib
import pathlib
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager

import jax.monitoring

from rlfx.errors import ProfileError
from rlfx.profile import compilations

SETTLED = 1.0


def execute(script: pathlib.Path, arguments: list[str]) -> int:
    """Run a script as `__main__`; the status with which it would have ended. A traceback begins with its own lines."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
            frames = frames.tb_next
        traceback.print_exception(error.with_traceback(frames or error.__traceback__))
        return 1
    finally:
        sys.argv, sys.path[:] = argv, path
    return 0


class Window:
    """Begins and ends the capture on the main thread, between two of its instructions: by SIGURG, which others ignore.

    Without `start`, it begins when jax first traces a function: a capture initializes jax's backends, and the script
    may have to choose its devices before. Without `duration`, it ends `SETTLED` seconds after the last compilation: a
    program that compiles no more repeats itself, millions of instructions a second. 0: it ends with the script.
    """

    def __init__(self, captured: Callable[[], AbstractContextManager], start: float, duration: float | None):
        self._captured, self._start, self._duration = captured, start, duration
        self._stack, self._cleanup = contextlib.ExitStack(), contextlib.ExitStack()
        self._compiled = 0.0
        self.begun = self.cut = self.refused = False

    def __enter__(self) -> Window:
        self._cleanup.callback(signal.signal, signal.SIGURG, signal.signal(signal.SIGURG, self._ring))
        jax.monitoring.register_event_duration_secs_listener(self._traced)
        self._cleanup.callback(jax.monitoring.unregister_event_duration_listener, self._traced)
        if self._start:
            self._later(self._start)
        return self

    def __exit__(self, *exc: object) -> None:
        self._cleanup.close()
        self._stack.close()

    def _later(self, seconds: float) -> None:
        timer = threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGURG))
        timer.daemon = True
        timer.start()
        self._cleanup.callback(timer.cancel)

    def _traced(self, event: str, seconds: float, **tags: object) -> None:
        if event in compilations.STAGES:
            self._compiled = time.monotonic()
            if not self.begun and not self._start and threading.current_thread() is threading.main_thread():
                self._begin()

    def _begin(self) -> None:
        self.begun = True
        try:
            self._stack.enter_context(self._captured())
        except ProfileError:  # the script captures itself, and shall go on
            self.refused = True
            return
        if self._duration != 0:
            self._later(self._duration or SETTLED)

    def _ring(self, number: int, frame: object) -> None:
        if not self.begun:
            self._begin()
        elif not self.cut and not self.refused:
            left = self._compiled + SETTLED - time.monotonic() if self._duration is None else 0.0
            if left > 0:
                self._later(left)
            else:
                self.cut = True
                self._stack.close()
