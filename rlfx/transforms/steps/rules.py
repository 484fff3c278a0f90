"""The scalar form of each class of primitives: a table from primitive to rule."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.transforms.steps import keys as F
from rlfx.transforms.steps.control import CONTROL_RULES
from rlfx.transforms.steps.indexing import INDEXING_RULES
from rlfx.transforms.steps.random import RANDOM_RULES
from rlfx.transforms.steps.scalarize import Dense, Interpreter, array_of, boxed, map_any, tidy, unsupported

DENSE_FROM = 48
"""Products with at least this many weights, and those that follow one, are left to a matrix product, where there is one."""


def elementwise(ip: Interpreter, eqn: Any, args: list) -> list:
    """One operation for each distinct tuple of operands; on whole arrays where an operand is kept as one."""
    aval, op = eqn.outvars[0].aval, eqn.primitive
    if any(isinstance(x, Dense) and not x.uniform for x in args) and all(_shaped_like(x, aval.shape) for x in args):
        return [Dense(J.bind(op, eqn.params, *[_dense(ip, x, aval.shape) for x in args])[0], aval.shape)]
    if J.is_key(aval) and op.name != "select_n":
        raise unsupported(eqn, "has no meaning on keys")
    return [ip.map(lambda *xs: ip.bind(op, eqn.params, *xs), args, aval)]


def _shaped_like(x: Any, shape: tuple) -> bool:
    return x.shape in ((), shape)


def _dense(ip: Interpreter, x: Any, shape: tuple) -> jax.Array:
    array = ip.dense(x)
    if array.ndim == len(x.shape):  # uniform: no block axis yet
        array = array.reshape(*x.shape, *(1 for _ in ip.target.block))
    elif x.shape == ():
        array = array.reshape(*(1 for _ in shape), *ip.target.block)
    return jnp.broadcast_to(array, (*shape, *ip.target.block))


def identity(ip: Interpreter, eqn: Any, args: list) -> list:
    return list(args)


def select_n(ip: Interpreter, eqn: Any, args: list) -> list:
    which, *cases = args
    aval = eqn.outvars[0].aval
    if any(isinstance(x, Dense) and not x.uniform for x in args) and all(_shaped_like(x, aval.shape) for x in args):
        return elementwise(ip, eqn, args)

    def one(index, *options):
        if isinstance(index, np.generic):
            return options[int(index)]
        if len(options) == 2 and index.dtype == bool:
            return ip.select(index, options[1], options[0])
        chosen = options[-1]
        for i in reversed(range(len(options) - 1)):
            chosen = ip.select(ip.equals(index, i), options[i], chosen)
        return chosen

    return [map_any(ip, one, [which, *cases], aval)]


_TRANSPOSE = J.primitive("transpose")
#: What gives the elements of an array in another order, also where the shape stays: of a square matrix, say.
_PERMUTING = (_TRANSPOSE, J.primitive("rev"))


def structural(ip: Interpreter, eqn: Any, args: list) -> list:
    """Moves elements: the primitive itself, run now on the numbers of the elements, says where each comes from."""
    if len(args) == 1 and isinstance(args[0], Dense):
        if eqn.primitive is _TRANSPOSE and args[0].uniform and ip.target.dense_matmul:  # weights stay weights
            return [Dense(jnp.transpose(args[0].array, eqn.params["permutation"]), eqn.outvars[0].aval.shape)]
        if eqn.primitive not in _PERMUTING and args[0].shape == eqn.outvars[0].aval.shape:
            return [args[0]]
    arrays = [ip.elements(x) for x in args]
    offsets = np.cumsum([0, *(x.size for x in arrays)])
    numbers = [np.arange(x.size, dtype=np.int32).reshape(x.shape) + o for x, o in zip(arrays, offsets, strict=False)]
    flat = [e for x in arrays for e in x.reshape(-1)]
    moved = ip.fold(eqn.primitive, eqn.params, numbers)
    return [
        tidy(array_of([flat[int(i)] for i in at.reshape(-1)], at.shape), v.aval)
        for at, v in zip(moved, eqn.outvars, strict=True)
    ]


_COMBINE = {
    "reduce_sum": jax.lax.add, "reduce_prod": jax.lax.mul, "reduce_max": jax.lax.max, "reduce_min": jax.lax.min,
    "reduce_and": jax.lax.bitwise_and, "reduce_or": jax.lax.bitwise_or, "reduce_xor": jax.lax.bitwise_xor,
    "cumsum": jax.lax.add, "cumprod": jax.lax.mul, "cummax": jax.lax.max, "cummin": jax.lax.min,
}  # fmt: skip


def reduction(ip: Interpreter, eqn: Any, args: list) -> list:
    """A fold over the reduced axes, in order."""
    combine, axes = _COMBINE[eqn.primitive.name], eqn.params["axes"]
    x, aval = ip.elements(args[0]), eqn.outvars[0].aval
    rows = np.moveaxis(x, axes, range(len(axes))).reshape(-1, math.prod(aval.shape))
    total = list(rows[0])
    for row in rows[1:]:
        total = [ip.apply(combine, a, b) for a, b in zip(total, row, strict=True)]
    return [tidy(array_of(total, aval.shape), aval)]


def arg_reduction(ip: Interpreter, eqn: Any, args: list) -> list:
    """The first index of the extreme element; a NaN counts as extreme."""
    (axis,), dtype = eqn.params["axes"], eqn.params["index_dtype"]
    greater = jax.lax.gt if eqn.primitive.name == "argmax" else jax.lax.lt
    rows = np.moveaxis(ip.elements(args[0]), axis, 0)
    floating = jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)

    def better(new, best):
        won = greater(new, best)
        return won | ((new != new) & (best == best)) if floating else won

    out = []
    for column in rows.reshape(rows.shape[0], -1).T:
        best, index = column[0], np.zeros((), dtype)[()]
        for i, new in enumerate(column[1:], 1):
            won = ip.apply(better, new, best)
            best, index = ip.select(won, new, best), ip.select(won, np.asarray(i, dtype)[()], index)
        out.append(index)
    return [tidy(array_of(out, eqn.outvars[0].aval.shape), eqn.outvars[0].aval)]


def cumulative(ip: Interpreter, eqn: Any, args: list) -> list:
    combine, axis = _COMBINE[eqn.primitive.name], eqn.params["axis"]
    x = np.moveaxis(ip.elements(args[0]), axis, 0)
    x = x[::-1] if eqn.params["reverse"] else x
    rows = [list(row) for row in x.reshape(x.shape[0], -1)]
    for before, row in itertools.pairwise(rows):
        row[:] = [ip.apply(combine, a, b) for a, b in zip(before, row, strict=True)]
    out = array_of([e for row in rows for e in row], x.shape)
    out = out[::-1] if eqn.params["reverse"] else out
    return [tidy(np.moveaxis(out, 0, axis), eqn.outvars[0].aval)]


def sort(ip: Interpreter, eqn: Any, args: list) -> list:
    """Odd-even transposition: stable, n (n - 1) / 2 exchanges."""
    axis, num_keys = eqn.params["dimension"], eqn.params["num_keys"]
    arrays = [boxed(np.moveaxis(ip.elements(x), axis, 0)) for x in args]
    n = arrays[0].shape[0]
    if n > 32:
        raise unsupported(eqn, f"sorts {n} elements: more than 32 would make too large a kernel")

    def before(*xs):  # the second operand strictly before the first, lexicographically in the keys
        total = jnp.zeros_like(xs[0], dtype=bool)
        for a, b in reversed([(xs[2 * i], xs[2 * i + 1]) for i in range(len(xs) // 2)]):
            total = (b < a) | ((b == a) & total)
        return total

    for phase in range(n):
        for i in range(phase % 2, n - 1, 2):
            for at in np.ndindex(*arrays[0].shape[1:]):
                pairs = [(x[(i, *at)], x[(i + 1, *at)]) for x in arrays]
                swap = ip.apply(before, *itertools.chain(*pairs[:num_keys]))
                for x, (a, b) in zip(arrays, pairs, strict=True):
                    x[(i, *at)], x[(i + 1, *at)] = ip.select(swap, b, a), ip.select(swap, a, b)
    return [tidy(np.moveaxis(x, 0, axis), v.aval) for x, v in zip(arrays, eqn.outvars, strict=True)]


def dot_general(ip: Interpreter, eqn: Any, args: list) -> list:
    (contract, batch), aval = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    lhs, rhs = args
    after_another = isinstance(lhs, Dense) and not lhs.uniform
    weights = isinstance(rhs, Dense) and rhs.uniform and (rhs.size >= DENSE_FROM or after_another)
    if ip.target.dense_matmul and weights and len(lhs.shape) == 1 and len(rhs.shape) == 2 and not batch[0]:
        kernel = rhs.array.T if contract[1] == (0,) else rhs.array
        out = jax.lax.dot_general(kernel, ip.dense(lhs), (((1,), (0,)), ((), ())), eqn.params["precision"])
        return [Dense(out.astype(aval.dtype), aval.shape)]
    positions = [_operand_positions(x.shape, c, b) for x, c, b in zip(args, contract, batch, strict=True)]
    left, right = (ip.elements(x).reshape(-1) for x in args)
    out = []
    for b in range(positions[0].shape[0]):
        for i, j in itertools.product(range(positions[0].shape[1]), range(positions[1].shape[1])):
            pairs = zip(positions[0][b, i], positions[1][b, j], strict=True)
            products = [_product(ip, left[p], right[q], aval.dtype) for p, q in pairs]
            kept = [x for x in products if not (isinstance(x, np.generic) and x == 0)]
            out.append(
                functools.reduce(lambda x, y: ip.apply(jax.lax.add, x, y), kept)
                if kept
                else np.zeros((), aval.dtype)[()]
            )
    return [tidy(array_of(out, aval.shape), aval)]


def _product(ip: Interpreter, x: Any, y: Any, dtype: Any) -> Any:
    if any(isinstance(v, np.generic) and v == 0 for v in (x, y)):
        return np.zeros((), dtype)[()]
    return ip.apply(lambda a, b: a.astype(dtype) * b.astype(dtype), x, y)


def _operand_positions(shape: tuple, contract: tuple, batch: tuple) -> np.ndarray:
    """Flat positions of an operand, as ``[batch, free, contracted]``."""
    free = [d for d in range(len(shape)) if d not in (*contract, *batch)]
    at = np.arange(math.prod(shape)).reshape(shape).transpose(*batch, *free, *contract)
    sizes = [math.prod(shape[d] for d in dims) for dims in (batch, free, contract)]
    return at.reshape(sizes)


_STRUCTURAL = F.named("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "slice", "rev",
                      "concatenate", "pad", "split", "tile", "stack", "unstack")  # fmt: skip
RULES: dict[Any, Any] = {
    **dict.fromkeys(J.ELEMENTWISE, elementwise),
    **dict.fromkeys([*F.named("bitcast_convert_type", "le_to", "lt_to", "eq_to", "mulhi")], elementwise),
    **dict.fromkeys(J.STOP_GRADIENT, identity),
    **dict.fromkeys([*F.named("optimization_barrier", "name", "sharding_constraint", "copy")], identity),
    J.varies_with: lambda ip, eqn, args: args[:1],
    **dict.fromkeys(_STRUCTURAL, structural),
    **dict.fromkeys(
        F.named("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor"),
        reduction,
    ),
    **dict.fromkeys(F.named("argmax", "argmin"), arg_reduction),
    **dict.fromkeys(F.named("cumsum", "cumprod", "cummax", "cummin"), cumulative),
    J.primitive("select_n"): select_n,
    J.primitive("sort"): sort,
    J.primitive("dot_general"): dot_general,
    **INDEXING_RULES,
    **CONTROL_RULES,
    **RANDOM_RULES,
}
"""Primitive → rule ``(interpreter, equation, arguments) -> outputs``."""
