"""Sums over pairs in a loop over one of the two: ``f(x[:, None], y[None, :]).sum(1)`` as the sum over j of ``f(x, y[j])``.

A loss over all pairs (of quantiles and targets, of points of two sets) has operands of N and M numbers, and N x M of every
value in between. XLA:CPU writes these for the derivative, and adds up the last axis number by number. A loop over j computes N
numbers at a time for all rows, which stay in the cache, and again for its derivative.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.active import data_of, float_inputs, reached_values
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var
from rlfx.recurrence.rewrite.lift import reaches
from rlfx.recurrence.rewrite.whole_sums import SUM, with_whole_sums

_BROADCAST = J.primitive("broadcast_in_dim")

#: Operations a pair, at least: XLA computes fewer where it adds them up.
_FEWEST = 3

#: Iterations of the loop, and numbers of each, at least; and how many iterations are one.
_FEW, _UNROLL = 8, 4


@dataclass(frozen=True)
class Pairs:
    """A sum of what is computed of all pairs, and of nothing else.

    Attributes:
      total: the sum.
      inside: the equations between, in order; each gives a value of the shape of all pairs.
      spread: those that spread an operand over all pairs.
      along: the axes of all pairs along which the numbers of each operand differ.
    """

    total: Equation
    inside: tuple[Equation, ...]
    spread: tuple[Equation, ...]
    along: Mapping[Atom, tuple[int, ...]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all pairs."""
        return self.total.inputs[0].shape

    @property
    def operands(self) -> tuple[Atom, ...]:
        """What the sum is a function of."""
        made = {v for e in (*self.spread, *self.inside) for v in e.outputs}
        return tuple(dict.fromkeys(v for e in (*self.spread, *self.inside) for v in e.inputs if v not in made))

    def expanded(self, values: Sequence[Any]) -> dict[Atom, Any]:
        """What the equations inside read: each operand, with all axes of the pairs, of one number where it is spread."""
        given = dict(zip(self.operands, values, strict=True))
        for e in self.spread:
            along = e.params["broadcast_dimensions"]
            others = [d for d in range(len(self.shape)) if d not in along]
            given[e.outputs[0]] = jnp.expand_dims(given[e.inputs[0]], others)
        return {v: x for v, x in given.items() if x.ndim in (0, len(self.shape))}

    def of_one(self, given: Mapping[Atom, Any], rest: tuple[int, ...]) -> Any:
        """What is added up, of one number of an axis; ``rest``: the other axes."""
        one = {v: jnp.broadcast_to(x, rest) if v.shape else x for v, x in given.items()}
        for e in self.inside:
            one[e.outputs[0]] = e.op.bind(*(one[v] for v in e.inputs), **e.params)
        return one[self.total.inputs[0]]


def with_loops_over_pairs(program: Program, fewest: int) -> Program:
    """The program with loops for sums over ``fewest`` pairs or more; without such sums ``program``.

    Meaning-preserving up to reassociation, with the derivative. Sums that a recurrence over t needs stay as they are: few rows
    are added up there at a time. A sum of such a sum is one with it if that leaves a better axis for the loop.
    """
    loop_of, of_cotangents = _loops(program, fewest)
    whole = with_whole_sums(program, lambda e: (found := loop_of(e)) is not None and of_cotangents(*found))
    if whole is not program:
        return with_loops_over_pairs(whole, fewest)

    def instead(e: Equation) -> tuple[Callable, Sequence[Atom]] | None:
        found = loop_of(e)
        return None if found is None else (functools.partial(_evaluated, *found), found[0].operands)

    return exchanged(program, instead)


def _loops(program: Program, fewest: int) -> tuple[Callable, Callable]:
    """``loop_of(equation)``: the pairs that a sum adds up, and the axis to loop over, if any; and ``of_cotangents(pairs, axis)``:
    whether the cotangent of an operand would be a sum of every iteration's numbers."""
    definition, users = program.definitions(), program.users
    varying = reached_values(program, float_inputs(program) - data_of(program))

    def of_cotangents(pairs: Pairs, axis: int) -> bool:
        return any(axis in axes and v in varying for v, axes in pairs.along.items())

    def loop_of(e: Equation) -> tuple[Pairs, int] | None:
        pairs = pairs_of(e, definition, users, fewest)
        if pairs is None or len(pairs.inside) < _FEWEST or (axis := _axis(pairs, of_cotangents)) is None:
            return None
        stays = "t" not in program.dims_of(e.outputs[0]) or reaches(e, e, definition)
        return None if stays else (pairs, axis)

    return loop_of, of_cotangents


def pairs_of(
    total: Equation,
    definition: Mapping,
    users: Mapping,
    fewest: int,
    is_spread: Callable[[Atom], bool] = lambda v: False,
) -> Pairs | None:
    """The pairs that a sum adds up; None if it is no such sum.

    Args:
      fewest: pairs.
      is_spread: whether a value of the shape of all pairs is one of those that are spread, over all points.
    """
    if total.op is not SUM:
        return None
    (whole,) = total.inputs
    shape = whole.shape
    if not isinstance(whole, Var) or J.symbolic_axes(shape) or math.prod(shape) < fewest:
        return None
    if not jnp.issubdtype(whole.dtype, jnp.floating) or jnp.finfo(whole.dtype).bits < 32:
        return None  # a sum of few bits is rounded once, not at every step
    inside: dict[Equation, None] = {}
    spread: dict[Equation, None] = {}
    operands: dict[Atom, tuple[int, ...]] = {}
    todo: list[Atom] = [whole]
    while todo:
        v = todo.pop()
        if v.shape != shape:
            operands[v] = _along(v)
            continue
        e = definition.get(v)
        if is_spread(v):
            operands[v] = _along(v)
            continue
        if e is None:
            return None
        if e.op is _BROADCAST and len(e.inputs) == 1 and math.prod(e.inputs[0].shape) < math.prod(shape):
            spread[e] = None
            operands[e.inputs[0]] = _along(e.inputs[0], e)
        elif e.op in J.ELEMENTWISE and len(e.outputs) == 1:
            todo += [] if e in inside else e.inputs
            inside[e] = None
        else:
            return None
    kept = {total, *inside}
    alone = all(u in kept for e in inside for v in e.outputs for u in users.get(v, ()))
    if not alone or not inside:
        return None
    order = {v: i for i, v in enumerate(definition)}
    return Pairs(total, tuple(sorted(inside, key=lambda e: order[e.outputs[0]])), tuple(spread), operands)


def _along(v: Atom, spread: Equation | None = None) -> tuple[int, ...]:
    """The axes of all pairs along which an operand's numbers differ."""
    names = range(len(v.shape)) if spread is None else spread.params["broadcast_dimensions"]
    return tuple(d for d, n in zip(names, v.shape, strict=True) if n > 1)


def _axis(pairs: Pairs, of_cotangents: Callable[[Pairs, int], bool]) -> int | None:
    """Which axis to loop over, of those that are added up and along which some operands differ, others do not.

    The cotangent of an operand that differs along it is a sum of every iteration's numbers; those of others are added up
    iteration by iteration. First, then, where no such operand is learnt (aims are given, what is drawn towards them is not); of
    these the shortest.
    """
    shape, differs = pairs.shape, [axes for axes in pairs.along.values() if axes]

    def fits(a: int) -> bool:
        both = {a in axes for axes in differs} == {True, False}
        return both and min(shape[a], math.prod(shape) // shape[a]) >= _FEW

    return min(filter(fits, pairs.total.params["axes"]), key=lambda a: (of_cotangents(pairs, a), shape[a]), default=None)


def _evaluated(pairs: Pairs, axis: int, *values: Any) -> Any:
    """The sum, of the operands at one point."""
    (whole,), rest = pairs.total.inputs, pairs.shape[:axis] + pairs.shape[axis + 1 :]
    first = {v: jnp.moveaxis(x, axis, 0) if x.shape else x for v, x in pairs.expanded(values).items()}
    moving = {v: x for v, x in first.items() if x.shape and x.shape[0] > 1}
    still = {v: x[0] if x.shape else x for v, x in first.items() if v not in moving}

    # Computed again for the derivative: that is less than to write it and to read it.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def of_one(*values: Any) -> Any:
        return pairs.of_one(dict(zip((*still, *moving), values, strict=True)), rest)

    add = lambda total, parts: (total + of_one(*still.values(), *parts), None)  # noqa: E731
    total, _ = jax.lax.scan(add, jnp.zeros(rest, whole.dtype), list(moving.values()), unroll=_UNROLL)
    axes = tuple(a - (a > axis) for a in pairs.total.params["axes"] if a != axis)
    return jnp.sum(total, axes, dtype=total.dtype) if axes else total
