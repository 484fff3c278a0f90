"""What is kept and what is computed again: a minimum cut of the dataflow graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rlfx.recurrence.analysis.cost import bytes_in_all, flops_of, points
from rlfx.recurrence.analysis.cuts import Network, units
from rlfx.recurrence.ir.program import Equation, Program, Var

#: Bytes of memory traffic that one floating-point operation is worth.
BYTES_PER_FLOP = 0.25

#: What a barred value costs, relative to its bytes: more than any work that could replace it.
BARRED = 1e9


@dataclass(frozen=True)
class Cut:
    """The result of :func:`minimum_cut`.

    Attributes:
      stored: values that are kept where they are first computed.
      again: equations that are evaluated (again) by the consumer, in program order.
    """

    stored: frozenset[Var]
    again: tuple[Equation, ...]


def minimum_cut(
    program: Program,
    equations: Iterable[Equation],
    wanted: Iterable[Var],
    *,
    fixed: Callable[[Equation], bool],
    free: Callable[[Equation], bool],
    kept: Callable[[Var], bool] = lambda v: False,
    barred: frozenset[Var] = frozenset(),
    follows: Callable[[Equation], bool] = lambda e: False,
    stays: Callable[[Equation], float] = lambda e: 0.0,
    leaves: Callable[[Equation], float] = lambda e: 0.0,
    bytes_per_flop: float = BYTES_PER_FLOP,
) -> Cut:
    """Choose what a consumer keeps from the producer, and what it evaluates again.

    Every equation v has two nodes: in(v) on the sink's side means "evaluated again", out(v) on the sink's side "available
    to the consumer". Cutting in -> out costs the bytes of the value over the whole domain; cutting source -> in costs
    the operations to evaluate it again. A third, made(v), is on the source's side where the producer evaluates v, for what it
    keeps or for another equation that it evaluates: cutting made -> sink costs what ``stays`` says.

    Args:
      equations: the producer's equations.
      wanted: values that the consumer needs.
      fixed: equations that only the producer can evaluate.
      free: equations that the consumer evaluates in any case (the active ones: their tangents need it).
      kept: values that are kept anyway, at no further cost.
      barred: values that may be kept only if there is no other way.
      follows: reads whose source the consumer needs if it evaluates them (it always does for those that are free).
      stays: bytes that it is worth if the producer need not evaluate an equation.
      leaves: bytes that it is worth if the consumer need not, beside the work.
      bytes_per_flop: bytes kept that one floating-point operation is worth.

    Returns:
      The cut; values of equations outside of ``equations`` are available everywhere.
    """
    equations = tuple(equations)
    owner = {v: e for e in equations for v in e.outputs}
    network = Network()
    spared = {e: gained for e in equations if (gained := stays(e)) > 0}
    for equation in equations if spared else ():
        network.add(("in", equation), ("made", equation))
        if equation in spared:
            network.add(("made", equation), "sink", units(spared[equation]))
        for u in equation.inputs:
            if isinstance(u, Var) and u in owner:
                network.add(("made", equation), ("made", owner[u]))
    for equation in equations:
        for v in equation.outputs:
            size = 0 if kept(v) else bytes_in_all(v, program) * (BARRED if v in barred else 1)
            # On ties keep what comes later: it is what the consumer asked for, in its final form.
            network.add(("in", equation), ("out", v), units(size) + 1000)
        if free(equation):
            network.add(("in", equation), "sink")
        elif fixed(equation):
            network.add("source", ("in", equation))
        else:
            work = work_of(equation, program) * bytes_per_flop + leaves(equation)
            network.add("source", ("in", equation), units(work) + 1)
        for u in equation.inputs:
            if isinstance(u, Var) and u in owner and u is not (equation.source if equation.is_read else None):
                network.add(("out", u), ("in", equation))
        if equation.is_read and (free(equation) or follows(equation)) and equation.source in owner:
            network.add(("out", equation.source), ("in", equation))
    for v in wanted:
        if v in owner:
            network.add(("out", v), "sink")
    if "sink" not in network or "source" not in network:
        return Cut(frozenset(), tuple(e for e in equations if free(e)))
    produced, consumed = network.sides("source", "sink")
    # An output counts as stored only if something on the consumer's side uses it.
    again = tuple(e for e in equations if ("in", e) in consumed)
    used = {u for e in again for u in e.inputs if isinstance(u, Var)} | set(wanted)
    stored = {v for e in equations if ("in", e) in produced for v in e.outputs if ("out", v) in consumed and v in used}
    needed = _reachable(again, used & set(wanted) | _roots(again, wanted, free))
    return Cut(frozenset(stored & _inputs_of(needed, wanted)), needed)


def work_of(equation: Equation, program: Program) -> float:
    """Floating-point operations of an equation at all its points."""
    dims = frozenset().union(*(program.dims_of(v) for v in equation.outputs))
    return flops_of(equation, program.domain) * points(dims, program.domain)


def _roots(again: tuple[Equation, ...], wanted: Iterable[Var], free: Callable[[Equation], bool]) -> set[Var]:
    return {v for e in again if free(e) for v in e.outputs} | set(wanted)


def _reachable(again: tuple[Equation, ...], roots: set[Var]) -> tuple[Equation, ...]:
    """The equations of ``again`` on which the roots depend, in order."""
    owner = {v: e for e in again for v in e.outputs}
    seen: set[Equation] = set()
    todo = [v for v in roots if v in owner]
    while todo:
        equation = owner[todo.pop()]
        if equation not in seen:
            seen.add(equation)
            todo += [u for u in equation.inputs if u in owner]
    return tuple(e for e in again if e in seen)


def _inputs_of(equations: tuple[Equation, ...], wanted: Iterable[Var]) -> set[Var]:
    return {u for e in equations for u in e.inputs if isinstance(u, Var)} | set(wanted)
