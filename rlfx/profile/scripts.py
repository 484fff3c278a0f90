"""Run a user's script in this process, and capture a window of it."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager

import jax
import jax.monitoring

from rlfx.errors import ProfileError
from rlfx.profile import compilations
from rlfx.profile.capture import not_ready

SETTLED = 1.0  # s without a compilation
WORKED = 0.05  # s of work of jax in them
PERIOD = 0.01


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
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
            frames = frames.tb_next
        traceback.print_exception(error.with_traceback(frames or error.__traceback__))
        return 1
    finally:
        sys.argv, sys.path[:] = argv, path
    return 0


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # so that what was captured is written


class Window:
    """Captures part of a script from a thread of its own, which goes on while the script is inside a call of XLA.

    Without `start`, it begins when jax first traces a function: a capture initializes jax's backends, and the script
    may have to choose its devices before. Without `duration`, it ends when there was no compilation for `SETTLED`
    seconds and jax worked for `WORKED` of them: a program that compiles no more repeats itself, millions of instructions
    a second. 0: it ends with the script. It also ends when the process has grown by `memory` bytes, and when the script
    captures itself.
    """

    def __init__(
        self, captured: Callable[[], AbstractContextManager], start: float, duration: float | None, memory: int
    ):
        self._captured, self._start, self._duration, self._memory = captured, start, duration, memory
        self._asked, self._begun, self._leave = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlfx.profile.run", daemon=True)
        self._cleanup = contextlib.ExitStack()
        self._compiled, self._worked = time.monotonic(), 0.0
        self.begun = self.refused = False
        self.cut = ""  # why it ended before the script
        self.failed: BaseException | None = None

    def __enter__(self) -> Window:
        self._cleanup.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _terminated))
        jax.monitoring.register_event_duration_secs_listener(self._traced)
        self._cleanup.callback(jax.monitoring.unregister_event_duration_listener, self._traced)
        original = jax.profiler.start_trace
        jax.profiler.start_trace = self._yields(original)
        self._cleanup.callback(setattr, jax.profiler, "start_trace", original)
        if self._start:
            timer = threading.Timer(self._start, self._asked.set)
            timer.daemon = True
            timer.start()
            self._cleanup.callback(timer.cancel)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end()
        self._cleanup.close()
        if self.failed is not None and not exc[0]:
            raise self.failed

    def _end(self) -> None:
        self._leave.set()
        self._asked.set()
        self._thread.join()

    def _traced(self, event: str, seconds: float, **tags: object) -> None:
        if event in compilations.STAGES:
            self._compiled, self._worked = time.monotonic(), 0.0
            if not self._start and not self._asked.is_set() and threading.current_thread() is threading.main_thread():
                self._asked.set()
                self._begun.wait(30)  # so that the first compilation is seen

    def _yields(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def start_trace(*args, **kwargs):
            if threading.current_thread() is not self._thread and not self.refused:
                self.refused = True
                self._end()
            return original(*args, **kwargs)

        return start_trace

    def _run(self) -> None:
        self._asked.wait()
        try:
            if not self._leave.is_set():
                self._capture()
        except ProfileError as error:
            self.refused = "already running" in str(error)
            self.failed = None if self.refused else error
        except OSError as error:
            self.failed = error
        finally:
            self._begun.set()

    def _capture(self) -> None:
        small = _resident()
        with self._captured():
            self.begun = True
            self._begun.set()
            begin, arrays = time.monotonic(), set()
            while not self._leave.wait(PERIOD):
                arrays, before = {id(a) for a in jax.live_arrays()}, arrays
                self._worked += PERIOD * (arrays != before or bool(not_ready()))
                self.cut = self._over(begin, small)
                if self.cut:
                    return

    def _over(self, begin: float, small: int) -> str:
        """Why it is time to end; empty if it is not."""
        now = time.monotonic()
        if _resident() - small > self._memory:
            return f"when the process had grown by {self._memory >> 20} MB"
        if self._duration:
            return f"after {self._duration:g} s" if now - begin > self._duration else ""
        settled = self._duration is None and now - self._compiled > SETTLED and self._worked > WORKED
        return "a second after the last compilation" if settled else ""


def _resident() -> int:
    """Bytes of memory of this process; 0 where the system does not say."""
    status = pathlib.Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0
