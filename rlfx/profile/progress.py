"""What a script does, looked at from another thread: does it set up (import, compile) or work, and in which functions?

So it is known when a script has settled, whatever it computes with, and how like a window is to what the script does.
"""

from __future__ import annotations

import collections
import sys
import threading
import time
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import NamedTuple

from rlfx.profile import threads
from rlfx.profile.capture import not_ready

#: Looks are made so often (s); after `FEW` of them only so often that the later half of a run always has as many.
PERIOD = 0.01
FEW = 2000
SETTLED = 1.0  # s without importing and compiling
WORKED = 0.05  # s of work in them
IMPORTED = 0.2  # s of work after the last import of a script without jax
UNTRACED = 10.0  # s of work after which a script that could use jax is taken for one that does not
LOADS = "_find_and_load"  # of importlib, open while a module is imported
SETTING_UP = "setting up"
NEAR = 0.03  # shares that differ by no more are alike

Mix = collections.Counter  # functions, and `SETTING_UP`, to how many looks they were on the stack


class Look(NamedTuple):
    """At `at` (s): the functions on the main thread's stack; does it set up?"""

    at: float
    functions: frozenset[CodeType]
    sets_up: bool


class Progress:
    """What the main thread does; `look()` now and then."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident or 0
        self._before = set(sys.modules)
        self.began = self.set_up = time.monotonic()  # when it last imported or compiled
        self.looks: list[Look] = []
        self._worked = 0.0  # s since then
        self._clocks: tuple[float, float] | None = None  # None: count from now on
        self._uses: tuple[int, bool] = 0, False

    def look(self) -> None:
        """Look at the main thread, and at the clock of the process; always from the same thread."""
        now = time.monotonic()
        functions, imports, compiles = _doing(sys._current_frames().get(self._main))
        self.looks.append(Look(now, functions, imports or compiles))
        if imports or compiles:
            self.compiled()
        before, self._clocks = self._clocks, (time.process_time() - time.thread_time(), now)
        if before is not None:
            worked, lasted = (a - b for a, b in zip(self._clocks, before, strict=True))
            self._worked += lasted if worked < 0.1 * lasted and not_ready() else worked

    def compiled(self) -> None:
        """It has just compiled, or imported."""
        self.set_up, self._worked, self._clocks = time.monotonic(), 0.0, None

    def imports(self) -> bool:
        """Is the calling thread in an import of what is not the user's?"""
        return _doing(sys._getframe())[1]

    @property
    def pause(self) -> float:
        """s until the next look is due."""
        return max(PERIOD, (time.monotonic() - self.began) / FEW)

    @property
    def settled(self) -> bool:
        """A second without importing and compiling, in which it worked."""
        return time.monotonic() - self.set_up > SETTLED and self._worked > WORKED

    def works_without_jax(self) -> bool:
        """Is it past its imports, and does nothing of what was imported use jax, or has it long worked without?

        TensorFlow imports jax, and never calls it.
        """
        if time.monotonic() - self.set_up < IMPORTED or self._worked < WORKED:
            return False
        if self._uses[0] != len(sys.modules):
            self._uses = len(sys.modules), _uses_jax(self._before)
        return not self._uses[1] or self._worked > UNTRACED

    def mix(self, start: float = 0.0, stop: float = float("inf")) -> Mix:
        """Of the looks in an interval."""
        out: Mix = collections.Counter()
        for look in self.looks:
            if start <= look.at < stop:
                out[None] += 1
                out.update([SETTING_UP] if look.sets_up else look.functions)
        return out

    def lately(self) -> Mix:
        """Of the later half of the time until now."""
        return self.mix((self.began + self.looks[-1].at) / 2) if self.looks else collections.Counter()


class Unlike(NamedTuple):
    """The function whose shares of two mixes are farthest apart; empty where both have no looks."""

    name: str
    first: float
    second: float

    @property
    def by(self) -> float:
        return abs(self.first - self.second)


def unlike(one: Mix, other: Mix) -> Unlike:
    """How far two mixes are apart: by the function whose share differs most, the innermost of several.

    Example:
      >>> unlike(collections.Counter({None: 10, "learn": 9}), collections.Counter({None: 4, "learn": 1}))
      Unlike(name='learn', first=0.9, second=0.25)
    """
    if not one[None] or not other[None]:
        return Unlike("", 0.0, 0.0)
    shares = [(f, one[f] / one[None], other[f] / other[None]) for f in one.keys() | other.keys() if f is not None]
    most = max((abs(a - b) for _, a, b in shares), default=0.0)
    near = [s for s in shares if abs(s[1] - s[2]) > most - NEAR]
    function, first, second = min(near, key=lambda s: s[1] + s[2], default=("", 0.0, 0.0))
    return Unlike(getattr(function, "co_qualname", function), first, second)


def _doing(frame: FrameType | None) -> tuple[frozenset[CodeType], bool, bool]:
    """The functions on a stack that are neither Python's nor jax's; does it import a package, does it compile?"""
    functions, inner, imports, compiles = [], "", False, False
    while frame is not None:
        code = frame.f_code
        path = code.co_filename
        if path.startswith("<frozen importlib"):
            imports = imports or (code.co_name == LOADS and (not inner or threads.foreign(inner)))
        else:
            inner = path
            compiles = compiles or threads.compiles(path, code.co_name)
            if not path.startswith("<frozen") and not threads.internal(path):
                functions.append(code)
        frame = frame.f_back
    return frozenset(functions), imports, compiles


def _uses_jax(before: set[str]) -> bool:
    """Does a module that was imported since name anything of jax?"""
    for name, module in list(sys.modules.items()):
        mine = name == "__main__" or name not in before
        if mine and name.partition(".")[0] not in ("jax", "jaxlib", "rlfx"):
            for value in list(getattr(module, "__dict__", {}).values()):
                home = value.__name__ if type(value) is ModuleType else None
                home = value.__module__ if type(value) is FunctionType else home
                if home is not None and home.partition(".")[0] == "jax":
                    return True
    return False
