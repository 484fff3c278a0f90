"""A jaxpr as one list of operations: calls inlined, views seen through, loops with the buffers that they take over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from rlfx import _jaxpr as J
from rlfx.recurrence.memory.sizes import (
    BROADCAST,
    COPY,
    LOOPS,
    Buffer,
    Node,
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

    inputs: list[Buffer]
    outputs: list[Buffer | None]
    nodes: list[Node]


def flatten(jaxpr: Any) -> Flat:
    """Of a jaxpr; its constants are inputs. Without what no result needs."""
    nodes: list[Node] = []

    def visit(equation: Any, ins: list[Buffer | None], within: tuple) -> Sequence[Buffer | None]:
        if _is_view(equation):
            return ins[: len(equation.outvars)]
        op, outs = equation.primitive, [of_aval(v.aval) for v in equation.outvars]
        nodes.extend(_loop(equation, ins, outs) if op in LOOPS else [made(op, ins, outs, equation)])
        return outs

    inputs, consts = ([of_aval(v.aval) for v in of] for of in (jaxpr.invars, jaxpr.constvars))
    constant = lambda value: of_aval(jax.typeof(value))  # noqa: E731
    outputs = J.walk(jaxpr, consts, inputs, visit, literal=lambda atom: None, constant=constant)
    needed, kept = {id(v) for v in outputs if v}, []
    for node in reversed(nodes):
        if any(id(v) in needed for v in node.outs):
            needed |= {id(v) for v in node.ins}
            kept.append(node)
    return Flat(inputs, outputs, kept[::-1])


def _loop(equation: Any, ins: list[Buffer | None], outs: list[Buffer]) -> list[Node]:
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
