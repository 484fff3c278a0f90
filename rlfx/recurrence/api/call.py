"""What a call does: a program's results for its arguments, in the trees of the user's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax

from rlfx import _jaxpr as J
from rlfx.errors import ProgramError, ProgramTypeError, located
from rlfx.recurrence.api.machine import check_axes
from rlfx.recurrence.gradient.rule import GradientRule
from rlfx.recurrence.ir.arguments import Arguments
from rlfx.recurrence.ir.program import Equation
from rlfx.recurrence.ir.trace import rewrap_shared
from rlfx.recurrence.language.time import as_integer

tree = jax.tree_util


def starts(t0: Any) -> bool:
    """Whether the first timestep is known to be 0: what is on a device is not waited for."""
    return not isinstance(t0, jax.Array) and as_integer(t0) == 0


def results(rule: GradientRule, consts: list, arguments: Arguments, carry: Any, t0: Any, begins: bool = False) -> Any:
    """What a compiled function returns. ``begins``: whether ``t0`` is 0, whatever is traced."""
    program, keeping = rule.program, arguments.keeping
    if keeping is not None:
        others = replace(arguments, keeping=None)
        return keeping.results(results(rule, consts, others, keeping.carry(carry), t0, begins))
    rule = rule.begun if begins else rule
    key = () if arguments.key is None or program.key is None else (arguments.key,)
    flat = [*arguments.params, *consts, *arguments.carry, *key]
    loss, next_carry, aux, lengths = _call(rule, flat, t0)
    out_carry = rewrap_shared(tree.tree_unflatten(program.trees["carry"], next_carry), carry)
    out_aux = tree.tree_unflatten(program.trees["aux"], aux)
    extra = () if lengths is None else (lengths,)
    return (out_carry, out_aux, *extra) if program.loss is None else (loss, (out_carry, out_aux, *extra))


def _call(rule: GradientRule, flat: list, t0: Any) -> tuple:
    check_axes(rule.sharding, flat)
    try:
        if J.linearizes_staged([*flat, t0]):
            return rule(flat, t0)  # a call without its derivative is not traced only to be thrown away
        # Compiled once where no jax.jit is around, and nothing but its body where there is one.
        return rule.once("call", lambda: jax.jit(rule, inline=True))(flat, t0)
    except J.UnexpectedTracerError as error:
        raise ProgramError(
            located(
                "A value leaked out of the traced program (it was stored outside of the function, in a list or an attribute, and "
                "is used in another trace).",
                where=J.leaked_from(error) or rule.program.where,
                fix="Return it from the program as aux instead of storing it.",
            )
        ) from error
    except ValueError as error:
        if "ordered IO callback" not in str(error):
            raise
        ordered = (e for e in rule.program.equations if any(of.get("ordered") for of in _parameters(e)))
        fact = (
            "An ordered io_callback is called for several timesteps or environments at once, which have no order among them: "
            "jax maps none."
        )
        fix = (
            "Write rlfx.effect(fn, x): once at each timestep, in the order of time, with the values of all environments. If the "
            "order is nothing to you: ordered=False."
        )
        where = next((e.where for e in ordered), rule.program.where)
        raise ProgramError(located(fact, where=where, fix=fix)) from error
    except TypeError as error:
        if "forward-mode" not in str(error) and "jvp" not in str(error):
            raise
        raise ProgramTypeError(
            located(
                "A compiled program has reverse-mode derivatives only (it re-schedules the backward pass).",
                where=J.here(),
                fix="Use jax.grad, jax.vjp or jax.jacrev; for a Jacobian-vector product of its loss, jnp.vdot the gradient "
                "with the direction.",
            )
        ) from error


def _parameters(equation: Equation) -> Iterator[Mapping]:
    """Those of an equation, and of what is in its bodies."""
    yield equation.params
    yield from (e.params for e in J.equations_in(dict(equation.params)))
