"""Products with weights on the left, ``w @ x``, as products of rows with weights, ``x @ w.T``.

Weights are kept as ``[out, in]`` by some (equinox, PyTorch), and a timestep's product is one of a matrix and a vector. Of all
points it is ``[out, t, b]``, of which XLA turns the result, and the derivatives; and what knows products of rows (loops that are
differentiated by their weights, products of one value, parts of what is put together) would not know it. Weights are turned
once, those of the user's loops before these (where a loop turns them itself, ``invariant.py`` does so).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.build import exchanged, with_calls
from rlfx.recurrence.ir.interpret import inlined_body, scanned
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var
from rlfx.recurrence.rewrite.unrolled import has_more_than

_DOT, _TRANSPOSE = J.primitive("dot_general"), J.primitive("transpose")

#: Equations of a loop's body, at most, that are traced once more: a physics engine has thousands.
_MOST = 1024

#: Columns are multiplied by so few weights (those that mix eight entities) as fast as rows.
_FEW = 64


def with_rows_first(program: Program) -> Program:
    """The program with such products, in ``lax.scan``, too; without any it is ``program``. Meaning-preserving, and idempotent.

    Those of several rows of a point, of which ``jax.vmap`` makes columns, are turned afterwards.
    """
    definition = program.definitions()

    def instead(e: Equation) -> tuple[Callable, Sequence[Atom]] | None:
        if _has_columns(e, program):
            return (lambda x, w: _of_columns(e.params, x, w)), e.inputs
        turned = e.op is _TRANSPOSE and isinstance(e.inputs[0], Var)
        product = definition.get(e.inputs[0]) if turned else e
        if product is None or not _has_weights_first(product, program):
            return None
        order = _order(product.params, product.inputs, e.params["permutation"] if turned else None)
        w, x = product.inputs
        return (lambda x, w: _by_rows(product.params, order, x, _turned(product.params, w))), (x, w)

    return with_calls(exchanged(program, instead), lambda e: _Loop.of(e, program))


@dataclass(frozen=True, eq=False)
class _Loop:
    """A ``lax.scan`` with such products of weights that it only reads.

    Attributes:
      params: of the equation.
      body: its body.
      found: these equations of the body, and which of its constants the weights are.
    """

    params: Mapping[str, Any]
    body: Any
    found: Mapping[Any, int]

    @classmethod
    def of(cls, e: Equation, program: Program) -> _Loop | None:
        if e.op is not J.SCAN or e.is_ragged or e.has_effects or not any(map(program.dims_of, e.outputs)):
            return None
        if has_more_than(_MOST, e.params["jaxpr"].jaxpr):
            return None
        count, _ = J.scan_counts(dict(e.params))
        shared = [i for i, v in enumerate(e.inputs[:count]) if v.shape and not program.dims_of(v)]
        if not shared:
            return None
        body = inlined_body(e.params["jaxpr"])
        weights = {body.jaxpr.invars[i]: i for i in shared}

        def fits(eqn: Any) -> bool:
            if eqn.primitive is not _DOT or any(map(J.is_literal, eqn.invars)):
                return False
            w, x = eqn.invars
            return w in weights and x not in weights and _adds_up_rows(eqn.params, x.aval)

        found = {eqn: weights[eqn.invars[0]] for eqn in body.jaxpr.eqns if fits(eqn)}
        return cls(e.params, body, found) if found else None

    def __call__(self, *operands: Any) -> list[Any]:
        """The loop's outputs."""
        turned = {eqn: _turned(eqn.params, operands[i]) for eqn, i in self.found.items()}

        def rule(eqn: Any, operands: list) -> list | None:
            if eqn not in turned:
                return None
            order = _order(eqn.params, [v.aval for v in eqn.invars])
            return [_by_rows(eqn.params, order, operands[1], turned[eqn])]

        return scanned(self.params, self.body, operands, rule)


def _has_weights_first(e: Equation, program: Program) -> bool:
    """Whether it is a product of what all points share with rows of each of them, or with columns, ``w[out, in] @ x[in, n]``."""
    if e.op is not _DOT or e.is_ragged or not program.dims_of(e.outputs[0]) or program.dims_of(e.inputs[0]):
        return False
    (contracted, _), (batched, _) = e.params["dimension_numbers"]
    columns = not batched and len(contracted) == 1 and _are_several(e.inputs[0])
    return columns or _adds_up_rows(e.params, e.inputs[1])


def _has_columns(e: Equation, program: Program) -> bool:
    """Whether it is a product of the columns of each point, ``[in, n]``, with weights."""
    if e.op is not _DOT or e.is_ragged or not program.dims_of(e.inputs[0]) or program.dims_of(e.inputs[1]):
        return False
    x, w = e.inputs
    (contracted, _), (batched, _) = e.params["dimension_numbers"]
    columns = not batched and len(contracted) == 1 and contracted[0] < len(x.shape) - 1
    return columns and _are_several(w)


def _are_several(w: Any) -> bool:
    """Whether columns are multiplied by enough weights that turning them pays."""
    return len(w.shape) > 1 and math.prod(w.shape) > _FEW


def _of_columns(params: Mapping, x: Any, w: Any) -> Any:
    """Such a product, as one of rows."""
    ((axis,), of_w), batched = params["dimension_numbers"]
    changed = {"dimension_numbers": (((x.ndim - 1,), of_w), batched)}
    return J.bind(_DOT, {**params, **changed}, jnp.moveaxis(x, axis, -1), w)[0]


def _adds_up_rows(params: Mapping, x: Any) -> bool:
    """Whether it adds up the last axis of the second operand, or all of its axes."""
    (_, contracted), (_, batched) = params["dimension_numbers"]
    return contracted == (len(x.shape) - 1,) or len(contracted) + len(batched) == len(x.shape)


def _order(params: Mapping, operands: Sequence[Any], wanted: Sequence[int] | None = None) -> tuple[int, ...]:
    """Where the axes of a product are with its operands in the other order; ``wanted``: of its transpose."""
    (contracted, _), (batched, _) = params["dimension_numbers"]
    several = len(batched)
    of_weights, of_rows = (len(v.shape) - len(contracted) - several for v in operands)
    axes = range(several + of_weights + of_rows)
    others = (*axes[:several], *axes[several + of_weights :], *axes[several : several + of_weights])
    return tuple(map(others.index, axes if wanted is None else wanted))


def _turns(params: Mapping, w: Any) -> bool:
    """Whether weights are added up along their last axis, and have others."""
    (contracted, _), (batched, _) = params["dimension_numbers"]
    return contracted == (w.ndim - 1,) and w.ndim > 1 and w.ndim - 2 not in batched


def _turned(params: Mapping, w: Any) -> Any:
    """Weights as rows are multiplied by them."""
    return jnp.swapaxes(w, -1, -2) if _turns(params, w) else w


def _by_rows(params: Mapping, order: tuple[int, ...], x: Any, w: Any) -> Any:
    """The product of one point with weights that are turned, its axes in some order."""
    (of_w, of_x), (batch_w, batch_x) = params["dimension_numbers"]
    of_w = (w.ndim - 2,) if _turns(params, w) else of_w
    if len(of_x) == 1 and not batch_x:
        x, of_x = jnp.moveaxis(x, of_x[0], -1), (x.ndim - 1,)
    precision = params["precision"]
    changed = {
        "dimension_numbers": ((of_x, of_w), (batch_x, batch_w)),
        "precision": precision[::-1] if isinstance(precision, tuple) else precision,
    }
    (out,) = J.bind(_DOT, {**params, **changed}, x, w)
    return out if order == tuple(range(out.ndim)) else jnp.transpose(out, order)
