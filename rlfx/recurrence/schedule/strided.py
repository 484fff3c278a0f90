"""What ``rlfx.every(n, fn)`` computes in a stage of all timesteps: at every n-th of them, and not at all to choose afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.cost import FUSED, flops_of_jaxpr_equation
from rlfx.recurrence.ir.program import Equation, Lit, Program, Var

_CONVERT, _EQ, _REM = (J.primitive(name) for name in ("convert_element_type", "eq", "rem"))


@dataclass(frozen=True, eq=False)
class Strided:
    """A branch that is taken where ``(t0 + t) % n == 0``: the equation runs at those timesteps alone.

    Attributes:
      equation: a ``cond``; its first branch is what there is at the other timesteps.
      n: how many timesteps are between them.
    """

    equation: Equation
    n: int

    def __str__(self) -> str:
        return f"rlfx.every({self.n}, fn): of {self.n} timesteps one computes fn"


def strided(equations: Sequence[Equation], program: Program) -> list[tuple[Equation, ...] | Strided]:
    """Equations in order, with those apart that run at every n-th timestep."""
    parts: list[tuple[Equation, ...] | Strided] = []
    before: list[Equation] = []
    for e in equations:
        n = period(e, program)
        if n is None or not _pays(e, program):
            before.append(e)
            continue
        parts += [tuple(before), Strided(e, n)] if before else [Strided(e, n)]
        before = []
    return [*parts, tuple(before)] if before else parts


def period(equation: Equation, program: Program) -> int | None:
    """n of a branch that is taken at every n-th timestep (``rlfx.every``); None of any other equation.

    A branch at every timestep, or with effects, is none: of these each timestep has its own.
    """
    if equation.op is not J.COND or len(equation.params["branches"]) != 2 or equation.has_effects or equation.is_ragged:
        return None
    if J.contains(equation.op, dict(equation.params), J.CALLBACKS):
        return None
    at = equation.inputs[0]
    for op in (_CONVERT, _EQ):
        at = _argument(at, op, program)
    definition = program.definitions().get(at) if isinstance(at, Var) else None
    if definition is None or definition.op is not _REM or definition.inputs[0] is not program.now:
        return None
    divisor = definition.inputs[1]
    n = int(np.asarray(divisor.value)) if isinstance(divisor, Lit) else 0
    return n if n > 1 else None


def _argument(atom: object, op: object, program: Program) -> object:
    """What an equation of one argument (beside zeros) has been given, None if it is another."""
    definition = program.definitions().get(atom) if isinstance(atom, Var) else None
    if definition is None or definition.op is not op:
        return None
    rest = definition.inputs[1:]
    return definition.inputs[0] if all(isinstance(r, Lit) and not np.any(r.value) for r in rest) else None


def _pays(equation: Equation, program: Program) -> bool:
    """Whether the branch is more than what XLA makes one with the choice of its result, and varies with time."""
    moving = [v for v in equation.inputs[1:] if "t" in program.dims_of(v)]
    sizes = sum(int(np.prod(v.shape, dtype=np.int64)) for v in (*moving, *equation.outputs))
    body, _ = J.body_of(equation.params["branches"][1])
    return bool(moving) and sum(map(flops_of_jaxpr_equation, body.eqns)) > FUSED * sizes
