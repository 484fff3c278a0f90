"""Products with windows of a fixed length, ``keys.window(-15, 1) @ query``, for all timesteps: of blocks of rows.

A window of all timesteps is as many copies of a series as it is long, and a product with it at each timestep is one of a matrix
and a vector. A block of S timesteps sees S + w - 1 consecutive rows: products with them are products of matrices, of which each
timestep takes its own w (Beltagy et al. 2020, section 3.1; ``bands.py`` does so with slices, whose length is symbolic). So are
sums of windows by weights. Nothing is copied but rows that two blocks see, and so it is in the way back.
``execute/window_products.py`` runs them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx._axes import nest_of
from rlfx.recurrence.analysis.graph import Graph
from rlfx.recurrence.analysis.timed import of_one
from rlfx.recurrence.ir.program import Equation, Lit, Program, Var
from rlfx.recurrence.language.index import Window
from rlfx.recurrence.schedule.bands import NARROWEST, Band, in_vectors

_DOT, _TRANSPOSE = J.primitive("dot_general"), J.primitive("transpose")


@dataclass(frozen=True, eq=False)
class WindowProduct:
    """A product with a window, as it runs. Prints as text.

    Attributes:
      read: of the window.
      equation: the product.
      order: the axes of the window as the product has them.
      fill: what there is outside of the domain.
      side: which of its operands the window is.
      along: the axis of its positions: of the result, or, where they are added up, of the other operand.
      adds: whether they are.
      features: numbers at a position that one product, of a batch of them, takes.
    """

    read: Equation
    equation: Equation
    order: tuple[int, ...]
    fill: Any
    side: int
    along: int
    adds: bool
    features: int

    @property
    def band(self) -> Band:
        """Which rows a block of timesteps sees."""
        width = self.read.access.hi - self.read.access.lo
        block = in_vectors(width)
        return Band(self.read.access.lo, in_vectors(block + width - 1), block)

    def __str__(self) -> str:
        return f"x[{self.read.access}]: products of blocks of {self.band.block} timesteps with all rows that they see"


Part = tuple[Equation, ...] | WindowProduct


def window_products(equations: Sequence[Equation], graph: Graph, at_least: int = 1) -> list[Part]:
    """Some equations of a stage of all timesteps, in order, with such products by themselves and without their windows.

    Args:
      at_least: numbers at a position that one product takes. A block multiplies about twice what it uses, and with few numbers
        the products are most of the time.
    """
    found = _found(equations, graph, at_least)
    if not found:
        return [tuple(equations)]
    unmade = {p.read.outputs[0] for p in found.values()}
    parts: list[Part] = []
    others: list[Equation] = []
    for e in equations:
        if e in found:
            parts += [*_some(others), found[e]]
            others = []
        elif e.op is _TRANSPOSE and e.inputs[0] in unmade:
            unmade.add(e.outputs[0])
        elif e.outputs[0] not in unmade:
            others.append(e)
    return [*parts, *_some(others)]


def _some(equations: list[Equation]) -> Iterator[Part]:
    if equations:
        yield tuple(equations)


def _found(equations: Sequence[Equation], graph: Graph, at_least: int) -> dict[Equation, WindowProduct]:
    """The products, of windows of which nothing else is made."""
    own = frozenset(equations)
    found: dict[Equation, WindowProduct] = {}
    for read in equations:
        if not _is_short(read, graph.program):
            continue
        products = _products(read, read.outputs[0], tuple(range(len(read.outputs[0].shape))), graph, own)
        mine = {p.equation: p for p in products if p is not None and p.features >= at_least}
        # No product with itself, and what is a product of two windows is one of the first.
        if mine and len(mine) == len(products) and mine.keys().isdisjoint(found):
            found |= mine
    return found


def _products(
    read: Equation, window: Var, order: tuple[int, ...], graph: Graph, own: Collection[Equation]
) -> list[WindowProduct | None]:
    """What is made of a window whose axes are in some order; None for what is no product with it."""
    if window in graph.complete:
        return [None]
    found: list[WindowProduct | None] = []
    for e in graph.users.get(window, ()):
        if e in own and e.op is _TRANSPOSE:
            found += _products(read, e.outputs[0], tuple(order[a] for a in e.params["permutation"]), graph, own)
        else:
            found.append(_product(read, window, order, e, graph.program) if e in own else None)
    return found


def _is_short(e: Equation, program: Program) -> bool:
    """Whether an equation reads windows, short against T, of numbers that are zero, or another number, outside of the domain."""
    if not e.is_read or not isinstance(e.access, Window) or program.domain.until:
        return False
    near = NARROWEST <= e.access.hi - e.access.lo <= program.domain.length // 2 and "t" in program.dims_of(e.source)
    return near and _fill(e, program) is not None and jnp.issubdtype(e.outputs[0].dtype, jnp.floating)


def _fill(read: Equation, program: Program) -> Any | None:
    """The numbers outside of the domain, if they are known, and finite."""
    fill = of_one(read.operands[0], program)
    return fill.value if isinstance(fill, Lit) and np.all(np.isfinite(fill.value)) else None


def _product(
    read: Equation, window: Var, order: tuple[int, ...], e: Equation, program: Program
) -> WindowProduct | None:
    """A product of windows with something else of each timestep."""
    if e.op is not _DOT or e.is_ragged or e.inputs.count(window) != 1:
        return None
    side = e.inputs.index(window)
    other = e.inputs[1 - side]
    it = nest_of(e.op, e.params, [v.shape for v in e.inputs], [e.outputs[0].shape])
    if it is None or not isinstance(other, Var) or "t" not in program.dims_of(other):
        return None
    mine, theirs, (result,) = it.operands[side], it.operands[1 - side], it.results
    positions = mine[order.index(0)]
    adds = positions in theirs
    if adds == (positions in result):  # a batch of products
        return None
    along = (theirs if adds else result).index(positions)
    heads = {positions, *theirs} & {positions, *result}
    features = math.prod(n for axis, n in zip(mine, window.shape, strict=True) if axis not in heads)
    return WindowProduct(read, e, order, _fill(read, program), side, along, adds, features)
