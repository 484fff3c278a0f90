"""Blocks of a batch: where the batch is in a value, what a rule says about an equation, and equations without calls."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J


class Axis(NamedTuple):
    """The batch of size N is in dimension ``dim``, whose size is ``outer * N * inner`` (row-major)."""

    dim: int
    outer: int = 1
    inner: int = 1

    def at(self, dim: int) -> Axis:
        return Axis(dim, self.outer, self.inner)

    def size(self, n: int) -> int:
        return self.outer * n * self.inner


class Partial(NamedTuple):
    """Every block has its own value; the whole is their sum."""


class Same(NamedTuple):
    """Every block has the same value."""


PARTIAL, SAME = Partial(), Same()


@dataclass(frozen=True)
class Block:
    """A block of the batch: its first example (a traced integer), and how many."""

    start: Any
    size: int
    is_first: Any


@dataclass(frozen=True)
class Fold:
    """A reduction over the batch that is no sum: ``start() -> state``, ``step(state, block, ins) -> state``."""

    start: Callable[[Sequence[Any]], Any]
    step: Callable[[Any, Block, Sequence[Any]], Any]
    finish: Callable[[Any], list]


@dataclass(frozen=True)
class Blockwise:
    """How an equation runs on one block.

    Attributes:
      demands: for each operand the axis along which a block of it is read, or None: all of it.
      outs: for each result where the batch is, or ``PARTIAL`` or ``SAME``; empty if ``fold`` computes them.
      run: ``(block, operands) -> results``.
      fold: a reduction over the batch; its ``start`` gets the operands that are demanded whole, None for the others.
    """

    demands: tuple[Axis | Partial | None, ...]
    outs: tuple[Axis | Partial | Same, ...]
    run: Callable[[Block, Sequence[Any]], list] | None = None
    fold: Fold | None = None


@dataclass(eq=False, frozen=True)
class Array:
    """A value of the program; equal only to itself."""

    aval: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)


@dataclass(eq=False, frozen=True)
class Const:
    """A literal."""

    value: Any
    aval: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.aval.shape)


Atom = Array | Const
_LINE = re.compile(r":\d+")


@dataclass(eq=False, frozen=True)
class Equation:
    op: Any
    params: dict
    ins: tuple[Atom, ...]
    outs: tuple[Array, ...]
    made_by: Any
    within: Any

    @property
    def source(self) -> str:
        """The user's line: of the equation, or of the call of a library function that it is a part of."""
        own = J.source_of(self.made_by)
        return own if _LINE.search(own) or self.within is None else J.source_of(self.within)

    def bind(self, ins: Sequence[Any], **changed: Any) -> list:
        return J.bind(self.op, {**self.params, **changed}, *ins)


@dataclass(frozen=True)
class Flat:
    """A program without calls: constants are its first inputs."""

    inputs: tuple[Array, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Atom, ...]


def flatten(jaxpr: Any) -> Flat:
    """``jaxpr`` with calls inlined and dead code removed; its constants come first among the inputs."""
    equations: list[Equation] = []

    def visit(made: Any, ins: list[Atom], within: tuple) -> tuple[Array, ...]:
        outs, call = tuple(Array(v.aval) for v in made.outvars), within[0] if within else None
        equations.append(Equation(made.primitive, dict(made.params), tuple(ins), outs, made, call))
        return outs

    consts = [Array(v.aval) for v in jaxpr.constvars]
    args = [Array(v.aval) for v in jaxpr.invars]
    literal, constant = (lambda atom: Const(atom.val, atom.aval)), (lambda value: Const(value, jax.typeof(value)))
    outputs = J.walk(jaxpr, consts, args, visit, literal=literal, constant=constant)
    needed = set(outputs)
    kept = []
    for equation in reversed(equations):
        if needed.intersection(equation.outs) or equation.made_by.effects:
            needed.update(equation.ins)
            kept.append(equation)
    return Flat((*consts, *args), tuple(kept[::-1]), tuple(outputs))


# -- blocks of arrays ------------------------------------------------------------------------------------------------


def take(x: Any, axis: Axis, block: Block) -> Any:
    """The block of ``x`` along ``axis``."""
    if axis.outer == 1:
        size = block.size * axis.inner
        if x.shape[axis.dim] == size:
            return x
        return jax.lax.dynamic_slice_in_dim(x, block.start * axis.inner, size, axis.dim)
    n = x.shape[axis.dim] // (axis.outer * axis.inner)
    split = x.reshape(*x.shape[: axis.dim], axis.outer, n, axis.inner, *x.shape[axis.dim + 1 :])
    part = jax.lax.dynamic_slice_in_dim(split, block.start, block.size, axis.dim + 1)
    return part.reshape(*x.shape[: axis.dim], axis.size(block.size), *x.shape[axis.dim + 1 :])


def join(parts: Sequence[Any], axis: Axis) -> Any:
    """The whole from consecutive blocks."""
    if len(parts) == 1:
        return parts[0]
    dim, outer, inner = axis

    def split(x: Any) -> Any:
        n = x.shape[dim] // (outer * inner)
        return x.reshape(*x.shape[:dim], outer, n, inner, *x.shape[dim + 1 :])

    if outer == 1:
        return jnp.concatenate(parts, axis=dim)
    whole = jnp.concatenate([split(p) for p in parts], axis=dim + 1)
    return whole.reshape(*parts[0].shape[:dim], math.prod(whole.shape[dim : dim + 3]), *parts[0].shape[dim + 1 :])


def unstack(stacked: Any, axis: Axis) -> Any:
    """The whole from blocks ``[blocks, ...]`` of one size."""
    dim, outer, inner = axis
    blocks, shape = stacked.shape[0], stacked.shape[1:]
    n = shape[dim] // (outer * inner)
    split = stacked.reshape(blocks, *shape[:dim], outer, n, inner, *shape[dim + 1 :])
    moved = jnp.moveaxis(split, 0, dim + 1)
    return moved.reshape(*shape[:dim], outer * blocks * n * inner, *shape[dim + 1 :])
