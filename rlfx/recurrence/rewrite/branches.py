"""Conditions that each environment has for itself are choices between values: all branches are evaluated, as ``vmap`` does.

``jax.vmap`` of ``jax.lax.cond`` or ``switch`` gives each point a copy of all that the branches read, weights too, and a gradient
of its own of them. Here points share their weights, as in ``jnp.where``. What the derivative of a branch makes of points that
did not take it (a root of a negative number) does not reach anything, as with ``cond``, and unlike with ``where``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.active import active_equations, float_inputs
from rlfx.recurrence.analysis.cost import PRODUCTS
from rlfx.recurrence.ir.build import with_calls
from rlfx.recurrence.ir.interpret import evaluate, inlined_body
from rlfx.recurrence.ir.program import Equation, Program

_DIV = J.primitive("div")
#: The derivative by one operand is zero where the other and the cotangent are, or is the cotangent, moved.
_MASKED = (
    PRODUCTS | J.LAYOUTS | set(map(J.primitive, ("add", "sub", "mul", "max", "min", "select_n", "gather", "dynamic_slice")))
)


class _Branch(NamedTuple):
    """A branch, and where its points meet what they share.

    Attributes:
      body: a closed jaxpr.
      own: its values that differ from point to point.
      mixed: its equations of such values and of shared ones, through which a derivative goes; of a condition its branches.
    """

    body: Any
    own: AbstractSet = frozenset()
    mixed: Mapping[Any, Sequence[_Branch]] = MappingProxyType({})


def with_branches_chosen(program: Program) -> Program:
    """The program with choices for such conditions; without any it is ``program``. Meaning-preserving; idempotent.

    A condition stays where a derivative by what is shared goes through a loop in it, or an operation that is not known here.
    """
    conditions = {e for e in program.equations if _is_apart(e, program)}
    if not conditions:
        return program
    active = active_equations(program, float_inputs(program), (program.loss, *program.next_carry, *program.aux))

    def instead(e: Equation) -> Callable | None:
        if e not in conditions:
            return None
        own = [program.dims_of(v) >= program.dims_of(e.inputs[0]) for v in e.inputs[1:]]
        branches = [_branch(body, own) if e in active else _Branch(body) for body in e.params["branches"]]
        return None if None in branches else functools.partial(_chosen, branches)

    return with_calls(program, instead)


def _is_apart(e: Equation, program: Program) -> bool:
    """Whether it is a condition of each environment that reads an array which environments share."""
    if e.op is not J.COND or e.has_effects or e.is_ragged or "b" not in program.dims_of(e.inputs[0]):
        return False
    shared = any(v.shape and "b" not in program.dims_of(v) for v in e.inputs[1:])
    return shared and not J.contains(e.op, dict(e.params), J.CALLBACKS)


def _branch(body: Any, own: Sequence[bool]) -> _Branch | None:
    """A branch through which a derivative goes; None if what it makes of points that do not take it cannot be kept apart."""
    body = inlined_body(body)
    differ, mixed = {v for v, mine in zip(body.jaxpr.invars, own, strict=True) if mine}, {}
    for eqn in body.jaxpr.eqns:
        mine = [not J.is_literal(v) and v in differ for v in eqn.invars]
        if not any(mine):
            continue
        differ.update(eqn.outvars)
        if not any(J.is_inexact(v.aval) and not (J.is_literal(v) or v in differ) for v in eqn.invars):
            continue
        inner = [_branch(b, mine[1:]) for b in eqn.params["branches"]] if eqn.primitive is J.COND and mine[0] else []
        if None in inner or not (inner or eqn.primitive in _MASKED or (eqn.primitive is _DIV and mine[0])):
            return None
        mixed[eqn] = inner
    return _Branch(body, differ, mixed)


def _chosen(branches: Sequence[_Branch], which: Any, *operands: Any, within: Any = True) -> list:
    """What the branch of a point gives; ``within``: whether the point comes here."""
    cases = [_taken(branch, (which == n) & within, operands) for n, branch in enumerate(branches)]
    return [jax.lax.select_n(which, *values) for values in zip(*cases, strict=True)]


def _taken(branch: _Branch, taken: Any, operands: Sequence) -> list:
    """What a branch gives at a point that takes it. Derivatives are of such points alone.

    Zeros are in the place of what other points multiply with what is shared, and of the cotangents of that. (A cotangent of zero
    alone would not do: what it has come through may be infinite.)
    """

    def masked(v: Any, x: Any) -> Any:
        own = not J.is_literal(v) and v in branch.own and J.is_inexact(v.aval)
        return jax.lax.select_n(taken, jnp.zeros_like(x), x) if own else x

    def rule(eqn: Any, values: list) -> list | None:
        inner = branch.mixed.get(eqn)
        if inner:
            return _chosen(inner, *values, within=taken)
        return None if inner is None else list(map(masked, eqn.outvars, J.bind_again(eqn, *map(masked, eqn.invars, values))))

    jaxpr = branch.body.jaxpr
    return evaluate(jaxpr, branch.body.consts, list(map(masked, jaxpr.invars, operands)), rule)
