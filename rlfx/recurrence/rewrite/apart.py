"""Products of what is put together from parts that vary less: ``concatenate([z, x]) @ w`` as ``z @ w[:n] + x @ w[n:]``.

A decoder that tells the reward of a task z at many points x, a critic of one state and many actions, a model of what is known
and what is sampled: vectorised, z is spread over all points, and multiplied with its rows of the weights at each. Apart, its
product is computed once for each z, and that of what is the same at every timestep once for all of them. So of the edges of a
graph: ``concatenate([nodes[to], nodes[of]], 1) @ w`` is ``(nodes @ w[:n])[to] + (nodes @ w[n:])[of]``, a product for each node.
So of one row, put together with others or not: ``embedding[token] @ w`` is ``(embedding @ w)[token]`` where there are fewer
tokens than points, and what a decoder tells of the city that it is at, and began at, is computed once for each city.
Rows may be timesteps of a slice, as many as t says: a network of what the next timesteps were, told many goals.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.cost import points
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var
from rlfx.recurrence.language.domain import Domain, widest

_DOT, _CONCATENATE, _BROADCAST = map(J.primitive, ("dot_general", "concatenate", "broadcast_in_dim"))
_GATHER, _SLICE, _SQUEEZE = map(J.primitive, ("gather", "dynamic_slice", "squeeze"))
#: Rows of a matrix, by their numbers; and one of them.
_ROWS, _ROW = (
    jax.lax.GatherDimensionNumbers(offset_dims=(n,), collapsed_slice_dims=(0,), start_index_map=(0,)) for n in (1, 0)
)

#: A part leaves the product if that takes at most so much of its work, and if it has so many rows of the weights: the sum that
#: is added takes about as long as the product of one.
_WORTH, _FEWEST = 0.75, 4


@dataclass(frozen=True)
class Operand:
    """Of what is put together.

    Attributes:
      first, count: its rows of the weights.
      operand: the value, before it is spread.
      axes: which axis of the whole each of the operand's is; None: it is one long, and spread along that.
      points: at how many points of the domain it, or what it is multiplied with, is another one.
      picks: what takes its rows, a gather, or one row, a gather or a slice; or None.
    """

    first: int
    count: int
    operand: Atom
    axes: tuple[int | None, ...]
    points: float
    picks: Equation | None = None

    @property
    def beside(self) -> tuple:
        """Equal of parts that are multiplied together: they vary alike, and the same rows are picked of as many."""
        picked = None if self.picks is None else (self.picks.inputs[1], self.operand.shape[0])
        return self.axes, self.points, picked

    def work(self, domain: Domain) -> float:
        """Its elements, over the domain."""
        return math.prod(widest(domain, n) for n in self.operand.shape) * self.points


@dataclass(frozen=True)
class Apart:
    """A product in groups of parts.

    Attributes:
      side: which operand is put together.
      axis: its axis that is contracted.
      groups: the parts that are multiplied together.
    """

    product: Equation
    side: int
    axis: int
    groups: tuple[tuple[Operand, ...], ...]


def with_parts_apart(program: Program) -> Program:
    """The program with products of parts; without such products ``program``. Meaning-preserving up to reassociation."""
    definition = program.definitions()

    def instead(e: Equation) -> tuple[Callable, Sequence[Atom]] | None:
        apart = _apart(e, program, definition)
        return None if apart is None else (functools.partial(_sum_of_products, apart), _inputs(apart))

    return exchanged(program, instead)


def _apart(product: Equation, program: Program, definition: Mapping) -> Apart | None:
    """How a product falls apart; None if it does not, or if nothing is gained by it."""
    if product.op is not _DOT:
        return None
    out = product.outputs[0]
    if not jnp.issubdtype(out.dtype, jnp.floating) or jnp.finfo(out.dtype).bits < 32:
        return None  # sums of few bits are rounded once
    contracted, batched = product.params["dimension_numbers"]
    if any(batched) or len(contracted[0]) != 1:
        return None
    for side, whole in enumerate(product.inputs):
        e, axis = definition.get(whole), contracted[side][0]
        if e is None:
            continue
        together = e.inputs if e.op is _CONCATENATE and e.params["dimension"] == axis else [whole]
        if any(J.is_symbolic(v.shape[axis]) for v in together):
            continue  # slices beside each other: where one ends depends on t
        rows = math.prod(widest(program.domain, n) for a, n in enumerate(whole.shape) if a != axis)
        often = points(program.dims_of(whole), program.domain) * rows
        groups: dict[tuple, list[Operand]] = {}
        weights = program.dims_of(product.inputs[1 - side])
        for v, part in zip(together, _parts(together, axis, weights, program, definition), strict=True):
            if part.work(program.domain) <= _WORTH * often * part.count:
                groups.setdefault(part.beside, []).append(part)
            else:
                groups.setdefault((), []).append(replace(part, operand=v, axes=tuple(range(len(v.shape))), picks=None))
        taken = [part for key, group in groups.items() if key for part in group]
        if together == [whole] and all(part.picks is None for part in taken):
            continue  # a product of what is spread
        if sum(part.count for part in taken) >= _FEWEST:
            return Apart(product, side, axis, tuple(map(tuple, groups.values())))
    return None


def _parts(
    together: Sequence[Atom], axis: int, weights: frozenset, program: Program, definition: Mapping
) -> list[Operand]:
    found, first = [], 0
    for v in together:
        count, operand, axes, picks = v.shape[axis], v, tuple(range(len(v.shape))), None
        spread = definition.get(v)
        taking = None if spread is None or axis != len(v.shape) - 1 else _taking(spread, definition)
        if taking is not None:
            operand, picks = taking.inputs[0], taking
        elif spread is not None and spread.op is _BROADCAST and len(spread.inputs) == 1:
            (given,), along = spread.inputs, spread.params["broadcast_dimensions"]
            if axis in along and given.shape[along.index(axis)] == count:
                operand = given
                axes = tuple(a if n == v.shape[a] else None for n, a in zip(given.shape, along, strict=True))
        dims = weights | (program.dims_of(operand) if isinstance(operand, Var) else frozenset())
        found.append(Operand(first, count, operand, axes, points(dims, program.domain), picks))
        first += count
    return found


def _taking(e: Equation, definition: Mapping) -> Equation | None:
    """What takes rows of a matrix, or one row, and gives them as they are; None for anything else.

    What a gather gives beyond the rows is not a number, or zero: so are products of that. Beyond them a slice gives the last one.
    """
    one = e.op is _SQUEEZE and e.params["dimensions"] == (0,)
    e = definition.get(e.inputs[0], e) if one else e
    if e.op is not (_SLICE if one else _GATHER):
        return None
    matrix, picked = e.inputs[:2]
    if len(matrix.shape) != 2 or J.symbolic_axes(matrix.shape) or tuple(e.params["slice_sizes"]) != (1, matrix.shape[1]):
        return None
    if one:
        return e
    known = (e.params["dimension_numbers"], len(picked.shape)) in ((_ROWS, 2), (_ROW, 1))
    return e if known and e.params["fill_value"] in (None, 0) else None


def _takes_one(picks: Equation) -> bool:
    """Whether it takes one row, whose axis is gone."""
    return picks.op is _SLICE or picks.params["dimension_numbers"] == _ROW


def _inputs(apart: Apart) -> list[Atom]:
    """What its products are computed of: the weights, the parts, and the numbers of the rows that are picked."""
    operands = [part.operand for group in apart.groups for part in group]
    picked = [group[0].picks.inputs[1] for group in apart.groups if group[0].picks is not None]
    return [apart.product.inputs[1 - apart.side], *operands, *picked]


def _sum_of_products(apart: Apart, *values: Any) -> Any:
    """The product, at one point."""
    weights, *others = values
    operands, picked = iter(others), iter(others[sum(map(len, apart.groups)) :])
    found = []
    for group in apart.groups:
        product = _product(apart, group, [next(operands) for _ in group], weights)
        picks = group[0].picks
        found.append(_spread(apart, group[0], product if picks is None else _taken(apart, picks, product, next(picked))))
    return functools.reduce(jnp.add, found)


def _product(apart: Apart, group: Sequence[Operand], operands: Sequence[Any], weights: Any) -> Any:
    """That of one group."""
    side, axis, product = apart.side, apart.axis, apart.product
    contracted, _ = product.params["dimension_numbers"]
    rows = contracted[1 - side][0]
    cut = [jax.lax.slice_in_dim(weights, p.first, p.first + p.count, axis=rows) for p in group]
    axes = [a for a in group[0].axes if a is not None]
    one_long = [i for i, a in enumerate(group[0].axes) if a is None]
    operands = [jnp.squeeze(x, one_long) for x in operands]
    own = axes.index(axis) + (group[0].picks is not None and _takes_one(group[0].picks))
    pair = [jnp.concatenate(operands, own), jnp.concatenate(cut, rows)]
    dims = [(own,), (rows,)]
    if side:
        pair, dims = pair[::-1], dims[::-1]
    return J.bind(_DOT, {**product.params, "dimension_numbers": (tuple(dims), ((), ()))}, *pair)[0]


def _taken(apart: Apart, picks: Equation, product: Any, picked: Any) -> Any:
    """The rows of a product, where those of its operand were taken: they are its first axis, or its last one."""
    at = product.ndim - 1 if apart.side else 0
    if picks.op is _SLICE:
        starts = (picked if i == at else jnp.zeros_like(picked) for i in range(product.ndim))
        sizes = tuple(1 if i == at else n for i, n in enumerate(product.shape))
        return jnp.squeeze(J.bind(_SLICE, {**picks.params, "slice_sizes": sizes}, product, *starts)[0], at)
    others = tuple(i for i in range(product.ndim) if i != at)
    if _takes_one(picks):
        others = tuple(range(product.ndim - 1))
    numbers = jax.lax.GatherDimensionNumbers(offset_dims=others, collapsed_slice_dims=(at,), start_index_map=(at,))
    sizes = tuple(1 if i == at else n for i, n in enumerate(product.shape))
    return J.bind(_GATHER, {**picks.params, "dimension_numbers": numbers, "slice_sizes": sizes}, product, picked)[0]


def _spread(apart: Apart, part: Operand, found: Any) -> Any:
    """As the whole product is."""
    side, axis, product = apart.side, apart.axis, apart.product
    axes = [a for a in part.axes if a is not None]
    free = [a for a in range(len(product.inputs[side].shape)) if a != axis]  # of the whole one, in the output's order
    shape = product.outputs[0].shape
    others = len(shape) - len(free)
    place = {a: i + (others if side else 0) for i, a in enumerate(free)}
    mine = [place[a] for a in axes if a != axis]
    along = [*range(others), *mine] if side else [*mine, *range(len(free), len(shape))]
    return jax.lax.broadcast_in_dim(found, shape, along)
