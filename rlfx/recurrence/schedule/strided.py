"""What ``rlfx.every(n, fn)`` computes in a stage of all timesteps: at every n-th of them, and not at all to choose afterwards.

So is what ``jnp.where(t % n == k, fn(), x)`` becomes (``rewrite/now_and_then.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.cost import FUSED, flops_of_jaxpr_equation
from rlfx.recurrence.analysis.timed import every_nth
from rlfx.recurrence.ir.program import Equation, Program


@dataclass(frozen=True, eq=False)
class Strided:
    """A branch that is taken where ``(t0 + t) % n == at``: the equation runs at those timesteps alone.

    Attributes:
      equation: a ``cond``; its first branch is what there is at the other timesteps.
      n: how many timesteps are between them.
    """

    equation: Equation
    n: int
    at: int

    def __str__(self) -> str:
        return f"of {self.n} timesteps one computes what is needed where t % {self.n} == {self.at}"


def strided(equations: Sequence[Equation], program: Program) -> list[tuple[Equation, ...] | Strided]:
    """Equations in order, with those apart that run at every n-th timestep."""
    parts: list[tuple[Equation, ...] | Strided] = []
    before: list[Equation] = []
    for e in equations:
        period = _period(e, program)
        if period is None or not _pays(e, program):
            before.append(e)
            continue
        parts += [tuple(before), Strided(e, *period)] if before else [Strided(e, *period)]
        before = []
    return [*parts, tuple(before)] if before else parts


def _period(equation: Equation, program: Program) -> tuple[int, int] | None:
    """``(n, k)`` of a branch that is taken where ``t % n == k``; None of any other equation.

    A branch at every timestep, or with effects, is none: of these each timestep has its own.
    """
    if equation.op is not J.COND or len(equation.params["branches"]) != 2 or equation.has_effects or equation.is_ragged:
        return None
    if J.contains(equation.op, dict(equation.params), J.CALLBACKS):
        return None
    return every_nth(equation.inputs[0], program).get(True)


def _pays(equation: Equation, program: Program) -> bool:
    """Whether the branch is more than what XLA makes one with the choice of its result, and varies with time."""
    moving = [v for v in equation.inputs[1:] if "t" in program.dims_of(v)]
    sizes = sum(int(np.prod(v.shape, dtype=np.int64)) for v in (*moving, *equation.outputs))
    body, _ = J.body_of(equation.params["branches"][1])
    return bool(moving) and sum(map(flops_of_jaxpr_equation, body.eqns)) > FUSED * sizes
