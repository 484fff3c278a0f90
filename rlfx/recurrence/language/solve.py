"""Series that are defined by a recurrence: declared, read, and tied to their definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from rlfx import _jaxpr as J
from rlfx._checks import expect, function
from rlfx.errors import BoundaryError, ProgramError, located
from rlfx.recurrence.language.boundary import boundary
from rlfx.recurrence.language.crossing import by_dimension
from rlfx.recurrence.language.domain import current_domain
from rlfx.recurrence.language.operands import as_array
from rlfx.recurrence.language.primitives import declare_p, define_p
from rlfx.recurrence.language.series import Series
from rlfx.recurrence.language.settled import settled
from rlfx.recurrence.language.time import without_time

tree = jax.tree_util


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
    expect("fn", fn, function("x"), ProgramError, of="rlfx.solve", fix="Give the recurrence: lambda x: x[t - 1] + 1.")
    if start is None and end is None:
        raise BoundaryError(
            located("rlfx.solve has no boundary value.", where=J.here(), fix="Give start=... or end=....")
        )
    (start, first), (end, last) = by_dimension(start, "start"), by_dimension(end, "end")
    guess = without_time(next(edge for edge in (start, end, first, last) if edge is not None))
    like = jax.eval_shape(lambda: tree.tree_map(lambda leaf: as_array(leaf, "rlfx.solve"), guess))
    value_of = lambda like: jax.eval_shape(lambda: without_time(fn(declare(like, start, end, True))))  # noqa: E731
    value_like = settled(value_of, like)
    declared = replace(declare(value_like, start, end), _around=(first, last))
    return define(declared, without_time(fn(declared)))


def define(declared: Series, value: Any, outer: bool = False) -> Any:
    """Tie a series that was declared to its value, which it returns; ``outer``: of the program around a call."""
    leaves = [
        define_p.bind(d, as_array(v, "rlfx.solve"), outer=outer)
        for d, v in zip(declared._leaves, tree.tree_leaves(value), strict=True)
    ]
    return tree.tree_unflatten(tree.tree_structure(value), leaves)


def declare(like: Any, start: Any, end: Any, on_trial: bool = False) -> Series:
    """A series before its value is known: of the types of ``like``."""
    leaves, treedef = tree.tree_flatten(like)
    weak = [bool(getattr(leaf, "weak_type", False)) for leaf in leaves]
    bound = tuple(
        declare_p.bind(shape=tuple(leaf.shape), dtype=leaf.dtype, weak_type=w)
        for leaf, w in zip(leaves, weak, strict=True)
    )
    return Series(
        bound,
        treedef,
        None if start is None else boundary(start, treedef, leaves, "start"),
        None if end is None else boundary(end, treedef, leaves, "end"),
        _on_trial=on_trial,
    )
