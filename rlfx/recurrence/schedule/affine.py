"""Which loops are affine: every state is, element by element, ``a * state + b``, with ``a`` and ``b`` known before it.

Discounted sums, GAE, λ-returns, V-trace, eligibility traces, counters, gated linear cells. The composition of two such maps
is another, so that a device that is slow to start operations computes all T states in a few (``execute/affine.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.program import Equation, Var
from rlfx.recurrence.language.primitives import series_p
from rlfx.recurrence.schedule.schedule import REGISTER, Loop

NEG, ADD, SUB, MUL, DIV, SELECT, COPY = map(J.primitive, ("neg", "add", "sub", "mul", "div", "select_n", "copy"))

#: Operations that are affine in a state, element by element, if these of their operands vary with it.
AFFINE: dict[Any, Callable[[Sequence[bool]], bool]] = {
    **dict.fromkeys((NEG, ADD, SUB, COPY, series_p), lambda varies: True),
    MUL: lambda varies: sum(varies) == 1,
    DIV: lambda varies: not varies[1],
    SELECT: lambda varies: not varies[0],
}


@dataclass(frozen=True)
class Operation:
    """An equation, of a program or of a jaxpr: ``inputs`` has None for literals."""

    op: Any
    inputs: tuple
    outputs: tuple


@dataclass(frozen=True)
class State:
    """A state of a loop.

    Attributes:
      before: the names of its value before an iteration.
      after: that of its value after it; None: a literal.
    """

    before: frozenset
    after: Any


def order_of(operations: Sequence[Operation], states: Mapping[Hashable, State]) -> list | None:
    """In which order the states can be computed, each for all timesteps; None if they cannot.

    A state may be any function of those before it in the order, and is affine in itself.
    """
    varies = {key: _varying(operations, state.before) for key, state in states.items()}
    needs = {key: {k for k in states if state.after in varies[k]} for key, state in states.items()}
    order: list = []
    while len(order) < len(states):
        left = [k for k in states if k not in order and needs[k] <= {*order, k}]
        key = next((k for k in left if _is_affine(operations, states[k].after, varies[k])), None)
        if key is None:
            return None
        order.append(key)
    return order


def _varying(operations: Iterable[Operation], before: frozenset) -> frozenset:
    """What varies with a state."""
    found = set(before)
    for o in operations:
        if not found.isdisjoint(o.inputs):
            found.update(o.outputs)
    return frozenset(found)


def _is_affine(operations: Sequence[Operation], after: Any, varies: frozenset) -> bool:
    """Whether what a state is computed by is affine in what varies with it."""
    needed = {after}
    for o in reversed(operations):
        mine = [name in varies for name in o.inputs]
        if any(mine) and not needed.isdisjoint(o.outputs):
            if o.op not in AFFINE or not AFFINE[o.op](mine):
                return False
            needed.update(o.inputs)
    return True


def is_affine(loop: Loop) -> bool:
    """Whether a loop of a schedule is, and does nothing else that keeps the order of its iterations."""
    if not loop.depth or any(depth != REGISTER or not is_wide(v.dtype) for v, depth in loop.depth.items()):
        return False
    if any(e.has_effects or not (e in loop.reads or _is_simple(e)) for e in loop.body):
        return False
    operations = [
        Operation(e.op, tuple(v if isinstance(v, Var) else None for v in e.inputs), e.outputs)
        for e in loop.body
        if e not in loop.reads
    ]
    read = {v: frozenset(e.outputs[0] for e in loop.reads if e.source is v) for v in loop.depth}
    return order_of(operations, {v: State(before, v) for v, before in read.items()}) is not None


def _is_simple(e: Equation) -> bool:
    return e.is_pointwise and not e.is_ragged


def is_wide(dtype: Any) -> bool:
    """Whether numbers of a dtype may be put together in another order: 16 bits would round otherwise."""
    return jnp.issubdtype(dtype, jnp.integer) or (jnp.issubdtype(dtype, jnp.inexact) and np.dtype(dtype).itemsize >= 4)
