"""How many temporary bytes XLA will need for a jaxpr, without compiling it.

A model of what XLA does with memory, in four steps. *Simplification*: constants are folded, operations with 0 and 1 and on
repeated numbers replaced. *Fusion*: which values get a buffer; the others are computed inside the loop that reads them.
*Schedule*: XLA:CPU runs what is ready, first come first served. *Live ranges*: a buffer lives
from its definition to its last use, results are written over operands that die there, loops update their carries in
place. Arguments, constants and results of the program are no temporaries, as in ``temp_size_in_bytes``.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.cost import show_bytes
from rlfx.recurrence.memory.flat import Flat, flatten
from rlfx.recurrence.memory.fusion import IN_PLACE, units_of
from rlfx.recurrence.memory.order import schedule
from rlfx.recurrence.memory.sizes import Node, Value


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
      live: the values in memory, its results among them, in the caller's buffers or not.
      inside: the temporaries of its own at their peak.
      saved: computes how many bytes of both lie in buffers of results that are not written yet.
    """

    node: Node
    live: tuple[Value, ...]
    inside: tuple[Value, ...]
    saved: Callable[[], int]


def _peak(moments: Iterator[Moment]) -> tuple[int, tuple]:
    """``(bytes, what is live then)``."""
    peak, at_peak = 0, ()
    for m in moments:
        now = _total(m.live) + _total(m.inside)
        if now > peak and now - (saved := m.saved()) > peak:
            peak, at_peak = now - saved, (*m.live, *m.inside)
    return peak, at_peak


def _moments(
    flat: Flat,
    outside: set[int],
    needing_buffer: set[int],
    carried: Mapping[int, Value],
    copied: Sequence[Value] = (),
) -> Iterator[Moment]:
    """What is in memory while one operation after the other runs.

    Args:
      outside: results that live in buffers of the caller.
      needing_buffer: values that must be in memory whoever reads them.
      carried: result of a loop's body -> the input whose buffer it takes over.
      copied: results that are returned twice.
    """
    units = schedule(units_of(flat, needing_buffer))
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
        target = unit.target
        fits = target is not None and target.node is not None and target.bytes == unit.node.outs[0].bytes
        if target is not None and fits and last.get(id(target)) == i:
            taken_over[id(unit.node.outs[0])] = target
    for i, unit in reversed(list(enumerate(units))):
        for value in unit.node.outs:
            cost.setdefault(id(value), 0 if id(value) in outside else value.bytes)
            before = carried.get(id(value))
            if before is not None and (
                last.get(id(before), -1) > i or (last.get(id(before)) == i and unit.node.op not in IN_PLACE)
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
        begin = defined.get(id(first), 0)
        begins[id(value)] = (begin, value.bytes, units[begin].aligned)
    for value in copied:
        begins[id(value), "again"] = (defined.get(id(value), 0) + 1, value.bytes, set())

    live: dict[int, Value] = {}
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
        lasting, inside = tuple(live.values()), _inside(unit.node)
        yield Moment(unit.node, lasting, inside, functools.partial(_saved, i, lasting, inside, last, begins))
        for value in [*dying, *(v for v in unit.node.outs if last[id(v)] == i)]:
            live.pop(id(value), None)


def _total(values: Any) -> int:
    return sum(v.bytes for v in values)


def _saved(now: int, lasting: tuple, inside: tuple, last: Mapping[int, int], begins: Mapping) -> int:
    temporaries = [(v, last[id(v)]) for v in lasting] + [(v, now) for v in inside]
    return _in_results(now, temporaries, begins) if begins else 0


def _in_results(now: int, temporaries: list[tuple[Value, int]], begins: Mapping[int, tuple[int, int, set]]) -> int:
    """Bytes of temporaries that fit into buffers of results which are not written yet."""
    saved, left = 0, sorted(temporaries, key=lambda t: -t[0].bytes)
    for begin, size, aligned in sorted(begins.values(), key=lambda b: -b[1]):
        if begin >= now:
            found = next((t for t in left if _fits(*t, begin, size, aligned)), None)
            if found is not None:
                left.remove(found)
                saved += found[0].bytes
    return saved


def _fits(value: Value, until: int, begin: int, size: int, aligned: set[int]) -> bool:
    """Whether a temporary may be in the buffer of a result: until that is written, or written over it."""
    if until < begin:
        return value.bytes <= size
    return until == begin and value.bytes == size and id(value) in aligned


def _inside(node: Node) -> tuple[Value, ...]:
    """Temporaries inside an operation: bodies, branches, and what XLA's own expansions need."""
    op, params = node.op, node.equation.params
    if op is J.SCAN:
        consts, carry = J.scan_counts(params)
        return _peak(loop_moments(*J.body_of(params["jaxpr"]), consts, carry))[1]
    if op is J.WHILE:
        body, body_consts = J.body_of(params["body_jaxpr"])
        return _peak(loop_moments(body, body_consts, params["body_nconsts"], len(body.outvars)))[1]
    if op is J.COND:
        return max((_peak(program_moments(*J.body_of(b)))[1] for b in params["branches"]), key=_total)
    if op in J.RANDOM:
        return _random(node) if J.random_by_loop(node.equation) else _words(node)
    return ()


def _words(node: Node) -> tuple[Value, ...]:
    """The two words of keys are computed apart, and put together."""
    out = node.outs[0]
    if J.short_dtype(out.dtype) != "key":
        return ()
    return tuple(Value(out.bytes // 2, out.shape, np.dtype("u4"), node) for _ in range(2))


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


def loop_moments(jaxpr: Any, jaxpr_consts: Sequence, consts: int, carry: int) -> Iterator[Moment]:
    """One iteration of a loop."""
    flat = flatten(jaxpr, jaxpr_consts)
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
    return _moments(flat, set(carried), set(carried) | written, carried)


def program_moments(jaxpr: Any, consts: Sequence) -> Iterator[Moment]:
    """A program, or a branch."""
    flat = flatten(jaxpr, consts)
    outputs = {id(v) for v in flat.outputs if v is not None}
    computed = [v for v in flat.outputs if v is not None and v.node is not None]
    copied = [v for i, v in enumerate(computed) if any(v is w for w in computed[:i])]
    return _moments(flat, outputs, outputs, {}, copied)


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
    return _peak(program_moments(*J.body_of(jaxpr)))[0]


def largest_values(jaxpr: Any, n: int = 5) -> list[LiveValue]:
    """The ``n`` largest values that occupy memory at the estimated peak, largest first.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> [v.bytes for v in largest_values(jax.make_jaxpr(lambda x: jnp.tanh(x @ x).sum())(jnp.ones((256, 256))))]
      [262144]
    """
    _, live = _peak(program_moments(*J.body_of(jaxpr)))
    known = (v for v in live if v.node is not None and v.node.equation is not _NO_EQUATION)
    found = [LiveValue(v.bytes, v.shape, J.short_dtype(v.dtype), J.source_of(v.node.equation)) for v in known]
    return sorted(found, key=lambda v: -v.bytes)[:n]
