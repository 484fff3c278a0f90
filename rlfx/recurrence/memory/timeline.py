"""Memory over time: what a program holds on the device and on the host while it runs, by the static estimate.

TimeRL Fig. 11 measures it on a GPU. Here the live ranges of the estimate are laid out one after the other, loops iteration
by iteration, so that it can be drawn before anything is compiled. Time is estimated work, not seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.cost import flops_of_jaxpr_equation
from rlfx.recurrence.memory.estimate import Moment, loop_moments, program_moments
from rlfx.recurrence.memory.sizes import BROADCAST, COPY, LOOPS, Buffer

#: The ``jax.named_scope`` of everything that is learned.
LEARNING = "rlfx.learn"

#: Of a loop that runs for longer, consecutive iterations are drawn as one; of a long body, consecutive operations.
ITERATIONS, OPERATIONS = 64, 24

#: Operations that the traffic of one byte is worth.
_FLOPS_PER_BYTE = 0.5


@dataclass(frozen=True)
class Segment:
    """A part of the time.

    Attributes:
      work: how long it takes: operations, and bytes at what they are worth in operations.
      device, host: bytes of the buffers in the memory of the device, and in that of the host.
      filled, filled_host: of them the bytes that are written and still needed: what a loop stacks has its buffer from the
        start.
      learning: whether the loss or its gradient is computed; otherwise the program acts.
    """

    work: float
    device: int
    host: int
    filled: int
    filled_host: int
    learning: bool


@dataclass(frozen=True)
class Timeline:
    """The segments of one evaluation, one after the other.

    Attributes:
      peak: the most bytes at once, on the device and the host together: ``estimate_temp_bytes``.
      peak_device, peak_host: of either memory.
      ends: when each segment ends, as a share of the whole.
    """

    segments: tuple[Segment, ...]

    @property
    def peak(self) -> int:
        return max((s.device + s.host for s in self.segments), default=0)

    @property
    def peak_device(self) -> int:
        return max((s.device for s in self.segments), default=0)

    @property
    def peak_host(self) -> int:
        return max((s.host for s in self.segments), default=0)

    @property
    def ends(self) -> list[float]:
        total, so_far, found = sum(s.work for s in self.segments), 0.0, []
        for s in self.segments:
            so_far += s.work
            found.append(so_far / total)
        return found

    @property
    def learning_begins(self) -> float:
        """At which share of the whole a hundredth of the learning is done; 1 if there is none."""
        learning = sum(s.work for s in self.segments if s.learning)
        done = itertools.accumulate(s.work if s.learning else 0.0 for s in self.segments)
        return next((end for end, so_far in zip(self.ends, done, strict=True) if so_far > 0.01 * learning), 1.0)


def timeline(jaxpr: Any) -> Timeline:
    """The memory of a jitted jaxpr over time, in bytes; arguments and results are not counted.

    Args:
      jaxpr: a ``ClosedJaxpr``, as ``jax.make_jaxpr`` returns it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def grow(x):
      ...     return jax.lax.scan(lambda c, _: (c + 1.0, jnp.tanh(c)), x, None, length=4)[1].max()
      >>> found = timeline(jax.make_jaxpr(grow)(jnp.ones(1024)))
      >>> [s.filled for s in found.segments if s.device == found.peak_device][:4]
      [12288, 16384, 20480, 24576]
    """
    return Timeline(tuple(_segments(program_moments(J.body_of(jaxpr)[0]), False)))


def _segments(moments: Iterable[Moment], learning: bool) -> Iterator[Segment]:
    for m in moments:
        learns = learning or LEARNING in _scope(m)
        outer = _holding(m.live, learns)
        if m.node.op is not J.SCAN:
            yield replace(_and(outer, _holding(m.inside, learns)), work=_work(m))
            continue
        trips = m.node.equation.params["length"]
        consts, carry = J.scan_counts(m.node.equation.params)
        body = loop_moments(J.body_of(m.node.equation.params["jaxpr"])[0], consts, carry)
        inner = coarse([*_segments(body, learns)], OPERATIONS)
        stacked = [v for v in m.node.outs[carry:] if v in m.live]
        groups = min(trips, ITERATIONS)
        for group in range(groups):
            part = [(v.host, v.bytes - v.bytes * (group + 1) // groups) for v in stacked]
            unwritten = {on_host: sum(n for h, n in part if h == on_host) for on_host in (False, True)}
            now = replace(
                outer,
                filled=max(0, outer.filled - unwritten[False]),
                filled_host=max(0, outer.filled_host - unwritten[True]),
            )
            for s in inner:
                yield _and(now, replace(s, work=s.work * trips / groups))


def _holding(values: Sequence[Buffer], learning: bool) -> Segment:
    def total(host: bool, filled: bool) -> int:
        return sum(v.bytes for v in values if v.host == host and not (filled and _empty(v)))

    return Segment(0.0, total(False, False), total(True, False), total(False, True), total(True, True), learning)


def _empty(value: Buffer) -> bool:
    """The buffer of what a loop will stack."""
    while value.node is not None and value.node.op is COPY and value.node.ins:
        (value,) = value.node.ins
    return value.node is not None and value.node.op in (BROADCAST, COPY) and value.node.equation.primitive in LOOPS


def _and(one: Segment, other: Segment) -> Segment:
    """What two parts of one program hold at the same time, for as long as the second takes."""
    return Segment(
        other.work,
        one.device + other.device,
        one.host + other.host,
        one.filled + other.filled,
        one.filled_host + other.filled_host,
        one.learning or other.learning,
    )


def _scope(m: Moment) -> str:
    return J.scope_of(m.node.equation) if isinstance(m.node.equation, J.JaxprEqn) else ""


def _work(m: Moment) -> float:
    moved = sum(v.bytes for v in (*m.node.ins, *m.node.outs))
    itself = isinstance(m.node.equation, J.JaxprEqn) and m.node.op is m.node.equation.primitive  # no copy that it needs
    return max(1.0, (flops_of_jaxpr_equation(m.node.equation) if itself else 0.0) + _FLOPS_PER_BYTE * moved)


def coarse(segments: Sequence[Segment], at_most: int) -> list[Segment]:
    """The same time in about so many segments: neighbours become one, with what the larger of them holds."""
    size, found = math.ceil(len(segments) / at_most), []
    for _, same in itertools.groupby(segments, key=lambda s: s.learning):
        run = list(same)
        found += [_most(run[i : i + size]) for i in range(0, len(run), size)]
    return found


def _most(segments: Sequence[Segment]) -> Segment:
    largest = max(segments, key=lambda s: s.device + s.host)
    return replace(largest, work=sum(s.work for s in segments))
