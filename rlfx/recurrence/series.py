"""Series: values that can be read at other timesteps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.errors import BoundaryError, DomainError, ProgramError, located
from rlfx.recurrence.domain import current_domain
from rlfx.recurrence.history import History
from rlfx.recurrence.index import LENGTH, Index, Lookup, Point, Slice, Window, as_index
from rlfx.recurrence.primitives import across_p, declare_p, define_p, inputs_p, now_p, read_p, series_p
from rlfx.recurrence.time import index_of, without_time

tree = jax.tree_util


@dataclass(frozen=True, eq=False)
class Series:
    """A named value of a program, readable at other timesteps.

    ====================================  ==========================================================
    ``x[t]``, ``x[t + c]``, ``x[t - c]``  the value at one other timestep
    ``x[t:]``, ``x[:t + 1]``              all future, all past values: a leading axis of length T - t, t + 1
    ``x[t:t + n]``                        a sliding window, clipped to [0, T)
    ``x[t - t % n:t - t % n + n]``        the block that contains t
    ``x[:]``                              every timestep
    ``x.window(lo, hi, fill=v)``          a window of fixed length, filled at the ends
    ``x[i]``, ``x[i, b]``                 random access, with traced integers
    ====================================  ==========================================================

    Attributes:
      history: the next value of the :class:`History` given to :func:`series`, else None.
    """

    _leaves: tuple
    _treedef: Any
    _start: tuple | None
    _end: tuple | None
    history: History | None = None

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._slice(index)
        position = index_of(index)
        if position is not None:
            return self._read(Point(_not_from_the_end(position)))
        return self._lookup(index)

    def window(self, lo: int, hi: int, *, fill: Any = 0) -> Any:
        """The window ``t + lo, ..., t + hi - 1``: a leading axis of fixed length ``hi - lo``.

        Positions outside ``[0, T)`` hold ``fill`` (a scalar, or a pytree prefix of values).

        Raises:
          DomainError: unless ``lo < hi`` are integers.
        """
        if not (isinstance(lo, int) and isinstance(hi, int) and lo < hi):
            raise DomainError(
                located(f"window needs integers lo < hi, got lo={lo!r}, hi={hi!r}.", where=J.here(), fix="Give both.")
            )
        fills = _boundary(fill, self._treedef, [leaf.aval for leaf in self._leaves], "fill")
        return self._bind(Window(lo, hi), hi - lo, [(f,) for f in fills])

    def _slice(self, index: slice) -> Any:
        if index.step is not None:
            raise DomainError(
                located(
                    f"A slice of a series has no step (got {index.step}).", where=J.here(), fix="Read, then [::step]."
                )
            )
        domain = current_domain("A slice of a series")
        bounds = []
        for bound, default in ((index.start, Index()), (index.stop, LENGTH)):
            expr = default if bound is None else index_of(bound)
            if expr is None:
                raise DomainError(
                    located(
                        f"A slice bound must be affine in t (also //, %, rlfx.minimum, rlfx.maximum), got {bound!r}.",
                        where=J.here(),
                        fix="Read single positions with x[i] for traced integers, or mask a slice with static bounds.",
                    )
                )
            # T and N are the same bound of the domain: print and compare them as one.
            bounds.append(LENGTH if expr.is_constant and expr.constant == domain.length else _not_from_the_end(expr))
        access = Slice(*bounds)
        return self._read(access, domain.size_of(access))

    def _read(self, access: Any, size: Any = None) -> Any:
        n = len(self._leaves)
        operands = list(zip(*(side for side in (self._start, self._end) if side is not None), strict=True)) or [()] * n
        if not isinstance(access, Point):
            operands = [()] * n
        return self._bind(access, size, operands)

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

    def _lookup(self, index: Any) -> Any:
        i, b = index if isinstance(index, tuple) and len(index) == 2 else (index, None)
        for name, value in (("i", i), ("b", b)):
            if (value is not None or name == "i") and not _is_integer_array(value):
                raise DomainError(
                    located(
                        f"A series is indexed by expressions affine in t, or by traced integers; {name} is {value!r}.",
                        where=J.here(),
                        fix="Use t, integers, //, % by a constant, rlfx.minimum and rlfx.maximum; or an integer array.",
                    )
                )
        # A time in (i, b) is absolute, like every traced index.
        i = jnp.asarray(i)
        if b is not None:
            i, b = jnp.broadcast_arrays(i, jnp.asarray(b))
        if self.history is not None:
            return self.history.lookup(now_p.bind(), i, b, across_p.bind)
        domain = current_domain("A read of a series")
        if b is not None and domain.batch is None:
            raise DomainError(
                located(
                    "x[i, b] reads another environment, and this program has no batch.", where=J.here(), fix="Use x[i]."
                )
            )
        operands = (i.astype(jnp.int32),) if b is None else (i.astype(jnp.int32), b.astype(jnp.int32))
        return self._bind(Lookup(b is not None), None, [operands] * len(self._leaves))

    def __iter__(self):
        raise _not_an_array()

    def __len__(self):
        raise _not_an_array()

    def __bool__(self):
        raise _not_an_array()


def _not_an_array() -> TypeError:
    return TypeError(
        located(
            "A Series is not an array: it stands for its values at all timesteps.", where=J.here(), fix="Write x[t]."
        )
    )


def _raise_not_an_array(self, *_):
    raise _not_an_array()


for _op in (
    *[
        "add",
        "radd",
        "sub",
        "rsub",
        "mul",
        "rmul",
        "truediv",
        "rtruediv",
        "floordiv",
        "rfloordiv",
        "mod",
        "rmod",
        "pow",
        "rpow",
        "matmul",
        "rmatmul",
        "neg",
        "pos",
        "abs",
    ],
    *["invert", "and", "rand", "or", "ror", "xor", "rxor", "lt", "le", "gt", "ge"],
):
    setattr(Series, f"__{_op}__", _raise_not_an_array)


def series(value: Any, *, start: Any = None, end: Any = None, history: History | None = None) -> Series:
    """Name a value, so that it can be read at other timesteps.

    Args:
      value: any pytree of arrays: the value at t.
      start: what reads at indices < 0 give; a pytree prefix of ``value``, broadcast to it. A value that varies with
        time is taken at the first timestep.
      end: what reads at indices >= T give. Without it, a read beyond the end is evaluated from the final carry where
        the equations of ``value`` allow that (see the language's page on demand extension).
      history: a ring buffer from the carry, into which this timestep's value is written; ``x.history`` is its next
        value, and ``x[i]`` then reaches ``history.capacity`` steps back, across calls.

    Returns:
      The Series.

    Raises:
      ProgramError: outside of a per-timestep program.

    TimeRL section 4: its tensors are series by themselves; here only what is named can be read at other times, which
    keeps ordinary JAX values ordinary.

    Example:
      >>> import jax.numpy as jnp, rlfx
      >>> def difference(params, carry, t):
      ...     x = rlfx.series(jnp.float32(2.0) * t.now, end=0.0)
      ...     return carry, x[t + 1] - x[t]
      >>> rlfx.unroll(difference, length=3)(None, None)[1]
      Array([ 2.,  2., -4.], dtype=float32)
    """
    current_domain("rlfx.series")
    leaves, treedef = tree.tree_flatten(without_time(value))
    leaves = tuple(series_p.bind(_as_array(leaf, "rlfx.series")) for leaf in leaves)
    avals = [leaf.aval for leaf in leaves]
    kept = None
    if history is not None:
        kept = history.write(now_p.bind(), tree.tree_unflatten(treedef, leaves))
    return Series(
        leaves,
        treedef,
        None if start is None else _boundary(start, treedef, avals, "start"),
        None if end is None else _boundary(end, treedef, avals, "end"),
        kept,
    )


def inputs(xs: Any, *, axes: str = "tb") -> Series:
    """Data given from outside, as a series: element ``(t, b)`` of every leaf.

    Args:
      xs: a pytree of arrays with leading axes ``[T, B]`` (``[T]`` without a batch), whole, as they come in through
        ``params`` or a closure.
      axes: which of the axes the leaves have: ``"tb"``, ``"t"`` or ``"b"``.

    Raises:
      DomainError: if a leaf's leading axes are not those of the domain.

    Example:
      >>> import jax.numpy as jnp, rlfx
      >>> sum_of_two = lambda xs, carry, t: (carry, (x := rlfx.inputs(xs))[t] + x[rlfx.minimum(t + 1, t.length - 1)])
      >>> rlfx.unroll(sum_of_two, length=3)(jnp.array([1.0, 2.0, 3.0]), None)[1]
      Array([3., 5., 6.], dtype=float32)
    """
    domain = current_domain("rlfx.inputs")
    if axes not in ("tb", "t", "b"):
        raise DomainError(
            located(f'axes is "tb", "t" or "b", got {axes!r}.', where=J.here(), fix="Choose one of them.")
        )
    if domain.batch is None:
        axes = axes.replace("b", "")
    expected = tuple({"t": domain.length, "b": domain.batch}[a] for a in axes)
    treedef = tree.tree_structure(xs)
    read = []
    for path, leaf in tree.tree_flatten_with_path(xs)[0]:
        leaf = _as_array(leaf, "rlfx.inputs")
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


def solve(fn: Callable[[Series], Any], *, start: Any = None, end: Any = None) -> Any:
    """Define a series by a recurrence; returns its value at t.

    Args:
      fn: receives the Series being defined and returns its value at t, which may read it at other times.
      start: its value at indices < 0, for recurrences into the past: a pytree of the value's structure, each leaf
        broadcast to the value's shape.
      end: its value at indices >= T, for recurrences into the future.

    Returns:
      The value at t (wrap it in :func:`series` to read it at other times).

    Raises:
      ProgramError: if the shape or dtype of the value does not settle, or neither start nor end is given.
      CausalityError: (when compiled) if values depend on each other through both the past and the future.

    TimeRL section 4, "branching definitions"; here the boundary is an argument.

    Example:
      >>> import jax.numpy as jnp, rlfx
      >>> def fibonacci(params, carry, t):
      ...     return carry, rlfx.solve(lambda f: f[t - 1] + f[t - 2], start=1)
      >>> rlfx.unroll(fibonacci, length=5)(None, None)[1]
      Array([ 2,  3,  5,  8, 13], dtype=int32)
    """
    current_domain("rlfx.solve")
    if start is None and end is None:
        raise BoundaryError(
            located("rlfx.solve has no boundary value.", where=J.here(), fix="Give start=... or end=....")
        )
    guess = without_time(start if start is not None else end)
    like = tree.tree_map(lambda leaf: _strong(_as_array(leaf, "rlfx.solve")), guess)
    like = jax.eval_shape(lambda: like)
    for _ in range(4):  # the value may be wider than the boundary: (shape, dtype) rise to a fixed point
        value_like = jax.eval_shape(lambda like=like: without_time(fn(_declare(like, start, end))))
        value_like = tree.tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), value_like)
        if value_like == like:
            break
        like = value_like
    else:
        raise ProgramError(
            located(
                f"The value that rlfx.solve defines does not settle: its type is now {value_like}, and it was {like} "
                "in the round before.",
                where=J.here(),
                fix="Give start= or end= of the value's own shape and dtype.",
            )
        )
    declared = _declare(like, start, end)
    value = without_time(fn(declared))
    leaves = [
        define_p.bind(d, _as_array(v, "rlfx.solve"))
        for d, v in zip(declared._leaves, tree.tree_leaves(value), strict=True)
    ]
    return tree.tree_unflatten(tree.tree_structure(value), leaves)


def _declare(like: Any, start: Any, end: Any) -> Series:
    leaves, treedef = tree.tree_flatten(like)
    bound = tuple(declare_p.bind(shape=tuple(leaf.shape), dtype=leaf.dtype) for leaf in leaves)
    return Series(
        bound,
        treedef,
        None if start is None else _boundary(start, treedef, leaves, "start"),
        None if end is None else _boundary(end, treedef, leaves, "end"),
    )


def _boundary(value: Any, treedef: Any, avals: list, name: str) -> tuple:
    """A boundary value (a pytree prefix) as one array per leaf, of its shape and dtype."""
    like, value = tree.tree_unflatten(treedef, avals), without_time(value)
    try:
        spread = tree.tree_leaves(tree.tree_map(lambda v, sub: [v] * tree.tree_structure(sub).num_leaves, value, like))
        return tuple(
            jnp.broadcast_to(_convert(_as_array(v, name), aval.dtype), aval.shape)
            for v, aval in zip(spread, avals, strict=True)
        )
    except (ValueError, TypeError) as error:
        raise BoundaryError(
            located(
                f"{name}= does not fit the series: {error}",
                where=J.here(),
                fix=f"Give a value (or a prefix of the pytree) that broadcasts to {like}.",
            )
        ) from None


def _convert(x: Any, dtype: Any) -> Any:
    """To the series' dtype, where jax would promote so too (an int literal to float, never a float to int)."""
    if x.dtype == dtype:
        return x
    if jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"its dtype is {x.dtype}, the series' is {jnp.dtype(dtype).name}")
    return x.astype(dtype)


def _strong(x: Any) -> Any:
    return jax.lax.convert_element_type(x, x.dtype)


def _as_array(leaf: Any, what: str) -> Any:
    if isinstance(leaf, Series):
        raise _not_an_array()
    try:
        return jnp.asarray(leaf)
    except TypeError as error:
        raise ProgramError(located(f"{what} takes arrays, got {leaf!r}.", where=J.here(), fix=str(error))) from None


def _is_integer_array(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and np.issubdtype(dtype, np.integer)


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
