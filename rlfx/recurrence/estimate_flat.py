"""The flattened jaxpr of the estimate: calls inlined, views dropped, the copies that XLA makes spelled out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.estimate_constants import counts, folded, is_small, within


@dataclass(eq=False, slots=True)
class Value:
    """An array of the flattened program.

    Attributes:
      bytes: what its buffer takes.
      node: the operation that computes it; None for an input.
      host: whether it is in host memory.
      varying, constant: along which dimensions it may vary, and whether XLA knows it: computed when first asked for.
      known: its numbers, of small constants.
    """

    bytes: int
    shape: tuple
    dtype: Any
    node: Node | None = None
    varying: frozenset | None = None
    constant: bool | None = None
    host: bool = False
    known: np.ndarray | None = None


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


def names(*names: str) -> frozenset:
    return frozenset(p for n in names if (p := getattr(J.primitives, n + "_p", None)) is not None)


#: The same bytes in another shape: no buffer of their own.
_VIEWS = names(
    "reshape", "squeeze", "stop_gradient", "copy", "bitcast_convert_type", "sharding_constraint", "device_put", "name",
) | {J.OPTIMIZATION_BARRIER, J.RANDOM_WRAP, J.RANDOM_UNWRAP}  # fmt: skip
LOOPS = frozenset({J.SCAN, J.WHILE})
COPY, BROADCAST = J.primitive("copy"), J.primitive("broadcast_in_dim")
#: A copy into another layout.
RELAYOUT, FOR_LOOP = "relayout", "relayout for a loop"
#: The same bytes in another shape, for operations that want one of their own: what is fused with it writes in place no more.
RESHAPED = "reshape"


def bytes_of(aval: Any) -> int:
    if J.short_dtype(aval.dtype) == "key":
        return 8 * math.prod(aval.shape)
    return math.prod(int(d) for d in aval.shape) * np.dtype(aval.dtype).itemsize


@dataclass
class Flat:
    """A jaxpr without calls and views: what is computed, in program order."""

    inputs: list[Value]
    outputs: list[Value | None]
    nodes: list[Node]


def flatten(jaxpr: Any, consts: Sequence = ()) -> Flat:
    nodes: list[Node] = []
    known: dict[Any, list[Value]] = {}
    widened: dict[tuple[int, tuple], Value] = {}
    repetitions: dict[tuple, Value] = {}
    constants: dict[tuple, Value] = {}

    def constant(numbers: np.ndarray) -> Value:
        """One value for all constants of the same numbers."""
        key = numbers.shape, str(numbers.dtype), numbers.tobytes()
        if key not in constants:
            constants[key] = Value(numbers.nbytes, numbers.shape, numbers.dtype, known=numbers)
        return constants[key]

    def repeated(number: Any, like: Value, equation: Any) -> Value:
        """A number in the shape of an array: one value for all who read it."""
        key = like.shape, str(like.dtype), like.host, str(number)
        if key not in repetitions:
            repetitions[key] = Value(like.bytes, like.shape, like.dtype, host=like.host)
            nodes.append(made(BROADCAST, [], [repetitions[key]], equation))
        return repetitions[key]

    def spelled_out(equation: Any, ins: list[Value | None], like: Value) -> list[Value | None]:
        """The operands of an elementwise operation, literals as arrays: XLA's library reads those from memory."""
        numbers = [_number(atom, v) for atom, v in zip(equation.invars, ins, strict=True)]
        if _is_scaling(equation) and numbers[1] is not None:
            numbers[1] = str(1 / float(numbers[1]))
        if equation.primitive is _SUB and numbers[1] is not None:  # XLA adds the negative number
            numbers[1] = str(-float(numbers[1]))
        kinds = (np.dtype(atom.aval.dtype) if n is not None else None for atom, n in zip(equation.invars, numbers, strict=True))
        return [
            v if n is None else repeated(n, Value(like.bytes, like.shape, kind, host=like.host), equation)
            for v, n, kind in zip(ins, numbers, kinds, strict=True)
        ]

    def captured(variables: Sequence, numbers: Sequence) -> list[Value]:
        return [
            constant(np.asarray(n)) if is_small(v.aval) and not isinstance(n, jax.core.Tracer) else new(v.aval)
            for v, n in zip(variables, numbers, strict=True)
        ]

    def wide(value: Value | None, like: Value, equation: Any) -> Value | None:
        """An operand of an elementwise operation, with its axes of length 1 repeated."""
        if value is None or value.shape in (like.shape, ()) or _squeezed(value.shape) == _squeezed(like.shape):
            return value
        if (id(value), like.shape) not in widened:
            twin = Value(bytes_of(equation.outvars[0].aval.update(dtype=value.dtype)), like.shape, value.dtype)
            nodes.append(made(BROADCAST, [value], [twin], equation))
            widened[id(value), like.shape] = twin
        return widened[id(value), like.shape]

    def new(aval: Any) -> Value:
        return Value(bytes_of(aval), tuple(aval.shape), aval.dtype, host=_on_host(aval))

    def run(jaxpr: Any, args: Sequence[Value | None], consts: Sequence[Value | None]) -> list[Value | None]:
        env: dict[Any, Value | None] = dict(zip(jaxpr.constvars, consts, strict=True))
        number = lambda atom: constant(np.asarray(atom.val)) if _number(atom) is not None else read(atom)  # noqa: E731
        env.update(zip(jaxpr.invars, args, strict=True))
        read = lambda atom: None if J.is_literal(atom) else env[atom]  # noqa: E731
        for equation in jaxpr.eqns:
            op, ins = equation.primitive, [read(v) for v in equation.invars]
            if J.is_call(op):
                body, body_consts = J.call_body(op, equation.params)
                outs = run(body, [number(v) for v in equation.invars], captured(body.constvars, body_consts))
            elif _is_view(equation):
                outs = ins[: len(equation.outvars)]
            elif (same := _unchanged(equation, ins)) is not None or (same := _same_cases(equation, ins)) is not None:
                outs = [ins[same]]
            elif op in SCATTERS and all(v is None or _is_folded(v) for v in ins):
                outs = [new(v.aval) for v in equation.outvars]
            elif (product := _product(equation, ins)) is not None:
                outs = [new(equation.outvars[0].aval)]
                nodes.append(made(op, [product], outs, equation))
            elif (numbers := folded(equation, ins)) is not None:
                outs = [constant(numbers)]
            else:
                key = _identity(equation, ins)
                outs = known.get(key) if key else None
                if outs is None:
                    outs = [new(v.aval) for v in equation.outvars]
                    if op in J.ELEMENTWISE:
                        ins = [wide(v, outs[0], equation) for v in ins]
                        if is_preferred(outs):
                            ins = spelled_out(equation, ins, outs[0])
                    if (simpler := simplified(equation, ins, outs)) is not None:
                        nodes.extend(simpler)
                    elif op is BROADCAST and (text := _number(equation.invars[0], ins[0])) is not None:
                        outs = [repeated(text, outs[0], equation)]
                    else:
                        nodes.extend(_expand(equation, ins, outs, repeated))
                    if key:
                        known[key] = outs
            env.update(zip(equation.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    inputs = [new(v.aval) for v in jaxpr.invars]
    outputs = run(jaxpr, inputs, captured(jaxpr.constvars, consts) if consts else [new(v.aval) for v in jaxpr.constvars])
    needed, kept = {id(v) for v in outputs if v}, []
    for node in reversed(nodes):
        if node.op is J.SCAN:
            _drop_unread(node, needed)
        if any(id(v) in needed for v in node.outs):
            needed |= {id(v) for v in node.ins}
            kept.append(node)
    return Flat(inputs, outputs, kept[::-1])


def simplified(equation: Any, ins: Sequence[Value | None], outs: list[Value]) -> list[Node] | None:
    """An operation on what repeats fewer numbers: XLA computes with those, and repeats the result."""
    if equation.primitive in J.ELEMENTWISE:
        return _repeated_after(equation, ins, outs[0])
    if equation.primitive in _REDUCED_REPEATED and ins[0] is not None:
        return _reduced_before(equation, ins[0], outs[0]) or _of_parts(equation, ins, outs)
    return None


def _of_parts(equation: Any, ins: Sequence[Value | None], outs: list[Value]) -> list[Node] | None:
    """A reduction over parts that are put together along a reduced axis: of each part, and of the results."""
    (value, *_), axes = ins, set(equation.params["axes"])
    if value is None or value.node is None:
        return None
    source = value.node
    if source.op is _TRANSPOSE:
        order = source.equation.params["permutation"]
        (value,), axes = source.ins, {order[a] for a in axes}
        source = value.node
    if source is None or source.op not in _JOINED or len(source.ins) != len(source.equation.invars):
        return None
    stacked, along = _JOINED[source.op], source.equation.params[_JOINED[source.op]]
    if along not in axes or (stacked == "dimension" and value.shape != source.equation.outvars[0].aval.shape):
        return None
    parts = list(source.ins)
    nodes = []
    if stacked == "dimension" or len(axes) > 1:
        reduced = [Value(outs[0].bytes, outs[0].shape, outs[0].dtype) for _ in parts]
        nodes += [made(equation.primitive, [p], [r], equation) for p, r in zip(parts, reduced, strict=True)]
        parts = reduced
    total = parts[0]
    for i, part in enumerate(parts[1:], 2):
        both = outs[0] if i == len(parts) else Value(outs[0].bytes, outs[0].shape, outs[0].dtype)
        nodes.append(made(_JOINS[equation.primitive], [total, part], [both], equation))
        total = both
    return nodes if len(source.ins) > 1 else None


def _repeats(value: Value) -> bool:
    return value.node is not None and value.node.op is BROADCAST and value.varying is None


def _repeated_after(equation: Any, ins: Sequence[Value | None], out: Value) -> list[Node] | None:
    arrays = [v for v in ins if v is not None and v.shape != ()]
    if not arrays or len(out.shape) == 0 or not all(_repeats(v) and v.shape == out.shape for v in arrays):
        return None
    sources = [v.node.ins for v in arrays if v.node is not None]
    large = {id(s[0]): s[0] for s in sources if s and math.prod(s[0].shape) > 1}
    wide = [v for v, s in zip(arrays, sources, strict=True) if s and id(s[0]) in large]
    if len({id(v) for v in wide}) > 1:
        return None
    (source,) = large.values() or [None]
    shape = () if source is None else source.shape
    narrow = Value(out.bytes // math.prod(out.shape) * math.prod(shape), shape, out.dtype)
    operands = [v for v in ins if v is not None and v.shape == ()] + [s[0] for s in sources if s]
    computed = made(equation.primitive, operands, [narrow], equation)
    again = made(BROADCAST, [narrow], [out], wide[0].node.equation if wide and wide[0].node else equation)
    return [computed, again]


def _reduced_before(equation: Any, value: Value, out: Value) -> list[Node] | None:
    axes = set(equation.params["axes"])
    if not _repeats(value) or value.node is None or axes & varying_of(value) or not value.node.ins:
        return None
    (source,) = value.node.ins
    if math.prod(source.shape) == math.prod(out.shape):
        return [made(MUL, [source], [out], equation)]
    scaled = Value(source.bytes, source.shape, source.dtype)
    return [made(MUL, [source], [scaled], equation), made(BROADCAST, [scaled], [out], equation)]


def varying_of(value: Value) -> frozenset:
    """The dimensions along which a value may vary."""
    if value.varying is not None:
        return value.varying
    node, known = value.node, frozenset(d for d, size in enumerate(value.shape) if size != 1)
    if node is None or node.op is not BROADCAST:
        return known
    if node.equation.primitive is BROADCAST and node.equation.outvars[0].aval.shape == value.shape:
        dims, shape = node.equation.params["broadcast_dimensions"], node.equation.invars[0].aval.shape
        return frozenset(int(d) for d, size in zip(dims, shape, strict=True) if size != 1)
    if not node.ins or math.prod(node.ins[0].shape) == 1:
        return frozenset()
    (source,) = node.ins
    same = len(source.shape) == len(value.shape)
    return frozenset(d for d, size in enumerate(source.shape) if size != 1) if same else known


def _drop_unread(node: Node, needed: set[int]) -> None:
    """Forgets the sequences that a loop writes and nobody reads."""
    _, carry = J.scan_counts(node.equation.params)
    sequences = {id(v) for v in node.outs[carry:]}
    unread = {id(init) for init, out in node.pairs if id(out) in sequences - needed}
    if unread and any(id(v) in needed for v in node.outs):
        node.ins = tuple(v for v in node.ins if id(v) not in unread)
        node.pairs = tuple(p for p in node.pairs if id(p[0]) not in unread)
        node.outs = tuple(v for v in node.outs if id(v) not in sequences - needed)


def _identity(equation: Any, ins: Sequence[Value | None]) -> Any:
    """What two equations have in common that XLA computes once; None if it cannot be compared."""
    if equation.primitive in LOOPS or equation.primitive is J.COND:
        return None
    values = tuple(id(v) if v is not None else str(atom) for v, atom in zip(ins, equation.invars, strict=True))
    try:
        key = (equation.primitive, values, tuple(sorted(equation.params.items())))
        hash(key)
    except TypeError:
        return None
    return key


def made(op: Any, ins: Sequence[Value | None], outs: Sequence[Value], equation: Any, pairs: Sequence = ()) -> Node:
    node = Node(op, tuple(i for i in ins if i is not None), tuple(outs), equation, tuple(pairs))
    for out in outs:
        out.node = node
    return node


def _expand(equation: Any, ins: list[Value | None], outs: list[Value], repeated: Callable) -> list[Node]:
    """The operations XLA makes of one equation: itself, after copies into the layout or the buffer that it needs.

    Args:
      repeated: makes an array of a number; loops write their results over zeros.
    """
    op, before = equation.primitive, []

    def copied(op: Any, value: Value | None, like: Value) -> Value:
        twin = Value(like.bytes, like.shape, like.dtype, host=like.host)
        before.append(made(op, [value], [twin], equation))
        return twin

    pairs: list[tuple[Value, Value]] = []
    if _is_scaling(equation) and (_number(equation.invars[1], ins[1]) or (ins[1] is not None and _is_number(ins[1]))):
        return [made(MUL, ins, outs, equation)]
    if op in _COMPOSED:
        like = [Value(outs[0].bytes, outs[0].shape, outs[0].dtype) for _ in _COMPOSED[op]]
        for part, out in zip(_COMPOSED[op], like, strict=True):
            before.append(made(part, ins[-1:], [out], equation))
            ins = [*ins, out]
        return [*before, made(_LAST, ins, outs, equation)]
    if op in SCATTERS:
        target, *others = ins
        ins = [copied(COPY, target, outs[0]), *(v and copied(RESHAPED, v, v) for v in others)]
    if op is J.SPLIT:
        return [made(_SLICE, ins, [out], equation) for out in outs]
    if op is _GATHER:
        return _gathered(equation, ins, outs)
    if op in _ARGUMENTS and ins[0] is not None:  # XLA computes the extremum, too
        return [made(op, ins, [*outs, Value(outs[0].bytes, outs[0].shape, ins[0].dtype)], equation)]
    if op in LOOPS:
        start, carry = _carries(equation)
        for i, out in enumerate(outs):
            if i < carry and ins[start + i] is None:
                continue
            init = copied(COPY, ins[start + i] if i < carry else repeated(_ZERO[out.dtype == bool], out, equation), out)
            if i < carry:
                ins[start + i] = init
            else:
                ins.append(init)
            pairs.append((init, out))
        # Constants that are repeated are made inside of the loop.
        carried = range(start, start + carry)
        ins = [None if i not in carried and _is_repeated_constant(v) else v for i, v in enumerate(ins)]
        # What is transposed gets another layout, and is copied into the one that a loop reads.
        ins = [copied(FOR_LOOP, v, v) if v is not None and v.node and v.node.op is _TRANSPOSE else v for v in ins]
    elif op in _LAYOUTS:
        ins = [
            copied(RELAYOUT, v, v) if v is not None and bad else v
            for v, bad in zip(ins, _LAYOUTS[op](equation), strict=True)
        ]
    return [*before, made(op, ins, outs, equation, pairs)]


def _in_bounds(equation: Any, ins: Sequence[Value | None]) -> bool:
    """Whether XLA need not check the indices of a gather, or knows that they are in bounds."""
    if equation.params["mode"] is not jax.lax.GatherScatterMode.FILL_OR_DROP:
        return True
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape = equation.invars[0].aval.shape
    limits = [shape[d] - sizes[d] for d in numbers.start_index_map]
    return ins[1] is not None and ins[1].known is not None and within(ins[1].known, limits)


def _gathered(equation: Any, ins: list[Value | None], outs: list[Value]) -> list[Node]:
    """A gather, and a selection between what it found and the number for indices out of bounds.

    With one index it is a slice.
    """
    indices = equation.invars[1].aval.shape
    one = math.prod(indices[:-1]) == 1
    op = _GATHER if not one else _SLICE if ins[1] is not None and ins[1].known is not None else _DYNAMIC_SLICE
    (out,), offsets = outs, equation.params["dimension_numbers"].offset_dims
    rows = Value(out.bytes, out.shape, out.dtype)
    if _in_bounds(equation, ins):
        return [made(op, ins, [rows], equation), made(RESHAPED, [rows], outs, equation)]
    found = Value(out.bytes, out.shape, out.dtype)
    valid = Value(math.prod(out.shape), out.shape, np.dtype(bool))
    valid.varying = frozenset(d for d, size in enumerate(out.shape) if d not in offsets and size != 1)
    return [
        made(op, ins, [rows], equation),
        made(RESHAPED, [rows], [found], equation),
        made(BROADCAST, ins[1:], [valid], equation),
        made(_SELECT, [valid, found], outs, equation),
    ]


def _is_folded(value: Value) -> bool:
    """Whether XLA computes a value while it compiles: not what is counted, 0, 1, 2, ..."""
    if value.known is not None:
        return not counts(value.known)
    return value.node is not None and value.node.op is not _IOTA and all(map(_is_folded, value.node.ins))


def is_constant(value: Value) -> bool:
    """Whether XLA knows a value: it is computed from literals."""
    if value.constant is None:
        value.constant = value.known is not None or value.node is not None and all(map(is_constant, value.node.ins))
    return value.constant


def _is_repeated_constant(value: Value | None) -> bool:
    return value is not None and value.node is not None and value.node.op is BROADCAST and is_constant(value)


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


def _on_host(aval: Any) -> bool:
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def _is_view(equation: Any) -> bool:
    if equation.primitive in _VIEWS:  # what moves between host and device is somewhere else afterwards
        return all(
            _on_host(i.aval) == _on_host(o.aval) for i, o in zip(equation.invars, equation.outvars, strict=False)
        )
    ins, outs = equation.invars, equation.outvars
    if not ins or len(outs) != 1 or J.is_literal(ins[0]):
        return False
    before, after = ins[0].aval, outs[0].aval
    if equation.primitive in _RESHAPING:
        return (
            before.dtype == after.dtype
            and _squeezed(before.shape) == _squeezed(after.shape)
            and (equation.primitive is not J.primitive("transpose") or _order_kept(equation, before))
        )
    return equation.primitive is J.primitive("convert_element_type") and before.dtype == after.dtype


#: As text: numbers are told apart by how they are written.
_ZERO = {False: "0.0", True: "False"}


def _number(atom: Any, value: Value | None = None) -> str | None:
    """One number that XLA knows, as text."""
    if J.short_dtype(atom.aval.dtype) == "key" or atom.aval.shape:
        return None
    found = atom.val if J.is_literal(atom) else None if value is None else value.known
    return None if found is None else str(bool(found) if atom.aval.dtype == bool else float(np.asarray(found).reshape(())))


def is_preferred(values: Sequence[Value]) -> bool:
    """Whether XLA may hand an operation to its library: on enough floats."""
    dtypes = all(J.short_dtype(v.dtype) in ("f32", "f64", "bf16") for v in values)
    return dtypes and max(math.prod(v.shape) for v in values) >= _AT_LEAST


#: With fewer elements XLA computes them itself.
_AT_LEAST = 4096


def _squeezed(shape: tuple) -> list:
    return [d for d in shape if d != 1]


def _unchanged(equation: Any, ins: Sequence[Value | None]) -> int | None:
    """The operand that an operation with a number returns as it is: times 1, plus 0."""
    number = _NEUTRAL.get(equation.primitive)
    if number is None:
        return None
    places = [1] if equation.primitive in (_SUB, _DIV) else [0, 1]
    for i in places:
        atom, other = equation.invars[i], equation.invars[1 - i]
        text = _number(atom, ins[i])
        same = ins[1 - i] is not None and other.aval.shape == equation.outvars[0].aval.shape
        if text is not None and same and float(text == "True" if text in ("True", "False") else text) == number:
            return 1 - i
    return None


#: As text: numbers are told apart by how they are written.
_ZERO = {False: "0.0", True: "False"}


def _number(atom: Any, value: Value | None = None) -> str | None:
    """One number that XLA knows, as text."""
    if J.short_dtype(atom.aval.dtype) == "key" or atom.aval.shape:
        return None
    found = atom.val if J.is_literal(atom) else None if value is None else value.known
    return None if found is None else str(bool(found) if atom.aval.dtype == bool else float(np.asarray(found).reshape(())))


def is_preferred(values: Sequence[Value]) -> bool:
    """Whether XLA may hand an operation to its library: on enough floats."""
    dtypes = all(J.short_dtype(v.dtype) in ("f32", "f64", "bf16") for v in values)
    return dtypes and max(math.prod(v.shape) for v in values) >= _AT_LEAST


#: With fewer elements XLA computes them itself.
_AT_LEAST = 4096


def _squeezed(shape: tuple) -> list:
    return [d for d in shape if d != 1]


def _times_one(equation: Any) -> int | None:
    """The operand that a product with 1, as differentiation makes them, returns."""
    if equation.primitive is not J.primitive("mul"):
        return None
    for i, v in enumerate(equation.invars):
        if J.is_literal(v) and np.ndim(v.val) == 0 and v.val == 1 and not J.is_literal(equation.invars[1 - i]):
            return 1 - i
    return None


def _is_scaling(equation: Any) -> bool:
    """Whether an equation divides floats: by a number that is a product with its inverse."""
    return equation.primitive is _DIV and equation.outvars[0].aval.dtype.kind in "fV"


def _is_number(value: Value) -> bool:
    """Whether a value repeats a number that XLA knows."""
    return value.node is not None and value.node.op is BROADCAST and not value.node.ins


def _product(equation: Any, ins: Sequence[Value | None]) -> Value | None:
    """What is multiplied by two numbers, one after the other: XLA multiplies by their product."""
    first = _scaled(equation, ins)
    again = None if first is None or first.node is None else _scaled(first.node.equation, first.node.ins)
    return again if again is not None and first is not None and again.shape == first.shape else None


def _scaled(equation: Any, ins: Sequence[Value | None]) -> Value | None:
    """The array that an equation multiplies by a number."""
    if getattr(equation, "primitive", None) is not MUL or not any(
        _number(atom, v if v is not None and v.shape == () else None) for atom, v in zip(equation.invars, [*ins, None], strict=False)
    ):
        return None
    arrays = [v for v in ins if v is not None and v.shape and not is_constant(v)]
    return arrays[0] if len(arrays) == 1 else None


def _same_cases(equation: Any, ins: Sequence[Value | None]) -> int | None:
    """A case of a selection between the same value and itself, or the one that is always selected."""
    cases = ins[1:] if equation.primitive is J.primitive("select_n") else ()
    if cases and ins[0] is not None and (which := ins[0].known) is not None and (which == which.flat[0]).all():
        chosen = int(which.flat[0])
        return 1 + chosen if cases[chosen] is not None and cases[chosen].shape == equation.outvars[0].aval.shape else None
    return 1 if cases and cases[0] is not None and all(v is cases[0] for v in cases) else None


_TRANSPOSE, _GATHER = J.primitive("transpose"), J.primitive("gather")
_IOTA = J.primitive("iota")
_SELECT, _SLICE, _DYNAMIC_SLICE = J.primitive("select_n"), J.primitive("slice"), J.primitive("dynamic_slice")
_REDUCED_REPEATED, MUL = names("reduce_sum", "reduce_max", "reduce_min"), J.primitive("mul")
#: What puts arrays together -> its parameter for the axis.
_JOINED = {J.primitive("concatenate"): "dimension"} | {p: "axis" for p in J.STACKING if p.name == "stack"}
_JOINS = {
    J.primitive("reduce_sum"): J.primitive("add"),
    J.primitive("reduce_max"): J.primitive("max"),
    J.primitive("reduce_min"): J.primitive("min"),
}
SCATTERS = names("scatter", "scatter_add", "scatter_mul", "scatter_min", "scatter_max")
_DIV, _SUB = J.primitive("div"), J.primitive("sub")
_NEUTRAL = {MUL: 1.0, _DIV: 1.0, J.primitive("add"): 0.0, J.ADD_ANY: 0.0, _SUB: 0.0}
_ARGUMENTS = names("argmax", "argmin")
#: What XLA makes of a function: others of the argument, each computed of the one before; the last one reads all of them.
_COMPOSED = {
    J.primitive("erf_inv"): (J.primitive("log1p"), J.primitive("sqrt")),
    J.primitive("logistic"): (J.primitive("exp"), J.primitive("div")),
}
_LAST = _SELECT


def _order_kept(equation: Any, before: Any) -> bool:
    moved = [d for d in equation.params["permutation"] if before.shape[d] != 1]
    return moved == sorted(moved)


_LAYOUTS = {J.primitive("dot_general"): _dot_layout, J.primitive("conv_general_dilated"): _conv_layout}
_RESHAPING = names("broadcast_in_dim", "transpose", "reduce_sum", "reduce_max", "reduce_min", "slice", "concatenate")
