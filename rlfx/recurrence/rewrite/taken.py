"""What is taken of computed values is computed of what is taken: ``far[near]`` of distances to all entries of a memory.

An agent that looks for the nearest of many entries has no derivative of where they are, and one of what it takes there. As it is
written, the gradient of the few goes back through what was computed of all:

    far = sum((keys - h) ** 2, -1); far[near]   ->   sum((keys[near] - h) ** 2, -1)

Only where far fewer are taken than there are, and where what is computed was more numbers before it was added up: anything else
is fused with what is around it. Products of matrices stay: of all entries they are faster.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._axes import REDUCTIONS, Nest, nest_of, resized
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var
from rlfx.recurrence.rewrite.picks import axis_of_rows

_GATHER, _BROADCAST = map(J.primitive, ("gather", "broadcast_in_dim"))
_FILLS = jax.lax.GatherScatterMode.FILL_OR_DROP

#: What is computed again acts on entries one by one, or adds up what is theirs.
_COMPUTED = (J.ELEMENTWISE | REDUCTIONS.keys() | {_BROADCAST, *map(J.primitive, ("squeeze", "transpose"))}) - J.STOP_GRADIENT

#: So many times more entries than are taken, and numbers of an entry than are taken of it, at least.
_MORE, _NUMBERS = 8, 4


@dataclass(frozen=True)
class _At:
    """Entries of a value: which axis is theirs, and which are those of the rows."""

    value: Var
    axis: int
    rows: tuple[int, ...]


@dataclass
class _Chain:
    """What leads to a value that is taken from, back to what is not computed entry by entry.

    Attributes:
      computed: the equations that are evaluated of what is taken, in order, with the loop of the entries.
      leaves: what is taken from instead.
      others: their operands that have no axis of the entries.
    """

    definition: Mapping[Var, Equation]
    count: int
    computed: dict[_At, tuple[Equation, Nest, int, list[_At | Atom]]] = field(default_factory=dict)
    leaves: dict[_At, None] = field(default_factory=dict)
    others: dict[Var, None] = field(default_factory=dict)

    def add(self, at: _At) -> None:
        if at in self.computed or at in self.leaves:
            return
        found = self._operands(at)
        if found is None:
            self.leaves[at] = None
            return
        e, it, loop, operands = found
        for u in operands:
            if isinstance(u, _At):
                self.add(u)
            elif isinstance(u, Var):
                self.others[u] = None
        self.computed[at] = e, it, loop, operands

    def _operands(self, at: _At) -> tuple[Equation, Nest, int, list[_At | Atom]] | None:
        """How a value is computed entry by entry; None if it is not, or not in each row by what is of the row."""
        e = self.definition.get(at.value)
        if e is None or e.op not in _COMPUTED or not e.is_pointwise or e.is_ragged or e.has_effects:
            return None
        it = nest_of(e.op, e.params, [v.shape for v in e.inputs], [v.shape for v in e.outputs])
        if it is None:
            return None
        (axes,) = it.results
        loop, rows = axes[at.axis], [axes[a] for a in at.rows]
        if loop is None or loop not in it.free or None in rows:
            return None
        operands: list[_At | Atom] = []
        for u, theirs in zip(e.inputs, it.operands, strict=True):
            if loop not in theirs:
                operands.append(u)
            elif isinstance(u, Var) and all(row in theirs for row in rows):
                operands.append(_At(u, theirs.index(loop), tuple(theirs.index(row) for row in rows)))
            else:
                return None
        return (e, it, loop, operands) if any(isinstance(u, _At) for u in operands) else None

    @property
    def numbers(self) -> int:
        """The most numbers that are computed of a row's entries."""
        return max(math.prod(at.value.shape) for at in (*self.computed, *self.leaves))

    def taken(self, last: _At, mode: Any, given: Sequence[Any], places: Any) -> Any:
        """What ``last`` is of the entries at ``places[*rows, k]``; ``given``: the leaves, and the other operands."""
        known: dict[Any, Any] = dict(zip((*self.leaves, *self.others), given, strict=True))
        for at in self.leaves:
            known[at] = _entries(known[at], at, places, mode)
        for at, (e, it, loop, operands) in self.computed.items():
            params = resized(e.op, e.params, it, {loop: self.count})
            of = [known[u] if isinstance(u, _At | Var) else u.value for u in operands]
            (known[at],) = J.bind(e.op, params, *of)
        return known[last]


def with_taken_first(program: Program) -> Program:
    """The program with such equations; without any ``program``. Meaning-preserving; idempotent."""
    definition = program.definitions()

    def instead(e: Equation) -> tuple[Callable, Sequence[Atom]] | None:
        last = _taken_from(e)
        if last is None:
            return None
        x, places = e.inputs
        chain = _Chain(definition, places.shape[-2])
        chain.add(last)
        if not chain.computed or chain.numbers < _NUMBERS * math.prod(x.shape) or not _moves(chain):
            return None
        return functools.partial(_computed, chain, last, dict(e.params)), [
            *(at.value for at in chain.leaves), *chain.others, places,
        ]  # fmt: skip

    return exchanged(program, instead)


def _taken_from(e: Equation) -> _At | None:
    """Of an equation that takes a few entries in each row, of what."""
    if e.op is not _GATHER or e.is_ragged or any(J.symbolic_axes(v.shape) for v in (*e.inputs, *e.outputs)):
        return None
    (x, places), n = e.inputs, e.params["dimension_numbers"]
    ndim = len(x.shape)
    axis = axis_of_rows(n.start_index_map, (n.operand_batching_dims, n.start_indices_batching_dims), ndim)
    if axis is None or not isinstance(x, Var) or not jnp.issubdtype(x.dtype, jnp.floating):
        return None
    single = tuple(n.collapsed_slice_dims) == (axis,) and not n.offset_dims and len(places.shape) == ndim + 1
    if not single or set(e.params["slice_sizes"]) != {1} or places.shape[-2] * _MORE > x.shape[axis]:
        return None
    return _At(x, axis, tuple(a for a in range(ndim) if a != axis))


def _moves(chain: _Chain) -> bool:
    """Whether there may be a derivative by what is taken from."""
    return any(
        jnp.issubdtype(at.value.dtype, jnp.floating)
        and ((e := chain.definition.get(at.value)) is None or e.op not in J.STOP_GRADIENT)
        for at in chain.leaves
    )


def _computed(chain: _Chain, last: _At, params: dict, *values: Any) -> Any:
    """Of the gather's own output: rows first, then what is taken."""
    *given, places = values
    places = places[..., 0]
    found = jnp.moveaxis(chain.taken(last, params["mode"], given, places), last.axis, -1)
    if params["mode"] != _FILLS:
        return found
    fill = jnp.nan if params["fill_value"] is None else params["fill_value"]
    inside = (places >= 0) & (places < last.value.shape[last.axis])
    return jnp.where(inside, found, jnp.full_like(found, fill))


def _entries(x: Any, at: _At, places: Any, mode: Any) -> Any:
    """The entries of each row at ``places[*rows, k]``; the axes stay where they are."""
    order = (*at.rows, at.axis)
    rest = tuple(a for a in range(x.ndim) if a not in order)
    within = "clip" if mode == _FILLS else mode
    take = lambda x, places: x.at[places].get(mode=within, wrap_negative_indices=False)  # noqa: E731
    for _ in at.rows:
        take = jax.vmap(take)
    found = take(jnp.transpose(x, (*order, *rest)), places)
    return jnp.transpose(found, [(*order, *rest).index(a) for a in range(x.ndim)])
