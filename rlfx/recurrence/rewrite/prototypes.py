"""Squared distances to what all points share, ``sum(((x - y) / scale) ** 2, -1)`` of ``x[d]`` and ``y[n, d]``, differentiated.

Of a Gaussian process to what it has seen, of a network of radial functions to its centres, of a code to its book. XLA:CPU writes
every difference for the derivative, and adds up a few numbers at a time. Here distances are added up dimension by dimension
(``distances.py``), from differences as before; their derivatives are products:

    d |x - y|^2 = 2 ((x - c) . dx - (y - c) @ dx),   c: the mean of y

Nothing is kept but x. What differences would have is lost of a derivative only as far as points are far from each other, beside
the distances that count: c is why it does not matter where they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.active import active_equations, float_inputs
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var

_SUM, _POWER, _SQUARE, _MUL, _DIV, _SUB, _BROADCAST = map(
    J.primitive, ("reduce_sum", "integer_pow", "square", "mul", "div", "sub", "broadcast_in_dim")
)

#: Dimensions, at most: each is a few equations; and prototypes, at least.
_MOST, _FEWEST = 32, 8


@dataclass(frozen=True)
class _Distances:
    """How squared distances are written.

    Attributes:
      x, y: one point's numbers ``[d]`` (or ``[1, ..., d]``), and those of all prototypes ``[n, d]``.
      scale: what differences are multiplied or divided by, of as many axes as the differences; None: nothing.
      by: with which operation.
      shape: of the differences, ``[..., n, d]``.
    """

    x: Atom
    y: Atom
    scale: Atom | None
    by: Any
    shape: tuple[int, ...]

    def __call__(self, x: Any, y: Any, *scale: Any) -> Any:
        """The distances ``[..., n]``."""
        ndim = len(self.shape)
        by = jnp.reshape(scale[0], scale[0].shape or (1,) * ndim) if scale else jnp.ones((1,) * ndim, x.dtype)
        found = _distances(self.by is _DIV, jnp.reshape(x, (x.shape[-1],)), y, by)
        return jnp.reshape(jnp.broadcast_to(found, self.shape[:-1]), self.shape[:-1])


def with_prototypes(program: Program, fewest: int) -> Program:
    """The program with such distances, of ``fewest`` numbers or more, where a gradient goes through them; without any
    ``program``. Meaning-preserving up to reassociation; idempotent.
    """
    definition, found = program.definitions(), {}
    for e in program.equations:
        far = _found(e, program, definition) if e.op is _SUM and not e.is_ragged else None
        if far is not None and math.prod(far.shape) >= fewest:
            found[e] = far, [far.x, far.y, *([] if far.scale is None else [far.scale])]
    if not found:
        return program
    active = active_equations(program, float_inputs(program), (program.loss, *program.next_carry))
    return exchanged(program, lambda e: found.get(e) if e in active else None)


def _found(e: Equation, program: Program, definition: Mapping[Var, Equation]) -> _Distances | None:
    """Such distances of one point, if a sum gives them."""
    (whole,) = e.inputs
    shape = whole.shape
    if J.symbolic_axes(shape) or tuple(e.params["axes"]) != (len(shape) - 1,) or whole.dtype != jnp.float32:
        return None
    square = definition.get(whole) if isinstance(whole, Var) else None
    if square is None or not is_square(square):
        return None
    d = definition.get(square.inputs[0])
    by = scale = None
    if d is not None and d.op in (_MUL, _DIV):
        u, scale = d.inputs
        if isinstance(scale, Var) and program.dims_of(scale) and d.op is _MUL:
            u, scale = scale, u
        if not isinstance(u, Var) or program.dims_of(scale) or len(scale.shape) not in (0, len(shape)):
            return None
        if len(scale.shape) and (scale.shape[-2] != 1 or scale.shape[-1] not in (1, shape[-1])):
            return None
        by, d = d.op, definition.get(u)
    if d is not None and d.op is _BROADCAST and tuple(d.params["broadcast_dimensions"]) == (len(shape) - 2, len(shape) - 1):
        d = definition.get(d.inputs[0])
    return None if d is None or d.op is not _SUB else _of_difference(d, scale, by, shape, program)


def is_square(e: Equation) -> bool:
    """Whether a value is multiplied by itself."""
    squared = e.op is _SQUARE or (e.op is _POWER and e.params["y"] == 2) or (e.op is _MUL and e.inputs[0] is e.inputs[1])
    return squared and isinstance(e.inputs[0], Var)


def _of_difference(d: Equation, scale: Atom | None, by: Any, shape: tuple[int, ...], program: Program) -> _Distances | None:
    """Of one point, and of prototypes that all points share; either may come first."""
    n, dims = shape[-2:] if len(shape) > 1 else (0, 0)
    if n < _FEWEST or not 1 < dims <= _MOST:
        return None
    for x, y in (d.inputs, d.inputs[::-1]):
        mine = program.dims_of(x) and x.shape[-1:] == (dims,) and math.prod(x.shape) == dims
        if mine and not program.dims_of(y) and y.shape == (n, dims):
            return _Distances(x, y, scale, by, shape)
    return None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _distances(divides: bool, x: Any, y: Any, scale: Any) -> Any:
    """``[..., n]`` of ``x[d]``, ``y[n, d]`` and ``scale[..., 1, d or 1]``: dimension by dimension."""
    return functools.reduce(jnp.add, (jnp.square(d) for d in _differences(divides, x, y, scale)))


def _differences(divides: bool, x: Any, y: Any, scale: Any) -> list:
    """Scaled, of each dimension ``[..., n]``."""
    at = lambda j: scale[..., j if scale.shape[-1] > 1 else 0]  # noqa: E731
    far = functools.partial(_unscaled, x, y, scale)
    return [far(j) / at(j) if divides else far(j) * at(j) for j in range(len(x))]


def _unscaled(x: Any, y: Any, scale: Any, j: int) -> Any:
    """The difference in one dimension, with as many axes as its scale."""
    return jnp.expand_dims(x[j] - y[:, j], tuple(range(scale.ndim - 2)))


@functools.partial(_distances.defjvp, symbolic_zeros=True)
def _derivative(divides: bool, values: tuple, tangents: tuple) -> tuple:
    (x, y, scale), (dx, dy, ds) = values, tangents
    is_zero = lambda v: isinstance(v, jax.custom_derivatives.SymbolicZero)  # noqa: E731
    found = _distances(divides, x, y, scale)
    moved = jnp.zeros_like(found)
    weight = (1.0 / scale**2 if divides else scale**2)[..., 0, :]  # [..., d or 1]
    centre = jax.lax.stop_gradient(y.mean(0))
    here, there = x - centre, y - centre[None]
    if not is_zero(dx):
        by = weight * _like(dx, weight)  # [..., d]
        moved += 2.0 * ((_like(here, weight) * by).sum(-1, keepdims=True) - by @ there.T)
    if not is_zero(dy):
        by = jnp.broadcast_to(weight, (*weight.shape[:-1], len(x)))
        moved -= 2.0 * ((by * _like(here, weight)) @ dy.T - by @ (there * dy).T)
    if not is_zero(ds):
        of = jnp.broadcast_to(-ds / scale if divides else ds, (*scale.shape[:-1], len(x)))
        for j, d in enumerate(_differences(divides, x, y, scale)):
            far = d if divides else _unscaled(x, y, scale, j)
            moved += 2.0 * d * far * of[..., j]
    return found, moved


def _like(v: Any, w: Any) -> Any:
    """A vector with as many axes as the weights."""
    return v.reshape((1,) * (w.ndim - 1) + v.shape)
