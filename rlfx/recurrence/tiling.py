"""Slices of symbolic length for all timesteps, in blocks: no array of ``[T, T]`` exists, forwards or backwards.

``softmax(keys[:t + 1] @ q)`` for all t at once is a masked ``[T, T]`` array. Where that is large, the equations between
the slice and what it is reduced to run in blocks of t, each of which is computed again for its derivative. Blocks are
grouped into sections, in each of which a slice is as wide as its readers can see: the past of ``t < 1024`` is 1024
positions, whatever T is. What is masked entirely is never touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence import reads
from rlfx.recurrence.cost import bytes_of, points
from rlfx.recurrence.domain import Domain
from rlfx.recurrence.graph import Graph
from rlfx.recurrence.index import Slice
from rlfx.recurrence.precision import narrowed, widened
from rlfx.recurrence.program import Equation, Program, Var
from rlfx.recurrence.ragged import widest
from rlfx.recurrence.ragged.shapes import POSITIONWISE
from rlfx.recurrence.values import Value, expand

#: The largest value of all timesteps that is computed at once, in bytes, by platform.
AT_ONCE = {"cpu": 4 << 20}
#: The same within one block.
IN_BLOCK = {"cpu": 1 << 20}
_ELSEWHERE = 1 << 30
#: Each section is compiled by itself; with n of them the past that is read is (n + 1) / 2n of T.
MOST_SECTIONS = 8
SMALLEST_BLOCK = 8


@dataclass(frozen=True)
class Stretch(Domain):
    """The timesteps ``begin <= t < end`` of a domain: slices are as wide as these readers see."""

    begin: int = 0
    end: int = 0

    def times(self) -> np.ndarray:
        return np.arange(self.begin, self.end, dtype=np.int32)


@dataclass(frozen=True, eq=False)
class Blocked:
    """Equations that run in blocks of timesteps.

    Attributes:
      equations: in order.
      outputs: what is needed of them elsewhere.
      block: timesteps in a block.
      stretches: the sections, each a number of blocks (the last one may end with a shorter block).
      largest: bytes of their largest value, if it were computed for all timesteps at once.
    """

    equations: tuple[Equation, ...]
    outputs: tuple[Var, ...]
    block: int
    stretches: tuple[tuple[int, int], ...]
    largest: int

    def __str__(self) -> str:
        slices = ", ".join(dict.fromkeys(f"x[{e.access}]" for e in self.equations if e.is_read))
        sections = f" in {len(self.stretches)} sections" if len(self.stretches) > 1 else ""
        size = f"{self.largest / 2**20:.3g} MiB"
        return f"{slices}: blocks of {self.block} timesteps{sections}, a value of all of them would be {size}"


def divide(equations: Sequence[Equation], graph: Graph, batch: int, platform: str) -> list[tuple | Blocked]:
    """The equations of a stage, in an order in which those that run in blocks stand together."""
    if not any(_is_wide(e, graph.program) for e in equations):
        return [tuple(equations)]
    levels = _levels(equations, graph.program)
    parts: list[tuple | Blocked] = []
    for level in sorted(set(levels.values())):
        members = tuple(e for e in equations if levels[e] == level)
        parts.append(members if level % 2 == 0 else _blocked(members, equations, graph, batch, platform) or members)
    if not any(isinstance(p, Blocked) for p in parts):
        return [tuple(equations)]
    return parts


def _is_wide(equation: Equation, program: Program) -> bool:
    """Whether a value has an axis for many other timesteps at every timestep."""
    if not equation.is_pointwise or "t" not in frozenset().union(*map(program.dims_of, equation.outputs)):
        return False
    length = program.domain.length
    return equation.is_ragged or any(d == length for v in equation.outputs for d in v.shape if length >= 64)


def _levels(equations: Sequence[Equation], program: Program) -> dict[Equation, int]:
    """Odd levels run in blocks; a level needs nothing of later ones, and an odd one no other timesteps of its own."""
    level: dict[Equation, int] = {}
    owner = {v: e for e in equations for v in e.outputs}
    for e in equations:
        producers = [owner[v] for v in e.inputs if isinstance(v, Var) and v in owner]
        base = max((level[p] for p in producers if p in level), default=0)
        if _is_slice(e):
            level[e] = base + 1 if base % 2 == 0 else base + 2
        elif _is_wide(e, program) and not e.has_effects:
            level[e] = base | 1
        elif e.is_pointwise and not e.has_effects:
            level[e] = base
        else:
            level[e] = base + base % 2
    # What follows the last wide value of a level needs no blocks.
    needed: set[Equation] = set()
    for e in reversed(equations):
        if level[e] % 2 and not (e in needed or _is_slice(e) or _is_wide(e, program)):
            level[e] += 1
        else:
            needed |= {p for v in e.inputs if (p := owner.get(v)) is not None and level[p] == level[e]}
    return level


def _is_slice(equation: Equation) -> bool:
    return equation.is_read and isinstance(equation.access, Slice) and J.is_symbolic(equation.params["size"])


def _blocked(
    members: tuple[Equation, ...], stage: Sequence[Equation], graph: Graph, batch: int, platform: str
) -> Blocked | None:
    """How equations run in blocks; None if there is no need to."""
    program, length = graph.program, graph.program.domain.length
    own = {v for e in members for v in e.outputs}
    used = {v for e in graph.equations if e not in set(members) for v in e.inputs if isinstance(v, Var)}
    outputs = tuple(v for e in members for v in e.outputs if v in used or v in graph.complete)
    shared = _shared(members, program)
    wide = [v for v in own - shared if "t" in program.dims_of(v)]
    bounds = [bytes_of(v, program.domain) * points(program.dims_of(v) - {"b"}, program.domain) for v in wide]
    room = AT_ONCE.get(platform, _ELSEWHERE)
    if max(bounds, default=0) * batch <= room:
        return None
    if any(J.symbolic_axes(v.shape) for v in outputs) or any(
        v in used for e in members if e.is_read for v in e.outputs
    ):
        return None
    largest = max(_bytes(v, program) * length * (batch if "b" in program.dims_of(v) else 1) for v in wide)
    if largest <= room:
        return None
    block = _block_size(largest / length, length, IN_BLOCK.get(platform, _ELSEWHERE))
    # An environment that has ended sees what its last timestep saw, which may lie in an earlier section.
    sections = ((0, length),) if program.domain.until else _sections(length, block)
    return Blocked(members, outputs, block, sections, largest)


def _shared(equations: Iterable[Equation], program: Program) -> set[Var]:
    """Slices, and functions of them position by position: all timesteps see one array."""
    shared: set[Var] = set()
    for e in equations:
        steady = all(v in shared or "t" not in program.dims_of(v) for v in e.inputs)
        if _is_slice(e) or (e.op in POSITIONWISE and steady):
            shared.update(e.outputs)
    return shared


def _bytes(var: Var, program: Program) -> int:
    sizes = (widest(program.domain, d) for d in var.shape)
    return math.prod(sizes) * max(1, bytes_of(var, program.domain) // max(1, _elements(var, program)))


def _elements(var: Var, program: Program) -> int:
    return math.prod(program.domain.length if J.is_symbolic(d) else int(d) for d in var.shape)


def _block_size(per_step: float, length: int, room: int) -> int:
    """The divisor of T, or the power of two, that comes closest to what there is room for."""
    fitting = min(length, max(SMALLEST_BLOCK, int(room // per_step)))
    divisor = max(d for d in range(1, fitting + 1) if length % d == 0)
    return divisor if 2 * divisor >= fitting else 1 << (fitting.bit_length() - 1)


def _sections(length: int, block: int) -> tuple[tuple[int, int], ...]:
    blocks = -(-length // block)
    size = block * -(-blocks // MOST_SECTIONS)
    return tuple((first, min(first + size, length)) for first in range(0, length, size))


# -- execution -------------------------------------------------------------------------------------------------------


def run_blocked(run: Any, blocked: Blocked, at: Any) -> None:
    """Evaluate the equations at all timesteps, and add what is needed elsewhere to the values that ``run`` knows.

    Args:
      run: an execution over all timesteps.
      at: ``(times, domain, env) -> execution`` of a part of them.
    """
    defined = {v for e in blocked.equations for v in e.outputs}
    used = dict.fromkeys(v for e in blocked.equations for v in e.point_inputs if isinstance(v, Var))
    inputs = {v: run.now() if v is run.program.now else run.env[v] for v in used if v not in defined}
    moving = [v for v in inputs if "t" in inputs[v].dims]
    # Gradients of what all blocks use are added up in at least float32.
    fixed = {v: replace(x, data=widened(x.data)) for v, x in inputs.items() if v not in moving}
    found: list[list] = []
    for begin, end in blocked.stretches:
        domain = run.domain
        stretch = Stretch(domain.length, domain.batch, domain.until, begin=begin, end=end)
        views = {}
        for e in blocked.equations:
            if e.is_read and (view := reads.view_slice(run.env[e.source], e, stretch, run.sizes)) is not None:
                views[e.outputs[0]] = view
        rest = tuple(e for e in blocked.equations if not any(v in views for v in e.outputs))

        def evaluate(times, slices, rest=rest, stretch=stretch, views=views):
            here = {v: replace(i, data=x) for x, (v, i) in zip(slices, _pick(inputs, moving), strict=True)}
            own = {v: replace(x, data=narrowed(x.data, v.dtype)) for v, x in fixed.items()}
            part = at(times, stretch, {**own, **views, **here})

            def read(equation, env, t):
                return reads.gather_slice(run.env[equation.source], equation, stretch, times, run.sizes)

            part.sequence(rest, part.env, part.times, read)
            return [expand(part.env[v], run.program.dims_of(v) | {"t"}, part.sizes).data for v in blocked.outputs]

        found.append(_map_blocks(evaluate, blocked.block, begin, end, [inputs[v].data for v in moving], run.times.data))
    for v, pieces in zip(blocked.outputs, zip(*found, strict=True), strict=True):
        data = _joined(list(pieces))
        run.env[v] = Value(data, run.program.dims_of(v) | {"t"})


def _pick(inputs: Mapping[Var, Value], moving: Sequence[Var]) -> list[tuple[Var, Value]]:
    return [(v, inputs[v]) for v in moving]


def _map_blocks(fn: Any, block: int, begin: int, end: int, moving: Sequence, times: Any) -> list:
    """``fn(times, slices)`` of consecutive timesteps, block by block; each is computed again for its derivative."""
    again = jax.checkpoint(fn, prevent_cse=False)
    whole = (end - begin) // block
    outs: list[list] = []

    def cut(x: Any) -> Any:
        return x[begin : begin + whole * block].reshape(whole, block, *x.shape[1:])

    if whole > 1:
        ys = jax.lax.map(lambda xs: again(*xs), (cut(times), [cut(x) for x in moving]))
        outs.append([y.reshape(whole * block, *y.shape[2:]) for y in ys])
    elif whole:
        outs.append(jax.checkpoint(fn)(times[begin : begin + block], [x[begin : begin + block] for x in moving]))
    rest = begin + whole * block
    if rest < end:
        outs.append(jax.checkpoint(fn)(times[rest:end], [x[rest:end] for x in moving]))
    return [_joined(list(ys)) for ys in zip(*outs, strict=True)]


def _joined(parts: list) -> Any:
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]
