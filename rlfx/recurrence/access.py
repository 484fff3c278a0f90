"""Access relations as integer sets: from reader points to the points they read, and what follows from them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import islpy as isl

from rlfx.recurrence.domain import Domain
from rlfx.recurrence.index import LENGTH, Access, Index, Point, Slice, Window


@functools.lru_cache(maxsize=4096)
def relation(access: Access, length: int) -> isl.Map:
    """``{ [t] -> [s] }``: the reader at t reads the source at s. Points outside of ``[0, T)`` are kept for point reads.

    A two-sided or disjoint relation is never replaced by its hull.

    Example:
      >>> from rlfx.recurrence.index import TIME
      >>> print(relation(Point(TIME + 1), 3))
      { [t] -> [s = 1 + t] : 0 <= t <= 2 }
    """
    return isl.Map(f"{{ [t] -> [s] : 0 <= t < {length} and {_constraint(access, length)} }}").coalesce()


def _constraint(access: Access, length: int) -> str:
    def show(index: Index) -> str:
        return index.as_isl().replace("N", str(length))

    if isinstance(access, Point):
        return f"s = {show(access.index)}"
    if isinstance(access, Slice):
        hi = length if access.hi == LENGTH else show(access.hi)
        return f"0 <= s < {length} and {show(access.lo)} <= s < {hi}"
    if isinstance(access, Window):
        return f"0 <= s < {length} and t + {access.lo} <= s < t + {access.hi}"
    return "0 <= s <= t"  # a lookup reaches anywhere into the past


@dataclass(frozen=True)
class Reach:
    """What the schedule needs to know of an access.

    Attributes:
      past, now, future: whether some reader reads a point before, at, or after its own time.
      behind, ahead: the largest distance read backwards and forwards (0 if none).
      before_start, after_end: whether some reader reads a point < 0, or >= T.
      empty: whether some reader reads nothing.
    """

    past: bool
    now: bool
    future: bool
    behind: int
    ahead: int
    before_start: bool
    after_end: bool
    empty: bool

    @property
    def misses(self) -> bool:
        """Whether no reader reads a point of the domain: the boundary values are all there is."""
        return not (self.past or self.now or self.future)

    @property
    def kind(self) -> str:
        """Where the lattice of accesses puts it, for printing."""
        if not (self.past or self.future):
            return "pointwise"
        return "past" if not self.future else "future" if not self.past else "both"


@functools.lru_cache(maxsize=4096)
def reach(access: Access, length: int) -> Reach:
    """Analyse an access over ``0 <= t < length``."""
    rel = relation(access, length)
    inside = rel.intersect_range(isl.Set(f"{{ [s] : 0 <= s < {length} }}"))
    distances = inside.deltas()

    def some(condition: str) -> bool:
        return not distances.intersect(isl.Set(f"{{ [d] : {condition} }}")).is_empty()

    def furthest(sign: int) -> int:
        side = distances.intersect(isl.Set("{ [d] : d < 0 }" if sign < 0 else "{ [d] : d > 0 }"))
        if side.is_empty():
            return 0
        bound = side.dim_min_val(0) if sign < 0 else side.dim_max_val(0)
        return abs(int(bound.to_python()))

    points = rel.range()
    domain = isl.Set(f"{{ [t] : 0 <= t < {length} }}")
    return Reach(
        past=some("d < 0"),
        now=some("d = 0"),
        future=some("d > 0"),
        behind=furthest(-1),
        ahead=furthest(+1),
        before_start=not points.intersect(isl.Set("{ [s] : s < 0 }")).is_empty(),
        after_end=not points.intersect(isl.Set(f"{{ [s] : s >= {length} }}")).is_empty(),
        empty=not domain.subtract(inside.domain()).is_empty(),
    )


def reach_in(access: Access, domain: Domain) -> Reach:
    """Analyse an access over a domain. Under ``until=`` the end of an environment may come at any t."""
    found = reach(access, domain.length)
    if domain.until and isinstance(access, (Point, Window)):
        return Reach(**{**found.__dict__, "after_end": found.after_end or found.future})
    return found


def inverse(access: Access, length: int) -> Any:
    """``{ [s] -> [t] }``: who reads the point s. The dependences of reverse-mode differentiation (TimeRL section 5.1)."""
    return relation(access, length).reverse()


def is_shift(access: Access) -> int | None:
    """``c`` if the access reads ``t + c``, else None."""
    return access.index.offset if isinstance(access, Point) else None
