"""Which loops over one's own past run in sections, and how long these are.

In each section the past has one static length, so that the work of ``keys[:t + 1]`` inside the loop that computes ``keys`` grows
with t and not with T (``execute/sections.py`` runs them). TimeRL (section 6.2) masks the whole buffer.
"""

from __future__ import annotations

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.program import Equation, Var
from rlfx.recurrence.language.index import TIME, Index, Slice
from rlfx.recurrence.schedule.schedule import Loop

#: A section compiles the loop's body once more; with n of them the past that is read is (n + 1) / 2n of T.
MOST_SECTIONS = 8
#: Below this length of a section there is nothing to gain.
SMALLEST_TILE = 128


def sections_of(length: int) -> tuple[tuple[int, int], ...]:
    """The sections of a loop, as (first, end)."""
    size = min(length, max(SMALLEST_TILE, -(-length // MOST_SECTIONS)))
    return tuple((first, min(first + size, length)) for first in range(0, length, size))


def tiled_series(loop: Loop) -> frozenset[Var]:
    """The series of a loop that are kept in tiles: of which it reads prefixes, and nothing else.

    None are if a value as wide as the past is needed after the loop: stacked, it would be of another width in each section.
    """
    if loop.direction != "forward" or any(J.symbolic_axes(v.shape) for v in loop.stacked):
        return frozenset()

    def is_prefix(read: Equation) -> bool:
        access = read.access
        reaches_now = isinstance(access, Slice) and access.hi in (TIME, TIME + 1) and access.lo == Index()
        return reaches_now and J.is_symbolic(read.params["size"])

    readers: dict[Var, list[Equation]] = {}
    for e in loop.reads:
        readers.setdefault(e.source, []).append(e)
    return frozenset(v for v, found in readers.items() if all(map(is_prefix, found)))
