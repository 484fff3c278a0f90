"""Source lines: where the user wrote an XLA instruction, and which line a thread is at while a capture runs."""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from rlfx.profile import wire

#: Files of installed packages: their lines are not the user's to change.
INSTALLED = re.compile(r".*[/\\](site|dist)-packages[/\\].*|<.*>", re.DOTALL)


class Frame(NamedTuple):
    """A line of source, and the function that it is in."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        """Example:
        >>> str(Frame("/home/me/train.py", 23, "loss"))
        'train.py:23'
        """
        return f"{os.path.basename(self.file)}:{self.line}"


Stack = tuple[Frame, ...]  # innermost first


def stacks(module: dict) -> Callable[[dict], Stack]:
    """From an instruction's metadata to the lines that it comes from, of one HloModuleProto.

    jax writes an id into a table of frames with their callers (field 17 of the module), or one file and line.
    """
    table = wire.message(module[17][-1]) if 17 in module else {}
    files, functions = ([bytes(text).decode("utf-8", "replace") for text in table.get(i, [])] for i in (1, 2))
    places = [wire.message(raw) for raw in table.get(3, [])]
    frames = [wire.message(raw) for raw in table.get(4, [])]

    def name(known: list[str], number: int) -> str:
        return known[number - 1] if 0 < number <= len(known) else ""

    def frame(number: int) -> Frame | None:
        if not 0 < number <= len(places):
            return None
        place = places[number - 1]
        return Frame(
            name(files, wire.integer(place, 1)), wire.integer(place, 3), name(functions, wire.integer(place, 2))
        )

    def walk(number: int) -> Iterable[Frame]:
        for _ in range(len(frames)):  # a damaged table may go round in circles
            if not 0 < number <= len(frames):
                return
            found = frame(wire.integer(frames[number - 1], 1))
            if found is not None:
                yield found
            number = wire.integer(frames[number - 1], 2)

    known: dict[int, Stack] = {}

    def of(metadata: dict) -> Stack:
        number = wire.integer(metadata, 15)
        if number:
            if number not in known:
                known[number] = tuple(walk(number))
            return known[number]
        line = wire.integer(metadata, 4)
        return (Frame(wire.text(metadata, 3), line),) if line else ()

    return of


def own(stack: Stack) -> Stack:
    """The frames of a stack that are not of installed packages; all of them where there is no other.

    Example:
      >>> own((Frame("/lib/site-packages/flax/linen.py", 9), Frame("train.py", 3)))
      (Frame(file='train.py', line=3, function=''),)
    """
    return tuple(f for f in stack if not INSTALLED.fullmatch(f.file)) or stack


class Seen(NamedTuple):
    """A thread was at a line of the user's: `line` of the trace, ns, and whether the call there is one of jax's.

    `tick`: it was interrupted there, at any instant in which the process computes; else another thread looked at it, which
    is where it has let go of Python's lock.
    """

    thread: int
    at: int
    frame: Frame
    of_jax: bool
    callers: tuple[Frame, ...] = ()
    tick: bool = False


def samples(notes: dict[str, Any], start_ns: int) -> list[Seen]:
    """Where the sampler saw Python's threads, from the notes of a capture; times as in its trace."""
    places = [
        (Frame(file, line), bool(of_jax), tuple(Frame(*caller) for around in callers for caller in around))
        for file, line, of_jax, *callers in notes.get("places", [])
    ]
    return [
        Seen(thread["line"], at - start_ns, *places[place])
        for thread in notes.get("threads", [])
        for at, _, _, place in thread["samples"]
        if 0 <= place < len(places)
    ] + [
        Seen(thread, at - start_ns, *places[place], tick=True)
        for thread, at, place in notes.get("ticks", [])
        if 0 <= place < len(places)
    ]


def within(stacks: Iterable[Stack], frames: Callable[[Stack], Stack] = own) -> dict[Frame, list[Stack]]:
    """For every line of the user's the stacks that it is in: of what it computes, and all that it calls."""
    out: dict[Frame, list[Stack]] = collections.defaultdict(list)
    for stack in stacks:
        for frame in {f._replace(function="") for f in frames(stack)}:
            out[frame].append(stack)
    return dict(out)


def at(stacks: Iterable[Stack], frames: Callable[[Stack], Stack] = own) -> dict[Frame, list[Stack]]:
    """For every line of the user's the stacks that end in it, apart from what packages do for it."""
    out: dict[Frame, list[Stack]] = collections.defaultdict(list)
    for stack in stacks:
        for frame in frames(stack)[:1]:
            out[frame._replace(function="")].append(stack)
    return dict(out)


def most(counts: Iterable[Frame]) -> Frame | None:
    """The line that is there most often."""
    found = collections.Counter(counts).most_common(1)
    return found[0][0] if found else None
