"""What a value comes from: t and constants alone, or something that differs from run to run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rlfx import _jaxpr as J
from rlfx.errors import DomainError, located
from rlfx.recurrence.ir.program import Atom, Equation, Var
from rlfx.recurrence.language.index import Lookup
from rlfx.recurrence.language.primitives import inputs_p


def check_times(equations: Iterable[Equation], events: Iterable[tuple[Atom, str]], constants: Collection[Var]) -> None:
    """Refuse ``x[i]`` and ``x[t:end]`` with an integer of t and constants alone: it was meant as an index expression.

    Args:
      events: the computed times that are bounds of slices, each with the user's line.
      constants: the inputs that are the same in every run: the absolute time, and arrays that the function closes over.

    Raises:
      DomainError: with the line of the read.
    """
    equations = tuple(equations)
    definition = {v: e for e in equations for v in e.outputs}
    for e in equations:
        asked = e.is_read and isinstance(e.access, Lookup) and not e.access.explicit
        if asked and not _comes_from_outside(e.inputs[1], definition, constants):
            raise DomainError(
                located(
                    f"x[{e.access}] is a lookup, in absolute time and of the past alone, and this i depends on t and "
                    f"constants alone: {_NOTHING_ELSE}",
                    where=e.where,
                    fix="Write an index expression with t itself: x[t + 1], x[rlfx.minimum(t + 1, t.length - 1)]. For "
                    "other functions of t read the timesteps and choose: x[:][i], x[t:][i]. If it is meant as a "
                    "lookup, x.lookup(i).",
                )
            )
    for event, where in events:
        if not _comes_from_outside(event, definition, constants):
            raise DomainError(
                located(
                    f"x[t:end] is a slice to a computed time, an absolute one, and this end depends on t and constants alone: "
                    f"{_NOTHING_ELSE}",
                    where=where,
                    fix="Write an index expression with t itself: x[t:t + 5], x[t:rlfx.minimum(t + 5, t.length)]. If it is meant "
                    "as a computed time, give both bounds: x[t:(t.length, end)], x[(0, begin):t + 1].",
                )
            )


_NOTHING_ELSE = "no key, carry, parameter or data is in it."


def _comes_from_outside(atom: Atom, definition: Mapping[Var, Equation], constants: Collection[Var]) -> bool:
    todo: list[Any] = [atom]
    seen: set[Var] = set()
    while todo:
        var = todo.pop()
        if not isinstance(var, Var) or var in seen or var in constants:
            continue
        seen.add(var)
        equation = definition.get(var)
        if equation is None or equation.op is inputs_p or equation.has_effects or "callback" in equation.op.name:
            return True
        todo += equation.inputs
    return False


def known_values(values: Iterable[Any]) -> list[bool]:
    """Which of the arrays that a function closes over have their values already."""
    return [not isinstance(v, J.Tracer) for v in values]
