"""Lines of Python of a process that runs already, by py-spy: it is read from outside, and nothing in it is changed."""

from __future__ import annotations

import collections
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass

from rlfx._checks import POSITIVE, expect, number
from rlfx.errors import ProfileError, located
from rlfx.profile.lines import Frame, own
from rlfx.profile.tables import grid

RATE = 100  # samples a second
_FRAME = re.compile(r"(?P<function>.*) \((?P<file>.*):(?P<line>\d+)\)")
_REFUSED = re.compile(r"permission denied|operation not permitted", re.IGNORECASE)


@dataclass(frozen=True)
class Spied:
    """What threads were at, of `asked` samples: by name of the thread, and by line of the user's.

    `within` counts a line with all that it calls, `alone` where no other line of the user's was below it.
    """

    pid: int
    asked: int
    threads: collections.Counter[str]
    within: collections.Counter[Frame]
    alone: collections.Counter[Frame]

    def __str__(self) -> str:
        threads = ", ".join(f"{name} {n / self.asked:.0%}" for name, n in self.threads.most_common())
        head = f"process {self.pid}, {self.asked} samples; threads at work: {threads or 'none'}"
        body = [
            [str(frame), frame.function, f"{n / self.asked:.1%}", f"{self.alone[frame] / self.asked:.1%}"]
            for frame, n in self.within.most_common(20)
            if n >= 0.01 * self.asked
        ]
        table = grid(["line", "function", "of the time, with what it calls", "alone"], body, left=2)
        return f"{head}\n\n{table}" if body else head


def spy(pid: int, seconds: float = 5.0) -> Spied:
    """Sample the threads of a process for some seconds, 100 times a second.

    Threads that rest (they wait, sleep, or are blocked) count as not at work; a thread inside of XLA that computes is.

    Args:
      pid: of a process of Python, with or without jax.
      seconds: how long.

    Raises:
      ProfileError: py-spy is not installed, there is no such process of Python, or the system does not allow to read it.
    """
    pid = expect("pid", pid, POSITIVE, ProfileError, of="spy")
    seconds = expect("seconds", seconds, number(above=0), ProfileError, of="spy")
    program = _program()
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "stacks"
        whole = max(1, round(seconds))  # py-spy takes whole seconds
        command = [program, "record", "--pid", str(pid), "--duration", str(whole), "--rate", str(RATE)]
        options = ["--format", "raw", "--threads", "--full-filenames", "--nonblocking", "--output", str(out)]
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        if done.returncode or not out.is_file():
            fact, fix = _why(pid, done.stderr)
            raise ProfileError(located(fact, fix=fix))
        return read(pid, whole * RATE, out.read_text())


def _program() -> str:
    """Where py-spy is: beside this Python, or on the path."""
    beside = pathlib.Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.is_file() else shutil.which("py-spy")
    if program is None:
        raise ProfileError(
            located("attach needs py-spy, which is not installed.", fix="pip install 'rlfx[attach]'")
        )
    return program


def _why(pid: int, said: str) -> tuple[str, str]:
    """py-spy's error in our words: the fact, and the fix."""
    if not pathlib.Path(f"/proc/{pid}").exists() and pathlib.Path("/proc/self").exists():
        return f"There is no process {pid}.", "Give the pid of a process that runs: `pgrep -af python`."
    if _REFUSED.search(said):
        return (
            f"The system does not allow to read process {pid}.",
            "Run this as its owner, with CAP_SYS_PTRACE (`docker run --cap-add SYS_PTRACE`), or with sudo; on Linux "
            "`sysctl kernel.yama.ptrace_scope=0` allows it to the owner.",
        )
    lines = [line for line in said.strip().splitlines() if line.strip()]
    fact = f"py-spy cannot read process {pid}: {lines[0] if lines else 'it says nothing'}."
    return fact, "Give the pid of a process of Python that goes on for as long."


def read(pid: int, asked: int, text: str) -> Spied:
    """What py-spy wrote in its format `raw`: a stack a line, outermost frame first, and how often it was seen.

    Example:
      >>> spied = read(1, 10, "thread (0x1): main;<module> (train.py:9);step (train.py:4) 7")
      >>> spied.threads["main"], [(str(f), n) for f, n in spied.within.items()], [str(f) for f in spied.alone]
      (7, [('train.py:4', 7), ('train.py:9', 7)], ['train.py:4'])
    """
    threads: collections.Counter[str] = collections.Counter()
    within: collections.Counter[Frame] = collections.Counter()
    alone: collections.Counter[Frame] = collections.Counter()
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        # A process that has not imported `threading` has no names for them.
        name = thread.partition(": ")[2] or ("MainThread" if thread == f"thread ({pid})" else thread)
        threads[name] += int(count)
        found = [m for m in map(_FRAME.fullmatch, reversed(frames)) if m]
        mine = own(tuple(Frame(m["file"], int(m["line"]), m["function"]) for m in found))
        within.update(dict.fromkeys(mine, int(count)))
        if mine:
            alone[mine[0]] += int(count)
    return Spied(pid, asked, threads, within, alone)
