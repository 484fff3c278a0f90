"""The values and operations of the estimate, and what XLA knows of a value before the program runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.memory.constants import counts


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


LOOPS = frozenset({J.SCAN, J.WHILE})
COPY, BROADCAST = J.primitive("copy"), J.primitive("broadcast_in_dim")
#: A copy into another layout.
RELAYOUT, FOR_LOOP = "relayout", "relayout for a loop"
#: The same bytes in another shape, for operations that want one of their own: what is fused with it writes in place no more.
RESHAPED = "reshape"
MUL, IOTA = J.primitive("mul"), J.primitive("iota")
#: They write into their first operand.
SCATTERS = names("scatter", "scatter_add", "scatter_mul", "scatter_min", "scatter_max")
#: With fewer elements XLA computes them itself.
_AT_LEAST = 4096


def made(op: Any, ins: Sequence[Value | None], outs: Sequence[Value], equation: Any, pairs: Sequence = ()) -> Node:
    node = Node(op, tuple(i for i in ins if i is not None), tuple(outs), equation, tuple(pairs))
    for out in outs:
        out.node = node
    return node


def bytes_of(aval: Any) -> int:
    if J.short_dtype(aval.dtype) == "key":
        return 8 * math.prod(aval.shape)
    return math.prod(int(d) for d in aval.shape) * np.dtype(aval.dtype).itemsize


def on_host(aval: Any) -> bool:
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def squeezed(shape: tuple) -> list:
    return [d for d in shape if d != 1]


def number(atom: Any, value: Value | None = None) -> str | None:
    """One number that XLA knows, as text."""
    if J.short_dtype(atom.aval.dtype) == "key" or atom.aval.shape:
        return None
    found = atom.val if J.is_literal(atom) else None if value is None else value.known
    return (
        None if found is None else str(bool(found) if atom.aval.dtype == bool else float(np.asarray(found).reshape(())))
    )


def is_preferred(values: Sequence[Value]) -> bool:
    """Whether XLA may hand an operation to its library: on enough floats."""
    dtypes = all(J.short_dtype(v.dtype) in ("f32", "f64", "bf16") for v in values)
    return dtypes and max(math.prod(v.shape) for v in values) >= _AT_LEAST


def is_constant(value: Value) -> bool:
    """Whether XLA knows a value: it is computed from literals."""
    if value.constant is None:
        value.constant = value.known is not None or (value.node is not None and all(map(is_constant, value.node.ins)))
    return value.constant


def is_folded(value: Value) -> bool:
    """Whether XLA computes a value while it compiles: not what is counted, 0, 1, 2, ..."""
    seen, left = set(), [value]
    while left:
        value = left.pop()
        if value.known is not None:
            if counts(value.known):
                return False
        elif value.node is None or value.node.op is IOTA:
            return False
        else:
            left += [v for v in value.node.ins if id(v) not in seen]
            seen |= {id(v) for v in value.node.ins}
    return True


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
