"""What a compiled program launches: kernels by loop, collectives, and what goes between host and device.

Counted are the instructions of the entry computation and of what it runs; those inside of a fusion are one kernel. A loop
counts as often as it runs, where that is known; of a conditional the dearest branch; of an asynchronous pair its start.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlfx.ahead.hlo import (
    Computation,
    Instruction,
    branches,
    bytes_of,
    computations,
    constant,
    element,
    member,
    result_of,
    through,
)

#: What starts nothing on a device.
_FREE = frozenset(
    [
        "parameter",
        "get-tuple-element",
        "tuple",
        "constant",
        "bitcast",
        "after-all",
        "add-dependency",
        "opt-barrier",
        "domain",
    ]
)
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
                "collective-broadcast")  # fmt: skip
_HOST = "S(5)"


@dataclass(frozen=True)
class Loop:
    """A loop of a compiled program.

    Attributes:
      trips: how often it runs; None where that is decided by data: the host reads its condition before every iteration.
      kernels: that one iteration launches, without those of loops inside.
      loops: inside of it.
      name: where it comes from, in jax's words.
    """

    trips: int | None
    kernels: int
    loops: tuple[Loop, ...] = ()
    name: str = ""

    def launches(self, unknown: int = 1) -> int:
        """Kernels in all; loops of which the number of iterations is not known run ``unknown`` times."""
        trips = unknown if self.trips is None else self.trips
        return trips * (self.kernels + sum(loop.launches(unknown) for loop in self.loops))

    @property
    def is_known(self) -> bool:
        return self.trips is not None and all(loop.is_known for loop in self.loops)


@dataclass(frozen=True)
class Collective:
    """Devices that meet.

    Attributes:
      kind: "all-reduce", ...
      count: how often (loops of unknown length once).
      bytes: that one of them gives on a device.
      in_loop: whether it is inside of a loop.
    """

    kind: str
    count: int
    bytes: int
    in_loop: bool


@dataclass(frozen=True)
class Transfer:
    """Something between the host and a device.

    Attributes:
      kind: "to host", "to device", "callback", "infeed", "outfeed", "send", "recv", or "condition": a loop's, read by the host.
      count: how often (loops of unknown length once).
      bytes: of one of them, on one device.
      behind: kernels that are launched between its start and its end; 0: what follows waits.
    """

    kind: str
    count: int
    bytes: int
    behind: int = 0


@dataclass(frozen=True)
class Counted:
    """What a module launches."""

    kernels: int
    loops: tuple[Loop, ...]
    collectives: tuple[Collective, ...]
    transfers: tuple[Transfer, ...]
    conditionals: int


def count(text: str, host_loops: bool = True) -> Counted:
    """What a module launches.

    Args:
      host_loops: whether the host reads the condition of a loop whose length is not known (on GPUs).
    """
    return _Module(*computations(text), host_loops).counted()


@dataclass(frozen=True)
class _Module:
    computations: dict[str, Computation]
    entry: str
    host_loops: bool

    def counted(self) -> Counted:
        kernels, loops, conditionals = self._walk(self.entry)
        met = tuple(self._found(self.entry, 1, False))
        return Counted(
            kernels,
            loops,
            _merged(x for x in met if isinstance(x, Collective)),
            _merged(x for x in met if isinstance(x, Transfer)),
            conditionals,
        )

    def _walk(self, name: str) -> tuple[int, tuple[Loop, ...], int]:
        """Kernels outside of loops, loops, and conditionals, of a computation."""
        kernels, loops, conditionals = 0, [], 0
        for i in self.computations.get(name, {}).values():
            if i.opcode == "while":
                loops.append(self._loop(name, i))
            elif i.opcode == "conditional":
                found = [self._walk(branch) for branch in branches(i)]
                dearest = max(found, key=lambda w: w[0] + sum(loop.launches() for loop in w[1]), default=(0, (), 0))
                kernels, loops = kernels + 1 + dearest[0], [*loops, *dearest[1]]
                conditionals += 1 + sum(w[2] for w in found)
            elif i.opcode == "call":
                inside = self._walk(i.attribute("to_apply") or "")
                kernels, loops, conditionals = kernels + inside[0], [*loops, *inside[1]], conditionals + inside[2]
            elif _launches(i):
                kernels += 1
        return kernels, tuple(loops), conditionals

    def _loop(self, computation: str, i: Instruction) -> Loop:
        kernels, loops, _ = self._walk(i.attribute("body") or "")
        trips = self._trips(computation, i)
        if trips is None:  # its condition is computed before every iteration
            kernels += self._walk(i.attribute("condition") or "")[0]
        named = re.search(r'op_name="([^"]*)"', i.rest)
        return Loop(trips, kernels, loops, named.group(1) if named else "")

    def _found(self, name: str, times: int, in_loop: bool) -> Iterator[Collective | Transfer]:
        """Collectives and transfers of a computation that runs so many times."""
        for i in self.computations.get(name, {}).values():
            if i.opcode == "while":
                trips = self._trips(name, i)
                if trips is None and self.host_loops:
                    yield Transfer("condition", times, 1)
                yield from self._found(i.attribute("body") or "", times * (1 if trips is None else trips), True)
            elif i.opcode == "conditional":
                for branch in branches(i):
                    yield from self._found(branch, times, in_loop)
            elif i.opcode == "call":
                yield from self._found(i.attribute("to_apply") or "", times, in_loop)
            else:
                yield from self._of_one(name, i, times, in_loop)

    def _of_one(self, name: str, i: Instruction, times: int, in_loop: bool) -> Iterator[Collective | Transfer]:
        for x in self._inside(i):
            opcode = x.opcode.removesuffix("-start")
            if opcode in _COLLECTIVES:
                yield Collective(opcode, times, bytes_of(result_of(x)), in_loop)
            elif opcode in ("infeed", "outfeed") or (opcode in ("send", "recv") and "is_host_transfer=true" in x.rest):
                yield Transfer(opcode, times, bytes_of(result_of(x)))
            elif opcode == "custom-call" and "callback" in x.target:
                yield Transfer("callback", times, bytes_of(x.shape))
        if _launches(i):
            yield from self._moved(self.computations[name], i, times)

    def _moved(self, around: Computation, i: Instruction, times: int) -> Iterator[Transfer]:
        """A copy whose one side is in the host's memory: of a whole array, or of a slice that is read or written."""
        result = result_of(i)
        from_host = any(_HOST in around[o].shape for o in i.operands if o in around)
        written = [x for x in self._inside(i) if x.opcode.removesuffix("-start") == "dynamic-update-slice"]
        if _HOST in result and (written or not from_host):
            size = sum(self._update_bytes(around, i, x) for x in written) or bytes_of(result)
            yield Transfer("to host", times, size, _behind(around, i))
        elif from_host and _HOST not in result:
            yield Transfer("to device", times, bytes_of(result), _behind(around, i))

    def _update_bytes(self, around: Computation, i: Instruction, x: Instruction) -> int:
        """Bytes that are written into a larger array."""
        home = around if x is i else self.computations[i.attribute("calls") or ""]
        update = home.get(x.operands[1])
        return 0 if update is None else bytes_of(update.shape)

    def _inside(self, i: Instruction) -> list[Instruction]:
        """The instruction, and those of what it wraps."""
        called = i.attribute("calls")
        return [i, *self.computations.get(called or "", {}).values()]

    # -- how often a loop runs

    def _trips(self, computation: str, i: Instruction) -> int | None:
        said = re.search(r'known_trip_count":\{"n":"(\d+)"', i.rest)
        return int(said.group(1)) if said else self._counted_trips(computation, i)

    def _counted_trips(self, computation: str, loop: Instruction) -> int | None:
        """Of a loop that counts from a constant, by a constant, to a constant; None for others."""
        condition = self.computations.get(loop.attribute("condition") or "", {})
        body = self.computations.get(loop.attribute("body") or "", {})
        test = next((x for x in condition.values() if x.opcode == "compare"), None)
        if test is None or len(test.operands) != 2 or not self._is_root(condition, test):
            return None
        direction, end = test.attribute("direction"), constant(condition, test.operands[1])
        at = element(condition, test.operands[0])
        if at is None or end is None or direction not in ("LT", "LE", "GT", "GE", "NE"):
            return None
        around = self.computations[computation]
        start = constant(around, member(around, loop.operands[0], at))
        step = self._step(body, at)
        if start is None or not step:
            return None
        span = (end - start) * (1 if step > 0 else -1) + (1 if direction in ("LE", "GE") else 0)
        return max(0, math.ceil(span / abs(step)))

    def _step(self, body: Computation, at: int) -> int | None:
        """What an iteration adds to the element ``at`` of what a loop carries."""
        root = next(reversed(body.values()), None)
        new = body.get(through(body, member(body, root.name, at))) if root is not None else None
        if new is None or new.opcode not in ("add", "subtract") or len(new.operands) != 2:
            return None
        by = constant(body, new.operands[1])
        if element(body, new.operands[0]) != at or by is None:
            return None
        return by if new.opcode == "add" else -by

    @staticmethod
    def _is_root(computation: Computation, i: Instruction) -> bool:
        return next(reversed(computation.values())) is i


def _launches(i: Instruction) -> bool:
    if i.opcode in _FREE or i.opcode.endswith(("-done", "-update")):
        return False
    return not (i.opcode == "custom-call" and i.target in ("AllocateBuffer", "annotate_device_placement"))


def _behind(around: Computation, start: Instruction) -> int:
    """Kernels between the start of something and its end."""
    if not start.opcode.endswith("-start"):
        return 0
    kernels, started = 0, False
    for i in around.values():
        if started and start.name in i.operands:
            break
        kernels += started and _launches(i)
        started = started or i is start
    return kernels


def _merged(found: Iterator) -> tuple:
    """Of the same kind, size and place: one, with their number."""
    counts: dict = {}
    for x in found:
        key = replace(x, count=0)
        counts[key] = counts.get(key, 0) + x.count
    return tuple(replace(key, count=n) for key, n in counts.items())
