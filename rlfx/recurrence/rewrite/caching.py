"""Activation caching: the learner keeps what the actor's wide products gave, and computes their derivatives alone.

``y = x @ w`` becomes ``y = known(x, w, stop_gradient(x @ w))``, whose value is its last operand and whose derivative is that
of the product. The product itself is then no longer on a differentiable path, so that the learner's cut may store it: bytes
against operations, as for everything else. Only outputs of layers are ever kept, or sums of them (``sums.py``), never all
residuals of a backward pass; and only what is evaluated twice otherwise (``Learner.twice``): acting must evaluate what it keeps.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from rlfx.recurrence.analysis.cost import PRODUCTS, flops_of
from rlfx.recurrence.ir.program import Equation, Program
from rlfx.recurrence.rewrite.sums import Sum, sums_of, with_sums

#: Operations for one element of a product from which on it is wide: narrower ones are computed again as fast as read.
WIDE = 256


def is_wide(equation: Equation, program: Program) -> bool:
    """Whether a product takes long enough, for its size, to be kept."""
    if equation.op not in PRODUCTS or not equation.is_pointwise or equation.is_ragged:
        return False
    (out,) = equation.outputs
    if "t" not in program.dims_of(out) or not jnp.issubdtype(out.dtype, jnp.inexact):
        return False
    return flops_of(equation, program.domain) >= WIDE * math.prod(out.shape)


def with_caching(program: Program, wide: frozenset[Equation]) -> Program:
    """The program with wide products that know their values; without any ``program``. Meaning-preserving."""
    known = sums_that_know(program, wide)
    return with_sums(program, known) if known else program


def sums_that_know(program: Program, wide: frozenset[Equation]) -> dict[Equation, Sum]:
    """Of each wide product, and of what is linear in them, the sum whose values are kept: of a product alone it is itself."""
    sums = {e: one for one in sums_of(program, wide) for e in one.members}
    return sums | {e: Sum.of_one(e) for e in wide if e not in sums}
