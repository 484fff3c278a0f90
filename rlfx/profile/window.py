"""Which part of a script is captured, and when: from a thread that goes on while the script is inside a call of XLA."""

from __future__ import annotations

import bisect
import contextlib
import functools
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import jax
import jax.monitoring

from rlfx.errors import ProfileError
from rlfx.profile import compilations, ticks
from rlfx.profile.capture import Session
from rlfx.profile.memory import resident
from rlfx.profile.progress import PERIOD, Mix, Progress, Unlike, unlike

SHORT = 5.0  # s of a window, unless its events are enough before
LONG = 60.0  # s of any that nobody gave an end
ALIKE = 0.25  # how far the halves of a window may be apart
PATIENCE = 30.0  # s until a script that does not settle is captured as it is
LEAST = 0.1  # s that say something
AFTER = "a second after the last compilation"
ENOUGH = f"after {SHORT:g} s or more, when both halves of the window did the same"
RECORDED = 272  # bytes that jax's profiler keeps of an event; an instruction of XLA:CPU has two
WRITTEN = 4  # times as much memory when a capture ends


@dataclass
class Part:
    """A captured part of a script: of `start` to `stop` s after its begin, and what the script did in it."""

    session: Session
    start: float
    stop: float = 0.0
    mix: Mix | None = None


def _terminated(number: int, frame: object) -> None:
    raise SystemExit(128 + number)  # so that what was captured is written


class Window:
    """Captures parts of a script: how it sets up, and then what it repeats.

    Without `start`, the first part begins when jax traces a function outside of an import: a capture initializes jax's
    backends, and the script may have to choose its devices before. A script that imports nothing of jax begins after its
    imports. Without `duration`, the first part ends when the script has settled: a second without importing and
    compiling, in which it worked. A second part follows, until its halves are alike; and another each time the script has
    run twice as long as when the last one began, if it does other things by then and has settled. A script that does not
    settle is captured as it is after `PATIENCE`. Of what follows the first part the one that is most like the later half
    of the script's time is kept. `duration` 0: one part, which ends with the script.

    A part also ends before it holds more than `events`, or takes more than `memory` bytes, and when the script captures
    itself.
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
        self.progress = Progress()
        self.refused = False
        self.first: Part | None = None  # until the script settled, or all there is
        self.kept: Part | None = None  # what it repeats
        self.cut = ""  # why the last part ended before the script
        self._sizes: list[tuple[float, int]] = []  # when, and bytes of the process
        self._latest = self._asks_at = 0.0  # when the last part began, and when to ask whether it is enough
        self._programs, self._until = 0, 0.0  # bytes that compilers took, and until when they are counted
        self.other = Unlike("", 0.0, 0.0)  # how the script's later half differs from the part
        self.failed: BaseException | None = None

    @property
    def part(self) -> Part | None:
        """What to report on."""
        return self.kept or self.first

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
        if self.part is not None and self.part.mix is not None:
            self.other = unlike(self.part.mix, self.progress.lately())
        self._cleanup.close()
        if self.failed is not None and not exc[0]:
            raise self.failed

    def _end(self) -> None:
        self._leave.set()
        self._asked.set()
        self._thread.join()

    def _traced(self, event: str, seconds: float, **tags: object) -> None:
        if event in compilations.STAGES:
            self.progress.compiled()
            if self._sizes:  # what programs take is not the profiler's; a stage may be inside of another one
                now = time.monotonic()
                begin = max(now - seconds, self._until)
                at = bisect.bisect_right(self._sizes, begin, key=lambda size: size[0])
                self._programs += max(0, resident() - self._sizes[max(0, at - 1)][1])
                self._until = now
            mine = threading.current_thread() is threading.main_thread()
            if mine and not (self._start or self._asked.is_set() or self.progress.imports()):
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
        try:
            if self._begins():
                self.first = self._capture(self._duration, lambda part: AFTER if self.progress.settled else "")
            if self._duration is None and self.cut:
                while self._again():
                    self._keep(self._capture(None, self._repeats))
        except ProfileError as error:
            self.refused = "already running" in str(error)
            self.failed = None if self.refused else error
        except OSError as error:
            self.failed = error
        finally:
            self._begun.set()

    def _begins(self) -> bool:
        """Wait until it is time for the first part; False if the script ends before."""
        while not self._asked.wait(self.progress.pause):
            self.progress.look()
            if not self._start and self.progress.works_without_jax():
                return True
        return not self._leave.is_set()

    def _again(self) -> bool:
        """Wait until the script does what no part holds; False if it ends before."""
        last, asked = self.first, 0.0
        while not self._leave.wait(self.progress.pause):
            self.progress.look()
            now = self._now()
            if self.kept is None and (self.progress.settled or now - last.stop > max(PATIENCE, last.stop)):
                return True
            if self.kept is not None and self.progress.settled and now > max(2 * self._latest, asked):
                if unlike(self.kept.mix, self.progress.lately()).by > ALIKE:
                    return True
                asked = now + 1 + now / 20
        return False

    def _now(self) -> float:
        return time.monotonic() - self.progress.began

    def _capture(self, duration: float | None, ends: Callable[[Part], str]) -> Part:
        small = resident()
        with self._captured() as session:
            self._latest = self._now()
            self._asks_at = self._latest + SHORT
            part = Part(session, self._latest)
            if self.first is None:
                self.first = part
            self._begun.set()
            self.cut = ""
            self._sizes, self._programs = [(time.monotonic(), small)], 0
            while not self.cut and not self._leave.wait(PERIOD):
                self.progress.look()
                self._sizes.append((time.monotonic(), resident()))
                grown = self._sizes[-1][1] - small - self._programs
                self.cut = self._over(self._now() - part.start, grown, duration)
                if not self.cut and duration is None:
                    self.cut = ends(part)
            part.stop = self._now()
        part.mix = self._mix(part.start, part.stop)
        return part

    def _mix(self, start: float, stop: float) -> Mix:
        return self.progress.mix(self.progress.began + start, self.progress.began + stop)

    def _repeats(self, part: Part) -> str:
        """A window is long enough when both halves of it did the same."""
        now = self._now()
        if now < self._asks_at:
            return ""
        self._asks_at = now + 0.5
        middle = (part.start + now) / 2
        return ENOUGH if unlike(self._mix(part.start, middle), self._mix(middle, now)).by < ALIKE else ""

    def _keep(self, part: Part) -> None:
        """Keep the part that is most like what the script did lately; of one that is too short nothing is left."""
        lately = self.progress.lately()
        old = self.kept
        if part.stop - part.start < LEAST and self._leave.is_set():
            gone = part  # the script's end, not what it repeats
        elif old is None or unlike(part.mix, lately).by <= unlike(old.mix, lately).by:
            self.kept, gone = part, old
        else:
            gone = part
        if gone is not None and gone.session.folder is not None:
            shutil.rmtree(gone.session.folder)

    def _over(self, lasted: float, grown: int, duration: float | None) -> str:
        """Why it is time to end; empty if it is not."""
        if grown > RECORDED * self._events:
            return f"at the memory of {self._events:,} events"
        if WRITTEN * grown > self._memory:
            return f"at {self._memory >> 20} MB of memory"
        if duration:
            return f"after {duration:g} s" if lasted > duration else ""
        return f"after {LONG:g} s" if duration is None and lasted > LONG else ""
