"""Series: values that can be read at other timesteps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._checks import INT32, Kind, expect, shown
from rlfx.errors import DomainError, located
from rlfx.recurrence.language.boundary import boundary
from rlfx.recurrence.language.crossing import by_dimension, crossed_twice, crossing_of, outer_index
from rlfx.recurrence.language.domain import Level, current_domain, levels
from rlfx.recurrence.language.history import History
from rlfx.recurrence.language.index import LENGTH, TIME, Index, Lookup, Point, Slice, Window, as_index
from rlfx.recurrence.language.lookups import check_outside, check_promise, check_window, environments, filled, times
from rlfx.recurrence.language.masked import Masked, bound_of, inside_of
from rlfx.recurrence.language.names import BOTH, Names
from rlfx.recurrence.language.nesting import check_program, this_level
from rlfx.recurrence.language.operands import NoArray, as_array
from rlfx.recurrence.language.primitives import across_p, inputs_p, now_p, read_p, series_p
from rlfx.recurrence.language.steps import step_of, stepped, strided
from rlfx.recurrence.language.time import as_integer, index_of, without_time

tree = jax.tree_util


@dataclass(frozen=True, eq=False)
class Series(NoArray):
    """A named value of a program, readable at other timesteps.

    ====================================  ==========================================================
    ``x[t]``, ``x[t + c]``, ``x[t - c]``  the value at one other timestep
    ``x[t:]``, ``x[:t + 1]``              all future, all past values: a leading axis of length T - t, t + 1
    ``x[t:t + n]``                        a sliding window, clipped to [0, T)
    ``x[t:t + n:k]``                      every k-th of a slice, from its first bound on: t, t + k, ...
    ``x[t - t % n:t - t % n + n]``        the block that contains t
    ``x[:]``                              every timestep
    ``x[t:end]``, ``x[begin:t + 1]``      to, or since, a time that the program computes: a :class:`Masked`, to be reduced
    ``x.window(lo, hi, fill=v)``          a window of fixed length, filled at the ends
    ``x[i]``, ``x[i, b]``                 random access into the past, with traced integers: absolute times
    ``x[t, b]``                           the value of another environment
    ``x[i - 1, t + 1]``                   in a program that is called in one over i: of an earlier iteration
    ``x[i - 8:i, t]``                     there, of the eight before: those before the first i are ``start={"i": v}``
    ``x[:i, t]``, ``x[i:, t]``            there, of all before, of all from i on: a :class:`Masked`, to be reduced
    ====================================  ==========================================================

    Attributes:
      history: the next value of the :class:`History` given to :func:`series`, else None.
    """

    name, because, fix = "Series", "it stands for its values at all timesteps", "Write x[t]."

    _leaves: tuple[Any, ...]
    _treedef: Any
    _start: tuple[Any, ...] | None
    _end: tuple[Any, ...] | None
    history: History | None = None
    _level: Level | None = field(default_factory=this_level)
    _around: tuple[Any, Any] = (None, None)  # start and end along the dimension of the program around this one
    _back: int | None = None  # how far back it may be read
    _on_trial: bool = False  # whether solve asks for the type alone

    def __getitem__(self, index: Any) -> Any:
        check_program(self._level)
        outer = outer_index(index)
        if isinstance(outer, tuple):
            return tree.tree_map(lambda *each: jnp.stack(each), *(self._crossed(i, index[1]) for i in outer))
        if outer is not None:
            return self._crossed(outer, index[1])
        check_program(self._level, index)
        if isinstance(index, slice):
            return self._slice(index)
        i, b = index if isinstance(index, tuple) and len(index) == 2 else (index, None)
        position = index_of(i)
        if position is None:
            return self._lookup(i, b, Lookup(b is not None, back=self._back))
        value = self._read(Point(_not_from_the_end(position)))
        return value if b is None else _of_environment(value, b)

    def lookup(self, i: Any, b: Any = None, *, outside: str = "fill") -> Any:
        """Random access: the values at absolute times ``i``, of environments ``b`` (this one by default).

        ``x[i]`` is ``x.lookup(i)`` for an index that depends on a key, the carry, params or data. One that depends on t
        alone is an index expression, and has to be written as such: in ``x[...]`` it is refused.

        Args:
          i: integers of any shape; a time is its ``now``.
          b: integers of the shape of ``i``, or broadcast with it.
          outside: what is given for times before the oldest that is kept (the first of this call, or of the
            :class:`History`) and after now, and for environments that are not there: ``"fill"``, NaN (0 for integers and
            booleans), with a gradient of zero, or ``"clip"``, the nearest that is there.

        Returns:
          Arrays of shape ``i.shape + value.shape``.

        Raises:
          DomainError: if an index is no integer, or ``outside`` is something else.

        Example:
          >>> import jax.numpy as jnp, rlfx
          >>> def f(params, carry, t):
          ...     x = rlfx.series(t.astype(jnp.float32))
          ...     return carry, (x.lookup(t - 1), x.lookup(t - 1, outside="clip"))
          >>> rlfx.unroll(f, length=3)(None, None)[1]
          (Array([nan,  0.,  1.], dtype=float32), Array([0., 0., 1.], dtype=float32))
        """
        check_program(self._level)
        check_outside(outside)
        return self._lookup(i, b, Lookup(b is not None, outside, True, self._back))

    def window(self, lo: int, hi: int, *, fill: Any = 0) -> Any:
        """The window ``t + lo, ..., t + hi - 1``: a leading axis of fixed length ``hi - lo``. Both are offsets from t.

        Positions outside ``[0, T)`` hold ``fill`` (a scalar, or a pytree prefix of values).

        Raises:
          DomainError: unless ``lo < hi`` are integers.
        """
        first, stop = as_integer(lo), as_integer(hi)
        if first is None or stop is None or not first < stop <= first + INT32:
            fact = f"window needs integers lo < hi, got lo={lo!r}, hi={hi!r}."
            raise DomainError(located(fact, where=J.here(), fix=_offsets(lo, hi)))
        check_program(self._level)
        self._promised(TIME + first, TIME + stop, f"window({first}, {stop})")
        fills = boundary(fill, self._treedef, [leaf.aval for leaf in self._leaves], "fill")
        return self._bind(Window(first, stop), stop - first, [(f,) for f in fills])

    def at(self, index: Index) -> Any:
        """The value at an index expression."""
        return self._read(Point(_not_from_the_end(index)))

    def _crossed(self, outer: Any, own: Any) -> Any:
        """``x[i - 1, t + 1]``: what the call gave at i - 1, at t + 1; ``x[:i, t + 1]``: at all before i, of which some count."""
        if outer == TIME or (self._on_trial and isinstance(outer, Index)):
            return self[own]
        several = not isinstance(outer, Index)
        n = levels()[-2].length if isinstance(outer, Slice) else outer.hi - outer.lo if several else 0
        if self._on_trial:
            each = self[own]
            values = tree.tree_map(lambda leaf: jnp.broadcast_to(leaf, (n, *leaf.shape)), each)
            return values if isinstance(outer, Slice) else Masked(values, jnp.ones(n, bool))
        crossing = crossing_of(self)
        number, domain = crossing.read(self, outer), current_domain("A read of a series")
        axes = (n,) if several else ()
        if crossing.operands is None:
            lead = (domain.length, *(() if domain.batch is None else (domain.batch,)))
            zeros = [jnp.zeros((*lead, *axes, *leaf.shape), leaf.dtype) for leaf in self._leaves]
            source, count = tree.tree_unflatten(self._treedef, zeros), jnp.ones(axes, bool)
        else:
            source, count = crossing.operands[number]
        wide = lambda edge: edge and tuple(jnp.broadcast_to(leaf, (*axes, *leaf.shape)) for leaf in edge)  # noqa: E731
        value = replace(inputs(source), _start=wide(self._start), _end=wide(self._end))[own]
        if several and isinstance(value, Masked):
            raise crossed_twice(outer)
        if several and isinstance(own, slice):  # the iterations first
            value = tree.tree_map(lambda leaf: jnp.moveaxis(leaf, 1, 0), value)
        return Masked(value, count) if isinstance(outer, Window) else value

    def _slice(self, index: slice) -> Any:
        domain = current_domain("A slice of a series")
        bounds = [bound_of(b, d, index) for b, d in ((index.start, Index()), (index.stop, LENGTH))]
        # T and N are the same bound of the domain: print and compare them as one.
        last = lambda i: i.is_constant and i.constant == domain.length  # noqa: E731
        lo, hi = (LENGTH if last(b.index) else _not_from_the_end(b.index) for b in bounds)
        step = step_of(index)
        access = stepped(Slice(lo, hi), step)
        size = domain.size_of(access)
        taken = lambda leaf: leaf if step == 1 else strided(leaf, step, domain)  # noqa: E731
        every = tree.tree_map(taken, self._read(access, size))
        first, stop = (b.event for b in bounds)
        if first is None and stop is None:
            return every
        now = read_p.bind(series_p.bind(now_p.bind()), access=access, size=size, start=False, end=False)
        return Masked(every, inside_of(taken(now), first, stop))

    def _read(self, access: Any, size: Any = None) -> Any:
        lo, hi = (access.index, access.index + 1) if isinstance(access, Point) else (access.first, access.stop)
        self._promised(lo, hi, f"[{access}]")
        n = len(self._leaves)
        operands = list(zip(*(side for side in (self._start, self._end) if side is not None), strict=True)) or [()] * n
        if not isinstance(access, Point):
            operands = [()] * n
        return self._bind(access, size, operands)

    def _promised(self, lo: Index, hi: Index, read: str) -> None:
        if self._back is not None:
            check_promise(self._back, lo, hi, read, current_domain("A read of a series"))

    def _bind(self, access: Any, size: Any, operands: list[tuple]) -> Any:
        edges = isinstance(access, Point)
        leaves = [
            read_p.bind(
                leaf,
                *extra,
                access=access,
                size=size,
                start=edges and self._start is not None,
                end=edges and self._end is not None,
            )
            for leaf, extra in zip(self._leaves, operands, strict=True)
        ]
        return tree.tree_unflatten(self._treedef, leaves)

    def _lookup(self, i: Any, b: Any, access: Lookup) -> Any:
        domain = current_domain("A read of a series")
        i = times(i)
        if b is not None:
            i, b = jnp.broadcast_arrays(i, environments(b, domain))
        if self.history is not None:
            return self.history.lookup(now_p.bind(), i, b, across_p.bind, domain.batch, access.outside)
        return self._bind(access, None, [(i,) if b is None else (i, b)] * len(self._leaves))


def _of_environment(value: Any, b: Any) -> Any:
    """What environments ``b`` have for a value of this timestep."""
    domain = current_domain("A read of a series")
    b = environments(b, domain)
    assert domain.batch is not None
    inside, nearest = (b >= 0) & (b < domain.batch), jnp.clip(b, 0, domain.batch - 1)
    return tree.tree_map(
        lambda leaf: filled(inside, across_p.bind(leaf[None], jnp.zeros_like(nearest), nearest)), value
    )


def series(
    value: Any, *, start: Any = None, end: Any = None, history: History | None = None, window: int | None = None
) -> Series:
    """Name a value, so that it can be read at other timesteps.

    Args:
      value: any pytree of arrays: the value at t.
      start: what reads at indices < 0 give; a pytree prefix of ``value``, broadcast to it. A value that varies with
        time is taken at the first timestep. ``{"i": 0.0}``: along the dimension of the program that calls this one.
      end: what reads at indices >= T give. Without it, a read beyond the end is evaluated from the final carry where
        the equations of ``value`` allow that (see the language's page on demand extension). What is made of the series at t
        and read beyond the end is made of ``end`` there: ``f(x[t])`` at t + 1 is ``f(x[t + 1])``.
      history: a ring buffer from the carry, into which this timestep's value is written; ``x.history`` is its next
        value, and ``x[i]`` and ``x.lookup(t - n)`` then reach ``history.capacity`` steps back, across calls.
      window: a promise how far back it is read: of this and the ``window - 1`` timesteps before. A loop then keeps so many, and
        not all, for ``x[i]`` with computed times. What is older is outside, as in a History: NaN, or the nearest there is.

    Returns:
      The Series.

    Raises:
      ProgramError: outside of a per-timestep program.
      DomainError: ``window`` is no positive integer, stands beside ``history``, or an index expression reads further back.

    TimeRL section 4: its tensors are series by themselves; here only what is named can be read at other times, which
    keeps ordinary JAX values ordinary.

    Example:
      >>> import jax.numpy as jnp, rlfx
      >>> def difference(params, carry, t):
      ...     x = rlfx.series(2.0 * t, end=0.0)
      ...     return carry, x[t + 1] - x[t]
      >>> rlfx.unroll(difference, length=3)(None, None)[1]
      Array([ 2.,  2., -4.], dtype=float32)
    """
    current_domain("rlfx.series")
    check_window(window, history)
    leaves, treedef = tree.tree_flatten(without_time(value))
    leaves = tuple(series_p.bind(as_array(leaf, "rlfx.series")) for leaf in leaves)
    avals = [leaf.aval for leaf in leaves]
    (start, first), (end, last) = by_dimension(start, "start"), by_dimension(end, "end")
    kept = None
    if history is not None:
        kept = _history(history).write(now_p.bind(), tree.tree_unflatten(treedef, leaves))
    return Series(
        leaves,
        treedef,
        None if start is None else boundary(start, treedef, avals, "start"),
        None if end is None else boundary(end, treedef, avals, "end"),
        kept,
        _around=(first, last),
        _back=window,
    )


def _history(given: Any) -> History:
    if isinstance(given, History):
        return given
    fact = f"history= of rlfx.series is a ring buffer that the carry has; it was given {shown(given)}."
    fix = "Give rlfx.series(value, history=carry.buffer), whose first value is rlfx.History(capacity, like=value, batch=B)."
    raise DomainError(located(fact, where=J.here(), fix=fix))


def inputs(xs: Any, *, axes: Any = BOTH) -> Series:
    """Data given from outside, as a series: element ``(t, b)`` of every leaf.

    Args:
      xs: a pytree of arrays with leading axes ``[T, B]`` (``[T]`` without a batch), whole, as they come in through
        ``params`` or a closure.
      axes: which of the axes the leaves have: ``"tb"``, ``"t"`` or ``"b"``, by the names that the program has for them. Of
        leaves that differ, a pytree of these, or the beginning of one: ``{"obs": "tb", "weight": "b"}``.

    Raises:
      DomainError: if a leaf's leading axes are not those of the domain, or ``axes`` fits neither the domain nor ``xs``.

    Example:
      >>> import jax.numpy as jnp, rlfx
      >>> sum_of_two = lambda xs, carry, t: (carry, (x := rlfx.inputs(xs))[t] + x[rlfx.minimum(t + 1, t.length - 1)])
      >>> rlfx.unroll(sum_of_two, length=3)(jnp.array([1.0, 2.0, 3.0]), None)[1]
      Array([3., 5., 6.], dtype=float32)
    """
    domain = current_domain("rlfx.inputs")
    leaves, treedef = tree.tree_flatten_with_path(xs)
    every = ["tb"] * len(leaves) if axes is BOTH else _axes_of_leaves(axes, xs, domain.names)
    read = []
    for (path, leaf), own in zip(leaves, every, strict=True):
        axes = own.replace("b", "") if domain.batch is None else own
        expected = tuple({"t": domain.length, "b": domain.batch}[a] for a in axes)
        leaf = as_array(leaf, "rlfx.inputs")
        if leaf.shape[: len(axes)] != expected:
            raise DomainError(
                located(
                    f"rlfx.inputs(xs){tree.keystr(path)} has shape {leaf.shape}; its leading axes must be "
                    f"{list(expected)} ({', '.join(axes)}).",
                    where=J.here(),
                    fix=f"Give data of {domain.length} timesteps"
                    + (f" and {domain.batch} environments" if "b" in axes else "")
                    + ', or name the axes it has: axes="t" or axes="b".',
                )
            )
        read.append(series_p.bind(inputs_p.bind(leaf, axes=axes)))
    return Series(tuple(read), treedef, None, None)


def _axes_of_leaves(axes: Any, xs: Any, names: Names) -> list[str]:
    """Of each leaf of ``xs``, from those of all of them, or from a pytree of them that ``xs`` begins with."""
    named, kind = {names.dim, names.axis}, _axes_of(names)

    def is_one(x: Any) -> bool:
        return isinstance(x, str) or (type(x) in (tuple, list) and all(isinstance(a, str) and a in named for a in x))

    try:
        every = tree.tree_leaves(jax.tree.broadcast(axes, xs, is_leaf=is_one), is_leaf=is_one)
    except ValueError:
        fact = f"rlfx.inputs: axes={shown(axes)} is not how the data begin, {tree.tree_structure(xs)}."
        fix = 'Give the axes of all leaves, axes="tb", or those of parts of the data: axes={"obs": "tb", "weight": "b"}.'
        raise DomainError(located(fact, where=J.here(), fix=fix)) from None
    return [expect("axes", one, kind, of="rlfx.inputs") for one in every]


def _axes_of(names: Names) -> Kind:
    def take(axes: Any) -> str:
        letters = names.letters(axes)
        if "".join(axes) != "".join(names.of(letters)):  # in the order of the array's axes
            raise ValueError
        return letters

    return Kind('"tb", "t" or "b"', '"tb"', take)


def _not_from_the_end(expr: Index) -> Index:
    if expr.is_constant and expr.constant < 0:
        raise DomainError(
            located(
                f"The constant index {expr.constant} is outside of the domain: negative indices do not count from the "
                "end.",
                where=J.here(),
                fix=f"Write x[t.length - {-expr.constant}] for the end, or x[t - {-expr.constant}] for the past.",
            )
        )
    return as_index(expr)


def _offsets(*bounds: Any) -> str:
    """What to give a window, of bounds that may have been written as times."""
    found = [index_of(x) for x in bounds]
    lo, hi = (None if x is None else x - TIME for x in found)
    if lo is None or hi is None or not (lo.is_constant and hi.is_constant):
        return "Give both as integers, which are offsets from t: window(0, 5) begins at t."
    return f"They are offsets from t: window({lo.constant}, {hi.constant})."
