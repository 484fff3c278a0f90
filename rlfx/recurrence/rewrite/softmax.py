"""Attention divides once: ``softmax(x) @ v`` over a slice as ``(e @ v) / sum(e)`` with ``e = exp(x - max(x))``.

Divided first, every position of the slice is divided, and the derivative adds up over the slice once more. Divided last, it
is one division of what the product leaves. No ``e`` is above 1, so that the product is at most as many times larger as the
slice is long: in float16, where that may overflow, nothing changes. Where the slices are of what the product itself leads to
(a loop over t, acting), the softmax and its product are one equation, ``attend_p``: a timestep's softmax is so small there that
every mask and every pass counts, and that one needs the fewest.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.build import Builder, live
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var, with_equations
from rlfx.recurrence.language.domain import may_be_empty
from rlfx.recurrence.language.primitives import attend_p
from rlfx.recurrence.rewrite.lift import reaches

_DIV, _DOT, _EXP, _SUB = (J.primitive(p) for p in ("div", "dot_general", "exp", "sub"))
_SUM, _MAX, _BROADCAST = (J.primitive(p) for p in ("reduce_sum", "reduce_max", "broadcast_in_dim"))
#: What may stand between the maximum and its subtraction.
_UNCHANGED = frozenset({_BROADCAST, J.primitive("stop_gradient"), J.primitive("max")})


@dataclasses.dataclass(frozen=True)
class Softmax:
    """``weights / total``, where ``total`` is the sum of the weights along axes, one of which is of symbolic length.

    Attributes:
      scores: of which the weights are exponentials.
    """

    scores: Var
    weights: Var
    total: Var
    axes: tuple[int, ...]


def divide_last(program: Program) -> Program:
    """Divide products with a softmax, not the softmax. Meaning-preserving up to reassociation; idempotent."""
    definition = program.definitions()
    users = Counter(v for e in program.equations for v in e.inputs if isinstance(v, Var))
    build, equations = Builder(program), []
    for e in program.equations:
        equations += _divided_last(e, definition, users, build) or [e]
    if tuple(equations) == program.equations:
        return program
    return with_equations(program, live(tuple(equations), program))


def _divided_last(product: Equation, definition: Mapping, users: Mapping, build: Builder) -> list[Equation] | None:
    """The equations of a product with a softmax that nothing else uses; None if it is no such product."""
    if product.op is not _DOT or J.symbolic_axes(product.outputs[0].shape):
        return None
    (out,) = product.outputs
    contracted, batched = product.params["dimension_numbers"]
    for side, operand in enumerate(product.inputs):
        softmax = _softmax(operand, definition) if users.get(operand) == 1 else None
        if softmax is None or set(contracted[side]) != set(softmax.axes):
            continue
        if out.dtype != softmax.total.dtype or out.dtype == jnp.float16:
            continue
        axes = _axes_of_product(side, len(operand.shape), len(out.shape), softmax.axes, batched)
        if len(softmax.axes) == 1 and reaches(product, product, definition):
            params = {**product.params, "side": side, "axes": axes}
            inputs = (softmax.scores, product.inputs[1 - side])
            return [dataclasses.replace(product, op=attend_p, params=params, inputs=inputs)]
        bare = build.var(out.shape, out.dtype)
        inputs = tuple(softmax.weights if i == side else v for i, v in enumerate(product.inputs))
        build.equations = [dataclasses.replace(product, inputs=inputs, outputs=(bare,))]
        divisor = _not_of_nothing(softmax, product, build)
        build.call(lambda y, s: y / jax.lax.broadcast_in_dim(s, y.shape, axes), [bare, divisor], product)
        *others, division = build.equations
        return [*others, dataclasses.replace(division, outputs=(out,))]
    return None


def _not_of_nothing(softmax: Softmax, product: Equation, build: Builder) -> Atom:
    """The divisor: of a slice that is empty 1, so that the product is 0 and not NaN."""
    (dim,) = (d for a in softmax.axes if J.is_symbolic(d := softmax.weights.shape[a]))
    if not may_be_empty(build.program.domain, dim):
        return softmax.total
    size = build.var((), jnp.result_type(int))  # of 64 bits with jax_enable_x64
    build.equations.append(Equation(J.DIM_AS_VALUE, {"dim": dim}, (), (size,), product.where, product.scope))
    return build.call(lambda n, s: jnp.where(n <= 0, jnp.ones_like(s), s), [size, softmax.total], product)


def _axes_of_product(side: int, rank: int, out_rank: int, axes: tuple[int, ...], batched: Any) -> tuple[int, ...]:
    """Which axes of a product come from an operand's axes other than the contracted ones, in their order."""
    batch = list(batched[side])
    free = [a for a in range(rank) if a not in axes and a not in batch]
    first = out_rank - len(free) if side else len(batch)
    position = {a: i for i, a in enumerate(batch)} | {a: first + i for i, a in enumerate(free)}
    return tuple(position[a] for a in range(rank) if a not in axes)


def _softmax(atom: Atom, definition: Mapping[Atom, Equation]) -> Softmax | None:
    """The softmax that a value is, along axes of which one is of symbolic length."""
    division = definition.get(atom)
    if division is None or division.op is not _DIV:
        return None
    weights, divisor = division.inputs
    spread, exponential = definition.get(divisor), definition.get(weights)
    if spread is None or spread.op is not _BROADCAST or exponential is None or exponential.op is not _EXP:
        return None
    total = definition.get(spread.inputs[0])
    if total is None or total.op is not _SUM or total.inputs[0] is not weights:
        return None
    axes = tuple(total.params["axes"])
    others = tuple(a for a in range(len(weights.shape)) if a not in axes)
    symbolic = set(axes).intersection(J.symbolic_axes(weights.shape))
    if tuple(spread.params["broadcast_dimensions"]) != others or len(symbolic) != 1:
        return None
    scores = _scores(exponential, axes, definition)
    return None if scores is None else Softmax(scores, weights, total.outputs[0], axes)


def _scores(exponential: Equation, axes: tuple[int, ...], definition: Mapping[Atom, Equation]) -> Var | None:
    """The exponents, if the largest of them along ``axes`` is taken off all of them."""
    difference = definition.get(exponential.inputs[0])
    if difference is None or difference.op is not _SUB:
        return None
    x, largest = difference.inputs
    found = definition.get(largest)
    while found is not None and found.op in _UNCHANGED:
        known = [v for v in found.inputs if isinstance(v, Var)]
        found = definition.get(known[0]) if len(known) == 1 else None
    is_maximum = found is not None and found.op is _MAX and tuple(found.params["axes"]) == axes
    return x if is_maximum and isinstance(x, Var) and found.inputs[0] is x else None
