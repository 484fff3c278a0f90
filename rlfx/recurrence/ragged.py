"""Operations on slices whose length depends on t, lowered to masked operations on arrays of fixed length.

A ragged axis is an axis of fixed length W in which the positions ``start <= p < start + n`` are valid. ``n`` is the
symbolic dimension of the traced program and ``start`` is symbolic too, so that two slices of the same timesteps are
recognised as aligned: ``x[t:]`` stays the shared array ``X`` of all timesteps, with start ``t``, and is never gathered.

Before a nonlinear elementwise operation, positions that are not valid are filled with a copy of valid data: a large
exponent in the padding would have right values and NaN gradients. The fill carries no cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlfx import _jaxpr as J
from rlfx.errors import UnsupportedSliceOp, located
from rlfx.recurrence.domain import Domain
from rlfx.recurrence.primitives import discounted_sum_p, series_p
from rlfx.recurrence.program import Equation
from rlfx.recurrence.values import Value, discounted_total, map_over

#: The start of an axis along which all positions are equal.
ANYWHERE = "anywhere"


@dataclass(frozen=True, eq=False)
class Part:
    """A value of one point, with the starts of its ragged axes."""

    data: Any
    starts: tuple
    clean: bool = True

    @property
    def ragged(self) -> tuple[int, ...]:
        return tuple(i for i, s in enumerate(self.starts) if s is not None)


@dataclass(frozen=True, eq=False)
class Point:
    """Where the rules evaluate: one point of the domain. ``t`` is None for what does not vary with t."""

    domain: Domain
    t: Any
    n: Any

    def value(self, dim: Any) -> Any:
        """A symbolic dimension as an int32."""
        return J.evaluate_dim(dim, self.t + 1, self.n)

    def width(self, dim: Any) -> int:
        """The fixed length that stands for a dimension: its largest value."""
        return widest(self.domain, dim)

    def mask(self, part: Part, shape: Sequence) -> Any:
        """Which positions are valid, broadcastable to ``part.data``; ``shape`` are the symbolic dimensions."""
        mask = None
        for axis in part.ragged:
            if part.starts[axis] == ANYWHERE:
                continue
            size = part.data.shape[axis]
            position = lax.iota(jnp.int32, size)
            start = self.value(part.starts[axis])
            valid = (position >= start) & (position < start + self.value(shape[axis]))
            valid = lax.broadcast_in_dim(valid, (1,) * axis + (size,) + (1,) * (part.data.ndim - axis - 1), (axis,))
            mask = valid if mask is None else mask & valid
        return None if mask is None else jnp.broadcast_to(mask, part.data.shape)

    def masked(self, part: Part, shape: Sequence, identity: Any) -> Any:
        """The data with ``identity`` where it is not valid."""
        mask = self.mask(part, shape)
        return part.data if mask is None else jnp.where(mask, part.data, jnp.asarray(identity, part.data.dtype))

    def cleaned(self, part: Part, shape: Sequence) -> Part:
        """The part with copies of valid data at positions that are not valid."""
        if part.clean or not part.ragged:
            return part
        mask = self.mask(part, shape)
        if mask is None:
            return part
        sample = part.data
        for axis in part.ragged:
            if part.starts[axis] != ANYWHERE:
                first = jnp.clip(self.value(part.starts[axis]), 0, sample.shape[axis] - 1)
                sample = lax.dynamic_slice_in_dim(sample, first, 1, axis)
        return Part(jnp.where(mask, part.data, lax.stop_gradient(sample)), part.starts, True)

    def aligned(self, part: Part, axis: int, start: Any, width: int) -> Part:
        """The part moved along ``axis`` so that its valid positions begin at ``start``, in ``width`` positions."""
        have = part.starts[axis]
        if have == ANYWHERE:
            size = part.data.shape[axis]
            if size != width:
                one = lax.slice_in_dim(part.data, 0, 1, axis=axis)
                part = Part(jnp.broadcast_to(one, _with(part.data.shape, axis, width)), part.starts, part.clean)
            return Part(part.data, _with(part.starts, axis, start), part.clean)
        if same(have, start) and part.data.shape[axis] == width:
            return part
        position = lax.iota(jnp.int32, width) - self.value(start) + self.value(have)
        data = jnp.take(part.data, jnp.clip(position, 0, part.data.shape[axis] - 1), axis=axis, mode="clip")
        return Part(data, _with(part.starts, axis, start), False)


def _with(items: Sequence, index: int, item: Any) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


def same(a: Any, b: Any) -> bool:
    """Whether two starts are surely equal."""
    if isinstance(a, str) or isinstance(b, str):
        return a is b
    return bool(J.equal_dims(a, b))


def widest(domain: Domain, dim: Any) -> int:
    """The largest value of a dimension over the domain."""
    if not J.is_symbolic(dim):
        return int(dim)
    with jax.ensure_compile_time_eval():  # min and max in a dimension are evaluated by jnp
        return max(1, int(np.max(J.evaluate_dim(dim, domain.times() + 1, np.int32(domain.length)))))


# -- evaluation of one equation over the domain ----------------------------------------------------------------------


def evaluate_ragged(equation: Equation, values: Sequence[Value], domain: Domain, t: Value, n: Any) -> list[Value]:
    """Evaluate an equation with ragged operands or outputs at all points.

    Args:
      values: its operands.
      t: the time within the domain: all of them, or a scalar inside a loop.
      n: the length: the integer T, or a Value under ``until=``.
    """
    rule = RULES.get(equation.op)
    if rule is None:
        raise unsupported(equation, f"{equation.op.name} has no meaning on a slice whose length depends on t")
    length = n if isinstance(n, Value) else Value(n)
    meta: list[Part] = []

    def at(point_t, point_n, *data):
        parts = [Part(d, v.starts or (None,) * np.ndim(d), v.clean) for d, v in zip(data, values, strict=True)]
        outs = rule(Point(domain, point_t, point_n), equation, *parts)
        meta[:] = outs
        return [o.data for o in outs]

    data = [v.data for v in values]
    dims = frozenset().union(*(v.dims for v in values)) if values else frozenset()
    if "t" not in dims and _keeps_sharing(equation, values):
        mapped = map_over(lambda *d: at(None, None, *d), dims, [v.dims for v in values])
        outs = mapped(*data)
        return [Value(d, dims, _starts(m), False) for d, m in zip(outs, meta, strict=True)]
    dims = dims | t.dims | (length.dims if isinstance(n, Value) else frozenset())
    mapped = map_over(at, dims, [t.dims, length.dims, *(v.dims for v in values)])
    outs = mapped(t.data, length.data, *data)
    return [Value(d, dims, _starts(m), m.clean) for d, m in zip(outs, meta, strict=True)]


def _starts(part: Part) -> tuple | None:
    return part.starts if part.ragged else None


def _keeps_sharing(equation: Equation, values: Sequence[Value]) -> bool:
    """Whether the rule acts on positions one by one, alike at every t: then what is shared by all t stays so."""
    ragged = [v for v in values if v.starts is not None]
    if not ragged or equation.op not in _POSITIONWISE:
        return False
    keys = {tuple((i - len(v.starts), str(s)) for i, s in enumerate(v.starts) if s is not None) for v in ragged}
    return len(keys) == 1


def unsupported(equation: Equation, fact: str) -> UnsupportedSliceOp:
    """The refusal of an operation on a ragged axis."""
    return UnsupportedSliceOp(
        located(
            f"{fact}.",
            where=equation.where,
            fix="Read a window of fixed length, x.window(lo, hi, fill=v), or reduce the slice first.",
        )
    )


# -- rules -----------------------------------------------------------------------------------------------------------

RULES: dict[Any, Callable[..., list[Part]]] = {}


def rule(*ops: Any) -> Callable:
    def register(fn):
        for op in ops:
            RULES[op] = fn
        return fn

    return register


def _reference_starts(parts: Sequence[Part], ndim: int) -> tuple[list, list[int]]:
    """For each axis, the start and width to which the parts are aligned."""
    starts: list = [None] * ndim
    widths = [1] * ndim
    for axis in range(ndim):
        own = [p for p in parts if p.data.ndim == ndim and p.starts[axis] is not None]
        fixed = [p for p in own if p.starts[axis] != ANYWHERE]
        chosen = max(fixed or own, key=lambda p: p.data.shape[axis], default=None)
        if chosen is not None:
            starts[axis], widths[axis] = chosen.starts[axis], chosen.data.shape[axis]
    return starts, widths


def _align_all(point: Point, parts: Sequence[Part], ndim: int) -> tuple[list[Part], tuple]:
    starts, widths = _reference_starts(parts, ndim)
    out = []
    for part in parts:
        if part.data.ndim == ndim:
            for axis in part.ragged:
                part = point.aligned(part, axis, starts[axis], widths[axis])
        out.append(part)
    return out, tuple(starts)


@rule(*J.ELEMENTWISE, series_p)
def _elementwise(point: Point, equation: Equation, *parts: Part) -> list[Part]:
    shape = equation.outputs[0].shape
    aligned, starts = _align_all(point, parts, len(shape))
    if point.t is not None and equation.op not in _HARMLESS:
        aligned = [point.cleaned(p, shape) if p.data.ndim else p for p in aligned]
    clean = all(p.clean for p in aligned)
    if equation.op is series_p:
        return [Part(aligned[0].data, starts, clean)]
    return [Part(d, starts, clean) for d in J.bind(equation.op, dict(equation.params), *(p.data for p in aligned))]


_HARMLESS = frozenset(
    {series_p, *J.STOP_GRADIENT, *(J.primitive(n) for n in ("neg", "copy", "convert_element_type", "not"))}
)


@rule(J.primitive("broadcast_in_dim"))
def _broadcast(point: Point, equation: Equation, *parts: Part) -> list[Part]:
    operand, params = parts[0], equation.params
    shape, where = params["shape"], params["broadcast_dimensions"]
    starts: list = [ANYWHERE if J.is_symbolic(d) else None for d in shape]
    sizes = [point.width(d) for d in shape]
    for axis, target in enumerate(where):
        if operand.starts[axis] is not None:
            starts[target], sizes[target] = operand.starts[axis], operand.data.shape[axis]
    data = lax.broadcast_in_dim(operand.data, sizes, where)
    return [Part(data, tuple(starts), operand.clean)]


@rule(J.primitive("reshape"))
def _reshape(point: Point, equation: Equation, operand: Part, *_: Part) -> list[Part]:
    before, after = equation.inputs[0].shape, equation.outputs[0].shape
    old, new = J.symbolic_axes(before), J.symbolic_axes(after)
    if [str(before[i]) for i in old] != [str(after[i]) for i in new] or _products(before, old) != _products(after, new):
        raise unsupported(
            equation, f"A reshape from {before} to {after} merges or splits an axis whose length depends on t"
        )
    sizes, starts = list(after), [None] * len(after)
    for i, j in zip(old, new, strict=True):
        sizes[j], starts[j] = operand.data.shape[i], operand.starts[i]
    return [Part(operand.data.reshape(sizes), tuple(starts), operand.clean)]


def _products(shape: Sequence, symbolic: Sequence[int]) -> list[int]:
    """The sizes of the static stretches between symbolic axes."""
    out, current = [], 1
    for i, d in enumerate(shape):
        if i in symbolic:
            out.append(current)
            current = 1
        else:
            current *= d
    return [*out, current]


@rule(J.primitive("squeeze"))
def _squeeze(point: Point, equation: Equation, operand: Part) -> list[Part]:
    dropped = {d % operand.data.ndim for d in equation.params["dimensions"]}
    starts = tuple(s for i, s in enumerate(operand.starts) if i not in dropped)
    return [Part(lax.squeeze(operand.data, tuple(dropped)), starts, operand.clean)]


@rule(J.primitive("transpose"))
def _transpose(point: Point, equation: Equation, operand: Part) -> list[Part]:
    order = equation.params["permutation"]
    return [Part(lax.transpose(operand.data, order), tuple(operand.starts[i] for i in order), operand.clean)]


@rule(J.primitive("rev"))
def _reverse(point: Point, equation: Equation, operand: Part) -> list[Part]:
    starts, shape = list(operand.starts), equation.inputs[0].shape
    for axis in equation.params["dimensions"]:
        if starts[axis] is not None and starts[axis] != ANYWHERE:
            starts[axis] = operand.data.shape[axis] - starts[axis] - shape[axis]
    return [Part(lax.rev(operand.data, equation.params["dimensions"]), tuple(starts), operand.clean)]


@rule(J.primitive("iota"))
def _iota(point: Point, equation: Equation, *_: Part) -> list[Part]:
    shape, dimension = equation.params["shape"], equation.params["dimension"]
    sizes = tuple(point.width(d) for d in shape)
    starts = tuple((0 if i == dimension else ANYWHERE) if J.is_symbolic(d) else None for i, d in enumerate(shape))
    return [Part(lax.broadcasted_iota(equation.params["dtype"], sizes, dimension), starts, False)]


@rule(J.DIM_AS_VALUE)
def _dim(point: Point, equation: Equation) -> list[Part]:
    return [Part(jnp.asarray(point.value(equation.params["dim"]), equation.outputs[0].dtype), ())]


def extreme_of(dtype: Any, largest: bool) -> Any:
    """The largest, or smallest, value of a dtype: the identity of min and max."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.inf if largest else -np.inf
    if dtype == jnp.bool_:
        return largest
    return np.iinfo(dtype).max if largest else np.iinfo(dtype).min


_IDENTITY: dict[Any, Callable[[Any], Any]] = {
    "sum": lambda dtype: 0,
    "prod": lambda dtype: 1,
    "max": lambda dtype: extreme_of(dtype, False),
    "min": lambda dtype: extreme_of(dtype, True),
    "and": lambda dtype: True,
    "or": lambda dtype: False,
    "logsumexp": lambda dtype: -np.inf,
}


def _register_reductions() -> None:
    for name in ("sum", "prod", "max", "min", "and", "or"):
        op, identity = J.primitive(f"reduce_{name}"), _IDENTITY[name]

        def reduce(point: Point, equation: Equation, operand: Part, *, identity=identity) -> list[Part]:
            axes, shape = equation.params["axes"], equation.inputs[0].shape
            reduced = Part(
                operand.data, tuple(s if i in axes else None for i, s in enumerate(operand.starts)), operand.clean
            )
            # Along an axis on which all positions are equal, the valid ones still have to be counted.
            reduced = Part(reduced.data, tuple(0 if s == ANYWHERE else s for s in reduced.starts), reduced.clean)
            data = point.masked(reduced, shape, identity(operand.data.dtype))
            starts = tuple(s for i, s in enumerate(operand.starts) if i not in axes)
            (out,) = J.bind(equation.op, dict(equation.params), data)
            return [Part(out, starts, operand.clean)]

        RULES[op] = reduce
    for name, largest in (("argmax", False), ("argmin", True)):

        def arg(point: Point, equation: Equation, operand: Part, *, largest=largest) -> list[Part]:
            (axis,) = equation.params["axes"]
            if operand.starts[axis] is None:
                (out,) = J.bind(equation.op, dict(equation.params), operand.data)
                return [Part(out, _without(operand.starts, axis), operand.clean)]
            start = 0 if operand.starts[axis] == ANYWHERE else operand.starts[axis]
            one = Part(operand.data, tuple(start if i == axis else None for i in range(operand.data.ndim)), False)
            data = point.masked(one, equation.inputs[0].shape, extreme_of(operand.data.dtype, largest))
            # The first valid position wins ties with the padding, as it does in the slice itself.
            data = point.aligned(Part(data, one.starts, False), axis, 0, data.shape[axis]).data
            (out,) = J.bind(equation.op, dict(equation.params), data)
            return [Part(out, _without(operand.starts, axis), operand.clean)]

        RULES[J.primitive(name)] = arg
    for name, kind in (
        ("cumsum", "sum"),
        ("cumprod", "prod"),
        ("cummax", "max"),
        ("cummin", "min"),
        ("cumlogsumexp", "logsumexp"),
    ):

        def cumulative(point: Point, equation: Equation, operand: Part, *, kind=kind) -> list[Part]:
            axis = equation.params["axis"]
            if operand.starts[axis] is None:
                (out,) = J.bind(equation.op, dict(equation.params), operand.data)
                return [Part(out, operand.starts, operand.clean)]
            start = 0 if operand.starts[axis] == ANYWHERE else operand.starts[axis]
            one = Part(operand.data, tuple(start if i == axis else None for i in range(operand.data.ndim)), False)
            data = point.masked(one, equation.inputs[0].shape, _IDENTITY[kind](operand.data.dtype))
            (out,) = J.bind(equation.op, dict(equation.params), data)
            return [Part(out, _with(operand.starts, axis, start), False)]

        RULES[J.primitive(name)] = cumulative


def _without(items: Sequence, index: int) -> tuple:
    return (*items[:index], *items[index + 1 :])


_register_reductions()


@rule(J.primitive("dot_general"))
def _dot(point: Point, equation: Equation, lhs: Part, rhs: Part) -> list[Part]:
    (lc, rc), (lb, rb) = equation.params["dimension_numbers"]
    left_shape, right_shape = equation.inputs[0].shape, equation.inputs[1].shape
    for la, ra in (*zip(lc, rc, strict=True), *zip(lb, rb, strict=True)):
        if lhs.starts[la] is None:
            continue
        # Move what varies with t anyway; what is shared by all t stays as it is.
        if lhs.starts[la] != ANYWHERE and (rhs.starts[ra] == ANYWHERE or not rhs.clean or lhs.clean):
            target, width = lhs.starts[la], lhs.data.shape[la]
        else:
            target, width = rhs.starts[ra], rhs.data.shape[ra]
        if target == ANYWHERE:
            target = 0
        lhs = point.aligned(lhs, la, target, width)
        rhs = point.aligned(rhs, ra, target, width)
    contracted_left = tuple(s if i in lc else None for i, s in enumerate(lhs.starts))
    contracted_right = tuple(s if i in rc else None for i, s in enumerate(rhs.starts))
    left = point.masked(Part(lhs.data, contracted_left), left_shape, 0)
    # One masked operand is enough where the other holds data of other timesteps; derived data may be infinite there.
    right = point.masked(Part(rhs.data, contracted_right), right_shape, 0) if rhs.clean else rhs.data
    (out,) = J.bind(equation.op, dict(equation.params), left, right)
    batch = [lhs.starts[a] for a in lb]
    free_left = [s for i, s in enumerate(lhs.starts) if i not in (*lc, *lb)]
    free_right = [s for i, s in enumerate(rhs.starts) if i not in (*rc, *rb)]
    return [Part(out, (*batch, *free_left, *free_right), lhs.clean and rhs.clean)]


@rule(J.primitive("dynamic_slice"))
def _dynamic_slice(point: Point, equation: Equation, operand: Part, *indices: Part) -> list[Part]:
    sizes, shape = equation.params["slice_sizes"], equation.inputs[0].shape
    data, starts = operand.data, list(operand.starts)
    for axis, (size, index) in enumerate(zip(sizes, indices, strict=True)):
        if starts[axis] is None:
            data = lax.dynamic_slice_in_dim(data, index.data, size, axis)
        elif not J.is_symbolic(size):
            start = 0 if starts[axis] == ANYWHERE else point.value(starts[axis])
            within = jnp.clip(index.data, 0, jnp.maximum(point.value(shape[axis]) - size, 0))
            data, starts[axis] = lax.dynamic_slice_in_dim(data, start + within, size, axis), None
        elif str(size) != str(shape[axis]):
            raise unsupported(equation, "A dynamic slice of a slice whose length depends on t must have a fixed length")
    return [Part(data, tuple(starts), operand.clean)]


@rule(J.primitive("slice"))
def _static_slice(point: Point, equation: Equation, operand: Part) -> list[Part]:
    params = equation.params
    data, starts = operand.data, list(operand.starts)
    strides = params["strides"] or (1,) * data.ndim
    for axis, (lo, hi, step) in enumerate(zip(params["start_indices"], params["limit_indices"], strides, strict=True)):
        if starts[axis] is None:
            data = lax.slice_in_dim(data, lo, hi, step, axis)
        elif step != 1:
            raise unsupported(equation, "A slice with a step, of a slice whose length depends on t")
        elif J.is_symbolic(hi - lo):
            starts[axis] = starts[axis] if starts[axis] == ANYWHERE else starts[axis] + lo
        else:
            first = 0 if starts[axis] == ANYWHERE else point.value(starts[axis])
            data, starts[axis] = lax.dynamic_slice_in_dim(data, first + point.value(lo), hi - lo, axis), None
    return [Part(data, tuple(starts), operand.clean)]


@rule(J.primitive("gather"))
def _gather(point: Point, equation: Equation, operand: Part, indices: Part) -> list[Part]:
    params, shape = equation.params, equation.inputs[0].shape
    numbers, sizes = params["dimension_numbers"], list(params["slice_sizes"])
    index, starts = indices.data, list(operand.starts)
    batch_shape = equation.inputs[1].shape[:-1]
    for axis in operand.ragged:
        size = sizes[axis]
        column = numbers.start_index_map.index(axis) if axis in numbers.start_index_map else None
        first = 0 if starts[axis] == ANYWHERE else starts[axis]
        if column is None:
            sizes[axis] = operand.data.shape[axis]
        elif J.is_symbolic(size):
            offset = _static_offset(equation, column)
            if batch_shape or offset is None:
                raise unsupported(equation, "A slice at a traced position, of a slice whose length depends on t")
            starts[axis] = first + offset
            sizes[axis] = operand.data.shape[axis]
            index = index.at[..., column].set(0)
        else:
            within = jnp.clip(index[..., column], 0, jnp.maximum(point.value(shape[axis]) - size, 0))
            index = index.at[..., column].set(within.astype(index.dtype) + jnp.asarray(point.value(first), index.dtype))
    bound = {k: v for k, v in params.items() if k != "rlfx_static_indices"} | {"slice_sizes": tuple(map(int, sizes))}
    (out,) = J.bind(equation.op, bound, operand.data, index)
    kept = [
        i for i in range(operand.data.ndim) if i not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    by_offset = dict(zip(numbers.offset_dims, kept, strict=True))
    batch = iter(indices.starts[:-1])
    out_starts = tuple(
        (starts[by_offset[i]] if J.is_symbolic(equation.outputs[0].shape[i]) else None)
        if i in by_offset
        else next(batch)
        for i in range(out.ndim)
    )
    return [Part(out, out_starts, operand.clean and indices.clean)]


def _static_offset(equation: Equation, column: int) -> int | None:
    """The position of a slice of a slice, where it is a constant of the program."""
    index = equation.params.get("rlfx_static_indices")
    return None if index is None else int(np.asarray(index).reshape(-1)[column])


@rule(J.primitive("concatenate"))
def _concatenate(point: Point, equation: Equation, *parts: Part) -> list[Part]:
    axis, shape = equation.params["dimension"], equation.outputs[0].shape
    if not J.is_symbolic(shape[axis]):
        aligned, starts = _align_all(point, parts, len(shape))
        (out,) = J.bind(equation.op, dict(equation.params), *(p.data for p in aligned))
        return [Part(out, starts, all(p.clean for p in aligned))]
    width, offset, data = point.width(shape[axis]), 0, None
    position = lax.iota(jnp.int32, width)
    for part, var in zip(parts, equation.inputs, strict=True):
        start = part.starts[axis]
        first = 0 if start is None or start == ANYWHERE else point.value(start)
        size = point.value(var.shape[axis])
        source = jnp.clip(position - offset + first, 0, part.data.shape[axis] - 1)
        piece = jnp.take(part.data, source, axis=axis, mode="clip")
        here = (position >= offset).reshape((1,) * axis + (width,) + (1,) * (piece.ndim - axis - 1))
        data = piece if data is None else jnp.where(here, piece, data)
        offset = offset + size
    others = [_with(p.starts, axis, None) for p in parts]
    starts = _with(next((s for s in others if any(x is not None for x in s)), others[0]), axis, 0)
    return [Part(data, starts, False)]


@rule(J.primitive("pad"))
def _pad(point: Point, equation: Equation, operand: Part, fill: Part) -> list[Part]:
    config, shape, out_shape = equation.params["padding_config"], equation.inputs[0].shape, equation.outputs[0].shape
    data, starts = operand.data, list(operand.starts)
    if any(interior for *_, interior in config) or any(
        starts[i] is not None and (J.is_symbolic(lo) or lo < 0) for i, (lo, _, _) in enumerate(config)
    ):
        raise unsupported(equation, "Padding inside, or cutting, a slice whose length depends on t")
    data = point.masked(Part(data, tuple(0 if s == ANYWHERE else s for s in starts)), shape, fill.data)
    static = [(0, 0, 0) if starts[i] is not None else c for i, c in enumerate(config)]
    data = lax.pad(data, fill.data, static)
    for axis, (lo, _, _) in enumerate(config):
        if starts[axis] is None:
            continue
        width = point.width(out_shape[axis])
        first = 0 if starts[axis] == ANYWHERE else point.value(starts[axis])
        position = lax.iota(jnp.int32, width) - lo
        inside = (position >= 0) & (position < point.value(shape[axis]))
        taken = jnp.take(data, jnp.clip(position + first, 0, data.shape[axis] - 1), axis=axis, mode="clip")
        inside = inside.reshape((1,) * axis + (width,) + (1,) * (taken.ndim - axis - 1))
        data, starts[axis] = jnp.where(inside, taken, fill.data), 0
    return [Part(data, tuple(starts), False)]


@rule(J.primitive("sort"))
def _sort(point: Point, equation: Equation, *parts: Part) -> list[Part]:
    axis, shape = equation.params["dimension"], equation.inputs[0].shape
    aligned, starts = _align_all(point, parts, len(shape))
    if starts[axis] is None:
        outs = J.bind(equation.op, dict(equation.params), *(p.data for p in aligned))
        return [Part(d, starts, False) for d in outs]
    first = 0 if starts[axis] == ANYWHERE else starts[axis]
    only = Part(aligned[0].data, tuple(first if i == axis else None for i in range(len(shape))), False)
    padding = ~point.mask(only, shape)
    params = {**equation.params, "num_keys": equation.params["num_keys"] + 1}
    outs = J.bind(equation.op, params, padding, *(p.data for p in aligned))[1:]
    return [Part(d, _with(starts, axis, 0), False) for d in outs]


@rule(J.SCAN)
def _scan(point: Point, equation: Equation, *parts: Part) -> list[Part]:
    params = equation.params
    length, (n_consts, n_carry) = params["length"], J.scan_counts(dict(params))
    consts, init, xs = parts[:n_consts], parts[n_consts : n_consts + n_carry], parts[n_consts + n_carry :]
    if not J.is_symbolic(length) or any(p.ragged for p in (*consts, *init)) or any(p.ragged != (0,) for p in xs):
        raise unsupported(
            equation, "A scan over something else than the timesteps of a slice whose length depends on t"
        )
    body = J.jaxpr_as_fun(*J.body_of(params["jaxpr"]))
    width, n = point.width(length), point.value(length)
    front = [
        point.cleaned(point.aligned(p, 0, 0, width), v.shape)
        for p, v in zip(xs, equation.inputs[-len(xs) :], strict=True)
    ]
    front = [
        point.cleaned(Part(p.data, p.starts, False), v.shape)
        for p, v in zip(front, equation.inputs[-len(xs) :], strict=True)
    ]

    def step(carry, ix):
        i, x = ix
        out = body(*(c.data for c in consts), *carry, *x)
        following = [jnp.where(i < n, new, old) for new, old in zip(out[:n_carry], carry, strict=True)]
        return following, out[n_carry:]

    final, ys = lax.scan(
        step, [p.data for p in init], (lax.iota(jnp.int32, width), [p.data for p in front]), reverse=params["reverse"]
    )
    return [*(Part(c, (None,) * c.ndim) for c in final), *(Part(y, (0,) + (None,) * (y.ndim - 1), False) for y in ys)]


@rule(discounted_sum_p)
def _discounted_sum(point: Point, equation: Equation, rewards: Part, discounts: Part) -> list[Part]:
    (rewards, discounts), starts = _align_all(point, (rewards, discounts), rewards.data.ndim)
    shape = equation.inputs[0].shape
    valid = Part(rewards.data, starts, False)
    r = point.masked(valid, shape, 0)
    d = point.masked(Part(discounts.data, starts, False), shape, 1)
    total = discounted_total(r, d)
    return [Part(total, (None,) * total.ndim)]


#: Rules that act on positions one by one.
_POSITIONWISE = J.ELEMENTWISE | {
    series_p,
    *(J.primitive(n) for n in ("transpose", "squeeze", "reshape", "broadcast_in_dim")),
}
