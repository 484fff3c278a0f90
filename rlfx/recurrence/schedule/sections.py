"""Which loops over one's own past run in sections, and how long these are.

In each section the past has one static length, so that the work of ``keys[:t + 1]`` inside the loop that computes ``keys`` grows
with t and not with T (``execute/sections.py`` runs them). TimeRL (section 6.2) masks the whole buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.program import Equation, Var, users_of
from rlfx.recurrence.language.index import TIME, Index, Slice
from rlfx.recurrence.language.primitives import attend_p
from rlfx.recurrence.schedule.schedule import Loop
from rlfx.recurrence.schedule.tiling import POSITIONWISE

_TRANSPOSE = J.primitive("transpose")
_PRODUCTS = (J.primitive("dot_general"), attend_p)

#: A section compiles the loop's body once more; with n of them the past that is read is (n + 1) / 2n of T.
MOST_SECTIONS = 8
#: Below this length of a section there is nothing to gain.
SMALLEST_TILE = 64


def sections_of(length: int) -> tuple[tuple[int, int], ...]:
    """The sections of a loop, as (first, end)."""
    size = min(length, max(SMALLEST_TILE, -(-length // MOST_SECTIONS)))
    return tuple((first, min(first + size, length)) for first in range(0, length, size))


def tiled_series(loop: Loop) -> dict[Var, int]:
    """The series of a loop that are kept in tiles: of which it reads prefixes, and nothing else.

    None are if a value as wide as the past is needed after the loop: stacked, it would be of another width in each section.

    Returns:
      How many of each one's own axes come before time in its tiles: those that stand for separate products (heads), so that
      what a product contracts lies together in memory.
    """
    if loop.direction != "forward" or any(J.symbolic_axes(v.shape) for v in loop.stacked):
        return {}

    def is_prefix(read: Equation) -> bool:
        access = read.access
        reaches_now = isinstance(access, Slice) and access.hi in (TIME, TIME + 1) and access.lo == Index()
        return reaches_now and J.is_symbolic(read.params["size"])

    readers: dict[Var, list[Equation]] = {}
    for e in loop.reads:
        readers.setdefault(e.source, []).append(e)
    users = users_of(loop.body)
    return {v: _separate(found, users) for v, found in readers.items() if all(map(is_prefix, found))}


def _separate(reads: Sequence[Equation], users: Mapping[Var, Sequence[Equation]]) -> int:
    """How many of the first own axes of what is read are batch axes of every product that it is an operand of."""
    found = []
    # A value, and which axis each of its axes was.
    todo = [(v, tuple(range(len(v.shape)))) for e in reads for v in e.outputs]
    while todo:
        value, axes = todo.pop()
        for e in users.get(value, ()):
            if e.op in _PRODUCTS:
                batched = e.params["dimension_numbers"][1]
                # the softmax and the values of attend_p, whichever side of the product they are
                sides = batched if e.op is not attend_p else (batched[e.params["side"]], batched[1 - e.params["side"]])
                own = {axes[a] for side, v in zip(sides, e.inputs, strict=True) if v is value for a in side}
                found.append(next(n for n in range(len(axes)) if n + 1 not in own))
            elif e.op is _TRANSPOSE:
                todo.append((e.outputs[0], tuple(axes[a] for a in e.params["permutation"])))
            elif e.op in POSITIONWISE and e.outputs[0].shape == value.shape:
                todo.append((e.outputs[0], axes))
    return min(found, default=0)
