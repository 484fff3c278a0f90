"""How each primitive runs on a block of the batch: ``rule(equation, axes, n) -> Blockwise``, or None if it cannot.

``axes`` says for each operand where the batch (of size ``n``) is, ``None`` where it is not. An equation is given to its
rule when the batch is in at least one operand. A result without the batch is a sum over blocks (``PARTIAL``) or a fold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._axes import SUM, TABLE, Nest, extreme_of, nest_of, resized
from rlfx.recurrence.cpu.convolution import channels_last
from rlfx.transforms.blocks.flat import PARTIAL, Axis, Block, Blockwise, Equation, Fold

Axes = Sequence[Axis | None]
Rule = Callable[[Equation, Axes, int], Blockwise | None]

RULES: dict[Any, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for primitives by their public names."""

    def register(fn: Rule) -> Rule:
        RULES.update({getattr(J.primitives, name + "_p"): fn for name in names})
        return fn

    return register


def _first(axes: Axes) -> Axis:
    return next(a for a in axes if a is not None)


# -- from the table of axes ---------------------------------------------------------------------------------------------


def by_axes(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    """A block along the loop that the batch is in; None if that runs as a whole."""
    loops = loops_of(equation)
    if loops is None:
        return None
    found = ((loops.operands[i][axis.dim], axis) for i, axis in enumerate(axes) if axis is not None)
    return next((along(equation, loops, loop, axis) for loop, axis in found if loop is not None), None)


def loops_of(equation: Equation) -> Nest | None:
    """The table's row for an equation."""
    return nest_of(equation.op, equation.params, *([v.shape for v in side] for side in (equation.ins, equation.outs)))


def along(equation: Equation, loops: Nest, loop: int, axis: Axis) -> Blockwise | None:
    """An equation in blocks of one of its loops, which ``axis`` is in; None if it runs as a whole."""
    if loop in loops.pinned:
        return None
    demands, outs = (
        [axis.at(of.index(loop)) if loop in of else None for of in side] for side in (loops.operands, loops.results)
    )

    def run(block: Block, ins: Sequence) -> list:
        return J.bind(equation.op, resized(equation.op, equation.params, loops, {loop: axis.size(block.size)}), *ins)

    if loop not in loops.reduced:
        return Blockwise(tuple(demands), tuple(o for o in outs if o is not None), run)
    assert loops.monoid is not None
    if loops.monoid is SUM:
        return Blockwise(tuple(demands), (PARTIAL,), run)
    monoid, aval = loops.monoid, equation.outs[0].aval
    fold = Fold(
        start=lambda ins: jnp.full(aval.shape, monoid.identity(aval.dtype), aval.dtype),
        step=lambda state, block, ins: monoid.combine(state, run(block, ins)[0]),
        finish=lambda state: [state],
    )
    return Blockwise(tuple(demands), (), fold=fold)


RULES.update(dict.fromkeys(TABLE, by_axes))
RULES[J.OPTIMIZATION_BARRIER] = lambda equation, axes, n: Blockwise(
    tuple(axes), tuple(axes), lambda block, ins: equation.bind(ins)
)

# -- what is more than its axes ------------------------------------------------------------------------------------------


@rule("reshape")
def _reshape(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    """The batch may be a part of an axis, before and after."""
    axis, sizes = _first(axes), equation.params["new_sizes"]
    if equation.params["dimensions"] is not None:
        return None
    before = math.prod(equation.ins[0].shape[: axis.dim]) * axis.outer
    for dim, size in enumerate(sizes):
        outer, rest = divmod(before, math.prod(sizes[:dim]))
        if rest == 0 and size % (outer * n) == 0 and size > 0:
            return _reshaped(equation, axis, Axis(dim, outer, size // (outer * n)))
    return None


def _reshaped(equation: Equation, axis: Axis, out: Axis) -> Blockwise:
    first, last = equation.params["new_sizes"][: out.dim], equation.params["new_sizes"][out.dim + 1 :]

    def run(block: Block, ins: Sequence) -> list:
        return equation.bind(ins, new_sizes=(*first, out.size(block.size), *last))

    return Blockwise((axis,), (out,), run)


@rule("argmax", "argmin")
def _arg_reduction(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    axis, (dim,) = _first(axes), equation.params["axes"]
    if axis.dim != dim:
        return by_axes(equation, axes, n)
    if axis.outer != 1:
        return None
    largest = equation.op is J.primitive("argmax")
    dtype, aval = equation.ins[0].aval.dtype, equation.outs[0].aval
    reduce, better = (jnp.max, jnp.greater) if largest else (jnp.min, jnp.less)

    def start(ins: Sequence) -> Any:
        worst = extreme_of(dtype, not largest)
        return jnp.full(aval.shape, worst, dtype), jnp.zeros(aval.shape, aval.dtype)

    def step(state: Any, block: Block, ins: Sequence) -> Any:
        best, index = state
        here = equation.bind(ins)[0] + jnp.asarray(block.start * axis.inner).astype(aval.dtype)
        value = reduce(ins[0], axis=dim)
        wins = better(value, best)
        if jnp.issubdtype(dtype, jnp.floating):  # the first NaN wins
            wins = (wins | jnp.isnan(value)) & ~jnp.isnan(best)
        return jnp.where(wins, value, best), jnp.where(wins, here, index)

    return Blockwise((axis,), (), fold=Fold(start, step, lambda state: [state[1]]))


@rule("conv_general_dilated")
def _convolution(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    found, params = by_axes(equation, axes, n), equation.params
    return found and replace(found, run=lambda block, ins: [channels_last(ins[0], ins[1], params)])
