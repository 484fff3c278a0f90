"""Run a user's script in this process, and capture a window of it."""

from __future__ import annotations

import bisect
import contextlib
import functools
import os
import pathlib
import runpy
import shutil
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
from rlfx.profile import compilations, ticks
from rlfx.profile.capture import Session, not_ready

SETTLED = 1.0  # s without a compilation
WORKED = 0.05  # s of work of jax in them
WARM = 1.0  # s of a program that compiles no more
LEAST = 0.1  # s that say something
PERIOD = 0.01
AFTER = "a second after the last compilation"
RECORDED = 272  # bytes that jax's profiler keeps of an event; an instruction of XLA:CPU has two
WRITTEN = 4  # times as much memory when a capture ends


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
    seconds and jax worked for `WORKED` of them. A second capture follows, of `WARM` seconds of what the script repeats
    from then on; it takes the place of the first, unless the script ends before it says something. 0: it ends with the
    script. A capture also ends before it holds more than `events`, or takes more than `memory` bytes, and when the script
    captures itself.
    """

    def __init__(
        self,
        captured: Callable[[], AbstractContextManager[Session]],
        start: float,
        duration: float | None,
        memory: int,
        events: int = 1 << 40,
    ):
        self._captured, self._start, self._duration = captured, start, duration
        self._memory, self._events = memory, events
        self._asked, self._begun, self._leave = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="rlfx.profile.run", daemon=True)
        self._cleanup = contextlib.ExitStack()
        self._compiled, self._worked = time.monotonic(), 0.0
        self._arrays: set[int] = set()
        self.refused = False
        self.sessions: list[Session] = []  # until the script settled, and after that
        self.cut = ""  # why it ended before the script
        self._sizes: list[tuple[float, int]] = []  # when, and bytes of the process
        self._programs, self._until = 0, 0.0  # bytes that compilers took, and until when they are counted
        self.failed: BaseException | None = None

    def __enter__(self) -> Window:
        self._cleanup.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _terminated))
        self._cleanup.enter_context(ticks.handling())
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
            if self._sizes:  # what programs take is not the profiler's; a stage may be inside of another one
                begin = max(self._compiled - seconds, self._until)
                at = bisect.bisect_right(self._sizes, begin, key=lambda size: size[0])
                self._programs += max(0, _resident() - self._sizes[max(0, at - 1)][1])
                self._until = self._compiled
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
                self._capture(self._duration)
            if self._duration is None and self.cut and self._settles():
                self._capture(WARM)
        except ProfileError as error:
            self.refused = "already running" in str(error)
            self.failed = None if self.refused else error
        except OSError as error:
            self.failed = error
        finally:
            self._begun.set()

    def _capture(self, duration: float | None) -> None:
        small = _resident()
        with self._captured() as session:
            self.sessions.append(session)
            self._begun.set()
            begin, self.cut = time.monotonic(), ""
            self._sizes = [(begin, small)]
            self._programs = 0
            while not self.cut and not self._leave.wait(PERIOD):
                self._look()
                self._sizes.append((time.monotonic(), _resident()))
                grown = self._sizes[-1][1] - small - self._programs
                self.cut = self._over(time.monotonic() - begin, grown, duration)
            lasted = time.monotonic() - begin
        if len(self.sessions) > 1 and lasted < LEAST and session.folder is not None:
            shutil.rmtree(self.sessions.pop().folder)  # what is left is the script's end, not what it repeats

    def _look(self) -> None:
        """Does jax work?"""
        arrays = {id(a) for a in jax.live_arrays()}
        self._worked += PERIOD * (arrays != self._arrays or bool(not_ready()))
        self._arrays = arrays

    def _settled(self) -> bool:
        return time.monotonic() - self._compiled > SETTLED and self._worked > WORKED

    def _settles(self) -> bool:
        """Wait until the script has settled; False if it ends before."""
        while not self._settled():
            if self._leave.wait(PERIOD):
                return False
            self._look()
        return not self._leave.is_set()

    def _over(self, lasted: float, grown: int, duration: float | None) -> str:
        """Why it is time to end; empty if it is not."""
        if grown > RECORDED * self._events:
            return f"at the memory of {self._events:,} events"
        if WRITTEN * grown > self._memory:
            return f"at {self._memory >> 20} MB of memory"
        if duration:
            return f"after {duration:g} s" if lasted > duration else ""
        return AFTER if duration is None and self._settled() else ""


def _resident() -> int:
    """Bytes of memory of this process; 0 where the system does not say."""
    status = pathlib.Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0
