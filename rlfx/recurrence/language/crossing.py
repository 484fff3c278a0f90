"""Two indices inside an inner program: ``x[i - 1, t + 1]``, a series of this program at another index of the one around it.

A series over (i, t) is a series over i of arrays over t, so such a read is two: outside of the call, of all that the call gives,
at i - 1; inside, of the array that was read there, at t + 1. ``x[i - 8:i, t]`` is eight such reads. Here the reads are noted;
the call (``api/curried.py``) ties them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from rlfx import _jaxpr as J
from rlfx.errors import BoundaryError, DomainError, ProgramError, located
from rlfx.recurrence.language.domain import levels
from rlfx.recurrence.language.index import Index
from rlfx.recurrence.language.names import told
from rlfx.recurrence.language.time import Time, index_of

tree = jax.tree_util


@dataclass(frozen=True, eq=False)
class Field:
    """A series that is read at other iterations: of which types, and what it is before the first and after the last."""

    structure: Any
    avals: list
    around: tuple


@dataclass(frozen=True, eq=False)
class Crossed:
    """A read at another index of the enclosing program.

    Attributes:
      field: which of the crossing's fields it reads.
      outer: the index of the enclosing program.
      where: the user's line.
    """

    field: int
    outer: Index
    where: str


@dataclass(eq=False)
class Crossing:
    """The reads of one trace of an inner program that need other iterations of the call.

    Attributes:
      operands: what the reads gave, one for each, in the order in which they are made; None while they are noted.
      fields: the series that are read.
      reads: what is read of them.
      series: while the function is traced, the fields themselves.
      trace: of the function's body, then.
    """

    operands: Any = None
    fields: list[Field] = field(default_factory=list)
    reads: list[Crossed] = field(default_factory=list)
    series: list = field(default_factory=list)
    trace: Any = None

    def begin(self) -> None:
        """A trace of the function begins."""
        self.trace = J.current_trace()
        for known in (self.series, self.fields, self.reads):
            known.clear()

    def end(self) -> None:
        """It ends: jax's caches keep what was noted, and no value of the trace with it."""
        self.fields = [Field(s._treedef, [leaf.aval for leaf in s._leaves], s._around) for s in self.series]
        self.operands = None if self.operands is None else ()
        self.series.clear()
        self.trace = None

    def read(self, series: Any, outer: Index) -> int:
        """Note a read; its number."""
        if series not in self.series:
            self.series.append(series)
        field = self.series.index(series)
        same = [n for n, read in enumerate(self.reads) if (read.field, read.outer) == (field, outer)]
        if not same:
            self.reads.append(Crossed(field, outer, J.here()))
        return same[0] if same else len(self.reads) - 1


def outer_index(index: Any) -> Index | tuple[Index, ...] | None:
    """The index of an enclosing program that ``x[index]`` begins with, or those of a slice there; None for any other."""
    first = index[0] if isinstance(index, tuple) and index else None
    bounds = (first.start, first.stop) if isinstance(first, slice) else (first,)
    found = [b for b in bounds if isinstance(b, Time) and b.depth < len(levels())]
    if not found:
        return None
    *_, around, here = levels()
    if len(index) != 2 or any(b.depth != around.depth for b in found):
        raise _refusal(
            f"A series of {here} is read at an index of {found[0].level}, and is called by {around}.",
            f"Give two indices, the first of {around.program}, the second of {here.program}: "
            f"x[{around.names.dim} - 1, {here.names.dim}]. What is further outside is read before the call.",
        )
    return _each(first) if isinstance(first, slice) else index_of(found[0])


def _each(window: slice) -> tuple[Index, ...]:
    """The iterations of ``i - 8:i``, one by one: as many at each i."""
    *_, around, here = levels()
    dim = around.names.dim
    lo, hi = (None if bound is None else index_of(bound) for bound in (window.start, window.stop))
    width = None if lo is None or hi is None else hi - lo
    names = around.names.text
    written = ":".join("" if bound is None else names(str(bound)) for bound in (lo, hi))
    if width is None or not width.is_constant:
        raise _refusal(
            f"x[{written}, ...] is a slice over {dim} inside {here}: how many there are depends on {dim}.",
            f"Read as many at each {dim}, x[{dim} - 8:{dim}, {here.names.dim}]; or return x from {here.program}, and reduce a "
            "slice of what came back.",
        )
    if width.constant <= 0 or window.step is not None:
        fact = "is empty" if width.constant <= 0 else f"has a step, {window.step}"
        raise _refusal(
            f"x[{written}, ...], a slice over {dim} inside {here}, {fact}.",
            f"Write the earlier iteration first, x[{dim} - 8:{dim}, {here.names.dim}]; step through what was read, [::2].",
        )
    assert lo is not None
    return tuple(lo + k for k in range(width.constant))


def crossing_of(series: Any) -> Crossing:
    """What notes the reads of the program that is being traced."""
    crossing = next((level.crossing for level in levels()[-1:]), None)
    if crossing is None:
        raise _refusal(
            "A read with two indices needs the call of the program around it.",
            "Call the compiled program (rlfx.compile, rlfx.unroll) inside of the other.",
        )
    if any(J.trace_of(leaf) is not crossing.trace for leaf in series._leaves):
        raise told(
            ProgramError(
                located(
                    "A series with two indices is made inside of a function that jax transforms (grad, vmap, scan, cond).",
                    where=J.here(),
                    fix="Name it, rlfx.series(v), in the body of the program itself, and read it there.",
                )
            )
        )
    return crossing


def by_dimension(value: Any, name: str) -> tuple[Any, Any]:
    """``start=`` or ``end=`` of a series: of its own dimension, and of that of the program around it.

    ``{"i": 0.0}`` and ``{"i": 0.0, "t": 1.0}`` name them; anything else is of its own.
    """
    dims = [level.names.dim for level in levels()[-2:]]
    if (
        not isinstance(value, Mapping)
        or len(dims) < 2
        or dims[0] == dims[1]
        or not value
        or not set(value) <= set(dims)
    ):
        return value, None
    outer = value.get(dims[0])
    if any(isinstance(leaf, J.Tracer) for leaf in tree.tree_leaves(outer)):
        raise told(
            BoundaryError(
                located(
                    f"{name}={{{dims[0]!r}: ...}} is a value of the program; it stands for all {dims[1]} of the iterations that "
                    "are not there.",
                    where=J.here(),
                    fix="Give numbers, or NumPy arrays.",
                )
            )
        )
    return value.get(dims[1]), None if outer is None else tree.tree_map(np.asarray, outer)


def _refusal(fact: str, fix: str) -> Exception:
    return told(DomainError(located(fact, where=J.here(), fix=fix)))
