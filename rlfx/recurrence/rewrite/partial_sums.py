"""Sums over many rows, as sums over parts of the rows: what is left to add of all of them is added up at once.

A gradient of weights is a sum over the rows of a batch, of products or of cotangents. A machine computes it in two steps, parts
of the rows side by side, and then the sum of the parts: two operations for every array of weights. If the parts are values of
the program, the second step is one for all arrays (``packed.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J

DOT, SUM, SPREAD = map(J.primitive, ("dot_general", "reduce_sum", "broadcast_in_dim"))
MOVES = frozenset(map(J.primitive, ("transpose", "reshape", "squeeze")))

#: Rows of a part: so many that it takes no more memory than they do, for weights of 256 rows and columns. And parts: so many
#: that a machine has enough to do side by side.
ROWS, MOST_PARTS = 128, 128


@dataclass(frozen=True, eq=False)
class PartialSums:
    """A value that is the sum of these, along their first axis."""

    array: jax.Array

    def whole(self) -> jax.Array:
        """The value."""
        return jnp.sum(self.array, 0, dtype=self.array.dtype)


def added(values: Sequence[PartialSums]) -> jax.Array:
    """All of these values one after another, as a vector: one sum.

    Example:
      >>> added([PartialSums(jnp.ones((2, 3))), PartialSums(jnp.ones((4, 1)))])
      Array([2., 2., 2., 4.], dtype=float32)
    """
    most = max(len(v.array) for v in values)
    flat = [v.array.reshape(len(v.array), -1) for v in values]
    full = [x if len(x) == most else jnp.pad(x, ((0, most - len(x)), (0, 0))) for x in flat]
    return jnp.sum(jnp.concatenate(full, 1), 0, dtype=full[0].dtype)


def has_parts(eqn: Any) -> bool:
    """Whether an equation sums enough rows, in a type that loses nothing if parts are stored."""
    return _count(eqn) > 1


def in_parts(eqn: Any, operands: Sequence[Any]) -> PartialSums:
    """What such an equation gives.

    Example:
      >>> product = jax.make_jaxpr(lambda x, y: x.T @ y)(jnp.ones((512, 3)), jnp.ones((512, 2))).eqns[-1]
      >>> in_parts(product, [jnp.ones((3, 512)), jnp.ones((512, 2))]).array.shape
      (4, 3, 2)
    """
    count, axes = _count(eqn), _axes(eqn)
    cut = [_cut(x, mine[0], count) for x, mine in zip(operands, axes, strict=True)]
    inside = tuple(tuple(a + (a >= mine[0]) for a in mine) for mine in axes)  # of every part
    if eqn.primitive is DOT:
        numbers = inside, tuple((mine[0],) for mine in axes)
        return PartialSums(J.bind(DOT, {**eqn.params, "dimension_numbers": numbers}, *cut)[0])
    ((first, *_), (summed,)) = axes[0], inside
    (found,) = J.bind(SUM, {**eqn.params, "axes": tuple(sorted(summed))}, *cut)
    return PartialSums(jnp.moveaxis(found, first - sum(a < first for a in summed), 0))


def is_move(eqn: Any) -> bool:
    """Whether an equation changes the shape alone, or the order of axes: a sum along axes with one element does, too."""
    if eqn.primitive is SUM:
        return all(eqn.invars[0].aval.shape[a] == 1 for a in eqn.params["axes"])
    one = eqn.primitive is SPREAD and math.prod(eqn.outvars[0].aval.shape) == 1
    return one or eqn.primitive in MOVES


def moved(eqn: Any, value: PartialSums) -> PartialSums:
    """What such an equation gives."""
    x = value.array
    if eqn.primitive.name == "transpose":
        return PartialSums(jnp.transpose(x, (0, *(a + 1 for a in eqn.params["permutation"]))))
    return PartialSums(jnp.reshape(x, (len(x), *eqn.outvars[0].aval.shape)))


def _cut(x: Any, axis: int, count: int) -> Any:
    """An axis as two: parts, and rows of a part."""
    return jnp.reshape(x, (*x.shape[:axis], count, x.shape[axis] // count, *x.shape[axis + 1 :]))


def _axes(eqn: Any) -> tuple[tuple[int, ...], ...]:
    """Of every operand the axes that are summed over, in the same order; the longest first."""
    if eqn.primitive is SUM:
        axes = (tuple(eqn.params["axes"]),)
    else:
        axes = tuple(map(tuple, eqn.params["dimension_numbers"][0]))
    sizes = [eqn.invars[0].aval.shape[a] for a in axes[0]]
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    return tuple(tuple(mine[i] for i in order) for mine in axes)


def _count(eqn: Any) -> int:
    """Into how many parts the longest axis of rows is cut."""
    if eqn.primitive not in (DOT, SUM) or (eqn.primitive is DOT and any(eqn.params["dimension_numbers"][1])):
        return 1
    axes, dtype = _axes(eqn)[0], eqn.outvars[0].aval.dtype
    if not axes or not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 32:
        return 1
    sizes = [eqn.invars[0].aval.shape[a] for a in axes]
    most = min(MOST_PARTS, math.prod(sizes) // ROWS)
    return max((n for n in range(1, most + 1) if sizes[0] % n == 0), default=1)
