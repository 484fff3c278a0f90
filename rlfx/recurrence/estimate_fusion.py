"""Which values get a buffer, and in which order they are computed: a model of XLA:CPU's fusion and scheduling."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.estimate_flat import BROADCAST, COPY, LOOPS, RELAYOUT, Flat, Node, Value, is_constant, names
from rlfx.recurrence.estimate_library import library_calls

#: Computed inside the loop that reads them, as often as they are read.
_CHEAP = J.ELEMENTWISE | {J.ADD_ANY, J.SPLIT} | J.STACKING | names(
    "broadcast_in_dim", "iota", "slice", "dynamic_slice", "rev", "pad", "concatenate", "transpose", "gather",
    "dynamic_update_slice", "random_seed",
)  # fmt: skip
#: Computed inside the loop that reads them if there is only one.
_EXPENSIVE = names(
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "digamma", "div", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "gather", "igamma", "igammac", "lgamma", "log", "log1p", "logistic", "pow",
    "regularized_incomplete_beta", "rem", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh", "polygamma",
)  # fmt: skip
_REDUCTIONS = names(
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"
)
#: Operations that a reduction computes while it reads.
_REDUCED_WITH = names("mul", "integer_pow", "square", "abs", "neg", "sub", "add", "convert_element_type")
#: Between host and device; a slice of what is on the host is fetched as it is.
_MOVED = J.primitive("device_put")
_DIVISIONS, _BITS = names("div", "rem"), J.primitive("random_bits")
_REPEATED = names("broadcast_in_dim", "iota")
#: They write into their first operand.
UPDATES = names("scatter", "scatter_add", "scatter_mul", "scatter_min", "scatter_max", "dynamic_update_slice")
IN_PLACE = J.ELEMENTWISE | {J.ADD_ANY} | UPDATES


@dataclass(eq=False, slots=True)
class Unit:
    """What runs as one piece: an operation with buffers for its results, and everything fused into it.

    Attributes:
      reads: the values it reads from memory.
      aligned: those of which it reads the element that it writes, and no other: it may be written over them.
    """

    node: Node
    reads: list[Value]
    aligned: set[int]


def units_of(flat: Flat, needing_buffer: set[int]) -> list[Unit]:
    consumers: dict[int, list[Node]] = {}
    for node in flat.nodes:
        for value in node.ins:
            consumers.setdefault(id(value), []).append(node)
    library = library_calls(flat, consumers, needing_buffer)
    places: dict[int, int] = {}  # how often a fused value is computed
    roots: set[int] = set()
    for node in reversed(flat.nodes):
        count = 0
        for out in node.outs:
            for user in consumers.get(id(out), ()):
                count += 1 if id(user) in roots else places[id(user)]
        call = library.get(id(node))
        fused = (
            _is_cheap(node)
            and node.op is not COPY
            and not any(id(out) in needing_buffer for out in node.outs)
            and all(_fuses(user, out, library) for out in node.outs for user in consumers.get(id(out), ()))
            and not (_is_expensive(node) and count > 1)
            if call is None
            else call is not node
        )
        places[id(node)] = max(count, 1)
        if not fused:
            roots.add(id(node))
    # A copy into another layout computes its operand again, if that is needed in memory for contractions only.
    twice = {
        id(node)
        for node in flat.nodes
        if id(node) in roots
        and node.op in _CHEAP - _EXPENSIVE
        and not any(id(out) in needing_buffer for out in node.outs)
        and all(user.op in (RELAYOUT, J.primitive("dot_general")) for out in node.outs for user in consumers[id(out)])
    }
    again = {
        id(node)
        for node in flat.nodes
        if id(node) in roots and id(node) not in library and node.op in _CHEAP - _EXPENSIVE - {COPY} and _is_unary(node)
    }

    def computes(user: Node, value: Value) -> bool:
        """Whether an operation computes an operand again that is in memory for others."""
        if user.op is RELAYOUT:
            return id(value.node) in twice
        return id(value.node) in again and user.op in _CHEAP - {COPY} and id(user) not in library

    return [Unit(node, *_reads(node, roots, computes)) for node in flat.nodes if id(node) in roots]


def _is_cheap(node: Node) -> bool:
    """Whether an operation may run in the loop of what reads it: random bits where they are straight arithmetic, too."""
    return node.op in _CHEAP or (node.op is _BITS and not J.random_by_loop(node.equation))


def _is_expensive(node: Node) -> bool:
    if node.op not in _DIVISIONS or np.dtype(node.outs[0].dtype).kind not in "iu":
        return node.op in _EXPENSIVE
    by_constant = len(node.ins) == 1 or is_constant(node.ins[-1])  # literals are no operands
    return not by_constant  # of integers: multiplications and shifts


def _is_unary(node: Node) -> bool:
    """Whether XLA may compute an operation several times: it reads no more than one large operand."""
    rank = len(node.outs[0].shape)
    return sum(len(v.shape) >= rank and not (v.node and v.node.op in _REPEATED) for v in node.ins) <= 1


def _fuses(user: Node, value: Value, library: dict[int, Node]) -> bool:
    """Whether an operation computes what it reads, instead of reading it from memory."""
    if id(user) in library:
        if user.op in _REDUCTIONS and _narrow(value):
            return True
        return value.node is not None and library.get(id(value.node)) is library[id(user)]
    if user.op in _REDUCTIONS:  # a reduction takes over one operation on values in memory, no more
        if value.node is None or _narrow(value):
            return True
        return value.node.op in _REDUCED_WITH and all(
            _narrow(v) or (v.bytes == value.bytes and (v.node is None or v.node.op not in _CHEAP))
            for v in value.node.ins
        )
    return (user.op in _CHEAP and user.op is not COPY) or (value.host and user.op is _MOVED)


def _narrow(value: Value) -> bool:
    """Whether a value repeats fewer numbers: XLA reduces those, and broadcasts afterwards."""
    return len(_varying(value)) < sum(d != 1 for d in value.shape)


def _varying(value: Value) -> frozenset:
    """The dimensions along which a value may vary."""
    if value.varying is None:
        value.varying = frozenset(d for d, size in enumerate(value.shape) if size != 1)
        node = value.node
        if node is not None and node.op is BROADCAST and node.equation.primitive is not BROADCAST:
            value.varying = frozenset(d for v in node.ins for d, size in enumerate(v.shape) if size != 1)
        elif node is not None and node.op is BROADCAST:
            dims = node.equation.params["broadcast_dimensions"]
            shape = node.equation.invars[0].aval.shape
            value.varying = frozenset(int(d) for d, size in zip(dims, shape, strict=True) if size != 1)
        elif node is not None and node.op in J.ELEMENTWISE and all(v.shape in (value.shape, ()) for v in node.ins):
            value.varying = frozenset().union(*(_varying(v) for v in node.ins))
    return value.varying


def _reads(root: Node, roots: set[int], computes: Callable[[Node, Value], bool]) -> tuple[list[Value], set[int]]:
    found: dict[int, Value] = {}
    elsewhere: set[int] = set()
    seen: set[tuple[int, bool]] = set()

    def visit(node: Node, aligned: bool) -> None:
        aligned = aligned and (node.op in IN_PLACE or (node.op in LOOPS))
        for value in node.ins:
            if value.node is None or (id(value.node) in roots and not computes(node, value)):
                found[id(value)] = value
                if not aligned:
                    elsewhere.add(id(value))
            elif (id(value.node), aligned) not in seen:
                seen.add((id(value.node), aligned))
                visit(value.node, aligned)

    visit(root, True)
    return list(found.values()), set(found) - elsewhere


# -- schedule --------------------------------------------------------------------------------------------------------


def schedule(units: list[Unit]) -> list[Unit]:
    """First come, first served: XLA:CPU's order, which favours concurrency over memory."""
    owner = {id(v): unit for unit in units for v in unit.node.outs}
    waiting: dict[int, int] = {}
    users: dict[int, list[Unit]] = {}
    for unit in units:
        needs = {id(o): o for v in unit.reads if (o := owner.get(id(v))) is not None and o is not unit}
        waiting[id(unit)] = len(needs)
        for key in needs:
            users.setdefault(key, []).append(unit)
    for later in users.values():
        later.sort(key=_is_weight_gradient)
    ready = deque(u for u in units if waiting[id(u)] == 0)
    order = []
    while ready:
        unit = ready.popleft()
        order.append(unit)
        for user in users.get(id(unit), ()):
            waiting[id(user)] -= 1
            if waiting[id(user)] == 0:
                ready.append(user)
    return order


def _is_weight_gradient(unit: Unit) -> bool:
    """Contractions over leading axes: XLA makes them anew when it folds transposes, so they come last."""
    if unit.node.op is not J.primitive("dot_general"):
        return False
    (contract, _), batch = unit.node.equation.params["dimension_numbers"]
    return not any(batch) and 0 in contract
