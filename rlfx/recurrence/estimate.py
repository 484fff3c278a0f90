"""How many temporary bytes XLA will need for a jaxpr, without compiling it.

A model of what XLA does with memory, in three steps. *Fusion*: which values get a buffer; the others are computed inside
the loop that reads them. *Schedule*: XLA:CPU runs what is ready, first come first served. *Live ranges*: a buffer lives
from its definition to its last use, results are written over operands that die there, loops update their carries in
place. Arguments, constants and results of the program are no temporaries, as in ``temp_size_in_bytes``.
"""

from __future__ import annotations

import math
import types
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlfx import _jaxpr as J


@dataclass(eq=False, slots=True)
class Value:
    """An array of the flattened program.

    Attributes:
      bytes: what its buffer takes.
      node: the operation that computes it; None for an input.
    """

    bytes: int
    shape: tuple
    dtype: Any
    node: Node | None = None
    varying: frozenset | None = None


@dataclass(eq=False, slots=True)
class Node:
    """An operation: ``outs = op(ins)``, with its equation for parameters and the source line.

    Attributes:
      pairs: of a loop, the buffers it takes over: ``(initial value, result)``.
    """

    op: Any
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    equation: Any
    pairs: tuple[tuple[Value, Value], ...] = ()


@dataclass(frozen=True)
class LiveValue:
    """A value that occupies memory at the peak."""

    bytes: int
    shape: tuple
    dtype: str
    source: str

    def __str__(self) -> str:
        return f"{self.bytes / 2**20:.2f} MiB  {self.dtype}[{','.join(map(str, self.shape))}]  {self.source}"


def _names(*names: str) -> frozenset:
    return frozenset(p for n in names if (p := getattr(J.primitives, n + "_p", None)) is not None)


#: The same bytes in another shape: no buffer of their own.
_VIEWS = _names(
    "reshape", "squeeze", "stop_gradient", "copy", "bitcast_convert_type", "sharding_constraint", "device_put", "name",
) | {J.OPTIMIZATION_BARRIER, J.RANDOM_WRAP, J.RANDOM_UNWRAP}  # fmt: skip
#: Computed inside the loop that reads them, as often as they are read.
_CHEAP = J.ELEMENTWISE | {J.ADD_ANY, J.SPLIT} | _names(
    "broadcast_in_dim", "iota", "slice", "dynamic_slice", "rev", "pad", "concatenate", "transpose", "gather",
    "dynamic_update_slice", "random_seed",
)  # fmt: skip
#: Computed inside the loop that reads them if there is only one.
_EXPENSIVE = _names(
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "cos", "cosh", "digamma", "div", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "gather", "igamma", "igammac", "lgamma", "log", "log1p", "logistic", "pow",
    "regularized_incomplete_beta", "rem", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh", "polygamma",
)  # fmt: skip
_REDUCTIONS = _names(
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"
)
#: Operations that a reduction computes while it reads.
_REDUCED_WITH = _names("mul", "integer_pow", "square", "abs", "neg", "sub", "add", "convert_element_type")
_LOOPS = frozenset({J.SCAN, J.WHILE})
_COPY = J.primitive("copy")
#: A copy into another layout.
_RELAYOUT = "relayout"
#: They write into their first operand.
_UPDATES = _names("scatter", "scatter_add", "scatter_mul", "scatter_min", "scatter_max", "dynamic_update_slice")
_IN_PLACE = J.ELEMENTWISE | {J.ADD_ANY} | _UPDATES


def _bytes(aval: Any) -> int:
    if J.short_dtype(aval.dtype) == "key":
        return 8 * math.prod(aval.shape)
    return math.prod(int(d) for d in aval.shape) * np.dtype(aval.dtype).itemsize


# -- flattening ------------------------------------------------------------------------------------------------------


@dataclass
class Flat:
    """A jaxpr without calls and views: what is computed, in program order."""

    inputs: list[Value]
    outputs: list[Value | None]
    nodes: list[Node]


def _flatten(jaxpr: Any, consts: Sequence = ()) -> Flat:
    nodes: list[Node] = []
    known: dict[Any, list[Value]] = {}

    def new(aval: Any) -> Value:
        return Value(_bytes(aval), tuple(aval.shape), aval.dtype)

    def run(jaxpr: Any, args: Sequence[Value | None], consts: Sequence[Value | None]) -> list[Value | None]:
        env: dict[Any, Value | None] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        read = lambda atom: None if J.is_literal(atom) else env[atom]  # noqa: E731
        for equation in jaxpr.eqns:
            op, ins = equation.primitive, [read(v) for v in equation.invars]
            if J.is_call(op):
                body, body_consts = J.call_body(op, equation.params)
                outs = run(body, ins, [new(v.aval) for v in body.constvars] if body_consts else [])
            elif _is_view(equation):
                outs = ins[: len(equation.outvars)]
            elif (same := _times_one(equation)) is not None:
                outs = [ins[same]]
            else:
                key = _identity(equation, ins)
                outs = known.get(key) if key else None
                if outs is None:
                    outs = [new(v.aval) for v in equation.outvars]
                    nodes.extend(_expand(equation, ins, outs))
                    if key:
                        known[key] = outs
            env.update(zip(equation.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    inputs = [new(v.aval) for v in jaxpr.invars]
    outputs = run(jaxpr, inputs, [new(v.aval) for v in jaxpr.constvars])
    needed, kept = {id(v) for v in outputs if v}, []
    for node in reversed(nodes):
        if any(id(v) in needed for v in node.outs):
            needed |= {id(v) for v in node.ins}
            kept.append(node)
    return Flat(inputs, outputs, kept[::-1])


def _identity(equation: Any, ins: Sequence[Value | None]) -> Any:
    """What two equations have in common that XLA computes once; None if it cannot be compared."""
    if equation.primitive in _LOOPS or equation.primitive is J.COND:
        return None
    values = tuple(id(v) if v is not None else str(atom) for v, atom in zip(ins, equation.invars, strict=True))
    try:
        key = (equation.primitive, values, tuple(sorted(equation.params.items())))
        hash(key)
    except TypeError:
        return None
    return key


def _made(op: Any, ins: Sequence[Value | None], outs: Sequence[Value], equation: Any, pairs: Sequence = ()) -> Node:
    node = Node(op, tuple(i for i in ins if i is not None), tuple(outs), equation, tuple(pairs))
    for out in outs:
        out.node = node
    return node


def _expand(equation: Any, ins: list[Value | None], outs: list[Value]) -> list[Node]:
    """The operations XLA makes of one equation: itself, after copies into the layout or the buffer that it needs."""
    op, before = equation.primitive, []

    def copied(op: Any, value: Value | None, like: Value) -> Value:
        twin = Value(like.bytes, like.shape, like.dtype)
        before.append(_made(op, [value], [twin], equation))
        return twin

    pairs: list[tuple[Value, Value]] = []
    if op in _LOOPS:
        start, carry = _carries(equation)
        for i, out in enumerate(outs):
            if i < carry and ins[start + i] is None:
                continue
            init = copied(_COPY, ins[start + i] if i < carry else None, out)
            if i < carry:
                ins[start + i] = init
            else:
                ins.append(init)
            pairs.append((init, out))
    elif op in _LAYOUTS:
        ins = [
            copied(_RELAYOUT, v, v) if v is not None and bad else v
            for v, bad in zip(ins, _LAYOUTS[op](equation), strict=True)
        ]
    return [*before, _made(op, ins, outs, equation, pairs)]


def _carries(equation: Any) -> tuple[int, int]:
    """``(first carry among the inputs, number of carries)``."""
    params = equation.params
    if equation.primitive is J.SCAN:
        return J.scan_counts(params)
    consts = params["cond_nconsts"] + params["body_nconsts"]
    return consts, len(equation.outvars)


def _dot_layout(equation: Any) -> tuple[bool, bool]:
    """Which operands of a contraction XLA transposes into a matrix first."""
    (contract, batch) = equation.params["dimension_numbers"]
    shapes = [v.aval.shape for v in equation.invars]
    real = [[d for d in dims if shape[d] != 1] for dims, shape in zip(contract, shapes, strict=True)]
    if any(batch):
        return tuple(_scattered(shape, b, c) for shape, b, c in zip(shapes, batch, contract, strict=True))  # type: ignore
    return len(real[0]) > 1 and len(shapes[0]) > len(contract[0]), False


def _scattered(shape: tuple, batch: Sequence[int], contract: Sequence[int]) -> bool:
    free = [d for d in range(len(shape)) if d not in batch and d not in contract]
    orders = [[*batch, *free, *contract], [*batch, *contract, *free]]
    return not any((o := [d for d in order if shape[d] != 1]) == sorted(o) for order in orders)


def _conv_layout(equation: Any) -> tuple[bool, bool]:
    numbers = equation.params["dimension_numbers"]
    n = len(numbers.lhs_spec)
    inner = tuple(range(1, n - 1))
    return numbers.lhs_spec != (0, n - 1, *inner), numbers.rhs_spec != (n - 1, n - 2, *range(n - 2))


def _is_view(equation: Any) -> bool:
    if equation.primitive in _VIEWS:
        return True
    ins, outs = equation.invars, equation.outvars
    if not ins or len(outs) != 1 or J.is_literal(ins[0]):
        return False
    before, after = ins[0].aval, outs[0].aval
    if equation.primitive in _RESHAPING:
        squeezed = [[d for d in a.shape if d != 1] for a in (before, after)]
        return (
            before.dtype == after.dtype
            and squeezed[0] == squeezed[1]
            and (equation.primitive is not J.primitive("transpose") or _order_kept(equation, before))
        )
    return equation.primitive is J.primitive("convert_element_type") and before.dtype == after.dtype


def _times_one(equation: Any) -> int | None:
    """The operand that a product with 1, as differentiation makes them, returns."""
    if equation.primitive is not J.primitive("mul"):
        return None
    for i, v in enumerate(equation.invars):
        if J.is_literal(v) and np.ndim(v.val) == 0 and v.val == 1 and not J.is_literal(equation.invars[1 - i]):
            return 1 - i
    return None


def _order_kept(equation: Any, before: Any) -> bool:
    moved = [d for d in equation.params["permutation"] if before.shape[d] != 1]
    return moved == sorted(moved)


_LAYOUTS = {J.primitive("dot_general"): _dot_layout, J.primitive("conv_general_dilated"): _conv_layout}
_RESHAPING = _names("broadcast_in_dim", "transpose", "reduce_sum", "reduce_max", "reduce_min", "slice", "concatenate")


# -- fusion ----------------------------------------------------------------------------------------------------------


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


def _units(flat: Flat, needing_buffer: set[int]) -> list[Unit]:
    consumers: dict[int, list[Node]] = {}
    for node in flat.nodes:
        for value in node.ins:
            consumers.setdefault(id(value), []).append(node)
    places: dict[int, int] = {}  # how often a fused value is computed
    roots: set[int] = set()
    for node in reversed(flat.nodes):
        count = 0
        for out in node.outs:
            for user in consumers.get(id(out), ()):
                count += 1 if id(user) in roots else places[id(user)]
        fused = (
            node.op in _CHEAP
            and node.op is not _COPY
            and not any(id(out) in needing_buffer for out in node.outs)
            and all(_fuses(user, out) for out in node.outs for user in consumers.get(id(out), ()))
            and not (node.op in _EXPENSIVE and count > 1)
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
        and all(user.op in (_RELAYOUT, J.primitive("dot_general")) for out in node.outs for user in consumers[id(out)])
    }
    return [
        Unit(node, *_reads(node, roots - twice if node.op is _RELAYOUT else roots))
        for node in flat.nodes
        if id(node) in roots
    ]


def _fuses(user: Node, value: Value) -> bool:
    """Whether an operation computes what it reads, instead of reading it from memory."""
    if user.op in _REDUCTIONS:  # a reduction takes over one operation on values in memory, no more
        if value.node is None or _narrow(value):
            return True
        return value.node.op in _REDUCED_WITH and all(
            _narrow(v) or (v.bytes == value.bytes and (v.node is None or v.node.op not in _CHEAP))
            for v in value.node.ins
        )
    return user.op in _CHEAP


def _narrow(value: Value) -> bool:
    """Whether a value repeats fewer numbers: XLA reduces those, and broadcasts afterwards."""
    return len(_varying(value)) < sum(d != 1 for d in value.shape)


def _varying(value: Value) -> frozenset:
    """The dimensions along which a value may vary."""
    if value.varying is None:
        value.varying = frozenset(d for d, size in enumerate(value.shape) if size != 1)
        node = value.node
        if node is not None and node.op is J.primitive("broadcast_in_dim"):
            dims = node.equation.params["broadcast_dimensions"]
            shape = node.equation.invars[0].aval.shape
            value.varying = frozenset(int(d) for d, size in zip(dims, shape, strict=True) if size != 1)
        elif node is not None and node.op in J.ELEMENTWISE and all(v.shape in (value.shape, ()) for v in node.ins):
            value.varying = frozenset().union(*(_varying(v) for v in node.ins))
    return value.varying


def _reads(root: Node, roots: set[int]) -> tuple[list[Value], set[int]]:
    found: dict[int, Value] = {}
    elsewhere: set[int] = set()
    seen: set[tuple[int, bool]] = set()

    def visit(node: Node, aligned: bool) -> None:
        aligned = aligned and (node.op in _IN_PLACE or (node.op in _LOOPS))
        for value in node.ins:
            if value.node is None or id(value.node) in roots:
                found[id(value)] = value
                if not aligned:
                    elsewhere.add(id(value))
            elif (id(value.node), aligned) not in seen:
                seen.add((id(value.node), aligned))
                visit(value.node, aligned)

    visit(root, True)
    return list(found.values()), set(found) - elsewhere


# -- schedule --------------------------------------------------------------------------------------------------------


def _schedule(units: list[Unit]) -> list[Unit]:
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


# -- live ranges -----------------------------------------------------------------------------------------------------


def _peak(flat: Flat, outside: set[int], needing_buffer: set[int], carried: Mapping[int, Value]) -> tuple[int, tuple]:
    """``(bytes, what is live then)``.

    Args:
      outside: results that live in buffers of the caller.
      needing_buffer: values that must be in memory whoever reads them.
      carried: result of a loop's body -> the input whose buffer it takes over.
    """
    units = _schedule(_units(flat, needing_buffer))
    last: dict[int, int] = {}
    defined: dict[int, int] = {}
    for i, unit in enumerate(units):
        for value in unit.reads:
            last[id(value)] = i
        for value in unit.node.outs:
            defined[id(value)] = i
            last.setdefault(id(value), i)
    cost = {}
    taken_over = {id(out): init for unit in units for init, out in unit.node.pairs}
    for i, unit in enumerate(units):
        target = unit.node.ins[0] if unit.node.op in _UPDATES and unit.node.ins else None
        fits = target is not None and target.node is not None and target.bytes == unit.node.outs[0].bytes
        if target is not None and fits and last.get(id(target)) == i:
            taken_over[id(unit.node.outs[0])] = target
    for i, unit in reversed(list(enumerate(units))):
        for value in unit.node.outs:
            cost.setdefault(id(value), 0 if id(value) in outside else value.bytes)
            before = carried.get(id(value))
            if before is not None and (
                last.get(id(before), -1) > i or (last.get(id(before)) == i and unit.node.op not in _IN_PLACE)
            ):
                cost[id(value)] = value.bytes
            init = taken_over.get(id(value))
            if init is not None and cost[id(value)] == 0:
                cost[id(init)] = 0
    begins = {}  # when the buffer of a result is first written: until then it may hold something else
    for value in (v for unit in units for v in unit.node.outs if id(v) in outside and id(v) not in carried):
        first = value
        while id(first) in taken_over:
            first = taken_over[id(first)]
        begins[id(value)] = (defined.get(id(first), 0), value.bytes)

    live: dict[int, Value] = {}
    peak, at_peak = 0, ()
    for i, unit in enumerate(units):
        dying = [v for v in unit.reads if last[id(v)] == i and id(v) in live]
        free = [v for v in dying if id(v) in unit.aligned]
        for value in unit.node.outs:
            if not cost[id(value)]:
                continue
            init = taken_over.get(id(value))
            reused = next((v for v in free if (v.bytes == value.bytes if init is None else v is init)), None)
            if reused is not None:
                dying.remove(reused)
                free.remove(reused)
                del live[id(reused)]
            live[id(value)] = value
        inside = _inside(unit.node)
        now = _total(live.values()) + _total(inside)
        if now > peak:
            lasting = list(live.values())
            saved = _in_results(i, [(v, last[id(v)]) for v in lasting] + [(v, i) for v in inside], begins)
            if now - saved > peak:
                peak, at_peak = now - saved, (*lasting, *inside)
        for value in [*dying, *(v for v in unit.node.outs if last[id(v)] == i)]:
            live.pop(id(value), None)
    return peak, at_peak


def _total(values: Any) -> int:
    return sum(v.bytes for v in values)


def _in_results(now: int, temporaries: list[tuple[Value, int]], begins: Mapping[int, tuple[int, int]]) -> int:
    """Bytes of temporaries that fit into buffers of results which are not written yet."""
    saved, left = 0, sorted(temporaries, key=lambda t: -t[0].bytes)
    for begin, size in sorted(begins.values(), key=lambda b: -b[1]):
        if begin > now:
            found = next((t for t in left if t[0].bytes <= size and t[1] < begin), None)
            if found is not None:
                left.remove(found)
                saved += found[0].bytes
    return saved


def _inside(node: Node) -> tuple[Value, ...]:
    """Temporaries inside an operation: bodies, branches, and what XLA's own expansions need."""
    op, params = node.op, node.equation.params
    if op is J.SCAN:
        consts, carry = J.scan_counts(params)
        return _loop(*J.body_of(params["jaxpr"]), consts, carry)
    if op is J.WHILE:
        body, body_consts = J.body_of(params["body_jaxpr"])
        return _loop(body, body_consts, params["body_nconsts"], len(body.outvars))
    if op is J.COND:
        return max((_branch(*J.body_of(b))[1] for b in params["branches"]), key=_total)
    if op in J.RANDOM:
        return _random(node)
    return ()


def _random(node: Node) -> tuple[Value, ...]:
    """Threefry is a loop over two words, and three of the key where it varies; all of them are copied in its body."""
    out = node.outs[0]
    keys = node.ins[0] if node.ins else out
    lanes = out.bytes // 2 if J.short_dtype(out.dtype) == "key" else out.bytes
    key_lanes = min(4 * math.prod(keys.shape), lanes)
    held = out.bytes + (keys.bytes if keys is not out and key_lanes >= lanes else 0)  # among the live values already
    words = [lanes] * 4 + [key_lanes] * 6
    while words and held >= words[0]:
        held -= words.pop(0)
    return tuple(Value(w, (w // 4,), np.dtype("u4"), node) for w in words)


def _loop(jaxpr: Any, jaxpr_consts: Sequence, consts: int, carry: int) -> tuple[Value, ...]:
    flat = _flatten(jaxpr, jaxpr_consts)
    slices, writes = flat.inputs[consts + carry :], []
    for value in slices:
        value.node = Node(J.primitive("dynamic_slice"), (), (value,), _NO_EQUATION)
    for value in flat.outputs[carry:]:
        if value is not None and value.node is not None:
            writes.append(
                Node(J.primitive("dynamic_update_slice"), (value,), (Value(0, (), np.dtype("f4")),), _NO_EQUATION)
            )
    flat.nodes = [v.node for v in slices] + flat.nodes + writes
    befores, afters = flat.inputs[consts : consts + carry], flat.outputs[:carry]
    carried = {id(a): b for b, a in zip(befores, afters, strict=True) if a is not None and a.node is not None}
    written = {id(n.outs[0]) for n in writes}
    return _peak(flat, set(carried), set(carried) | written, carried)[1]


def _branch(jaxpr: Any, consts: Sequence) -> tuple[int, tuple]:
    flat = _flatten(jaxpr, consts)
    outputs = {id(v) for v in flat.outputs if v is not None}
    return _peak(flat, outputs, outputs, {})


#: What stands for the slices and updates that a loop makes by itself.
_NO_EQUATION = types.SimpleNamespace(params={})


# -- public ----------------------------------------------------------------------------------------------------------


def estimate_temp_bytes(jaxpr: Any) -> int:
    """Estimate ``compile().memory_analysis().temp_size_in_bytes`` of a jitted jaxpr, in bytes, without compiling it.

    Args:
      jaxpr: a ``ClosedJaxpr``, as ``jax.make_jaxpr`` returns it.

    Returns:
      An integer. Arguments (donated or not), constants and results are not counted. The model is that of XLA:CPU of
      jaxlib 0.10; see docs/memory.md for how far it is off.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> estimate_temp_bytes(jax.make_jaxpr(lambda x: jnp.tanh(x @ x).sum())(jnp.ones((256, 256))))
      262144
    """
    return _branch(*J.body_of(jaxpr))[0]


def largest_values(jaxpr: Any, n: int = 5) -> list[LiveValue]:
    """The ``n`` largest values that occupy memory at the estimated peak, largest first.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> [v.bytes for v in largest_values(jax.make_jaxpr(lambda x: jnp.tanh(x @ x).sum())(jnp.ones((256, 256))))]
      [262144]
    """
    _, live = _branch(*J.body_of(jaxpr))
    known = (v for v in live if v.node is not None and v.node.equation is not _NO_EQUATION)
    found = [LiveValue(v.bytes, v.shape, J.short_dtype(v.dtype), J.source_of(v.node.equation)) for v in known]
    return sorted(found, key=lambda v: -v.bytes)[:n]
