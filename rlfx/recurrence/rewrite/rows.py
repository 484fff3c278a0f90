"""Products with weights on the left, ``w @ x``, as products of rows with weights, ``x @ w.T``.

Weights are kept as ``[out, in]`` by some (equinox, PyTorch), and a timestep's product is one of a matrix and a vector. Of all
points it is ``[out, t, b]``, of which XLA turns the result, and the derivatives; and what knows products of rows (loops that are
differentiated by their weights, products of one value, parts of what is put together) would not know it. Weights are turned
once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var

_DOT, _TRANSPOSE = J.primitive("dot_general"), J.primitive("transpose")


def with_rows_first(program: Program) -> Program:
    """The program with such products; without any it is ``program``. Meaning-preserving, and idempotent.

    Those of several rows of a point, of which ``jax.vmap`` makes columns, are turned afterwards.
    """
    definition = program.definitions()

    def instead(e: Equation) -> tuple[Callable, Sequence[Atom]] | None:
        turned = e.op is _TRANSPOSE and isinstance(e.inputs[0], Var)
        product = definition.get(e.inputs[0]) if turned else e
        if product is None or not _has_weights_first(product, program):
            return None
        wanted = e.params["permutation"] if turned else range(len(e.outputs[0].shape))
        order = tuple(_rows_first(product).index(a) for a in wanted)
        w, x = product.inputs
        return functools.partial(_by_rows, product.params, order), (x, w)

    return exchanged(program, instead)


def _has_weights_first(e: Equation, program: Program) -> bool:
    """Whether it is a product of what all points share with rows of each of them."""
    if e.op is not _DOT or e.is_ragged or not program.dims_of(e.outputs[0]) or program.dims_of(e.inputs[0]):
        return False
    (_, contracted), (_, batched) = e.params["dimension_numbers"]
    axes = len(e.inputs[1].shape)
    return contracted == (axes - 1,) or len(contracted) + len(batched) == axes


def _rows_first(product: Equation) -> tuple[int, ...]:
    """The axes of a product as they are with its operands in the other order."""
    (contracted, _), (batched, _) = product.params["dimension_numbers"]
    several, of_weights = len(batched), len(product.inputs[0].shape) - len(contracted) - len(batched)
    axes = range(len(product.outputs[0].shape))
    return (*axes[:several], *axes[several + of_weights :], *axes[several : several + of_weights])


def _by_rows(params: Any, order: tuple[int, ...], x: Any, w: Any) -> Any:
    """The product of one point, its axes in some order: weights that it adds up along their last axis are turned."""
    (of_w, of_x), (batch_w, batch_x) = params["dimension_numbers"]
    precision = params["precision"]
    if of_w == (w.ndim - 1,) and w.ndim > 1 and w.ndim - 2 not in batch_w:
        w, of_w = jnp.swapaxes(w, -1, -2), (w.ndim - 2,)
    numbers = ((of_x, of_w), (batch_x, batch_w))
    turned = precision[::-1] if isinstance(precision, tuple) else precision
    (out,) = J.bind(_DOT, {**params, "dimension_numbers": numbers, "precision": turned}, x, w)
    return out if order == tuple(range(out.ndim)) else jnp.transpose(out, order)
