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
from rlfx.transforms import _keys as F
from rlfx.transforms._scalar_random import RANDOM_RULES
from rlfx.transforms._scalarize import Dense, Interpreter, array_of, boxed, is_known, tidy, unsupported

DENSE_FROM = 48
"""Products with at least this many weights, and those that follow one, are left to a matrix product, where there is one."""


def elementwise(ip: Interpreter, eqn: Any, args: list) -> list:
    """One operation for each distinct tuple of operands; on whole arrays where an operand is kept as one."""
    aval, op = eqn.outvars[0].aval, eqn.primitive
    if any(isinstance(x, Dense) and not x.uniform for x in args) and all(_shaped_like(x, aval.shape) for x in args):
        return [Dense(J.bind(op, eqn.params, *[_dense(ip, x, aval.shape) for x in args])[0], aval.shape)]
    if F.is_key(aval) and op.name != "select_n":
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

    return [_map_any(ip, one, [which, *cases], aval)]


def _map_any(ip: Interpreter, fn: Any, args: list, aval: Any) -> np.ndarray:
    """Like ``Interpreter.map``, for elements that may be keys."""
    columns = [np.broadcast_to(ip.elements(x), aval.shape).reshape(-1) for x in args]
    return tidy(array_of([fn(*row) for row in zip(*columns, strict=True)], aval.shape), aval)


def structural(ip: Interpreter, eqn: Any, args: list) -> list:
    """Moves elements: the primitive itself, run now on the numbers of the elements, says where each comes from."""
    if len(args) == 1 and isinstance(args[0], Dense) and args[0].shape == eqn.outvars[0].aval.shape:
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
    "scatter": lambda old, new: new, "scatter-add": jax.lax.add, "scatter_add": jax.lax.add,
    "scatter-mul": jax.lax.mul, "scatter_mul": jax.lax.mul, "scatter-max": jax.lax.max, "scatter_max": jax.lax.max,
    "scatter-min": jax.lax.min, "scatter_min": jax.lax.min,
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


# -- indexing --------------------------------------------------------------------------------------------------------


def _clamped(ip: Interpreter, start: Any, high: int) -> Any:
    if isinstance(start, np.generic):
        return np.int32(min(max(int(start), 0), high))
    if np.issubdtype(start.dtype, np.unsignedinteger) or start.dtype == bool:
        start = ip.apply(lambda s: s.astype(jnp.int32), start)
    return ip.apply(lambda s: jnp.clip(s, 0, high).astype(jnp.int32), start)


def _window(ip: Interpreter, x: np.ndarray, starts: list, sizes: tuple) -> np.ndarray:
    """``x[start:start + size]`` in each dimension, for starts within bounds, one dimension after the other."""
    for axis, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        places = x.shape[axis] - size + 1
        options = [np.take(x, range(s, s + size), axis) for s in range(places)]
        if isinstance(start, np.generic) or places == 1:
            x = options[int(start) if places > 1 else 0]
            continue
        chosen = options[-1]
        for s in reversed(range(places - 1)):
            here = ip.equals(start, s)
            flat = [ip.select(here, a, b) for a, b in zip(options[s].reshape(-1), chosen.reshape(-1), strict=True)]
            chosen = array_of(flat, chosen.shape)
        x = chosen
    return x


def dynamic_slice(ip: Interpreter, eqn: Any, args: list) -> list:
    x, starts = ip.elements(args[0]), [ip.elements(s)[()] for s in args[1:]]
    sizes = eqn.params["slice_sizes"]
    starts = [_clamped(ip, s, d - n) for s, d, n in zip(starts, x.shape, sizes, strict=True)]
    return [tidy(_window(ip, x, starts, sizes), eqn.outvars[0].aval)]


def dynamic_update_slice(ip: Interpreter, eqn: Any, args: list) -> list:
    x, update = ip.elements(args[0]), ip.elements(args[1])
    starts = [_clamped(ip, ip.elements(s)[()], d - n) for s, d, n in zip(args[2:], x.shape, update.shape, strict=True)]
    return [tidy(_write(ip, x, update, starts, lambda old, new: new), eqn.outvars[0].aval)]


def _write(ip: Interpreter, x: np.ndarray, update: np.ndarray, starts: list, combine: Any) -> np.ndarray:
    """``x`` with ``update`` combined in at ``starts``; a window that sticks out anywhere is dropped."""
    out = boxed(x)
    for offset in np.ndindex(*update.shape):
        for at in np.ndindex(*x.shape):
            first = [p - o for p, o in zip(at, offset, strict=True)]
            fits = all(0 <= s <= d - n for s, d, n in zip(first, x.shape, update.shape, strict=True))
            here = ip.logical_and([ip.equals(s, p) for s, p in zip(starts, first, strict=True)]) if fits else None
            if here is None or (isinstance(here, np.generic) and not here):
                continue
            new = update[offset]
            mixed = new if isinstance(new, tuple) else ip.apply(combine, out[at], new)
            out[at] = ip.select(here, mixed, out[at])
    return out


def gather(ip: Interpreter, eqn: Any, args: list) -> list:
    """One dynamic slice for each index vector; where the mode says so, a fill value outside."""
    d, sizes, mode = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], eqn.params["mode"]
    x, indices, aval = ip.elements(args[0]), ip.elements(args[1]), eqn.outvars[0].aval
    out = np.empty(aval.shape, object)
    batch_axes = [a for a in range(len(aval.shape)) if a not in d.offset_dims]
    for where in np.ndindex(*indices.shape[:-1]):
        starts = _full_starts(
            x.ndim, indices[where], where, d.start_index_map, d.operand_batching_dims, d.start_indices_batching_dims
        )
        inside = [_clamped(ip, s, n - k) for s, n, k in zip(starts, x.shape, sizes, strict=True)]
        window = _window(ip, x, inside, sizes)
        window = window.reshape(
            [k for a, k in enumerate(sizes) if a not in (*d.collapsed_slice_dims, *d.operand_batching_dims)]
        )
        if mode == jax.lax.GatherScatterMode.FILL_OR_DROP:
            window = _filled(ip, eqn, window, starts, [n - k for n, k in zip(x.shape, sizes, strict=True)])
        at: list = [slice(None)] * out.ndim
        for axis, i in zip(batch_axes, where, strict=True):
            at[axis] = i
        out[tuple(at)] = window if window.ndim else window[()]
    return [tidy(out, aval)]


def _full_starts(rank: int, vector: np.ndarray, where: tuple, index_map: tuple, batching: tuple, sources: tuple):
    starts: list = [np.int32(0)] * rank
    for axis, start in zip(index_map, vector, strict=True):
        starts[axis] = start
    for axis, source in zip(batching, sources, strict=True):
        starts[axis] = np.int32(where[source])
    return starts


def _filled(ip: Interpreter, eqn: Any, window: np.ndarray, starts: list, highs: list) -> np.ndarray:
    if F.is_key(eqn.outvars[0].aval):
        return window
    dtype = eqn.outvars[0].aval.dtype
    fill = eqn.params["fill_value"]
    fill = _default_fill(dtype) if fill is None else fill
    valid = ip.logical_and(
        [ip.apply(lambda s, high=high: (s >= 0) & (s <= high), s) for s, high in zip(starts, highs, strict=True)]
    )
    return array_of([ip.select(valid, e, np.asarray(fill, dtype)[()]) for e in window.reshape(-1)], window.shape)


def _default_fill(dtype: Any) -> Any:
    kinds = {"f": np.nan, "c": np.nan, "b": True}
    if dtype.kind in "iu":
        return np.iinfo(dtype).max if dtype.kind == "u" else np.iinfo(dtype).min
    return kinds.get(dtype.kind, np.nan)


def scatter(ip: Interpreter, eqn: Any, args: list) -> list:
    d, mode, combine = eqn.params["dimension_numbers"], eqn.params["mode"], _COMBINE[eqn.primitive.name]
    x, indices, updates = (ip.elements(a) for a in args)
    inserted = (*d.inserted_window_dims, *d.operand_batching_dims)
    scatter_axes = [a for a in range(updates.ndim) if a not in d.update_window_dims]
    for where in np.ndindex(*indices.shape[:-1]):
        at: list = [slice(None)] * updates.ndim
        for axis, i in zip(scatter_axes, where, strict=True):
            at[axis] = i
        window = np.asarray(updates[tuple(at)], object) if updates.ndim > len(where) else array_of([updates[where]], ())
        window = np.expand_dims(window, inserted) if inserted else window
        starts = _full_starts(
            x.ndim,
            indices[where],
            where,
            d.scatter_dims_to_operand_dims,
            d.operand_batching_dims,
            d.scatter_indices_batching_dims,
        )
        if mode == jax.lax.GatherScatterMode.CLIP:
            starts = [_clamped(ip, s, n - k) for s, n, k in zip(starts, x.shape, window.shape, strict=True)]
        x = _write(ip, x, window, starts, combine)
    return [tidy(x, eqn.outvars[0].aval)]


# -- control flow ----------------------------------------------------------------------------------------------------


def cond(ip: Interpreter, eqn: Any, args: list) -> list:
    """Every branch, then a selection; one branch, where the index is known."""
    index, branches = ip.elements(args[0])[()], [J.body_of(b) for b in eqn.params["branches"]]
    if isinstance(index, np.generic):
        return ip.run(*branches[min(max(int(index), 0), len(branches) - 1)], args[1:])
    outs = [[ip.elements(x) for x in ip.run(*b, args[1:])] for b in branches]
    chosen = outs[-1]
    for i in reversed(range(len(branches) - 1)):
        here = ip.equals(index, i) if i else ip.apply(lambda x: x <= 0, index)
        chosen = [
            _map_any(ip, lambda a, b, here=here: ip.select(here, a, b), [x, y], v.aval)
            for x, y, v in zip(outs[i], chosen, eqn.outvars, strict=True)
        ]
    return chosen


def scan(ip: Interpreter, eqn: Any, args: list) -> list:
    """Unrolled where it is short; else a loop over the elements of its carry."""
    q = eqn.params
    jaxpr, consts_of = J.body_of(q["jaxpr"])
    consts, carry, xs = _split_at(args, q["num_consts"], q["num_carry"])
    if not xs and len(eqn.outvars) == q["num_carry"] and q["length"] > ip.target.loop:
        return _loop(ip, eqn, lambda c: ip.run(jaxpr, consts_of, [*consts, *c]), carry)
    if q["length"] > 64:
        raise unsupported(eqn, f"runs {q['length']} iterations with inputs or outputs of their own")
    xs, ys = [ip.elements(x) for x in xs], []
    order = range(q["length"])
    for i in reversed(order) if q["reverse"] else order:
        out = ip.run(jaxpr, consts_of, [*consts, *carry, *[_row(x, i) for x in xs]])
        carry, y = out[: q["num_carry"]], out[q["num_carry"] :]
        ys.append([ip.elements(v) for v in y])
    ys = ys[::-1] if q["reverse"] else ys
    stacked = (
        [np.stack([boxed(y) for y in column]) for column in zip(*ys, strict=True)]
        if ys
        else [np.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars[q["num_carry"] :]]
    )
    return [*carry, *[tidy(y, v.aval) for y, v in zip(stacked, eqn.outvars[q["num_carry"] :], strict=True)]]


def _row(x: np.ndarray, i: int) -> np.ndarray:
    row = x[i]
    return row if isinstance(row, np.ndarray) else array_of([row], ()) if x.dtype == object else np.asarray(row)


def _split_at(args: list, *sizes: int) -> list[list]:
    bounds = list(itertools.accumulate(sizes, initial=0))
    return [*[args[a:b] for a, b in itertools.pairwise(bounds)], args[bounds[-1] :]]


def _loop(ip: Interpreter, eqn: Any, body: Any, carry: list) -> list:
    arrays = [ip.elements(x) for x in carry]
    layout = [(x.shape, v.aval) for x, v in zip(arrays, eqn.outvars, strict=True)]

    def pack(xs):
        return [
            ip.full(e)
            for x in xs
            for key in ip.elements(x).reshape(-1)
            for e in (key if isinstance(key, tuple) else (key,))
        ]

    def unpack(flat):
        out, flat = [], iter(flat)
        for shape, aval in layout:
            words = math.prod(F.key_shape(aval)) if F.is_key(aval) else 0
            take = [tuple(next(flat) for _ in range(words)) if words else next(flat) for _ in range(math.prod(shape))]
            out.append(array_of(take, shape))
        return out

    return unpack(jax.lax.fori_loop(0, eqn.params["length"], lambda _, c: pack(body(unpack(c))), pack(arrays)))


def while_loop(ip: Interpreter, eqn: Any, args: list) -> list:
    """Unrolled, where whether to go on is known at trace time."""
    q = eqn.params
    (test, test_consts), (body, body_consts) = J.body_of(q["cond_jaxpr"]), J.body_of(q["body_jaxpr"])
    of_test, of_body, carry = _split_at(args, q["cond_nconsts"], q["body_nconsts"])
    for _ in range(257):
        go_on = ip.run(test, test_consts, [*of_test, *carry])[0]
        if not is_known(go_on):
            raise unsupported(eqn, "runs until a condition on data")
        if not go_on[()]:
            return carry
        carry = ip.run(body, body_consts, [*of_body, *carry])
    raise unsupported(eqn, "runs more than 256 iterations")


_STRUCTURAL = F.named("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "slice", "rev",
                      "concatenate", "pad", "split", "tile", "stack", "unstack")  # fmt: skip
RULES: dict[Any, Any] = {
    **dict.fromkeys(J.ELEMENTWISE, elementwise),
    **dict.fromkeys([*F.named("bitcast_convert_type", "le_to", "lt_to", "eq_to", "mulhi")], elementwise),
    **dict.fromkeys(J.STOP_GRADIENT, identity),
    **dict.fromkeys([*F.named("optimization_barrier", "name", "sharding_constraint", "copy")], identity),
    **dict.fromkeys(_STRUCTURAL, structural),
    **dict.fromkeys(
        F.named("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor"),
        reduction,
    ),
    **dict.fromkeys(F.named("argmax", "argmin"), arg_reduction),
    **dict.fromkeys(F.named("cumsum", "cumprod", "cummax", "cummin"), cumulative),
    **dict.fromkeys(F.named("scatter", "scatter_add", "scatter_mul", "scatter_max", "scatter_min"), scatter),
    J.primitive("select_n"): select_n,
    J.primitive("sort"): sort,
    J.primitive("dot_general"): dot_general,
    J.primitive("dynamic_slice"): dynamic_slice,
    J.primitive("dynamic_update_slice"): dynamic_update_slice,
    J.primitive("gather"): gather,
    J.primitive("cond"): cond,
    J.primitive("scan"): scan,
    J.primitive("while"): while_loop,
    **RANDOM_RULES,
}
"""Primitive → rule ``(interpreter, equation, arguments) -> outputs``."""
