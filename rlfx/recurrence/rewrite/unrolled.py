"""Short nested loops, as the user wrote them with ``lax.scan``, without a loop: a model rolled out over five steps, say.

A loop on a CPU writes what its derivative needs of every iteration into arrays, and reads it back; nothing is fused across
iterations, and the last one computes what nobody reads. Of few iterations, each of few operations, that is what takes the time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.program import Equation, Program


def with_unrolled(program: Program, most: int) -> Program:
    """The program whose loops are unrolled where that makes at most so many equations; without such loops ``program``.

    Meaning-preserving. Those that the user unrolls in part stay as they are.
    """
    if not any(_is_short(e, most) for e in program.equations):
        return program
    return replace(program, equations=tuple(_unrolled(e) if _is_short(e, most) else e for e in program.equations))


def _is_short(e: Equation, most: int) -> bool:
    if e.op is not J.SCAN or e.is_ragged or e.params["unroll"] != 1:  # of a loop over a slice the length depends on t
        return False
    return e.params["length"] >= 2 and e.params["length"] * _equations(e.params["jaxpr"].jaxpr) <= most


def _equations(jaxpr: Any) -> int:
    """With those of what it calls."""
    return sum(1 + sum(_equations(body) for body, _ in J.sub_jaxprs(dict(e.params))) for e in jaxpr.eqns)


def _unrolled(e: Equation) -> Equation:
    return replace(e, params={**e.params, "unroll": e.params["length"]})
