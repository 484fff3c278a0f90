"""The values and operations of a program as the bound sees them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rlfx import _jaxpr as J


@dataclass(eq=False, slots=True)
class Buffer:
    """An array of the flattened program.

    Attributes:
      bytes: what its buffer takes.
      node: the operation that computes it; None for an input.
      host: whether it is in host memory.
    """

    bytes: int
    shape: tuple
    dtype: Any
    node: Node | None = None
    host: bool = False


@dataclass(eq=False, slots=True)
class Node:
    """An operation: ``outs = op(ins)``, with its equation for parameters and the source line.

    Attributes:
      pairs: of a loop, the buffers it takes over: ``(initial value, result)``.
    """

    op: Any
    ins: tuple[Buffer, ...]
    outs: tuple[Buffer, ...]
    equation: Any
    pairs: tuple[tuple[Buffer, Buffer], ...] = ()


def names(*names: str) -> frozenset:
    return frozenset(p for n in names if (p := getattr(J.primitives, n + "_p", None)) is not None)


LOOPS = frozenset({J.SCAN, J.WHILE})
COPY, BROADCAST = J.primitive("copy"), J.primitive("broadcast_in_dim")
#: They write into their first operand.
UPDATES = names("dynamic_update_slice", "scatter", "scatter_add", "scatter_mul", "scatter_min", "scatter_max")
#: Element by element: the result may be written over an operand that is read for the last time.
IN_PLACE = J.ELEMENTWISE | UPDATES


def made(op: Any, ins: Sequence[Buffer | None], outs: Sequence[Buffer], equation: Any, pairs: Sequence = ()) -> Node:
    node = Node(op, tuple(i for i in ins if i is not None), tuple(outs), equation, tuple(pairs))
    for out in outs:
        out.node = node
    return node


def of_aval(aval: Any) -> Buffer:
    return Buffer(bytes_of(aval), tuple(aval.shape), aval.dtype, host=on_host(aval))


def like(value: Buffer) -> Buffer:
    return Buffer(value.bytes, value.shape, value.dtype, host=value.host)


def bytes_of(aval: Any) -> int:
    if J.short_dtype(aval.dtype) == "key":
        return 8 * math.prod(aval.shape)
    return math.prod(int(d) for d in aval.shape) * np.dtype(aval.dtype).itemsize


def on_host(aval: Any) -> bool:
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def squeezed(shape: tuple) -> list:
    return [d for d in shape if d != 1]
