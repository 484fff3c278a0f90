"""A rule for each class of primitives: which loop each axis follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rlfx._axes.loops import SUM, Axes, Monoid, Nest, nest

Shapes = Sequence[Sequence]
#: ``(parameters, shapes of operands, shapes of results) -> loops``.
Rule = Callable[[Mapping, Shapes, Shapes], Nest | None]


def aligned(operand: Sequence, out: Sequence) -> Axes:
    """The axis of the result that each axis of an operand follows; those of size one may be stretched."""
    first = len(out) - len(operand)
    return tuple(first + a if n == out[first + a] else None for a, n in enumerate(operand))


def elementwise(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
    """One element of the result for each element of the operands."""
    return nest(ins, outs, [aligned(x, outs[0]) for x in ins], [range(len(x)) for x in outs])


def leading(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
    """The first axes of operand and result are the same ones; those that follow are the words of each element."""
    (x,), (out,) = ins, outs
    shared = min(len(x), len(out))
    cut = lambda shape: (a if a < shared else None for a in range(len(shape)))  # noqa: E731
    return nest(ins, outs, [cut(x)], [cut(out)])


def broadcast(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
    (out,), where = outs, params["broadcast_dimensions"]
    operand = [int(b) if n == out[b] else None for n, b in zip(ins[0], where, strict=True)]
    return nest(ins, outs, [operand, *([None] * len(x) for x in ins[1:])], [range(len(out))])


def iota(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
    return nest(ins, outs, [[None] * len(x) for x in ins], [range(len(outs[0]))], pinned={params["dimension"]})


def transpose(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
    return nest(ins, outs, [range(len(ins[0]))], [params["permutation"]])


def reshape(params: Mapping, ins: Shapes, outs: Shapes) -> Nest | None:
    """Axes of one length with as many elements before them; what is merged or split is a whole."""
    if params["dimensions"] is not None:
        return None
    (before, *_), (after,) = ins, outs
    at, results = {(math.prod(before[:a]), n): a for a, n in enumerate(before)}, []
    for b, n in enumerate(after):
        results.append(at.pop((math.prod(after[:b]), n), None))
    number = {a: i for i, a in enumerate(a for a in results if a is not None)}
    operands = [[number.get(a) for a in range(len(before))], *([None] * len(x) for x in ins[1:])]
    return nest(ins, outs, operands, [[None if a is None else number[a] for a in results]])


def without(name: str) -> Rule:
    """Of an operation after which the axes of a parameter, of size one, are gone."""

    def rule(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
        left = [a for a in range(len(ins[0])) if a not in params[name]]
        number = {a: i for i, a in enumerate(left)}
        return nest(ins, outs, [[number.get(a) for a in range(len(ins[0]))]], [range(len(left))])

    return rule


def reduction(monoid: Monoid) -> Rule:
    def rule(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
        axes = range(len(ins[0]))
        left = [a for a in axes if a not in params["axes"]]
        return nest(ins, outs, [axes], [left], reduced=params["axes"], monoid=monoid)

    return rule


def along(name: str, monoid: Monoid | None = None, gone: bool = False) -> Rule:
    """Of an operation along the axes that a parameter names, on each position of the others; ``gone``: without them then."""

    def rule(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
        axes = range(len(ins[0]))
        along = {a % len(axes) for a in (params[name] if isinstance(params[name], Sequence) else (params[name],))}
        left = [a for a in axes if a not in along] if gone else axes
        return nest(ins, outs, [axes for _ in ins], [left for _ in outs], pinned=along, monoid=monoid)

    return rule


def same_sizes(ins: Shapes, outs: Shapes, is_same: Callable[[int], bool]) -> Nest:
    """Axes of one rank follow each other where ``is_same``; elsewhere they are wholes."""
    rank = len(outs[0])
    number = {a: i for i, a in enumerate(a for a in range(rank) if is_same(a))}
    cut = lambda shape: [number.get(a) for a in range(len(shape))] if len(shape) == rank else [None] * len(shape)  # noqa: E731
    return nest(ins, outs, map(cut, ins), map(cut, outs))


def joined(name: str) -> Rule:
    """Of an operation after which the axis of a parameter is of another length."""

    def rule(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
        along = params[name] % len(outs[0])
        return same_sizes(ins, outs, lambda a: a != along)

    return rule


def static_slice(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
    strides = params["strides"] or (1,) * len(ins[0])
    return same_sizes(
        ins, outs, lambda a: params["start_indices"][a] == 0 and ins[0][a] == outs[0][a] and strides[a] == 1
    )


def dynamic_slice(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
    return same_sizes(ins, outs, lambda a: ins[0][a] == outs[0][a])


def dynamic_update(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
    return same_sizes(ins, outs, lambda a: ins[0][a] == ins[1][a])


def pad(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
    return same_sizes(ins, outs, lambda a: tuple(params["padding_config"][a]) == (0, 0, 0))


def tile(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
    return same_sizes(ins, outs, lambda a: params["reps"][a] == 1)


def stack(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
    axes, at = list(range(len(ins[0]))), params["axis"]
    return nest(ins, outs, [axes for _ in ins], [[*axes[:at], None, *axes[at:]]])


def unstack(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
    axes, at = list(range(len(outs[0]))), params["axis"]
    return nest(ins, outs, [[*axes[:at], None, *axes[at:]]], [axes for _ in outs])


def windows(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
    alone = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1, "window_dilation": 1}

    def is_alone(a: int) -> bool:
        found = ((params[k][a], v) for k, v in alone.items() if k in params)
        return all((tuple(n) if isinstance(n, Sequence) else n) == v for n, v in found)

    return same_sizes(ins, outs, is_alone)


def matrices(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
    """The last two axes of the first operand (as many as ``fft_lengths``) are one matrix; others are many of them."""
    many = len(ins[0]) - (len(params["fft_lengths"]) if "fft_lengths" in params else 2)
    cut = lambda shape: (a if a < many else None for a in range(len(shape)))  # noqa: E731
    return nest(ins, outs, map(cut, ins), map(cut, outs))


def dot(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
    """The loops are, in order: batch, rows, contracted, columns."""
    contracted, batched = params["dimension_numbers"]
    free = [[a for a in range(len(x)) if a not in (*c, *b)] for x, c, b in zip(ins, contracted, batched, strict=True)]
    rows = len(batched[0]) + len(free[0])
    columns = rows + len(contracted[0])
    operands = [[0] * len(x) for x in ins]
    for side, begin in enumerate((len(batched[0]), columns)):
        for first, axes in ((0, batched[side]), (begin, free[side]), (rows, contracted[side])):
            for i, a in enumerate(axes):
                operands[side][a] = first + i
    results = [*range(rows), *range(columns, columns + len(free[1]))]
    return nest(ins, outs, operands, [results], reduced=range(rows, columns), monoid=SUM)


def convolution(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
    """The loops are: images, filters, channels, places, and positions of the window; with groups, images at most are free."""
    numbers = params["dimension_numbers"]
    (n, c, *_), (o, i, *window), (out_n, out_o, *places) = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    image, kernel, out = (list[int | None]([None] * len(x)) for x in (*ins, *outs))
    image[n], out[out_n], kernel[o], out[out_o], kernel[i] = 0, 0, 1, 1, 2
    for k, a in enumerate((*places, *window)):
        (out if k < len(places) else kernel)[a] = 3 + k
    pinned = {*range(3, 3 + 2 * len(places))}
    if params["batch_group_count"] > 1:
        image[n] = kernel[o] = None
        return nest(ins, outs, [image, kernel], [out], pinned=pinned | {0, 1, 2})
    if params["feature_group_count"] > 1:
        return nest(ins, outs, [image, kernel], [out], pinned=pinned | {1, 2})
    image[c] = 2
    return nest(ins, outs, [image, kernel], [out], reduced={2}, pinned=pinned, monoid=SUM)


def gather(params: Mapping, ins: Shapes, outs: Shapes) -> Nest:
    """Axes of indices, batching axes, and what every slice contains as a whole."""
    numbers, sizes, operand, (out,) = params["dimension_numbers"], params["slice_sizes"], ins[0], outs
    many = [b for b in range(len(out)) if b not in numbers.offset_dims]
    result: list[int | None] = [None] * len(out)
    for i, b in enumerate(many):
        result[b] = i
    whole: list[int | None] = [None] * len(operand)
    for a, i in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        whole[a] = i
    window = [a for a in range(len(sizes)) if a not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    loop = len(many)
    for a, b in zip(window, numbers.offset_dims, strict=True):
        if a not in numbers.start_index_map and sizes[a] == operand[a]:
            whole[a] = result[b] = loop
            loop += 1
    return nest(ins, outs, [whole, [*range(len(many)), None]], [result])
