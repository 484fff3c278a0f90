"""Which equations a derivative goes through, in a learner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.program import Equation, Lit, Program, Var
from rlfx.recurrence.language.primitives import aside_p, inputs_p, series_p

#: What no derivative goes through.
STOPS = J.STOP_GRADIENT | {aside_p}


#: Linear if one of the last so many operands is a number that is written there.
_SCALED = {J.primitive("mul"): 2, J.primitive("div"): 1}
#: What is linear in all of its operands that are no integers or bools: places of elements, sums, choices.
_LINEAR = J.LAYOUTS | {J.ADD_ANY, series_p} | set(
    map(J.primitive, ("add", "sub", "neg", "convert_element_type", "copy", "real", "imag", "reduce_sum", "cumsum", "gather",
                      "dynamic_slice", "select_n", "pad"))
)  # fmt: skip


def keeps_operands(equation: Equation) -> bool:
    """Whether the derivative of an equation needs floats that it reads or gives; places and choices are few bytes."""
    by_number = equation.op in _SCALED and any(isinstance(v, Lit) for v in equation.inputs[-_SCALED[equation.op] :])
    return not (equation.op in _LINEAR or by_number)


def is_float(var: Var) -> bool:
    """Whether a value can carry a derivative."""
    return jnp.issubdtype(var.dtype, jnp.inexact)


def float_inputs(program: Program) -> frozenset[Var]:
    """The inputs that can carry a derivative."""
    return frozenset(filter(is_float, program.inputs))


def differentiated(equation: Equation) -> list[Var]:
    """The inputs through which an equation may have a derivative."""
    return [] if equation.op in STOPS else [v for v in equation.inputs if isinstance(v, Var) and is_float(v)]


def reached_values(program: Program, perturbed: Iterable[Var]) -> frozenset[Var]:
    """What varies, differentiably, with the perturbed inputs, through reads and the carry; they are among it."""
    users, todo = program.users, list(perturbed)
    reached = set(todo)
    while todo:
        for e in users.get(todo.pop(), ()):
            new = [v for v in e.outputs if e.op not in STOPS and is_float(v) and v not in reached]
            reached.update(new)
            todo += new
    return frozenset(reached)


def active_equations(program: Program, perturbed: frozenset[Var], targets: Iterable[Var]) -> frozenset[Equation]:
    """Equations on a differentiable path from the perturbed inputs to the targets, through reads and the carry."""
    reached, definition = reached_values(program, perturbed), program.definitions()
    leading: set[Equation] = set()
    todo = [v for v in targets if v in reached]
    while todo:
        equation = definition.get(todo.pop())
        if equation is None or equation in leading:
            continue
        leading.add(equation)
        todo += [v for v in equation.inputs if isinstance(v, Var) and v in reached]
    return frozenset(leading)


def carried_equations(body: Sequence[Equation], program: Program) -> tuple[Equation, ...]:
    """Those of a loop that lead, differentiably, from the program's inputs to what it reads of other timesteps.

    A state that an action moves is none of what chose the action: nothing goes back through a number that was picked.
    """
    read = [v for e in body if e.is_read for v in e.inputs[:1] if isinstance(v, Var)]
    active = active_equations(program, float_inputs(program), read)
    return tuple(e for e in body if e in active)


def data_of(program: Program) -> frozenset[Var]:
    """The leaves of ``params`` that nothing but ``rlfx.inputs`` reads, as they are, or changed one by one (an image of bytes)."""
    definition = program.definitions()
    on_the_way: set[Var] = set()
    for e in program.equations:
        given = [v for v in e.inputs if isinstance(v, Var)] if e.op is inputs_p else []
        while len(given) == 1 and given[0] not in on_the_way:
            on_the_way.update(given)
            made = definition.get(given[0])
            given = [] if made is None else [v for v in made.inputs if isinstance(v, Var)]
    used = {v for v in (program.loss, *program.next_carry, *program.aux) if isinstance(v, Var)}
    for e in reversed(program.equations):  # a value is defined before it is used, but by reads, which are no such chain
        if e.op is not inputs_p and not (set(e.outputs) <= on_the_way and used.isdisjoint(e.outputs)):
            used.update(v for v in e.inputs if isinstance(v, Var))
    return frozenset(v for v in program.params if v in on_the_way and v not in used)
