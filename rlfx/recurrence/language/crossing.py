"""Two indices inside an inner program: ``x[i - 1, t + 1]``, a series of this program at another index of the one around it.

A series over (i, t) is a series over i of arrays over t, so such a read is two: outside of the call, of all that the call gives,
at i - 1; inside, of the array that was read there, at t + 1. ``x[i - 8:i, t]`` is eight such reads, ``x[:i, t]`` a window as long
as the dimension, of which the iterations before i count. Here the reads are noted; the call (``api/curried.py``) ties them.
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
from rlfx.recurrence.language.index import LENGTH, Index, Slice, Window
from rlfx.recurrence.language.names import told
from rlfx.recurrence.language.time import Time, as_integer, index_of

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
      outer: the index of the enclosing program; a Slice of all iterations; a Window of which those that are there count.
      where: the user's line.
    """

    field: int
    outer: Index | Slice | Window
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

    def read(self, series: Any, outer: Index | Slice | Window) -> int:
        """Note a read; its number."""
        known = [n for n, one in enumerate(self.series) if one is series]
        field = known[0] if known else len(self.series)
        self.series += [] if known else [series]
        same = [n for n, read in enumerate(self.reads) if (read.field, read.outer) == (field, outer)]
        if not same:
            self.reads.append(Crossed(field, outer, J.here()))
        return same[0] if same else len(self.reads) - 1


def outer_index(index: Any) -> Index | Slice | Window | tuple[Index, ...] | None:
    """The index of an enclosing program that ``x[index]`` begins with, or those of a slice there; None for any other."""
    first = index[0] if isinstance(index, tuple) and index else None
    bounds = (first.start, first.stop) if isinstance(first, slice) else (first,)
    found = [b for b in bounds if isinstance(b, Time) and b.depth < len(levels())]
    if not found and not _is_constant(first, index):
        return None
    *_, around, here = levels()
    if len(index) != 2 or any(b.depth != around.depth for b in found):
        raise _refusal(
            f"A series of {here} is read at an index of {found[0].level}, and is called by {around}.",
            f"Give two indices, the first of {around.program}, the second of {here.program}: "
            f"x[{around.names.dim} - 1, {here.names.dim}]. What is further outside is read before the call.",
        )
    return _each(first) if isinstance(first, slice) else index_of(first)


def _is_constant(first: Any, index: Any) -> bool:
    """Whether a pair of indices names iterations by numbers: ``x[0, t]``, ``x[:, t]``; in ``x[0, b]`` b is an environment."""
    if len(levels()) < 2 or not isinstance(index, tuple) or len(index) != 2:
        return False
    if isinstance(first, slice):
        return not any(isinstance(bound, Time) for bound in (first.start, first.stop))
    if as_integer(first) is None:
        return False
    if as_integer(index[1]) is not None:
        *_, around, here = levels()
        i, t = around.names.dim, here.names.dim
        raise _refusal(
            f"x[{first}, {index[1]}] inside {here} has two meanings: {i} = {first} at {t} = {index[1]}, and {t} = {first} of "
            f"environment {index[1]}.",
            f"Write x[{first}:{first} + 1, {index[1]}][0] for the first, x.lookup({first}, {index[1]}) for the second.",
        )
    return isinstance(index[1], (slice, Time))


def _each(window: slice) -> Slice | Window | tuple[Index, ...]:
    """The iterations of ``i - 8:i``, one by one: as many at each i; all that there are; or all before i, or after it."""
    *_, around, here = levels()
    dim, length = around.names.dim, around.length
    lo, hi = (None if bound is None else _affine(bound) for bound in (window.start, window.stop))
    names = around.names.text
    written = ":".join("" if bound is None else names(str(bound)) for bound in (lo, hi))
    if window.step is not None:
        raise _refusal(
            f"x[{written}, ...], a slice over {dim} inside {here}, has a step, {window.step}.",
            "Step through what was read, [::2].",
        )
    if lo is None and hi is None:
        return Slice(Index(), LENGTH)
    if lo is None and hi is not None and hi.offset is not None:
        return Window(1 - length, hi.offset) if hi.offset > 1 - length else _empty(written)
    if hi is None and lo is not None and lo.offset is not None:
        return Window(lo.offset, length) if lo.offset < length else _empty(written)
    first, stop = Index() if lo is None else lo, LENGTH if hi is None else hi
    width = stop - first
    if hi is None and first.is_constant:
        width = Index(length - first.constant)
    if not width.is_constant:
        own = here.names.dim
        raise _refusal(
            f"x[{written}, ...] is a slice over {dim} inside {here}: how many there are depends on {dim}.",
            f"Read as many at each {dim}, x[{dim} - 8:{dim}, {own}], or all before it, x[:{dim}, {own}]; or return x from "
            f"{here.program}, and reduce a slice of what came back.",
        )
    if width.constant <= 0:
        _empty(written)
    return tuple(first + k for k in range(width.constant))


def _affine(bound: Any) -> Index:
    index = index_of(bound)
    if index is None:
        *_, around, here = levels()
        raise _refusal(
            f"A bound of a slice over {around.names.dim} inside {here} is no index expression of {around.names.dim}.",
            f"Return x from {here.program}, and read what came back: rlfx.series(x)[{around.names.dim}:end].",
        )
    return index


def _empty(written: str) -> Any:
    *_, around, here = levels()
    dim = around.names.dim
    raise _refusal(
        f"x[{written}, ...], a slice over {dim} inside {here}, is empty.",
        f"Write the earlier iteration first, x[{dim} - 8:{dim}, {here.names.dim}].",
    )


def crossed_twice(outer: Any) -> Exception:
    """The refusal of a read of which it is known in neither dimension how many there are."""
    *_, around, here = levels()
    text = around.names.text(str(outer))
    return _refusal(
        f"Of a slice over {around.names.dim} inside {here}, x[{text}, ...], timesteps to a computed time are read.",
        f"Read as many at each {around.names.dim}, x[{around.names.dim} - 8:{around.names.dim}, ...], or mask what was read.",
    )


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
