"""What the axes of a primitive's operands and results are to each other: the one table of it.

An equation is a loop nest: each axis of an operand or result is one of its loops, or is read (written) as a whole. A result
may be computed in pieces along a loop that is free; the partial results of a reduced one are combined; a pinned one must be
run as a whole. Blocks of a batch, shards of a placed program, masks of slices and positions follow from the table; what
depends on values (scatter, loops, custom derivatives) has rules of its own where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlfx import _jaxpr as J
from rlfx._axes import rules as r
from rlfx._axes.loops import AND, LOGSUMEXP, MAXIMUM, MINIMUM, OR, PRODUCT, SUM, XOR, Monoid, Nest


def _by_name(found: Mapping[str, Any]) -> dict[Any, Any]:
    return {J.primitive(name): value for name, value in found.items()}


#: Over the axes of the parameter ``axes``.
REDUCTIONS: dict[Any, Monoid] = _by_name({
    "reduce_sum": SUM, "reduce_prod": PRODUCT, "reduce_max": MAXIMUM, "reduce_min": MINIMUM, "reduce_and": AND,
    "reduce_or": OR, "reduce_xor": XOR,
})  # fmt: skip
#: Along the parameter ``axis``.
CUMULATIVE: dict[Any, Monoid] = _by_name({
    "cumsum": SUM, "cumprod": PRODUCT, "cummax": MAXIMUM, "cummin": MINIMUM, "cumlogsumexp": LOGSUMEXP,
})  # fmt: skip
ARGUMENTS = frozenset({J.primitive("argmax"), J.primitive("argmin")})

_STACKING = {"stack": r.stack, "unstack": r.unstack, "tile": r.tile}


def _names(*names: str) -> tuple:
    return tuple(map(J.primitive, names))


#: Their last axes are one matrix, or one signal.
MATRICES = frozenset(_names("cholesky", "triangular_solve", "lu", "qr", "eigh", "svd", "householder_product", "fft"))

#: The rule of each primitive.
TABLE: dict[Any, r.Rule] = {
    **dict.fromkeys((*J.ELEMENTWISE, *_names("name", "random_fold_in", "threefry2x32")), r.elementwise),
    **dict.fromkeys((J.RANDOM_WRAP, J.RANDOM_UNWRAP, *_names("random_bits", "random_split", "random_seed")), r.leading),
    **{op: r.reduction(monoid) for op, monoid in REDUCTIONS.items()},
    **{op: r.along("axis", monoid) for op, monoid in CUMULATIVE.items()},
    **dict.fromkeys(ARGUMENTS, r.along("axes", gone=True)),
    **dict.fromkeys(_names(
        "reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min", "select_and_scatter_add",
        "select_and_gather_add",
    ), r.windows),
    **dict.fromkeys(MATRICES, r.matrices),
    **_by_name({
        "broadcast_in_dim": r.broadcast, "iota": r.iota, "transpose": r.transpose, "reshape": r.reshape,
        "squeeze": r.without("dimensions"), "rev": r.along("dimensions"), "sort": r.along("dimension"),
        "concatenate": r.joined("dimension"), "slice": r.static_slice, "dynamic_slice": r.dynamic_slice,
        "dynamic_update_slice": r.dynamic_update, "pad": r.pad, "dot_general": r.dot, "conv_general_dilated": r.convolution,
        "gather": r.gather, "top_k": lambda params, *shapes: r.joined("axis")({"axis": -1, **params}, *shapes),
    }),
    J.SPLIT: r.joined("axis"),
    **{op: _STACKING[op.name] for op in J.STACKING},
}  # fmt: skip

#: Parameters that say how long the axes of an operand (0), or of the result (1), are.
_SIZED: dict[Any, tuple[str, int]] = _by_name({
    "broadcast_in_dim": ("shape", 1), "iota": ("shape", 1), "reshape": ("new_sizes", 1), "slice": ("limit_indices", 0),
    "dynamic_slice": ("slice_sizes", 1), "gather": ("slice_sizes", 0),
})  # fmt: skip


def nest_of(op: Any, params: Mapping, ins: Sequence[Sequence], outs: Sequence[Sequence]) -> Nest | None:
    """The loops of an equation, or None if its primitive has no place in the table.

    Args:
      ins, outs: the shapes of its operands and results; dimensions may be symbolic.

    Example:
      >>> numbers = {"dimension_numbers": (((1,), (0,)), ((), ()))}
      >>> found = nest_of(J.primitive("dot_general"), numbers, [(8, 3), (3, 5)], [(8, 5)])
      >>> found.operands, found.results, found.reduced
      (((0, 1), (1, 2)), ((0, 2),), frozenset({1}))
    """
    rule = TABLE.get(op)
    return None if rule is None else rule(params, ins, outs)


def resized(op: Any, params: Mapping, it: Nest, sizes: Mapping[int, Any]) -> dict:
    """The parameters of an equation of which some loops have other sizes.

    Example:
      >>> params = {"shape": (8, 3), "broadcast_dimensions": (0,), "sharding": None}
      >>> it = nest_of(J.primitive("broadcast_in_dim"), params, [(8,)], [(8, 3)])
      >>> resized(J.primitive("broadcast_in_dim"), params, it, {0: 4})["shape"]
      (4, 3)
    """
    if op not in _SIZED:
        return dict(params)
    name, of_result = _SIZED[op]
    (axes, *_) = it.results if of_result else it.operands

    def size(loop: int | None, n: Any) -> Any:
        return n if loop is None or n != it.sizes[loop] else sizes.get(loop, n)

    return {**params, name: tuple(map(size, axes, params[name]))}
