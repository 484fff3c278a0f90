"""Source lines: where the user wrote an XLA instruction, and which line a thread is at while a capture runs."""

from __future__ import annotations

import collections
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping
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


def completed(weights: Mapping[Stack, float]) -> collections.Counter:
    """Stacks with the callers that they lack: a function that jax traced before has only the lines up to where it was called.

    Of several callers, those that have most of the weight elsewhere.

    Example:
      >>> loss, learn, main = Frame("a.py", 3), Frame("a.py", 8), Frame("a.py", 20)
      >>> completed({(loss,): 1, (loss, learn, main): 2, (learn, main): 1})[loss, learn, main]
      3
    """
    callers: dict[Frame, collections.Counter] = collections.defaultdict(collections.Counter)
    for stack, weight in weights.items():
        for i, frame in enumerate(stack[:-1]):
            callers[frame][stack[i + 1 :]] += weight
    out: collections.Counter = collections.Counter()
    for stack, weight in weights.items():
        known = callers.get(stack[-1]) if stack and stack[-1] not in stack[:-1] else None
        out[stack + known.most_common(1)[0][0] if known else stack] += weight
    return out


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


#: A line in which nearly all samples are holds the program: what packages do in it says more.
HOLDS = 0.95


class Place(NamedTuple):
    """What a sample saw: `frames` innermost first. Does it call jax, and does it `import` a package or `compile`?"""

    frames: Stack
    of_jax: bool
    sets_up: str


def places(notes: dict[str, Any]) -> list[Place]:
    """The places of a capture's samples.

    Lines are the user's; where one of these holds nearly all samples (`model.learn()`), those of the packages inside of it
    count, too.
    """
    found = notes.get("places", [])
    threads = notes.get("threads", [])
    threads = [t for t in threads if t["line"] == notes.get("line")] or threads  # those of packages only wait
    counts = collections.Counter(at for thread in threads for *_, at in thread["samples"] if at >= 0)
    counts.update(at for _, _, at in notes.get("ticks", []))
    leaves: collections.Counter = collections.Counter()
    for i, (file, line, *_) in enumerate(found):
        leaves[file, line] += counts[i]
    wide = bool(leaves) and leaves.most_common(1)[0][1] > HOLDS * leaves.total()
    out = []
    for file, line, of_jax, *more in found:
        callers, packages, sets_up = (*more, *([], [], "")[len(more) :])
        inner = [Frame(*f) for f in packages] if wide else []
        frames = (*inner, Frame(file, line), *(Frame(*caller) for caller in callers))
        out.append(Place(frames, of_jax is True, sets_up))  # what NumPy computes is Python's
    return out


def samples(notes: dict[str, Any], start_ns: int) -> list[Seen]:
    """Where the sampler saw Python's threads, from the notes of a capture; times as in its trace. Imports are left out."""
    known = places(notes)
    seen = [(t["line"], at, place, False) for t in notes.get("threads", []) for at, _, _, place in t["samples"]]
    seen += [(thread, at, place, True) for thread, at, place in notes.get("ticks", [])]
    return [
        Seen(thread, at - start_ns, known[i].frames[0], known[i].of_jax, known[i].frames[1:], tick)
        for thread, at, i, tick in seen
        if 0 <= i < len(known) and known[i].sets_up != "import"
    ]


def computed(notes: dict[str, Any], ours: str, enough: int) -> collections.Counter:
    """`(file, line)` to ns that threads spent on a processor or ready for one there, from the notes of a capture.

    Args:
      notes: of a capture.
      ours: how the names of threads begin that do not count.
      enough: ticks that say more than the samples of another thread.
    """
    known = places(notes)
    ticked = [(line, known[place]) for line, _, place in notes.get("ticks", [])]
    often = {line for line, _ in ticked} if len(ticked) >= enough else set()
    out: collections.Counter = collections.Counter()
    for thread in notes.get("threads", []):
        if thread["name"].startswith(ours):
            continue
        mine: collections.Counter = collections.Counter()
        for (_, run, queued, before), (_, run_, queued_, after) in itertools.pairwise(thread["samples"]):
            if max(before, after) >= 0:
                mine[known[max(before, after) if min(before, after) < 0 else after]] += run_ + queued_ - run - queued
        if thread["line"] in often:  # the same time, divided by what was seen in it
            seen = collections.Counter(p for line, p in ticked if line == thread["line"] and not p.of_jax)
            mine = collections.Counter({p: n * mine.total() // seen.total() for p, n in seen.items()}) if seen else mine
        out += mine
    return _parted(collections.Counter({p: n for p, n in out.items() if not p.sets_up}))


def _parted(weights: Mapping[Place, int]) -> collections.Counter:
    """By the innermost line; where packages count, by the outermost one at which the program parts."""
    depth = max((len(p.frames) for p in weights), default=0)
    out: collections.Counter = collections.Counter()
    if not any(INSTALLED.fullmatch(p.frames[0].file) for p in weights):
        depth = 0
    for size in range(1, depth + 1):
        out = collections.Counter()
        for place, n in weights.items():
            out[place.frames[max(-size, -len(place.frames))][:2]] += n
        if out.total() and out.most_common(1)[0][1] <= HOLDS * out.total():
            return out
    out = collections.Counter()
    for place, n in weights.items():
        out[place.frames[0][:2]] += n
    return out


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
