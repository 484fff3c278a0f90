"""Distances in a few dimensions, number by number: ``sum((x[:, None] - y[None, :]) ** 2, -1)`` for all pairs at once.

Which entries of a memory are near, how far a state is from others (novelty, entropy of particles): distances in a few dimensions
of many pairs, which choose, or reward, and have no derivative. XLA:CPU adds up the dimensions of one pair after the other, 1 ns a
number. Here each dimension is an array of all pairs, and their sum is one function of them: a quarter of the time (of 16), a
tenth (8), a half (32). Of those that are differentiated the derivative adds up all pairs for each dimension: a quarter to a half
of the time in up to six, 0.5 to 0.9 in eight; of more see ``between.py``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from rlfx.recurrence.analysis.active import active_equations, float_inputs
from rlfx.recurrence.ir.bodies import Instead, exchanged_in_bodies
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var
from rlfx.recurrence.rewrite.pairs import Pairs, pairs_of

#: Dimensions, at most: each is a few equations. With a derivative all pairs are added up twice for each dimension.
MOST, MOST_DIFFERENTIATED = 32, 8
#: Pairs of a point, at least: of fewer, numbers of all points are no long rows.
_FEWEST = 8


def with_distances(program: Program, fewest: int) -> Program:
    """The program with such sums over ``fewest`` numbers or more; without any it is ``program``.

    Meaning-preserving up to the order of sums. Those in bodies of ``rlfx.shared`` are, too.
    """
    active = active_equations(program, float_inputs(program), (program.loss, *program.next_carry))

    def of_points(e: Equation) -> tuple[Callable, Sequence[Atom]] | None:
        is_spread = lambda v: isinstance(v, Var) and not program.dims_of(v)  # over all points  # noqa: E731
        pairs = pairs_of(e, program.definitions(), program.users, fewest, is_spread)
        most = MOST_DIFFERENTIATED if e in active else MOST
        return _instead(pairs, most) if pairs is not None and program.dims_of(e.outputs[0]) else None

    def in_body(most: int, definition: Mapping, users: Mapping) -> Instead:
        return lambda e: _instead(pairs_of(e, definition, users, fewest), most)

    found = exchanged_in_bodies(exchanged(program, of_points), functools.partial(in_body, MOST), lambda e: e not in active)
    return exchanged_in_bodies(found, functools.partial(in_body, MOST_DIFFERENTIATED), lambda e: e in active)


def _instead(pairs: Pairs | None, most: int) -> tuple[Callable, Sequence[Atom]] | None:
    """What computes a sum over the last axis of at most so many numbers, and of which values."""
    return (functools.partial(_added, pairs), pairs.operands) if pairs is not None and _is_short(pairs, most) else None


def _is_short(pairs: Pairs, most: int) -> bool:
    """Whether it adds up the last axis alone, along which all that varies does."""
    shape, last = pairs.shape, len(pairs.shape) - 1
    varying = [axes for axes in pairs.along.values() if axes]
    fitting = tuple(pairs.total.params["axes"]) == (last,) and 1 < shape[-1] <= most and len(pairs.inside) > 1
    several = max(len(varying), len(pairs.spread)) > 1  # a set may be spread twice, for its distances to itself
    return fitting and math.prod(shape[:-1]) >= _FEWEST and several and all(last in axes for axes in varying)


def _added(pairs: Pairs, *values: Any) -> Any:
    """The sum, of the operands at one point."""
    *rest, count = pairs.shape
    first = {v: jnp.moveaxis(x, -1, 0) if x.shape else x for v, x in pairs.expanded(values).items()}
    at = lambda i: {v: x[i] if x.shape and len(x) > 1 else x[0] if x.shape else x for v, x in first.items()}  # noqa: E731
    return functools.reduce(jnp.add, (pairs.of_one(at(i), tuple(rest)) for i in range(count)))
