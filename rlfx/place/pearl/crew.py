"""Threads that drive devices, the bounded channels between them, and the watch over both: no part ends a run in silence."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

from rlfx.errors import PartError, located

#: Settings that hold in a thread, as ``with jax.NAME(...)`` says: those of the caller hold in its parts.
SETTINGS = (
    "numpy_rank_promotion",
    "numpy_dtype_promotion",
    "default_matmul_precision",
    "default_prng_impl",
    "threefry_partitionable",
    "enable_x64",
    "debug_nans",
    "debug_infs",
    "log_compiles",
)


class Stopped(Exception):
    """The run is over: what a part that waits is woken with."""


class Channel:
    """A first-in-first-out queue that holds at most ``capacity`` items: who puts more waits."""

    def __init__(self, crew: Crew, name: str, capacity: int):
        self.name, self.capacity, self.peak = name, capacity, 0
        self.items: deque = deque()
        self.changed = crew.condition()

    def put(self, part: Part, item: Any) -> None:
        """Append, once there is room."""
        part.wait_for(self.changed, lambda: len(self.items) < self.capacity, f"room in {self.name}")
        with self.changed:
            self.items.append(item)
            self.peak = max(self.peak, len(self.items))
            self.changed.notify_all()

    def get(self, part: Part) -> Any:
        """Take the oldest, once there is one."""
        part.wait_for(self.changed, lambda: bool(self.items), self.name)
        with self.changed:
            item = self.items.popleft()
            self.changed.notify_all()
            return item


class Versions:
    """The newest ``keep`` versions of the weights by number: some are read while the next one is written.

    What is published is ``brought`` to where it is read by who takes it first: who publishes goes on meanwhile.
    """

    def __init__(self, crew: Crew, keep: int, held: dict[int, Any], brought: Callable[[Any], Any] | None = None):
        self.keep, self.held, self.brought = keep, dict(held), brought
        self.away: set[int] = set()
        self.changed = crew.condition()

    def publish(self, number: int, weights: Any) -> None:
        """Add a version; the oldest one goes."""
        with self.changed:
            self.held[number] = weights
            for old in [n for n in self.held if n <= number - self.keep]:
                del self.held[old]
            self.away = {n for n in (*self.away, number) if n in self.held} if self.brought else self.away
            self.changed.notify_all()

    def take(self, part: Part, number: int) -> Any:
        """That version, once it is there."""
        part.wait_for(self.changed, lambda: number in self.held, f"version {number} of the weights")
        with self.changed:
            weights, away = self.held[number], number in self.away
        if not away or self.brought is None:
            return weights
        weights = self.brought(weights)  # two who do so at once have equal ones
        with self.changed:
            if number in self.away:
                self.held[number] = weights
                self.away.discard(number)
        return weights


class Part:
    """One thread: its name, since when it works or waits for what, and how long it waited in all."""

    def __init__(self, crew: Crew, name: str):
        self.crew, self.name = crew, name
        self.since, self.waits = time.monotonic(), ""
        self.begun = self.ended = self.since
        self.waited = self.cpu = 0.0
        self.done = False

    def wait_for(self, condition: threading.Condition, ready: Callable[[], bool], what: str) -> None:
        """Return when ``ready()``, which no other thread may undo; raise :class:`Stopped` when the run ends before."""
        with condition:
            if not ready():
                self._turn(what)
                condition.wait_for(lambda: ready() or self.crew.stopped)
                self.waited += time.monotonic() - self.since
            self._turn("")
            if self.crew.stopped:
                raise Stopped

    def _turn(self, waits: str) -> None:
        self.since, self.waits = time.monotonic(), waits

    def alive(self) -> None:
        """Say that work goes on; raise :class:`Stopped` if nobody needs it any more."""
        self._turn("")
        if self.crew.stopped:
            raise Stopped

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around the caller's own work, which takes what it takes."""
        self.since = math.inf
        yield
        self._turn("")

    @property
    def busy(self) -> float:
        """Seconds not spent on waiting."""
        return max(0.0, self.ended - self.begun - self.waited)


class Crew:
    """The threads of one run. The first error stops all of them, and is raised where the run was called."""

    def __init__(self, patience: float):
        self.patience, self.stopped = patience, False
        self.parts: list[Part] = []
        self._lock = threading.RLock()
        self._conditions: list[threading.Condition] = []
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._failure: tuple[Part, BaseException] | None = None
        self._settings = {name: getattr(jax.config, f"jax_{name}") for name in SETTINGS if hasattr(jax, name)}

    def condition(self) -> threading.Condition:
        """What parts wait on; woken when the run stops."""
        self._conditions.append(threading.Condition(self._lock))
        return self._conditions[-1]

    def start(self, name: str, work: Callable[[Part], None], *, last: bool = False) -> None:
        """Run ``work(part)`` in a thread; the run is over when it returns, if it is the ``last`` one to."""
        part = Part(self, name)

        def body() -> None:
            try:
                with ExitStack() as stack:
                    for setting, value in self._settings.items():
                        stack.enter_context(getattr(jax, setting)(value))
                    work(part)
                if last:
                    self._over.set()
            except Stopped:
                pass
            except BaseException as error:  # whatever it is, the caller gets it
                with self._lock:
                    self._failure = self._failure or (part, error)
                self._over.set()
            finally:
                part.done, part.ended, part.cpu = True, time.monotonic(), time.thread_time()

        self.parts.append(part)
        self._threads.append(threading.Thread(target=body, name=name, daemon=True))
        self._threads[-1].start()

    def watch(self) -> None:
        """Return when the last part has; raise :class:`PartError` when one fails, or does not move for ``patience`` seconds."""
        while not self._over.wait(min(0.2, self.patience / 4)):
            self._check_that_all_move()
        if self._failure is not None:
            part, error = self._failure
            if isinstance(error, PartError):
                raise error
            fact = f"The part {part.name!r} raised {type(error).__name__}: {error}"
            fix = "The error above is its own; the state given to the run is as it was."
            raise PartError(located(fact, fix=fix), part.name) from error

    def _check_that_all_move(self) -> None:
        with self._lock:
            now, living = time.monotonic(), [p for p in self.parts if not p.done]
            late = [p for p in living if now - p.since > self.patience]
            hung = next((p for p in late if not p.waits), None)
            if hung is None and len(late) < len(living):
                return
            if hung is not None:
                fact = f"The part {hung.name!r} has worked on one thing for more than {self.patience:g} s."
            elif late:
                fact = "Every part waits: " + ", ".join(f"{p.name!r} for {p.waits}" for p in late) + "."
            else:
                return
        fix = "Give a larger patience if it is not stuck: compiling counts, too."
        raise PartError(located(fact, fix=fix), hung.name if hung else "")

    def stop(self, seconds: float = 5.0) -> None:
        """Wake every part that waits, and wait for their ends; who is stuck stays behind, as a daemon."""
        with self._lock:
            self.stopped = True
            for condition in self._conditions:
                condition.notify_all()
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
