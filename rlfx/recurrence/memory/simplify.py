"""What XLA makes simpler before it fuses: operations with 0 and 1, on repeated numbers, on parts that are put together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlfx import _jaxpr as J
from rlfx.recurrence.memory.sizes import BROADCAST, MUL, Node, Value, is_constant, made, names, number, varying_of

_DIV, SUB, _TRANSPOSE = J.primitive("div"), J.primitive("sub"), J.primitive("transpose")
_REDUCED_REPEATED = names("reduce_sum", "reduce_max", "reduce_min")
#: What puts arrays together -> its parameter for the axis.
_JOINED = {J.primitive("concatenate"): "dimension"} | {p: "axis" for p in J.STACKING if p.name == "stack"}
_JOINS = {
    J.primitive("reduce_sum"): J.primitive("add"),
    J.primitive("reduce_max"): J.primitive("max"),
    J.primitive("reduce_min"): J.primitive("min"),
}
#: The second operand that changes nothing.
_NEUTRAL = {MUL: 1.0, _DIV: 1.0, J.primitive("add"): 0.0, J.ADD_ANY: 0.0, SUB: 0.0}


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


def unchanged(equation: Any, ins: Sequence[Value | None]) -> int | None:
    """The operand that an operation with a number returns as it is: times 1, plus 0."""
    neutral = _NEUTRAL.get(equation.primitive)
    if neutral is None:
        return None
    places = [1] if equation.primitive in (SUB, _DIV) else [0, 1]
    for i in places:
        atom, other = equation.invars[i], equation.invars[1 - i]
        text = number(atom, ins[i])
        same = ins[1 - i] is not None and other.aval.shape == equation.outvars[0].aval.shape
        if text is not None and same and float(text == "True" if text in ("True", "False") else text) == neutral:
            return 1 - i
    return None


def is_scaling(equation: Any) -> bool:
    """Whether an equation divides floats: by a number that is a product with its inverse."""
    return equation.primitive is _DIV and equation.outvars[0].aval.dtype.kind in "fV"


def product(equation: Any, ins: Sequence[Value | None]) -> Value | None:
    """What is multiplied by two numbers, one after the other: XLA multiplies by their product."""
    first = _scaled(equation, ins)
    again = None if first is None or first.node is None else _scaled(first.node.equation, first.node.ins)
    return again if again is not None and first is not None and again.shape == first.shape else None


def _scaled(equation: Any, ins: Sequence[Value | None]) -> Value | None:
    """The array that an equation multiplies by a number."""
    if getattr(equation, "primitive", None) is not MUL or not any(
        number(atom, v if v is not None and v.shape == () else None)
        for atom, v in zip(equation.invars, [*ins, None], strict=False)
    ):
        return None
    arrays = [v for v in ins if v is not None and v.shape and not is_constant(v)]
    return arrays[0] if len(arrays) == 1 else None


def same_cases(equation: Any, ins: Sequence[Value | None]) -> int | None:
    """A case of a selection between the same value and itself, or the one that is always selected."""
    cases = ins[1:] if equation.primitive is J.primitive("select_n") else ()
    if cases and ins[0] is not None and (which := ins[0].known) is not None and (which == which.flat[0]).all():
        chosen = int(which.flat[0])
        return (
            1 + chosen if cases[chosen] is not None and cases[chosen].shape == equation.outvars[0].aval.shape else None
        )
    return 1 if cases and cases[0] is not None and all(v is cases[0] for v in cases) else None
