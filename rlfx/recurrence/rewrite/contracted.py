"""Sums of products of what is spread, as products of matrices: ``(x[:, None] * y[None, :]).sum(-1)`` is ``x @ y.T``.

Cosines of all pairs of codes, scores of all pairs of agents: as they are often written, each pair has numbers of its own, which
XLA adds up one by one, and writes for the derivative. They are a product of two matrices, and so are their derivatives.

So are sums of powers and quotients of such products, of which each operand's own are taken: the squared slopes of an example in
a matrix of weights, ``((x[:, None] * y[None, :]) ** 2 / s).sum()``, are ``x**2 @ (1 / s) @ y**2``. (Where an operand itself, and
not the product, is beyond 1e19 or below 1e-19, its square is infinite, or nothing: no network has such numbers beside others.)
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.bodies import Instead, exchanged_in_bodies
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program

_SUM, _TIMES, _OVER, _POWER, _DOT, _BROADCAST, _TRANSPOSE = map(
    J.primitive, ("reduce_sum", "mul", "div", "integer_pow", "dot_general", "broadcast_in_dim", "transpose")
)

#: The axes over which an operand is spread, and the one that is added up, have at least so many numbers.
_FEW = 4
#: Operands of a product, at most, and their powers.
_MOST = 4


@dataclass(frozen=True)
class Factor:
    """What is spread over the axes of a product.

    Attributes:
      value: before it is spread.
      along: for each of its axes that of the product; None: it has one number there.
      power: of the value.
    """

    value: Atom
    along: tuple[int | None, ...]
    power: int = 1

    @property
    def axes(self) -> frozenset[int]:
        return frozenset(a for a in self.along if a is not None)

    def sorted(self, x: Any) -> Any:
        """The value's power, its axes in the order of the product's, without those of one number."""
        order = sorted((a, i) for i, a in enumerate(self.along) if a is not None)
        alone = tuple(i for i, a in enumerate(self.along) if a is None)
        x = jnp.transpose(x, (*(i for _, i in order), *alone)).reshape([x.shape[i] for _, i in order])
        return x if self.power == 1 else jax.lax.integer_pow(x, self.power)


@dataclass(frozen=True)
class Contraction:
    """A sum of a product of operands, each spread over axes of the others.

    Attributes:
      operands: of the product.
      over: its axes that are added up.
      shape: of the sum.
    """

    operands: tuple[Factor, ...]
    over: frozenset[int]
    shape: tuple[int, ...]

    def __call__(self, *values: Any) -> Any:
        """The sum, as products of two matrices each, as exact as sums of products are; of those first that leave the least."""
        parts = [_Part(f.sorted(x), f.axes) for f, x in zip(self.operands, values, strict=True)]
        while len(parts) > 1:
            *others, x, y = min((self._ordered(parts, pair) for pair in itertools.combinations(parts, 2)), key=self._left)
            parts = [*others, _multiplied(x, y, self._gone(others))]
        return parts[0].value.reshape(self.shape)  # and axes of one number

    def _ordered(self, parts: Sequence[_Part], pair: tuple) -> list[_Part]:
        return [*(part for part in parts if part not in pair), *pair]

    def _gone(self, others: Sequence[_Part]) -> frozenset[int]:
        """What is added up behind a product of two."""
        return self.over.difference(*(part.axes for part in others))

    def _left(self, ordered: Sequence[_Part]) -> tuple[int, int]:
        """How many numbers the product of the last two has, after and before it is added up."""
        *others, x, y = ordered
        sizes, gone = x.sizes | y.sizes, self._gone(others)
        return math.prod(n for a, n in sizes.items() if a not in gone), math.prod(sizes.values())


@dataclass(frozen=True, eq=False)
class _Part:
    """An operand, or a product of some: its axes are those of the product, in order."""

    value: Any
    axes: frozenset[int]

    @property
    def sizes(self) -> dict[int, int]:
        return dict(zip(sorted(self.axes), self.value.shape, strict=True))

    def places(self, axes: frozenset[int]) -> tuple[int, ...]:
        return tuple(sorted(self.axes).index(a) for a in sorted(axes))

    def summed(self, over: frozenset[int]) -> _Part:
        over = over & self.axes
        return _Part(jnp.sum(self.value, self.places(over)), self.axes - over) if over else self


def _multiplied(x: _Part, y: _Part, gone: frozenset[int]) -> _Part:
    """The product of two, added up over the axes ``gone``, which no other operand has."""
    x, y = x.summed(gone - y.axes), y.summed(gone - x.axes)
    contracted, batched = x.axes & y.axes & gone, (x.axes & y.axes) - gone
    numbers = tuple((x.places(axes), y.places(axes)) for axes in (contracted, batched))
    out = jax.lax.dot_general(x.value, y.value, numbers, jax.lax.Precision.HIGHEST, x.value.dtype)  # type: ignore[arg-type]
    axes = (*sorted(batched), *sorted(x.axes - y.axes), *sorted(y.axes - x.axes))
    return _Part(jnp.transpose(out, [axes.index(a) for a in sorted(axes)]), frozenset(axes))


def with_contractions(program: Program, fewest: int) -> Program:
    """The program with products of matrices for such sums of ``fewest`` products or more; without any it is ``program``.

    Meaning-preserving up to the order of sums. Those in bodies of ``rlfx.shared`` are, too.
    """

    def instead_in(definition: Mapping, users: Mapping, dims_of: Callable[[Atom], Any] = lambda v: ()) -> Instead:
        def instead(e: Equation) -> tuple[Callable, Sequence[Atom]] | None:
            found = _contraction(e, definition, users, fewest, dims_of)
            return None if found is None else (found, [o.value for o in found.operands])

        return instead

    of_points = instead_in(program.definitions(), program.users, program.dims_of)
    return exchanged_in_bodies(exchanged(program, of_points), instead_in)


def _contraction(
    total: Equation, definition: Mapping, users: Mapping, fewest: int, dims_of: Callable[[Atom], Any]
) -> Contraction | None:
    """The contraction that a sum is; None if it is none, or is too small."""
    if total.op is not _SUM:
        return None
    shape, dtype = total.inputs[0].shape, total.inputs[0].dtype
    if J.symbolic_axes(shape) or math.prod(shape) < fewest:
        return None
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 32:
        return None  # each product is rounded to few bits
    axes = frozenset(a for a, n in enumerate(shape) if n > 1)
    factors = _factors(Factor(total.inputs[0], tuple(range(len(shape)))), definition, users, axes)
    factors = sorted(factors, key=lambda factor: not dims_of(factor.value))  # what all points share comes last
    over = frozenset(total.params["axes"])
    among = lambda axes: math.prod(shape[a] for a in axes)  # noqa: E731
    plain = len(factors) == 2 and all(f.power == 1 for f in factors)
    pays = _is_plain(factors, over, among, dims_of) if plain else _is_less(factors, over, among)
    found = 1 < len(factors) <= _MOST and pays and _every(factors) == axes
    return Contraction(tuple(factors), over, total.outputs[0].shape) if found else None


def _every(factors: Sequence[Factor]) -> frozenset[int]:
    return frozenset().union(*(f.axes for f in factors))


def _is_plain(factors: Sequence[Factor], over: frozenset[int], among: Callable, dims_of: Callable[[Atom], Any]) -> bool:
    """Whether a product of two is one of matrices.

    What all points share is spread over them: that of others need not be spread over axes of its own.
    """
    first, second = factors
    wanted = [over, second.axes - first.axes]
    if not dims_of(first.value) or dims_of(second.value):
        wanted.append(first.axes - second.axes)
    return over <= first.axes & second.axes and min(map(among, wanted)) >= _FEW


def _is_less(factors: Sequence[Factor], over: frozenset[int], among: Callable) -> bool:
    """Whether each operand of a product, of which powers are taken, is spread over others' axes."""
    return min(map(among, (over, *(_every(factors) - f.axes for f in factors)))) >= _FEW


def _factors(whole: Factor, definition: Mapping, users: Mapping, axes: frozenset[int]) -> list[Factor]:
    """What a product with such axes is of, each as it is before it is spread over one. What others read is made, and stays."""
    spread = _unspread(whole, definition)
    made = definition.get(spread.value)
    rule = None if made is None or spread.axes < axes else _PRODUCTS.get(made.op)
    operands = rule(made, spread) if rule and len(users.get(spread.value, ())) == 1 else None
    return [spread] if operands is None else [f for operand in operands for f in _factors(operand, definition, users, axes)]


def _both(e: Equation, whole: Factor, inverse: int = 1) -> list[Factor] | None:
    """Of a product, or a quotient; None if one is a number for all."""
    if any(len(v.shape) != len(whole.along) for v in e.inputs):
        return None
    first, second = (replace(whole, value=v) for v in e.inputs)
    return [first, replace(second, power=inverse * second.power)]


def _of_power(e: Equation, whole: Factor) -> list[Factor] | None:
    power = e.params["y"] * whole.power
    return [replace(whole, value=e.inputs[0], power=power)] if 0 < abs(power) <= _MOST else None


def _of_outer(e: Equation, whole: Factor) -> list[Factor] | None:
    """Of a product of matrices that adds nothing up."""
    contracted, batched = e.params["dimension_numbers"]
    if contracted[0] or any(v.dtype != e.outputs[0].dtype for v in e.inputs):
        return None
    along, found = iter(whole.along[len(batched[0]) :]), []
    for v, own in zip(e.inputs, batched, strict=True):
        axes = [whole.along[own.index(i)] if i in own else next(along) for i in range(len(v.shape))]
        found.append(replace(whole, value=v, along=tuple(axes)))
    return found


#: What a product is made by: ``(equation, what is spread) -> its operands``, or None.
_PRODUCTS: dict[Any, Callable[[Equation, Factor], list[Factor] | None]] = {
    _TIMES: _both,
    _OVER: functools.partial(_both, inverse=-1),
    _POWER: _of_power,
    _DOT: _of_outer,
}


def _unspread(factor: Factor, definition: Mapping) -> Factor:
    """What is spread, and along which axes."""
    v, along = factor.value, [None if n == 1 else a for n, a in zip(factor.value.shape, factor.along, strict=True)]
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
    return replace(factor, value=v, along=tuple(along))
