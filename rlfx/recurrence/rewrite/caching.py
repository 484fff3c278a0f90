"""Activation caching: the learner keeps what the actor's wide products gave, and computes their derivatives alone.

``y = x @ w`` becomes ``y = known(x, w, stop_gradient(x @ w))``, whose value is its last operand and whose derivative is that
of the product. The product itself is then no longer on a differentiable path, so that the learner's cut may store it: bytes
against operations, as for everything else. Only outputs of layers are ever kept, or sums of them (``sums.py``), never all
residuals of a backward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.cost import PRODUCTS, flops_of
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Equation, Program
from rlfx.recurrence.rewrite.sums import sums_of, with_sums

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


def with_caching(program: Program) -> Program:
    """The program with wide products that know their values. Meaning-preserving.

    Without wide products, it is ``program``.
    """
    wide = frozenset(e for e in program.equations if is_wide(e, program))
    sums = {e: one for one in sums_of(program, wide) for e in one.members}
    summed = with_sums(program, sums) if sums else program
    return exchanged(summed, lambda e: _known(e) if e in wide and e not in sums else None)


def _known(equation: Equation) -> Callable:
    """The product of ``x`` and ``w``, whose value is not on the path of its derivative."""

    def product(x: Any, w: Any) -> Any:
        (out,) = J.bind(equation.op, dict(equation.params), x, w)
        return out

    @jax.custom_jvp
    def known(x: Any, w: Any, value: Any) -> Any:
        return value

    def derivative(primals: tuple, tangents: tuple) -> tuple:
        (x, w, value), (dx, dw, _) = primals, tangents
        zero = jax.custom_derivatives.SymbolicZero
        terms = [product(a, b) for a, b in ((dx, w), (x, dw)) if not isinstance(a, zero) and not isinstance(b, zero)]
        return value, functools.reduce(jnp.add, terms) if terms else jnp.zeros_like(value)

    known.defjvp(derivative, symbolic_zeros=True)
    return lambda x, w: known(x, w, jax.lax.stop_gradient(product(x, w)))
