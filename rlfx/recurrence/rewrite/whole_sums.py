"""Sums of sums over pairs as one sum: ``f(x[:, None], y[None, :]).sum(0).mean()`` adds up both axes at once.

A loss over all pairs is mostly added up over one of the two and then, perhaps divided by a number, over the other. As one sum it
is a loop over either of the two (``pairs.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var

SUM = J.primitive("reduce_sum")
#: What a sum and a number may change places in; of a quotient the number is the second operand.
_MUL, _DIV = map(J.primitive, ("mul", "div"))

#: The equations that scale a sum, and the numbers by which they do.
Scales = list[tuple[Equation, Atom]]


def with_whole_sums(program: Program, wanted: Callable[[Equation], bool]) -> Program:
    """The program with one sum for each sum of a ``wanted`` one that nothing else reads; without such sums ``program``.

    Meaning-preserving up to the order of sums, with the derivative.

    Args:
      wanted: whether a sum may be one with that of its results.
    """
    definition, users = program.definitions(), program.users
    alone = lambda v: len(users.get(v, ())) == 1 and v not in program.returned  # noqa: E731

    def instead(e: Equation) -> tuple[Callable, Sequence[Atom]] | None:
        if e.op is not SUM or (found := _sum_of(e, definition, alone)) is None:
            return None
        inner, scales = found
        axes = _axes_of_both(inner, e)
        return (functools.partial(_whole, axes, scales), (inner.inputs[0], *(v for _, v in scales))) if wanted(inner) else None

    return exchanged(program, instead)


def _sum_of(e: Equation, definition: Mapping, alone: Callable[[Var], bool]) -> tuple[Equation, Scales] | None:
    """The sum whose results another one adds up, and by what they are multiplied or divided in between, the last one first."""
    scales: Scales = []
    (v,) = e.inputs
    while isinstance(v, Var) and alone(v) and (made := definition.get(v)) is not None:
        if made.op is SUM:
            return made, scales
        scaled = _scaled(made)
        if scaled is None:
            return None
        v, by = scaled
        scales.append((made, by))
    return None


def _scaled(e: Equation) -> tuple[Atom, Atom] | None:
    """What an equation multiplies, or divides, and the one number by which it does."""
    if e.op not in (_MUL, _DIV):
        return None
    x, by = e.inputs
    if e.op is _MUL and not x.shape:
        x, by = by, x
    return (x, by) if x.shape and not by.shape else None


def _axes_of_both(inner: Equation, outer: Equation) -> tuple[int, ...]:
    """The axes of what the inner sum adds up over which both do."""
    first = inner.params["axes"]
    left = [d for d in range(len(inner.inputs[0].shape)) if d not in first]
    return tuple(sorted((*first, *(left[a] for a in outer.params["axes"]))))


def _whole(axes: tuple[int, ...], scales: Scales, x: Any, *numbers: Any) -> Any:
    """The sum, at one point."""
    total = jnp.sum(x, axes, dtype=x.dtype)
    for (e, _), by in reversed(list(zip(scales, numbers, strict=True))):
        total = e.op.bind(total, by, **e.params)
    return total
