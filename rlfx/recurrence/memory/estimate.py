"""How many temporary bytes a jaxpr takes: a bound from live ranges, without compiling it.

A value has a buffer from its definition to its last use; what is computed inside the loop that reads it has none
(``fusion.py``), results are written over operands that die there, loops update their carries in place, and the temporaries
of a loop's body exist once. Arguments and results of the program are no temporaries, as in XLA's ``temp_size_in_bytes``.
It ranks plans, and draws their memory over time, on any target; XLA's own number, of a program that is compiled, decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.cost import show_bytes
from rlfx.recurrence.memory.flat import Flat, flatten
from rlfx.recurrence.memory.fusion import units_of
from rlfx.recurrence.memory.order import schedule
from rlfx.recurrence.memory.sizes import UPDATES, Buffer, Node, like


@dataclass(frozen=True)
class LiveValue:
    """A value that occupies memory at the peak."""

    bytes: int
    shape: tuple
    dtype: str
    source: str

    def __str__(self) -> str:
        return f"{show_bytes(self.bytes)}  {self.dtype}[{','.join(map(str, self.shape))}]  {self.source}".rstrip()


@dataclass(frozen=True)
class Moment:
    """One operation at work.

    Attributes:
      live: the values in memory, its results among them.
      inside: the temporaries of its own at their peak.
    """

    node: Node
    live: tuple[Buffer, ...]
    inside: tuple[Buffer, ...]


def _peak(moments: Iterator[Moment]) -> tuple[int, tuple]:
    """``(bytes, what is live then)``."""
    peak, at_peak = 0, ()
    for m in moments:
        if (now := _total(m.live) + _total(m.inside)) > peak:
            peak, at_peak = now, (*m.live, *m.inside)
    return peak, at_peak


def _moments(flat: Flat, outside: set[int], carried: Mapping[int, Buffer]) -> Iterator[Moment]:
    """What is in memory while one operation after the other runs.

    Args:
      outside: results that live in buffers of the caller.
      carried: result of a loop's body -> the input whose buffer it takes over, if that is read no more.
    """
    units = schedule(units_of(flat, outside | set(carried)))
    last: dict[int, int] = {}
    for i, unit in enumerate(units):
        last.update({id(v): i for v in unit.reads})
        for value in unit.node.outs:
            last.setdefault(id(value), i)
    free = set(outside)
    for i, unit in reversed(list(enumerate(units))):  # what a result of the caller's is written over is there, too
        for value in unit.node.outs:
            before = carried.get(id(value))
            if before is not None and (
                last.get(id(before), -1) < i or (last.get(id(before)) == i and id(before) in unit.aligned)
            ):
                free.add(id(value))
            if id(value) in free:
                same = [init for init, out in unit.node.pairs if out is value]
                if unit.node.op in UPDATES:
                    same += [v for v in unit.node.ins[:1] if v.bytes == value.bytes and last[id(v)] == i]
                free |= {id(v) for v in same}
    live: dict[int, Buffer] = {}
    for i, unit in enumerate(units):
        dying = [v for v in unit.reads if last[id(v)] == i and id(v) in live]
        for value in unit.node.outs:
            if id(value) in free:
                continue
            inits = [init for init, out in unit.node.pairs if out is value]
            over = next(
                (v for v in dying if (v in inits if inits else id(v) in unit.aligned and v.bytes == value.bytes)), None
            )
            if over is not None:
                dying.remove(over)
                del live[id(over)]
            live[id(value)] = value
        yield Moment(unit.node, tuple(live.values()), _inside(unit.node))
        for value in [*dying, *(v for v in unit.node.outs if last[id(v)] == i)]:
            live.pop(id(value), None)


def _total(values: Any) -> int:
    return sum(v.bytes for v in values)


def _inside(node: Node) -> tuple[Buffer, ...]:
    """Temporaries inside an operation: of a body, of the branch that takes most, of random words."""
    op, params = node.op, node.equation.params
    if op is J.SCAN:
        return _peak(loop_moments(J.body_of(params["jaxpr"])[0], *J.scan_counts(params)))[1]
    if op is J.WHILE:
        body = J.body_of(params["body_jaxpr"])[0]
        return _peak(loop_moments(body, params["body_nconsts"], len(body.outvars)))[1]
    if op is J.COND:
        return max((_peak(program_moments(J.body_of(b)[0]))[1] for b in params["branches"]), key=_total)
    if op in J.RANDOM:  # by a loop over the two words of a block, copied in its body
        return tuple(like(v) for v in node.outs for _ in range(2 if J.random_by_loop(node.equation) else 1))
    return ()


def loop_moments(jaxpr: Any, consts: int, carry: int) -> Iterator[Moment]:
    """One iteration of a loop."""
    flat = flatten(jaxpr)
    befores, afters = flat.inputs[consts : consts + carry], flat.outputs[:carry]
    carried = {id(a): b for b, a in zip(befores, afters, strict=True) if a is not None and a.node is not None}
    written = {id(v) for v in flat.outputs[carry:] if v is not None and v.node is not None}  # a part of what it stacks
    return _moments(flat, written, carried)


def program_moments(jaxpr: Any) -> Iterator[Moment]:
    """A program, or a branch."""
    flat = flatten(jaxpr)
    return _moments(flat, {id(v) for v in flat.outputs if v is not None}, {})


# -- public ----------------------------------------------------------------------------------------------------------


def estimate_temp_bytes(jaxpr: Any) -> int:
    """Estimate ``compile().memory_analysis().temp_size_in_bytes`` of a jitted jaxpr, in bytes, without compiling it.

    Args:
      jaxpr: a ``ClosedJaxpr``, as ``jax.make_jaxpr`` returns it.

    Returns:
      An integer. Arguments (donated or not), constants and results are not counted. See docs/memory.md for how far it is off.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> estimate_temp_bytes(jax.make_jaxpr(lambda x: jnp.tanh(x @ x).sum())(jnp.ones((256, 256))))
      262144
    """
    return _peak(program_moments(J.body_of(jaxpr)[0]))[0]


def largest_values(jaxpr: Any, n: int = 5) -> list[LiveValue]:
    """The ``n`` largest values that occupy memory at the estimated peak, largest first.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> [v.bytes for v in largest_values(jax.make_jaxpr(lambda x: jnp.tanh(x @ x).sum())(jnp.ones((256, 256))))]
      [262144]
    """
    _, live = _peak(program_moments(J.body_of(jaxpr)[0]))
    known = (v for v in live if v.node is not None)
    found = [LiveValue(v.bytes, v.shape, J.short_dtype(v.dtype), J.source_of(v.node.equation)) for v in known]
    return sorted(found, key=lambda v: -v.bytes)[:n]
