"""What an HLO instruction computes and moves, from its shapes, counted as in XLA's own cost analysis of whole programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlfx.profile import wire


class Work(NamedTuple):
    """Arithmetic of products (two operations a multiply-add), other operations (one an element), bytes read and written."""

    products: float = 0.0
    elements: float = 0.0
    bytes: float = 0.0

    def times(self, factor: float) -> Work:
        """Example:
        >>> Work(2.0, 1.0, 8.0).times(3)
        Work(products=6.0, elements=3.0, bytes=24.0)
        """
        return Work(*(factor * x for x in self))

    def plus(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


NOTHING = Work()


class Shape(NamedTuple):
    """Of one array: its dimensions and bytes; of a tuple: all its bytes."""

    dims: tuple[int, ...] = ()
    bytes: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.dims)


#: Bytes of an element, by the number of its type in XLA's protocol; those not named have one.
SIZES = {3: 2, 4: 4, 5: 8, 7: 2, 8: 4, 9: 8, 10: 2, 11: 4, 12: 8, 13: 0, 14: 0, 15: 8, 16: 2, 17: 0, 18: 16}
#: Name what is there already: nothing moves.
NAMES = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "opt-barrier",
        "domain",
        "partition-id",
    }
)
#: Move elements, and compute nothing.
MOVES = NAMES | {
    "copy", "reshape", "broadcast", "transpose", "slice", "dynamic-slice", "dynamic-update-slice", "gather", "concatenate",
    "pad", "iota", "reverse", "copy-start", "copy-done", "rng-bit-generator", "custom-call", "infeed", "outfeed",
}  # fmt: skip
#: Read as much of their first operand as they return.
READ_PART = frozenset({"slice", "dynamic-slice", "gather"})
REDUCES = frozenset({"reduce", "reduce-window", "select-and-scatter"})
#: What a custom call of a library's product has in its name.
PRODUCTS = ("gemm", "matmul", "dot", "conv")


def shape(raw: memoryview | None) -> Shape:
    """Of a ShapeProto."""
    found = wire.message(raw) if raw is not None else {}
    if 4 in found:
        return Shape((), sum(shape(part).bytes for part in found[4]))
    dims = tuple(wire.integers(found, 3))
    return Shape(dims, math.prod(dims) * SIZES.get(wire.integer(found, 2), 1))


def summed(entry: dict) -> tuple[int, ...]:
    """The numbers of a product that its size follows from: the dimensions of the left operand that are summed over; of a
    convolution, the kernel's dimension of output features."""
    if 30 in entry:
        return tuple(wire.integers(wire.message(entry[30][-1]), 1))
    return (wire.integer(wire.message(entry[16][-1]), 4),) if 16 in entry else ()


def work(
    key: int, instructions: Mapping[int, Any], members: Mapping[int, Sequence[int]], roots: Mapping[int, int]
) -> Work:
    """What an instruction does in one execution; a loop, a branch or a call does nothing but what is inside."""
    i = instructions[key]
    products, elements = _arithmetic(i, instructions, members)
    return Work(
        products, elements, _fused(i, instructions, members, roots) if i.opcode == "fusion" else _moved(i, instructions)
    )


def _arithmetic(i: Any, instructions: Mapping[int, Any], members: Mapping[int, Sequence[int]]) -> tuple[float, float]:
    if i.opcode == "fusion":
        parts = [_arithmetic(instructions[k], instructions, members) for c in i.called for k in members.get(c, ())]
        return sum(p for p, _ in parts), sum(e for _, e in parts)
    operands = [instructions[o] for o in i.operands if o in instructions]
    product = i.opcode in ("dot", "convolution") or (i.opcode == "custom-call" and any(p in i.target for p in PRODUCTS))
    if product and len(operands) > 1:
        return 2.0 * i.elements * _terms(i, operands[0].shape, operands[1].shape), 0.0
    if i.opcode in MOVES:
        return 0.0, 0.0
    if i.opcode in REDUCES and operands:
        return 0.0, float(max(operands[0].elements - i.elements, i.elements if i.opcode != "reduce" else 0))
    if i.opcode == "scatter" and operands:
        return 0.0, float(operands[-1].elements)
    if i.opcode == "sort" and operands:
        return 0.0, operands[0].elements * math.log2(max(2, operands[0].elements))
    return 0.0, float(i.elements)


def _terms(i: Any, left: Shape, right: Shape) -> float:
    """How many products an element of the result sums."""
    if i.opcode == "dot" and all(d < len(left.dims) for d in i.summed):
        return math.prod(left.dims[d] for d in i.summed)
    if i.summed and i.summed[0] < len(right.dims):
        return right.elements / max(1, right.dims[i.summed[0]])
    # A library's product of m x k and k x n says no more: sqrt(mk * kn / mn) = k.
    return math.sqrt(left.elements * right.elements / max(1, i.elements))


def _moved(i: Any, instructions: Mapping[int, Any]) -> float:
    operands = [instructions[o].shape.bytes for o in i.operands if o in instructions]
    if i.opcode in NAMES or i.opcode in ("while", "conditional", "call"):
        return 0.0
    if i.opcode in READ_PART:
        return 2.0 * i.shape.bytes + sum(operands[1:])
    if i.opcode == "dynamic-update-slice" and len(operands) > 1:
        return 2.0 * operands[1] + sum(operands[2:])
    if i.opcode == "scatter" and len(operands) > 2:
        return 2.0 * operands[2] + operands[1]
    return float(i.shape.bytes + sum(operands))


def _fused(
    i: Any, instructions: Mapping[int, Any], members: Mapping[int, Sequence[int]], roots: Mapping[int, int]
) -> float:
    """A fusion reads of each operand what its instructions take, and writes its results: in place, only the update."""
    moved = 0.0
    for computation in i.called:
        inside = members.get(computation, ())
        users: dict[int, list[int]] = {}
        for k in inside:
            for operand in instructions[k].operands:
                users.setdefault(operand, []).append(k)
        moved += sum(_read(k, users, instructions) for k in inside if instructions[k].opcode == "parameter")
        moved += _written(roots.get(computation, 0), instructions)
    return moved


def _read(key: int, users: Mapping[int, list[int]], instructions: Mapping[int, Any]) -> float:
    whole, parts = instructions[key].shape.bytes, 0.0
    for user in users.get(key, ()):
        u = instructions[user]
        if u.opcode in READ_PART and u.operands[0] == key:
            parts += u.shape.bytes
        elif u.opcode == "bitcast":
            parts += _read(user, users, instructions)
        elif u.opcode != "dynamic-update-slice" or u.operands[0] != key:
            return whole
    return min(whole, parts)


def _written(key: int, instructions: Mapping[int, Any]) -> float:
    i = instructions.get(key)
    if i is None:
        return 0.0
    if i.opcode in ("tuple", "bitcast"):
        return sum(_written(o, instructions) for o in i.operands)
    if i.opcode == "dynamic-update-slice" and len(i.operands) > 1:
        return instructions[i.operands[1]].shape.bytes
    return i.shape.bytes
