"""What is made of a series that has a value behind the last timestep has one there, too: made of that value.

``end=`` says what a series is at t = T. So ``f(x[t])``, read at t + 1, is ``f(end)`` there, as ``f(x[t + 1])`` is. Before and
after:

    x = series[t] else e; y = f(x); z = y[t + 1]   ->   x = series[t]; y = f(x); w = f(e); z = y[t + 1] else w

Whatever else f depends on is asked for at t + 1, and evaluated or refused there as any such read is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.access import reach_in
from rlfx.recurrence.ir.program import Atom, Equation, Lit, Var
from rlfx.recurrence.language.domain import Domain
from rlfx.recurrence.language.index import TIME, Point
from rlfx.recurrence.language.primitives import across_p, inputs_p, read_p, reduce_p, whole_p

#: The scope under which environments step: such an equation is never evaluated beyond the rollout.
ENV_STEP = "rlfx.env.step"

SAME = Point(TIME)


def why_not_behind(equation: Equation, domain: Domain) -> str | None:
    """Why an equation has no value at t = T; None if it has one wherever its inputs have."""
    if equation.is_read and equation.access != SAME:
        return f"it depends on another timestep, x[{equation.access}]"
    if equation.op is inputs_p:
        return "it depends on data given from outside, rlfx.inputs"
    if equation.is_over_time:
        return "it depends on a reduction over all timesteps"
    if domain.until and equation.op in (reduce_p, whole_p, across_p):
        return "it depends on all environments, which end at different timesteps"
    if ENV_STEP in equation.scope:
        return "that would step the environment once more"
    return None


def extends(equation: Equation, domain: Domain) -> bool:
    """Whether it reads a value behind the last timestep, and is given none: its source is needed at t = T."""
    ahead = equation.is_read and isinstance(equation.access, Point) and equation.end is None
    return ahead and reach_in(equation.access, domain).after_end


def with_values_behind(
    equations: Sequence[Equation], now: Var, domain: Domain, dims: Callable[[], Mapping[Var, frozenset]], var: Callable
) -> Sequence[Equation]:
    """The equations, with ends for the reads behind the last timestep of what is made of series with ends.

    Args:
      now: the absolute time.
      dims: gives what each value varies with.
      var: a new variable of an abstract value.
    """
    behind: dict[Atom, Atom] = {e.outputs[0]: e.end for e in equations if e.is_read and e.access == SAME and e.end is not None}
    made = _made_of(behind, equations, domain) if behind else {}
    asks = {e for e in equations if extends(e, domain) and e.source in made}
    if not asks:
        return equations
    varies = {v for v, over in dims().items() if "t" in over}
    found: list[Equation] = []

    def at_the_end(v: Atom, reader: Equation) -> Atom:
        if v in behind or isinstance(v, Lit):
            return behind.get(v, v)
        aval = J.ShapedArray(v.shape, v.dtype)
        if v is now:
            behind[v] = var(aval)
            found.append(Equation(J.primitive("add"), {}, (v, Lit(np.int32(1))), (behind[v],), reader.where))
        elif v in varies:
            behind[v] = var(aval)
            params = {"access": Point(TIME + 1), "size": None, "start": False, "end": False}
            found.append(Equation(read_p, params, (v,), (behind[v],), reader.where, reader.scope))
        return behind.get(v, v)

    for e in equations:
        if e in asks:
            for again in _needed(e.source, made, behind):
                inputs = tuple(at_the_end(v, e) for v in again.inputs)
                outputs = tuple(var(J.ShapedArray(v.shape, v.dtype)) for v in again.outputs)
                found.append(replace(again, inputs=inputs, outputs=outputs))
                behind |= dict(zip(again.outputs, outputs, strict=True))
            e = replace(e, params={**e.params, "end": True}, inputs=(*e.inputs, behind[e.source]))
        found.append(e)
    return tuple(found)


def _made_of(given: Mapping[Atom, Atom], equations: Sequence[Equation], domain: Domain) -> dict[Var, Equation]:
    """What is made of these values at their own timestep, each with its equation, in the order of definition."""
    made: dict[Var, Equation] = {}
    for e in equations:
        again = not (why_not_behind(e, domain) or e.has_effects or e.is_ragged)
        if again and any(v in given or v in made for v in e.inputs):
            made |= {v: e for v in e.outputs if v not in given}
    return made


def _needed(value: Var, made: Mapping[Var, Equation], known: Mapping[Atom, Atom]) -> list[Equation]:
    """The equations of a value, each after those that it depends on, without those whose values are known."""
    needed, todo = set(), [value]
    while todo:
        v = todo.pop()
        if v in made and v not in known and made[v] not in needed:
            needed.add(made[v])
            todo += (u for u in made[v].inputs if isinstance(u, Var))
    return [e for e in dict.fromkeys(made.values()) if e in needed]
