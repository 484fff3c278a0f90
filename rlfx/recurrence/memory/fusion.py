"""Which values get a buffer: the others are computed inside the one loop that reads them, or inside each if that is cheap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlfx import _jaxpr as J
from rlfx._axes import ARGUMENTS, REDUCTIONS
from rlfx.recurrence.memory.flat import Flat
from rlfx.recurrence.memory.sizes import IN_PLACE, LOOPS, UPDATES, Buffer, Node, names

_REDUCTIONS = ARGUMENTS | REDUCTIONS.keys()
#: Computed inside the loop that reads them.
_FUSIBLE = (J.ELEMENTWISE | J.STACKING | _REDUCTIONS | names(
    "broadcast_in_dim", "iota", "slice", "dynamic_slice", "rev", "pad", "concatenate", "transpose", "gather",
    "dynamic_update_slice",
))  # fmt: skip
#: Never computed twice.
_EXPENSIVE = _REDUCTIONS | names(
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cosh", "digamma", "div", "erf", "erfc", "erf_inv",
    "exp", "exp2", "expm1", "gather", "igamma", "igammac", "lgamma", "log", "log1p", "logistic", "pow", "rem", "rsqrt",
    "sinh", "sqrt", "tanh", "polygamma",
)  # fmt: skip
#: A product reads its operands in any order.
_FOLDED = J.primitive("transpose"), J.primitive("dot_general")
#: How often an operation is computed at most, in all that read it.
_REPETITIONS = 15
#: Every element of the operand is read several times.
_REPEATING = names("broadcast_in_dim", "tile")


@dataclass(eq=False, slots=True)
class Unit:
    """What runs as one piece: an operation with buffers for its results, and everything computed inside of it.

    Attributes:
      reads: the values it reads from memory.
      aligned: those of which it reads the element that it writes, and no other: it may be written over them.
    """

    node: Node
    reads: list[Buffer]
    aligned: set[int]


def units_of(flat: Flat, needing_buffer: set[int]) -> list[Unit]:
    """The pieces of a program, in its order. ``needing_buffer``: values that are in memory whoever reads them."""
    users: dict[int, list[Node]] = {}
    for node in flat.nodes:
        for value in {id(v): v for v in node.ins}.values():
            users.setdefault(id(value), []).append(node)
    inside: dict[int, int] = {}  # operations that have no buffer, and how often they are computed
    for node in reversed(flat.nodes):
        if node.op in _FUSIBLE and len(node.outs) == 1 and id(node.outs[0]) not in needing_buffer:
            readers = users.get(id(node.outs[0]), ())
            once = node.op not in _EXPENSIVE or (len(readers) == 1 and readers[0].op not in _REPEATING)
            times = sum(inside.get(id(r), 1) for r in readers)
            if once and times <= _REPETITIONS and all(r.op in _FUSIBLE or (node.op, r.op) == _FOLDED for r in readers):
                inside[id(node)] = times
    return [_unit(node, inside) for node in flat.nodes if id(node) not in inside]


def _unit(root: Node, inside: Mapping[int, int]) -> Unit:
    reads: dict[int, Buffer] = {}
    elsewhere: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    todo = [(root, root.op in IN_PLACE or root.op in LOOPS)]
    while todo:
        node, aligned = todo.pop()
        for i, value in enumerate(node.ins):
            here = aligned and (node.op not in UPDATES or i == 0)
            if value.node is None or id(value.node) not in inside:
                reads[id(value)] = value
                if not here:
                    elsewhere.add(id(value))
            elif (id(value.node), here) not in seen:
                seen.add((id(value.node), here))
                todo.append((value.node, here and value.node.op in IN_PLACE))
    return Unit(root, list(reads.values()), set(reads) - elsewhere)
