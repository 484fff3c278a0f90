"""Squared distances between all pairs of two sets, ``sum((x[:, None] - y[None, :]) ** 2, -1)``, differentiated.

Of the codes of a batch to those of its goals (contrastive losses), of entities to each other, in many dimensions. XLA:CPU writes
all differences for the derivative, ``[n, m, d]``, multiplies them, and adds them up twice. Here distances are sums of the same
differences, and none is kept: their derivatives are products of the two sets (in a few dimensions those of ``distances.py``),

    d |x - y|^2 = 2 ((x - c) . dx + (y - c) . dy - (x - c) . dy - dx . (y - c)),   c: the mean of y

as in ``prototypes.py``, where what that costs is said: what differences would have is lost of a derivative only as far as pairs
are far from each other, beside the distances that count.
"""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.active import active_equations, float_inputs
from rlfx.recurrence.ir.bodies import Instead, exchanged_in_bodies
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var
from rlfx.recurrence.rewrite.distances import MOST, MOST_DIFFERENTIATED
from rlfx.recurrence.rewrite.prototypes import is_square

_SUM, _SUB, _BROADCAST = map(J.primitive, ("reduce_sum", "sub", "broadcast_in_dim"))


class _Side(NamedTuple):
    """One of the two sets: ``along``, the axes of all pairs that its own are."""

    points: Atom
    along: tuple[int, ...]


class _Between(NamedTuple):
    """Distances between all pairs: two sets, and the shape of their differences, ``[..., d]``."""

    x: _Side
    y: _Side
    shape: tuple[int, ...]

    def __call__(self, x: Any, y: Any) -> Any:
        """The distances, of the two sets at one point."""
        every = range(len(self.shape))
        sets = ((x, self.x), (y, self.y))
        return squared_distances(*(jnp.expand_dims(v, [a for a in every if a not in side.along]) for v, side in sets))


def with_distances_between(program: Program, fewest: int) -> Program:
    """The program with such distances of ``fewest`` numbers or more, in bodies of ``rlfx.shared``, too; without any ``program``.

    Meaning-preserving up to reassociation; idempotent. Those that nobody differentiates stay.
    """
    active = active_equations(program, float_inputs(program), (program.loss, *program.next_carry))

    def in_body(definition: Mapping[Var, Equation], users: Mapping[Var, Sequence[Equation]]) -> Instead:
        return lambda e: _instead(e, definition, users, fewest)

    of_points = in_body(program.definitions(), program.users)
    found = exchanged(program, lambda e: of_points(e) if e in active and program.dims_of(e.outputs[0]) else None)
    return exchanged_in_bodies(found, in_body, lambda e: e in active)


def _instead(e: Equation, definition: Mapping, users: Mapping, fewest: int) -> tuple[Callable, Sequence[Atom]] | None:
    """What computes a sum that is such distances, and of which values."""
    if e.op is not _SUM or e.is_ragged or not isinstance(e.inputs[0], Var):
        return None
    (whole,), shape = e.inputs, e.inputs[0].shape
    if J.symbolic_axes(shape) or tuple(e.params["axes"]) != (len(shape) - 1,) or whole.dtype != jnp.float32:
        return None
    square = definition.get(whole)
    if square is None or not is_square(square) or shape[-1] <= MOST_DIFFERENTIATED or math.prod(shape) < fewest:
        return None
    difference = definition.get(square.inputs[0])
    if difference is None or difference.op is not _SUB:
        return None
    if any(set(users.get(v, ())) != {u} for v, u in ((whole, e), (square.inputs[0], square))):
        return None
    x, y = (_side(v, definition) for v in difference.inputs)
    if not all(len(shape) - 1 in side.along and set(mine) > set(both) for side, mine, both in _varying(x, y, shape)):
        return None
    return _Between(x, y, shape), (x.points, y.points)


def _side(v: Atom, definition: Mapping[Var, Equation]) -> _Side:
    """What an operand of all pairs is spread from."""
    e = definition.get(v) if isinstance(v, Var) else None
    if e is None or e.op is not _BROADCAST or len(e.inputs) != 1:
        return _Side(v, tuple(range(len(v.shape))))
    return _Side(e.inputs[0], tuple(e.params["broadcast_dimensions"]))


def _varying(x: _Side, y: _Side, shape: Sequence[int]) -> list[tuple[_Side, list[int], list[int]]]:
    """Of both sets the axes along which its numbers differ, and those along which the numbers of both do."""
    mine = [[a for a, n in zip(s.along, s.points.shape, strict=True) if n > 1 and n == shape[a]] for s in (x, y)]
    both = [a for a in mine[0] if a in mine[1]]
    return [(x, mine[0], both), (y, mine[1], both)]


@jax.custom_jvp
def squared_distances(x: Any, y: Any) -> Any:
    """``[..., n, m]`` of ``x[..., n, 1, d]`` and ``y[..., 1, m, d]``: of differences, without a derivative by them.

    Example:
      >>> x, y = jnp.ones((2, 1, 3)), jnp.zeros((1, 4, 3))
      >>> squared_distances(x, y).tolist() == [[3.0] * 4] * 2
      True
    """
    if x.shape[-1] > MOST:
        return jnp.square(x - y).sum(-1)
    return functools.reduce(jnp.add, (jnp.square(x[..., i] - y[..., i]) for i in range(x.shape[-1])))


@functools.partial(squared_distances.defjvp, symbolic_zeros=True)
def _derivative(values: tuple, tangents: tuple) -> tuple:
    (x, y), found = values, squared_distances(*values)
    own = tuple(a for a in range(y.ndim - 1) if x.shape[a] == 1)
    centre = jax.lax.stop_gradient(y.mean(own, keepdims=True))
    moved = jnp.zeros_like(found)
    for (mine, change), other in zip(zip(values, tangents, strict=True), (y, x), strict=True):
        if not isinstance(change, jax.custom_derivatives.SymbolicZero):
            moved += 2.0 * (((mine - centre) * change).sum(-1) - _products(change, other - centre))
    return found, moved


def _products(a: Any, b: Any) -> Any:
    """``sum(a * b, -1)`` as a product of matrices: each has one number along the axes of the other."""
    names = string.ascii_letters[: a.ndim]
    kept = [[i for i in range(v.ndim) if v.shape[i] > 1 or w.shape[i] == 1] for v, w in ((a, b), (b, a))]
    letters, parts = zip(
        *(("".join(names[i] for i in k), v.reshape([v.shape[i] for i in k])) for v, k in zip((a, b), kept, strict=True)),
        strict=True,
    )
    return jnp.einsum(f"{letters[0]},{letters[1]}->{names[:-1]}", *parts)
