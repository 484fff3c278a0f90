"""The flattened jaxpr of the estimate: calls inlined, views dropped, the copies that XLA makes spelled out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.memory.constants import folded, numbers_of
from rlfx.recurrence.memory.expand import expand
from rlfx.recurrence.memory.simplify import SUB, is_scaling, product, same_cases, simplified, unchanged
from rlfx.recurrence.memory.sizes import (
    BROADCAST,
    LOOPS,
    SCATTERS,
    Node,
    Value,
    bytes_of,
    is_folded,
    is_preferred,
    made,
    names,
    number,
    on_host,
    squeezed,
)  # fmt: skip

#: The same bytes in another shape: no buffer of their own.
_VIEWS = names(
    "reshape", "squeeze", "stop_gradient", "copy", "bitcast_convert_type", "sharding_constraint", "device_put", "name",
) | {J.varies_with, J.OPTIMIZATION_BARRIER, J.RANDOM_WRAP, J.RANDOM_UNWRAP}  # fmt: skip
_RESHAPING = names("broadcast_in_dim", "transpose", "reduce_sum", "reduce_max", "reduce_min", "slice", "concatenate")


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

    def repeated(text: Any, like: Value, equation: Any) -> Value:
        """A number in the shape of an array: one value for all who read it."""
        key = like.shape, str(like.dtype), like.host, str(text)
        if key not in repetitions:
            repetitions[key] = Value(like.bytes, like.shape, like.dtype, host=like.host)
            nodes.append(made(BROADCAST, [], [repetitions[key]], equation))
        return repetitions[key]

    def spelled_out(equation: Any, ins: list[Value | None], like: Value) -> list[Value | None]:
        """The operands of an elementwise operation, literals as arrays: XLA's library reads those from memory."""
        numbers = [number(atom, v) for atom, v in zip(equation.invars, ins, strict=True)]
        if is_scaling(equation) and numbers[1] is not None:
            numbers[1] = str(1 / float(numbers[1]))
        if equation.primitive is SUB and numbers[1] is not None:  # XLA adds the negative number
            numbers[1] = str(-float(numbers[1]))
        kinds = (
            np.dtype(atom.aval.dtype) if n is not None else None
            for atom, n in zip(equation.invars, numbers, strict=True)
        )
        return [
            v if n is None else repeated(n, Value(like.bytes, like.shape, kind, host=like.host), equation)
            for v, n, kind in zip(ins, numbers, kinds, strict=True)
        ]

    def captured(variables: Sequence, numbers: Sequence) -> list[Value]:
        found = (numbers_of(v.aval, n) for v, n in zip(variables, numbers, strict=True))
        return [new(v.aval) if n is None else constant(n) for v, n in zip(variables, found, strict=True)]

    def wide(value: Value | None, like: Value, equation: Any) -> Value | None:
        """An operand of an elementwise operation, with its axes of length 1 repeated."""
        if value is None or value.shape in (like.shape, ()) or squeezed(value.shape) == squeezed(like.shape):
            return value
        if (id(value), like.shape) not in widened:
            twin = Value(bytes_of(equation.outvars[0].aval.update(dtype=value.dtype)), like.shape, value.dtype)
            nodes.append(made(BROADCAST, [value], [twin], equation))
            widened[id(value), like.shape] = twin
        return widened[id(value), like.shape]

    def new(aval: Any) -> Value:
        return Value(bytes_of(aval), tuple(aval.shape), aval.dtype, host=on_host(aval))

    def run(jaxpr: Any, args: Sequence[Value | None], consts: Sequence[Value | None]) -> list[Value | None]:
        env: dict[Any, Value | None] = dict(zip(jaxpr.constvars, consts, strict=True))
        argument = lambda atom: constant(np.asarray(atom.val)) if number(atom) is not None else read(atom)  # noqa: E731
        env.update(zip(jaxpr.invars, args, strict=True))
        read = lambda atom: None if J.is_literal(atom) else env[atom]  # noqa: E731
        for equation in jaxpr.eqns:
            op, ins = equation.primitive, [read(v) for v in equation.invars]
            if J.is_call(op):
                body, body_consts = J.call_body(op, equation.params)
                outs = run(body, [argument(v) for v in equation.invars], captured(body.constvars, body_consts))
            elif _is_view(equation):
                outs = ins[: len(equation.outvars)]
            elif (same := unchanged(equation, ins)) is not None or (same := same_cases(equation, ins)) is not None:
                outs = [ins[same]]
            elif op in SCATTERS and all(v is None or is_folded(v) for v in ins):
                outs = [new(v.aval) for v in equation.outvars]
            elif (scaled := product(equation, ins)) is not None:
                outs = [new(equation.outvars[0].aval)]
                nodes.append(made(op, [scaled], outs, equation))
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
                    elif op is BROADCAST and (text := number(equation.invars[0], ins[0])) is not None:
                        outs = [repeated(text, outs[0], equation)]
                    else:
                        nodes.extend(expand(equation, ins, outs, repeated))
                    if key:
                        known[key] = outs
            env.update(zip(equation.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    inputs = [new(v.aval) for v in jaxpr.invars]
    outputs = run(
        jaxpr, inputs, captured(jaxpr.constvars, consts) if consts else [new(v.aval) for v in jaxpr.constvars]
    )
    needed, kept = {id(v) for v in outputs if v}, []
    for node in reversed(nodes):
        if node.op is J.SCAN:
            _drop_unread(node, needed)
        if any(id(v) in needed for v in node.outs):
            needed |= {id(v) for v in node.ins}
            kept.append(node)
    return Flat(inputs, outputs, kept[::-1])


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


def _is_view(equation: Any) -> bool:
    if equation.primitive in _VIEWS:  # what moves between host and device is somewhere else afterwards
        return all(on_host(i.aval) == on_host(o.aval) for i, o in zip(equation.invars, equation.outvars, strict=False))
    ins, outs = equation.invars, equation.outvars
    if not ins or len(outs) != 1 or J.is_literal(ins[0]):
        return False
    before, after = ins[0].aval, outs[0].aval
    if equation.primitive in _RESHAPING:
        return (
            before.dtype == after.dtype
            and squeezed(before.shape) == squeezed(after.shape)
            and (equation.primitive is not J.primitive("transpose") or _order_kept(equation, before))
        )
    return equation.primitive is J.primitive("convert_element_type") and before.dtype == after.dtype


def _order_kept(equation: Any, before: Any) -> bool:
    moved = [d for d in equation.params["permutation"] if before.shape[d] != 1]
    return moved == sorted(moved)
