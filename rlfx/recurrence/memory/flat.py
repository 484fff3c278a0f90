"""A jaxpr as one list of operations: calls inlined, views seen through, loops with the buffers that they take over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlfx import _jaxpr as J
from rlfx.recurrence.memory.sizes import (
    BROADCAST,
    COPY,
    LOOPS,
    Node,
    Value,
    like,
    made,
    names,
    of_aval,
    on_host,
    squeezed,
)

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


def flatten(jaxpr: Any) -> Flat:
    """Of a jaxpr; its constants are inputs. Without what no result needs."""
    nodes: list[Node] = []

    def run(jaxpr: Any, args: Sequence[Value | None], consts: Sequence[Value | None]) -> list[Value | None]:
        env: dict[Any, Value | None] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        read = lambda atom: None if J.is_literal(atom) else env[atom]  # noqa: E731
        for equation in jaxpr.eqns:
            op, ins = equation.primitive, [read(v) for v in equation.invars]
            if J.is_call(op):
                body, _ = J.call_body(op, equation.params)
                outs = run(body, ins, [of_aval(v.aval) for v in body.constvars])
            elif _is_view(equation):
                outs = ins[: len(equation.outvars)]
            else:
                outs = [of_aval(v.aval) for v in equation.outvars]
                nodes.extend(_loop(equation, ins, outs) if op in LOOPS else [made(op, ins, outs, equation)])
            env.update(zip(equation.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    inputs = [of_aval(v.aval) for v in jaxpr.invars]
    outputs = run(jaxpr, inputs, [of_aval(v.aval) for v in jaxpr.constvars])
    needed, kept = {id(v) for v in outputs if v}, []
    for node in reversed(nodes):
        if any(id(v) in needed for v in node.outs):
            needed |= {id(v) for v in node.ins}
            kept.append(node)
    return Flat(inputs, outputs, kept[::-1])


def _loop(equation: Any, ins: list[Value | None], outs: list[Value]) -> list[Node]:
    """A loop writes over copies of the values that it begins with, and over zeros where it stacks."""
    params, before, pairs = equation.params, [], []
    scans = equation.primitive is J.SCAN
    start, carry = J.scan_counts(params) if scans else (params["cond_nconsts"] + params["body_nconsts"], len(outs))
    for i, out in enumerate(outs):
        init = like(out)
        source = ins[start + i] if i < carry else None
        before.append(made(COPY if source is not None else BROADCAST, [source], [init], equation))
        pairs.append((init, out))
        if i < carry:
            ins[start + i] = init
        else:
            ins.append(init)
    return [*before, made(equation.primitive, ins, outs, equation, pairs)]


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
