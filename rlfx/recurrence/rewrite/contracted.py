"""Sums of products of what is spread, as products of matrices: ``(x[:, None] * y[None, :]).sum(-1)`` is ``x @ y.T``.

Cosines of all pairs of codes, scores of all pairs of agents: as they are often written, each pair has numbers of its own, which
XLA adds up one by one, and writes for the derivative. They are a product of two matrices, and so are their derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.bodies import Instead, exchanged_in_bodies
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program

_SUM, _TIMES, _BROADCAST, _TRANSPOSE = map(J.primitive, ("reduce_sum", "mul", "broadcast_in_dim", "transpose"))

#: The axes over which an operand is spread, and the one that is added up, have at least so many numbers.
_FEW = 4


@dataclass(frozen=True)
class Factor:
    """What is spread over the axes of a product.

    Attributes:
      value: before it is spread.
      along: for each of its axes that of the product; None: it has one number there.
    """

    value: Atom
    along: tuple[int | None, ...]

    @property
    def axes(self) -> frozenset[int]:
        return frozenset(a for a in self.along if a is not None)

    def sorted(self, x: Any) -> Any:
        """The value, its axes in the order of the product's, without those of one number."""
        order = sorted((a, i) for i, a in enumerate(self.along) if a is not None)
        alone = tuple(i for i, a in enumerate(self.along) if a is None)
        return jnp.transpose(x, (*(i for _, i in order), *alone)).reshape([x.shape[i] for _, i in order])


@dataclass(frozen=True)
class Contraction:
    """A sum of a product of two operands, each spread over axes of the other.

    Attributes:
      operands: of the product.
      over: its axes that are added up.
    """

    operands: tuple[Factor, Factor]
    over: frozenset[int]

    def __call__(self, *values: Any) -> Any:
        """The sum, as one product of matrices as exact as a sum of products is."""
        first, second = self.operands
        x, y = (operand.sorted(value) for operand, value in zip(self.operands, values, strict=True))
        place = lambda operand, axes: tuple(sorted(operand.axes).index(a) for a in sorted(axes))  # noqa: E731
        batched = (first.axes & second.axes) - self.over
        numbers = tuple(tuple(place(operand, axes) for operand in self.operands) for axes in (self.over, batched))
        out = jax.lax.dot_general(x, y, numbers, jax.lax.Precision.HIGHEST, x.dtype)  # type: ignore[arg-type]
        axes = (*sorted(batched), *sorted(first.axes - second.axes), *sorted(second.axes - first.axes))
        return jnp.transpose(out, [axes.index(a) for a in sorted(axes)])


def with_contractions(program: Program, fewest: int) -> Program:
    """The program with products of matrices for such sums of ``fewest`` products or more; without any it is ``program``.

    Meaning-preserving up to the order of sums. Those in bodies of ``rlfx.shared`` are, too.
    """

    def instead_in(definition: Mapping, users: Mapping, dims_of: Callable[[Atom], Any] = lambda v: ()) -> Instead:
        def instead(e: Equation) -> tuple[Callable, Sequence[Atom]] | None:
            found = _contraction(e, definition, fewest, dims_of)
            alone = found is not None and len(users.get(e.inputs[0], ())) == 1
            return (found, [o.value for o in found.operands]) if found is not None and alone else None

        return instead

    of_points = instead_in(program.definitions(), program.users, program.dims_of)
    return exchanged_in_bodies(exchanged(program, of_points), instead_in)


def _contraction(
    total: Equation, definition: Mapping, fewest: int, dims_of: Callable[[Atom], Any]
) -> Contraction | None:
    """The contraction that a sum is; None if it is none, or is too small.

    What all points share is spread over them: that of others need not be spread over axes of its own.
    """
    if total.op is not _SUM or (product := definition.get(total.inputs[0])) is None or product.op is not _TIMES:
        return None
    shape, dtype = total.inputs[0].shape, total.inputs[0].dtype
    if J.symbolic_axes(shape) or math.prod(shape) < fewest:
        return None
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 32:
        return None  # each product is rounded to few bits
    if any(len(v.shape) != len(shape) for v in product.inputs):
        return None  # a number times all of them
    factors = (_factor(v, len(shape), definition) for v in product.inputs)
    first, second = sorted(factors, key=lambda factor: not dims_of(factor.value))  # what all points share comes last
    over = frozenset(total.params["axes"])
    among = lambda axes: math.prod(shape[a] for a in axes)  # noqa: E731
    wanted = [over, second.axes - first.axes]
    if not dims_of(first.value) or dims_of(second.value):
        wanted.append(first.axes - second.axes)
    if not over <= first.axes & second.axes or min(map(among, wanted)) < _FEW:
        return None
    return Contraction((first, second), over)


def _factor(v: Atom, axes: int, definition: Mapping) -> Factor:
    """What is spread, and along which axes."""
    along: list[int | None] = list(range(axes))
    while (made := definition.get(v)) is not None and len(made.inputs) == 1:
        if made.op is _BROADCAST:
            along = [along[d] for d in made.params["broadcast_dimensions"]]
        elif made.op is _TRANSPOSE:
            order = made.params["permutation"]
            along = [along[order.index(i)] for i in range(len(order))]
        else:
            break
        (v,) = made.inputs
        along = [None if n == 1 else a for n, a in zip(v.shape, along, strict=True)]
    return Factor(v, tuple(None if n == 1 else a for n, a in zip(v.shape, along, strict=True)))

