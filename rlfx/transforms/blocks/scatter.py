"""Rules for scatters: the gradients of shuffles, embeddings and ``take_along_axis``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlfx import _jaxpr as J
from rlfx.transforms.blocks.flat import PARTIAL, Axis, Blockwise, Equation, Fold
from rlfx.transforms.blocks.rules import Axes, rule


@rule("scatter", "scatter_add", "scatter_mul", "scatter_min", "scatter_max")
def scatter(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    """Updates of a block go into the block of the operand, or, one block after the other, into all of it."""
    numbers = equation.params["dimension_numbers"]
    operand, indices, updates = axes
    batching = [*zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)]
    shapes = [v.shape for v in equation.ins]
    scattered = [d for d in range(len(shapes[2])) if d not in numbers.update_window_dims]
    window = [
        d
        for d in range(len(shapes[0]))
        if d not in numbers.inserted_window_dims and d not in numbers.operand_batching_dims
    ]
    run = lambda block, ins: equation.bind(ins)  # noqa: E731

    if updates is not None and updates.dim in numbers.update_window_dims:
        operand = updates.at(window[list(numbers.update_window_dims).index(updates.dim)])
    elif updates is not None:
        indices = updates.at(scattered.index(updates.dim))
    elif indices is None and operand is not None and any(o == operand.dim for o, _ in batching):
        indices = operand.at(next(i for o, i in batching if o == operand.dim))

    if indices is not None:
        if indices.dim == len(shapes[1]) - 1:
            return None
        updates = indices.at(scattered[indices.dim])
        along = next((o for o, i in batching if i == indices.dim), None)
        if along is not None:
            return Blockwise((indices.at(along), indices, updates), (indices.at(along),), run)
        return Blockwise(
            (None, indices, updates),
            (),
            fold=Fold(
                start=lambda ins: ins[0],
                step=lambda state, block, ins: equation.bind([state, *ins[1:]])[0],
                finish=lambda state: [state],
            ),
        )
    assert operand is not None
    if operand.dim not in window or operand.dim in numbers.scatter_dims_to_operand_dims:
        return None
    updates = operand.at(int(numbers.update_window_dims[window.index(operand.dim)]))
    if shapes[2][updates.dim] != shapes[0][operand.dim]:
        return None
    return Blockwise((operand, None, updates), (operand,), run)


def partial_scatter(equation: Equation, kinds: Sequence[Any], n: int) -> Blockwise | None:
    """A scatter-add of a block into a sum over blocks."""
    if equation.op is not J.primitive("scatter_add") or kinds[0] is not PARTIAL or PARTIAL in kinds[1:]:
        return None
    if not any(isinstance(kind, Axis) for kind in kinds[1:]):
        return None
    found = scatter(equation, (None, *kinds[1:]), n)
    if found is None or found.fold is None:
        return None
    return Blockwise((PARTIAL, *found.demands[1:]), (PARTIAL,), lambda block, ins: equation.bind(ins))
