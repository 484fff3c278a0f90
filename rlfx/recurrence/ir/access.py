"""Access relations as integer sets: from reader points to the points they read, and what follows from them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import islpy as isl
import numpy as np

from rlfx.recurrence.language.domain import Domain
from rlfx.recurrence.language.index import LENGTH, Access, Index, Point, Slice, Window


@functools.lru_cache(maxsize=4096)
def relation(access: Access, length: int) -> isl.Map:
    """``{ [t] -> [s] }``: the reader at t reads the source at s. Points outside of ``[0, T)`` are kept for point reads.

    A two-sided or disjoint relation is never replaced by its hull.

    Example:
      >>> from rlfx.recurrence.language.index import TIME
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
    """Analyse an access over ``0 <= t < length``.

    All positions are known numbers, so they are compared as numbers: the time doesn't depend on how an index is written, as
    that of operations on :func:`relation` does.
    """
    t = np.arange(length)
    lo, stop = _positions(access, t, length)
    first, last = np.clip(lo, 0, length), np.clip(stop, 0, length) - 1
    some = first <= last
    back, ahead = (t - first)[some], (last - t)[some]
    is_point = isinstance(access, Point)
    return Reach(
        past=bool((back > 0).any()),
        now=bool(((back >= 0) & (ahead >= 0)).any()),
        future=bool((ahead > 0).any()),
        behind=max(int(back.max(initial=0)), 0),
        ahead=max(int(ahead.max(initial=0)), 0),
        before_start=is_point and bool((lo < 0).any()),
        after_end=is_point and bool((lo >= length).any()),
        empty=not bool(some.all()),
    )


def _positions(access: Access, t: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The first position that each reader asks for, and one past the last; they are contiguous."""

    def at(index: Index) -> np.ndarray:
        return np.broadcast_to(index.evaluate(t, length, low=np.minimum, high=np.maximum), t.shape)

    if isinstance(access, Point):
        return at(access.index), at(access.index) + 1
    if isinstance(access, Slice):
        return at(access.lo), at(access.hi)
    if isinstance(access, Window):
        return t + access.lo, t + access.hi
    return np.zeros_like(t), t + 1  # a lookup reaches anywhere into the past


@functools.lru_cache(maxsize=4096)
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


@functools.lru_cache(maxsize=4096)
def lag(access: Access, length: int) -> int:
    """How many timesteps at least lie between what is read and its reader; below 0: the future is read.

    Example:
      >>> from rlfx.recurrence.language.index import TIME
      >>> lag(Slice(TIME - 7, TIME - 1), 10)
      2
    """
    nearest = relation(access, length).deltas().dim_max_val(0)
    return -int(nearest.to_python()) if nearest.is_int() else 0
