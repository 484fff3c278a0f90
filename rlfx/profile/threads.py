"""What the threads of Python do while a capture runs: their processor clocks and the lines they are at, now and then.

A trace says which calls of jax a thread makes; between them it computes, or blocks on a queue, a lock, a pipe, another
process: that is what the clocks tell. A thread that waits for a processor computes (`schedstat`'s second number).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import linecache
import os
import pathlib
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import jax

from rlfx.profile import annotate, memory, ticks
from rlfx.profile.lines import INSTALLED

OURS = "rlfx.profile"  # how the names of our own threads begin
PERIOD = 0.01
ENOUGH = 8  # ticks
DEPTH = 8  # lines of the user's that a sample keeps
# A sample costs about 20 µs a thread; with many threads, samples are rarer, so that they take 1% of the time.
SHARE = 0.01
EDGE = 2 * 10**6  # ns

#: Where files of Python, of jax, and ours are.
STDLIB = tuple(
    str(pathlib.Path(p)) + os.sep for p in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
)
_JAX = str(pathlib.Path(jax.__file__).parent) + os.sep
_HERE = str(pathlib.Path(__file__).parent) + os.sep
PRIVATE = (*STDLIB, _JAX, _HERE)
#: Functions in C that wait for the device, called from anywhere.
FETCHES = frozenset({"block_until_ready", "asarray", "array", "item", "tolist", "device_get", "float", "int", "bool"})
#: In NumPy's own functions a thread computes, and waits for nothing but the array of jax that it was given: `np.any(x)`.
NUMPY = re.compile(r".*[/\\]numpy[/\\]_?core[/\\].*")
NUMPY_NAMES = frozenset({"np", "onp", "numpy"})
IF_BLOCKED = 2  # a call that is one of jax's only if the thread is blocked in it


def line_id(ident: int) -> int:
    """The id of a thread's line in a trace, from `threading.get_ident()`: libstdc++'s hash of it.

    Example:
      >>> hex(line_id(139849852279680))
      '0x9e04c0dfe2f064ab'
    """
    word, multiplier = (1 << 64) - 1, 0xC6A4A7935BD1E995
    k = ident * multiplier & word
    k = (k ^ k >> 47) * multiplier & word
    h = (0xC70F6907 ^ 8 * multiplier & word ^ k) * multiplier & word
    h = (h ^ h >> 47) * multiplier & word
    return h ^ h >> 47


# Called while the lock of Python is held: letting go of it costs a turn of 5 ms where threads compete for it.
_pread = getattr(ctypes.PyDLL(None), "pread", None)
if _pread is not None:
    _pread.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long]


Lines = tuple[tuple[CodeType, int], ...]  # code, and where in it


@functools.lru_cache(maxsize=65536)
def foreign(path: str) -> bool:
    """A file that is not the user's."""
    return path.startswith(PRIVATE) or bool(INSTALLED.fullmatch(path))


@functools.lru_cache(maxsize=65536)
def internal(path: str) -> bool:
    """A file of Python, of jax, or ours, whose lines say nothing of a program."""
    ours = path.startswith(tuple(p for p in PRIVATE if p not in STDLIB))
    return ours or (path.startswith(STDLIB) and not INSTALLED.fullmatch(path))


#: Functions of jax and torch that are open while they trace and compile.
COMPILES = re.compile(
    r".*[/\\]jax[/\\]_src[/\\](compiler\.py:.*|interpreters[/\\](mlir\.py:lower.*|partial_eval\.py:trace_to_jaxpr.*))"
    r"|.*[/\\]torch[/\\](_inductor[/\\].*|_dynamo[/\\](convert_frame|symbolic_convert|output_graph)\.py:.*)"
)


@functools.lru_cache(maxsize=65536)
def compiles(path: str, name: str) -> bool:
    """Is a function of a file one that is open while something is compiled?"""
    return bool(COMPILES.fullmatch(f"{path}:{name}"))


@dataclass
class Watched:
    """One thread: `samples` are `[epoch ns, ns on a processor, ns in the queue for one, place or -1]`."""

    ident: int
    native: int | None
    name: str
    file: int | None
    samples: list[list[int]] = field(default_factory=list)
    _text: Any = field(default_factory=lambda: ctypes.create_string_buffer(96))

    @classmethod
    def of(cls, thread: threading.Thread) -> Watched:
        file = None
        with contextlib.suppress(OSError):
            file = os.open(f"/proc/self/task/{thread.native_id}/schedstat", os.O_RDONLY)
        return cls(thread.ident or 0, thread.native_id, thread.name, file)

    def clocks(self) -> tuple[int, int] | None:
        """`(ns on a processor, ns ready for one)`; None where the thread has just ended, or the system does not say."""
        with contextlib.suppress(OSError, AttributeError, ValueError, IndexError):
            run = time.clock_gettime_ns(time.pthread_getcpuclockid(self.ident))
            if self.file is None or _pread is None:
                return run, 0
            size = _pread(self.file, self._text, 96, 0)
            return run, int(self._text.raw[: max(0, size)].split()[1])
        return None


@dataclass
class Watch:
    """Filled while `watching()`; `as_notes` for JSON."""

    threads: list[Watched] = field(default_factory=list)
    ticks: list[tuple[int, int]] = field(default_factory=list)  # of the main thread: epoch ns, place
    memory: list[memory.Held] = field(default_factory=list)
    _rest: float = 0.0  # s from one measurement of memory to the next
    _now: dict[int, Watched] = field(default_factory=dict)  # by ident, which threads that ended leave to others
    _places: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def sample(self, but: int = 0) -> None:
        """Read all clocks once, except of thread `but`."""
        known = {t.ident: t for t in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            thread = known.get(ident)
            if ident != but and thread is not None:
                self._read(self._of(thread), self._place(frame))

    def measure(self) -> None:
        """What memory is held now, if it was not asked for a while; of many arrays it takes long, and is asked rarely."""
        if not self.memory or time.time_ns() - self.memory[-1].at_ns > self._rest * 1e9:
            begin = time.thread_time()
            self.memory.append(memory.held())
            self._rest = _rest_after(begin, memory.PERIOD)

    def edge(self) -> None:
        """Read the clocks of the calling thread, where an operation begins or ends; not twice within `EDGE`."""
        found = self._now.get(threading.get_ident())
        if found is None or not found.samples or time.time_ns() - found.samples[-1][0] > EDGE:
            self._read(self._of(threading.current_thread()), -1)

    def _read(self, watched: Watched, place: int) -> None:
        clocks = watched.clocks()
        if clocks is not None:
            watched.samples.append([time.time_ns(), *clocks, place])

    def _of(self, thread: threading.Thread) -> Watched:
        found = self._now.get(thread.ident or 0)
        if found is None or found.native != thread.native_id:
            found = self._now[thread.ident or 0] = Watched.of(thread)
            self.threads.append(found)
        return found

    def _place(self, frame: FrameType) -> int:
        """The number of a place: what the thread does, and the lines that called for it, innermost first.

        Those of packages are kept up to the first of the user's, and only the user's from there on.
        """
        called = frame
        while called.f_back is not None and called.f_code.co_filename.startswith(_HERE):
            called = called.f_back  # a wrapper of ours, from an earlier capture, where a wait began in that one
        outer: FrameType | None = frame
        packages, mine, sets_up, inner = [], [], "", ""
        while outer is not None and len(mine) < DEPTH:
            path = outer.f_code.co_filename
            if path.startswith("<frozen importlib"):
                sets_up = sets_up or "import" * (not inner or foreign(inner))
            else:
                inner = path
                sets_up = sets_up or "compile" * compiles(path, outer.f_code.co_name)
            if not path.startswith("<frozen") and not internal(path):
                if not INSTALLED.fullmatch(path):
                    mine.append((outer.f_code, outer.f_lasti))
                elif not mine:
                    packages.append((outer.f_code, outer.f_lasti))
            outer = outer.f_back
        key = (called.f_code, called.f_lasti), tuple(packages[:DEPTH] + packages[DEPTH:][-DEPTH:]), tuple(mine), sets_up
        return self._places.setdefault(key, len(self._places))

    def tick(self, frame: FrameType) -> None:
        """The main thread is there, whoever has Python's lock."""
        self.ticks.append((time.time_ns(), self._place(frame)))

    def close(self) -> None:
        """Let go of the files of the system."""
        for thread in self.threads:
            thread.samples.sort()
            if thread.file is not None:
                os.close(thread.file)
                thread.file = None

    def as_notes(self) -> dict[str, Any]:
        return {
            "threads": [{"line": line_id(t.ident), "name": t.name, "samples": t.samples} for t in self.threads],
            "ticks": [[line_id(threading.main_thread().ident or 0), at, place] for at, place in self.ticks],
            "places": [_described(*key) for key in self._places],
            "memory": self.memory,
        }


def _described(here: tuple[CodeType, int], packages: Lines, mine: Lines, sets_up: str) -> list[Any]:
    """`[the user's file, its line, is the call one of jax's (True, False, IF_BLOCKED), [file, line] of its callers, those of
    packages in it, does it `import` or `compile`?]`."""
    of, name = _callee(*here)
    waits: bool | int = here[0].co_filename.startswith(_JAX) or name in FETCHES
    if not waits and (NUMPY.fullmatch(here[0].co_filename) or of in NUMPY_NAMES):
        waits = IF_BLOCKED

    def lines(found: Lines) -> list[list[Any]]:
        return [[c.co_filename, _position(c, i)[0] or c.co_firstlineno, c.co_qualname] for c, i in found]

    own, inner = lines(mine), lines(packages)
    first, *callers = own or inner[-1:] or lines((here,))
    return [*first[:2], waits, callers, inner if own else inner[:-1], sets_up]


def _position(code: CodeType, at: int) -> tuple[int | None, int | None, int | None, int | None]:
    return next(itertools.islice(code.co_positions(), at // 2, None), (None, None, None, None))


def _callee(code: CodeType, at: int) -> tuple[str, str]:
    """Whose function the instruction calls, and its name, as the source has them: `self.queue`, `get` of `self.queue.get(1)`."""
    line, last, begin, end = _position(code, at)
    if line is None or begin is None:
        return "", ""
    source = linecache.getline(code.co_filename, line).encode()[begin : end if line == last else None].decode()
    depth = cut = 0
    for i, c in enumerate(source):  # the bracket that opens the last call
        cut = i if c == "(" and not depth else cut
        depth += (c in "([{") - (c in ")]}")
    of, _, name = source[:cut].rpartition(".")
    return of.strip(), name.strip()


def _rest_after(begin: float, least: float) -> float:
    """Seconds to rest after what this thread has done since ``begin`` of its clock, so that it takes its share of the time."""
    return max(least, (time.thread_time() - begin) / SHARE)


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Sample the threads of this process in a thread of its own, at the begin, and at the end."""
    ended = threading.Lock()
    ended.acquire()
    watch.sample()
    watch.measure()
    annotate.at_edges(watch.edge)

    def run() -> None:
        me, pause = threading.get_ident(), PERIOD
        while not ended.acquire(timeout=pause):  # a bare lock: waits of `threading` leave events in the trace
            begin = time.thread_time()
            watch.sample(me)
            pause = _rest_after(begin, PERIOD)
            watch.measure()

    sampler = threading.Thread(target=run, name=OURS, daemon=True)
    sampler.start()
    try:
        with ticks.ticking(watch.tick):
            yield
    finally:
        annotate.at_edges(None)
        ended.release()
        sampler.join()
        watch.sample()
        watch.memory.append(memory.held())
        watch.close()
