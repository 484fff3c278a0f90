"""Bodies of ``rlfx.shared``, which may take gradients of their own, with contractions as a CPU does them best."""

from __future__ import annotations

from dataclasses import replace

from rlfx.recurrence.cpu.contractions import fast_body, has_contractions
from rlfx.recurrence.ir.program import Equation, Program
from rlfx.recurrence.language.primitives import whole_p


def with_fast_bodies(program: Program) -> Program:
    """``shared f(x)`` → ``shared g(x)``, where ``g`` is ``f`` with the rules of ``contractions.py``.

    Meaning-preserving, but for the order of sums; without such contractions it is ``program``.
    """
    if not any(map(_is_slow, program.equations)):
        return program
    return replace(program, equations=tuple(_fast(e) if _is_slow(e) else e for e in program.equations))


def _is_slow(equation: Equation) -> bool:
    return equation.op is whole_p and has_contractions(equation.params["jaxpr"].jaxpr)


def _fast(equation: Equation) -> Equation:
    return replace(equation, params={**equation.params, "jaxpr": fast_body(equation.params["jaxpr"])})
