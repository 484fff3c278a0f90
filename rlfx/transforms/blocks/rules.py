"""How each primitive runs on a block of the batch: ``rule(equation, axes, n) -> Blockwise``, or None if it cannot.

``axes`` says for each operand where the batch (of size ``n``) is, ``None`` where it is not. An equation is given to its
rule when the batch is in at least one operand. A result without the batch is a sum over blocks (``PARTIAL``) or a fold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from rlfx import _jaxpr as J
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


def _replaced(sizes: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


# -- one result for each example --------------------------------------------------------------------------------------


def elementwise(equation: Equation, axes: Axes, n: int) -> Blockwise:
    """Operands have the shape of the result, or are scalars, or have dimensions of size 1 that are repeated."""
    axis = _first(axes)
    demands = repeated(equation, axis)
    return Blockwise(demands, (axis,) * len(equation.outs), lambda block, ins: equation.bind(ins))


def repeated(equation: Equation, axis: Axis) -> tuple[Axis | None, ...]:
    """Which operands of an elementwise operation have the axis."""
    size = equation.outs[0].shape[axis.dim]
    return tuple(axis if v.shape and v.shape[axis.dim] == size else None for v in equation.ins)


RULES.update(dict.fromkeys(J.ELEMENTWISE | {J.RANDOM_WRAP, J.RANDOM_UNWRAP}, elementwise))
RULES[J.OPTIMIZATION_BARRIER] = lambda equation, axes, n: Blockwise(
    tuple(axes), tuple(axes), lambda block, ins: equation.bind(ins)
)


@rule("random_bits", "random_split", "random_seed")
def _prefix(equation: Equation, axes: Axes, n: int) -> Blockwise:
    return Blockwise((axes[0],), (axes[0],), lambda block, ins: equation.bind(ins))


@rule("random_fold_in", "threefry2x32")
def _broadcasting(equation: Equation, axes: Axes, n: int) -> Blockwise:
    axis = _first(axes)
    size = axis.size(n)
    demands = tuple(axis if len(v.shape) > axis.dim and v.shape[axis.dim] == size else None for v in equation.ins)
    return Blockwise(demands, (axis,) * len(equation.outs), lambda block, ins: equation.bind(ins))


@rule("broadcast_in_dim")
def _broadcast_in_dim(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    axis = _first(axes)
    out = axis.at(int(equation.params["broadcast_dimensions"][axis.dim]))
    shape = equation.params["shape"]

    def run(block: Block, ins: Sequence) -> list:
        return equation.bind(ins, shape=_replaced(shape, out.dim, out.size(block.size)))

    return Blockwise(tuple(axes), (out,), run)


@rule("reshape")
def _reshape(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    axis = _first(axes)
    before = math.prod(equation.ins[0].shape[: axis.dim]) * axis.outer
    sizes = equation.params["new_sizes"]
    for dim, size in enumerate(sizes):
        outer, rest = divmod(before, math.prod(sizes[:dim]))
        if rest == 0 and size % (outer * n) == 0 and size > 0:
            out = Axis(dim, outer, size // (outer * n))
            run = lambda block, ins: equation.bind(  # noqa: E731
                ins, new_sizes=_replaced(sizes, dim, out.size(block.size))
            )
            return Blockwise((axis,), (out,), run) if equation.params["dimensions"] is None else None
    return None


@rule("transpose")
def _transpose(equation: Equation, axes: Axes, n: int) -> Blockwise:
    axis = _first(axes)
    out = axis.at(tuple(equation.params["permutation"]).index(axis.dim))
    return Blockwise((axis,), (out,), lambda block, ins: equation.bind(ins))


def _without(axis: Axis, dims: Sequence[int]) -> Axis:
    return axis.at(axis.dim - sum(d < axis.dim for d in dims))


@rule("squeeze")
def _squeeze(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    axis = _first(axes)
    dims = equation.params["dimensions"]
    if axis.dim in dims:
        return None
    return Blockwise((axis,), (_without(axis, dims),), lambda block, ins: equation.bind(ins))


@rule("slice")
def _slice(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    axis, params = _first(axes), equation.params
    size = axis.size(n)
    strides = params["strides"] or (1,) * len(params["limit_indices"])
    if (params["start_indices"][axis.dim], params["limit_indices"][axis.dim], strides[axis.dim]) != (0, size, 1):
        return None

    def run(block: Block, ins: Sequence) -> list:
        return equation.bind(ins, limit_indices=_replaced(params["limit_indices"], axis.dim, axis.size(block.size)))

    return Blockwise((axis,), (axis,), run)


@rule("dynamic_slice")
def _dynamic_slice(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    axis, sizes = axes[0], equation.params["slice_sizes"]
    if axis is None or sizes[axis.dim] != axis.size(n):
        return None

    def run(block: Block, ins: Sequence) -> list:
        return equation.bind(ins, slice_sizes=_replaced(sizes, axis.dim, axis.size(block.size)))

    return Blockwise((axis, *(None,) * (len(axes) - 1)), (axis,), run)


@rule("dynamic_update_slice")
def _dynamic_update_slice(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    axis = axes[0] or axes[1]
    if axis is None or equation.ins[1].shape[axis.dim] != axis.size(n):
        return None
    return Blockwise((axis, axis, *(None,) * (len(axes) - 2)), (axis,), lambda block, ins: equation.bind(ins))


@rule("pad")
def _pad(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    axis = axes[0]
    if axis is None or tuple(equation.params["padding_config"][axis.dim]) != (0, 0, 0):
        return None
    return Blockwise((axis, None), (axis,), lambda block, ins: equation.bind(ins))


def _along_another(param: str) -> Rule:
    """An operation along one dimension, which must not be the batch."""

    def apply(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
        axis = _first(axes)
        dims = equation.params[param]
        if axis.dim in (dims if isinstance(dims, Sequence) else (dims,)):
            return None
        return Blockwise(
            (axis,) * len(equation.ins), (axis,) * len(equation.outs), lambda block, ins: equation.bind(ins)
        )

    return apply


rule("concatenate", "sort")(_along_another("dimension"))
rule("rev")(_along_another("dimensions"))
rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")(_along_another("axis"))
RULES[J.SPLIT] = _along_another("axis")


@rule("top_k")
def _top_k(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    axis = _first(axes)
    along = equation.params.get("axis", len(equation.ins[0].shape) - 1)
    if axis.dim == along % len(equation.ins[0].shape):
        return None
    return Blockwise((axis,), (axis,) * len(equation.outs), lambda block, ins: equation.bind(ins))


@rule("cholesky", "triangular_solve", "lu", "qr", "eigh", "svd", "householder_product", "fft")
def _matrices(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    """Leading dimensions are independent."""
    axis = _first(axes)
    inner = len(equation.params["fft_lengths"]) if "fft_lengths" in equation.params else 2
    if any(axis.dim >= len(v.shape) - inner for v in equation.ins):
        return None
    return Blockwise((axis,) * len(axes), (axis,) * len(equation.outs), lambda block, ins: equation.bind(ins))


# -- windows -----------------------------------------------------------------------------------------------------------


@rule(
    "reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter_add",
    "select_and_gather_add",
)  # fmt: skip
def _windows(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    axis, params = _first(axes), equation.params
    trivial = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1, "window_dilation": 1}
    if any(k in params and params[k][axis.dim] not in (v, [*v] if k == "padding" else v) for k, v in trivial.items()):
        return None
    demands = tuple(axis if v.shape else None for v in equation.ins)
    return Blockwise(demands, (axis,) * len(equation.outs), lambda block, ins: equation.bind(ins))


# -- reductions ------------------------------------------------------------------------------------------------------


def _lowest(dtype: Any) -> Any:
    if dtype == jnp.bool_:
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _highest(dtype: Any) -> Any:
    if dtype == jnp.bool_:
        return True
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


#: primitive -> (identity, how blocks combine)
_REDUCTIONS: dict[Any, tuple[Callable[[Any], Any], Callable]] = {
    J.primitive("reduce_sum"): (lambda dtype: 0, jnp.add),
    J.primitive("reduce_prod"): (lambda dtype: 1, jnp.multiply),
    J.primitive("reduce_max"): (_lowest, jnp.maximum),
    J.primitive("reduce_min"): (_highest, jnp.minimum),
    J.primitive("reduce_and"): (lambda dtype: -1 if dtype != jnp.bool_ else True, jnp.bitwise_and),
    J.primitive("reduce_or"): (lambda dtype: 0, jnp.bitwise_or),
    J.primitive("reduce_xor"): (lambda dtype: 0, jnp.bitwise_xor),
}


def _reduction(equation: Equation, axes: Axes, n: int) -> Blockwise:
    axis, dims = _first(axes), equation.params["axes"]
    run = lambda block, ins: equation.bind(ins)  # noqa: E731
    if axis.dim not in dims:
        return Blockwise((axis,), (_without(axis, dims),), run)
    if equation.op is J.primitive("reduce_sum"):
        return Blockwise((axis,), (PARTIAL,), run)
    identity, combine = _REDUCTIONS[equation.op]
    aval = equation.outs[0].aval
    return Blockwise(
        (axis,),
        (),
        fold=Fold(
            start=lambda ins: jnp.full(aval.shape, identity(aval.dtype), aval.dtype),
            step=lambda state, block, ins: combine(state, equation.bind(ins)[0]),
            finish=lambda state: [state],
        ),
    )


RULES.update(dict.fromkeys(_REDUCTIONS, _reduction))


@rule("argmax", "argmin")
def _arg_reduction(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    axis, (along,) = _first(axes), equation.params["axes"]
    if axis.dim != along:
        return Blockwise((axis,), (_without(axis, (along,)),), lambda block, ins: equation.bind(ins))
    if axis.outer != 1:
        return None
    largest = equation.op is J.primitive("argmax")
    dtype, aval = equation.ins[0].aval.dtype, equation.outs[0].aval
    reduce, better = (jnp.max, jnp.greater) if largest else (jnp.min, jnp.less)

    def start(ins: Sequence) -> Any:
        worst = (_lowest if largest else _highest)(dtype)
        return jnp.full(aval.shape, worst, dtype), jnp.zeros(aval.shape, aval.dtype)

    def step(state: Any, block: Block, ins: Sequence) -> Any:
        best, index = state
        here = equation.bind(ins)[0] + jnp.asarray(block.start * axis.inner).astype(aval.dtype)
        value = reduce(ins[0], axis=along)
        wins = better(value, best)
        if jnp.issubdtype(dtype, jnp.floating):  # the first NaN wins
            wins = (wins | jnp.isnan(value)) & ~jnp.isnan(best)
        return jnp.where(wins, value, best), jnp.where(wins, here, index)

    return Blockwise((axis,), (), fold=Fold(start, step, lambda state: [state[1]]))


# -- contractions ----------------------------------------------------------------------------------------------------


@rule("dot_general")
def _dot_general(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    (contract, batch) = equation.params["dimension_numbers"]
    contract, batch = [[list(map(int, d)) for d in pair] for pair in (contract, batch)]
    shapes = [v.shape for v in equation.ins]
    run = lambda block, ins: equation.bind(ins)  # noqa: E731
    side = 0 if axes[0] is not None else 1
    axis, other = axes[side], 1 - side
    assert axis is not None
    for dims, result in ((batch, True), (contract, False)):
        if axis.dim in dims[side]:
            k = dims[side].index(axis.dim)
            demands = [axis, axis.at(dims[other][k])]
            return Blockwise(tuple(demands if side == 0 else demands[::-1]), (axis.at(k) if result else PARTIAL,), run)
    free = [d for d in range(len(shapes[side])) if d not in contract[side] and d not in batch[side]]
    before = 0 if side == 0 else len(shapes[0]) - len(contract[0]) - len(batch[0])
    out = axis.at(len(batch[0]) + before + free.index(axis.dim))
    return Blockwise((axis, None) if side == 0 else (None, axis), (out,), run)


@rule("conv_general_dilated")
def _convolution(equation: Equation, axes: Axes, n: int) -> Blockwise | None:
    numbers, params = equation.params["dimension_numbers"], equation.params
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    run = lambda block, ins: [channels_last(ins[0], ins[1], params)]  # noqa: E731
    groups = (params["feature_group_count"], params["batch_group_count"])
    x, w = axes
    if groups[1] == 1 and x is not None and x.dim == lhs[0]:
        return Blockwise((x, None), (x.at(out[0]),), run)
    if groups == (1, 1) and (x is None or x.dim == lhs[1]) and (w is None or w.dim == rhs[1]):
        axis = _first(axes)
        return Blockwise((axis.at(lhs[1]), axis.at(rhs[1])), (PARTIAL,), run)
    if groups == (1, 1) and x is None and w is not None and w.dim == rhs[0]:
        return Blockwise((None, w), (w.at(out[1]),), run)
    return None
