"""Is a program legal? Every read has a value, and every circle of reads has a direction."""

from __future__ import annotations

from rlfx.errors import BoundaryError, located
from rlfx.recurrence.analysis.graph import Graph
from rlfx.recurrence.ir.access import reach_in
from rlfx.recurrence.ir.program import Program, Var
from rlfx.recurrence.language.index import Point, written


def whole_graph(program: Program) -> Graph:
    """The graph of everything that a program returns."""
    wanted = {v for v in (program.loss, *program.aux) if isinstance(v, Var)}
    last = frozenset(v for v in program.next_carry if isinstance(v, Var))
    return Graph(program, frozenset(wanted), last, roots=frozenset(e for e in program.equations if e.has_effects))


def check(program: Program) -> Program:
    """The program, if it is legal.

    Raises:
      CausalityError: for a circle of reads that needs both the past and the future, or the same point.
      BoundaryError: for a read that leaves the domain where the series has no value.
    """
    graph = whole_graph(program)
    for equation in graph.equations:
        if equation.is_read and isinstance(equation.access, Point):
            found = reach_in(equation.access, program.domain)
            if found.before_start and equation.start is None:
                raise BoundaryError(
                    located(
                        f"x[{equation.access}] is read before the first timestep, and the series has no value there.",
                        where=equation.where,
                        fix="Give it one, rlfx.series(v, start=...), or keep the index inside, "
                        f"x[rlfx.maximum({written(equation.access.index)}, 0)].",
                    )
                )
    for component in graph.components:
        graph.direction(component)
    return program
