"""What a loop over t does not need leaves it, if that gains more than it costs to keep what it reads.

An inner ``lax.scan`` from the state of every timestep (imagination, lookahead) takes T times as many steps inside the loop as
after it, of 1/T of the rows. Its work is the same in either place; what is gained is what it starts, T times or once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.cost import PRODUCTS, bytes_inside, bytes_of, is_counted_loop, points, starts_of
from rlfx.recurrence.analysis.graph import Graph
from rlfx.recurrence.analysis.storage import BYTES_PER_FLOP, work_of
from rlfx.recurrence.ir.program import Equation, Program, Var

#: Bytes: of two ways that cost the same, what may leave a loop leaves it.
_SOONER = 1.0


def worth(
    equation: Equation, program: Program, leaving: AbstractSet[Equation], together: AbstractSet[Equation] = frozenset()
) -> float:
    """Bytes of memory traffic that it is worth if a loop does not evaluate an equation.

    It is started once, and not at every timestep (unless what runs the loop starts all of its equations ``together``). The work
    of what leaves together is no reason to stay: it is the same there.
    """
    domain, asked = program.domain, program.directives
    start = 0 if equation in together else asked.start or 0
    if asked.nested is not None and equation in leaving and equation.op is J.SCAN:
        start = max(start, asked.nested.start)
    started = domain.length * start * starts_of(equation.op, equation.params, domain)
    return started + (_SOONER + work_of(equation, program) * BYTES_PER_FLOP if equation in leaving else 0.0)


def products_of_few_rows(movable: AbstractSet[Equation], program: Program) -> frozenset[Equation]:
    """Of the equations that a loop does not need: products of few rows with weights, and what follows from them.

    After the loop, they are products of T times as many: a critic of what a few environments have seen.
    """
    few = program.directives.rows
    found: set[Equation] = set()
    made: set[Var] = set()
    if few is None or program.domain.until:
        return frozenset()
    for e in program.equations:
        follows = not made.isdisjoint(v for v in e.inputs if isinstance(v, Var))
        nested = e.op in (J.SCAN, J.WHILE, J.COND) or e.calls
        if e in movable and not nested and (follows or rows_of_weights(e, program) < few):
            found.add(e)
            made.update(e.outputs)
    return frozenset(found)


def rows_of_weights(e: Equation, program: Program) -> float:
    """With how many rows a product multiplies weights at a timestep; infinite for anything else."""
    weights = e.op in PRODUCTS and any(isinstance(v, Var) and not program.dims_of(v) for v in e.inputs)
    return math.prod(e.outputs[0].shape[:-1]) * (program.domain.batch or 1) if weights else math.inf


def in_one_launch(
    equations: Iterable[Equation], body: AbstractSet[Equation], program: Program
) -> frozenset[Equation]:
    """Of equations in order: those that what runs the loop around ``body`` starts together, once for all timesteps.

    What it does not take, and what follows from that, runs after it.
    """
    runner = program.directives.loops
    found: set[Equation] = set()
    behind: set[Var] = set()
    for e in equations if runner is not None else ():
        if e in body or (runner.takes(e) and behind.isdisjoint(e.inputs)):
            found.add(e)
        else:
            behind.update(e.outputs)
    return frozenset(found)


def nested_loops(movable: AbstractSet[Equation], graph: Graph) -> frozenset[Equation]:
    """Of the equations that a loop does not need: nested loops and what follows from them, where all of that fits the room."""
    program, asked = graph.program, graph.program.directives.nested
    if asked is None:
        return frozenset()
    ordered = [e for e in program.equations if e in movable]
    large: set[Equation] = set()
    read: set[Var] = set()  # by what is too large, or by what leads to it
    for e in reversed(ordered):
        if not read.isdisjoint(e.outputs) or _bytes_at_once(e, program) > asked.room:
            large.add(e)
            read |= {v for v in e.inputs if isinstance(v, Var)}
    found: set[Equation] = set()
    for e in ordered:
        follows = any(graph.definition.get(v) in found for v in e.inputs if isinstance(v, Var))
        if follows or (e not in large and is_counted_loop(e)):
            found.add(e)
    return frozenset(found)


def _bytes_at_once(equation: Equation, program: Program) -> int:
    """Bytes that an equation reads, computes and gives for all timesteps at once."""
    domain = program.domain
    around = {v for v in (*equation.inputs, *equation.outputs) if isinstance(v, Var)}
    moving = {v: program.dims_of(v) for v in around if "t" in program.dims_of(v)}
    inside = bytes_inside(equation, domain) * max((points(dims, domain) for dims in moving.values()), default=1)
    return inside + sum(bytes_of(v, domain) * points(dims, domain) for v, dims in moving.items())
