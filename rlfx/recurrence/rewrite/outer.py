"""Reductions over points of outer products, ``rlfx.mean(jnp.outer(x, y))``, take what these are made of.

The product is larger than its factors, and each point has one; their sum is one product of matrices, ``x.T @ y`` of all points'
rows (``execute/outer.py``). So are second moments, factors of the Fisher information, correlations of codes.
"""

from __future__ import annotations

import math
from dataclasses import replace

import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._axes import nest_of
from rlfx.recurrence.ir.build import live
from rlfx.recurrence.ir.outer import Outer
from rlfx.recurrence.ir.program import Atom, Equation, Program, Var, with_equations
from rlfx.recurrence.language.primitives import reduce_p

_MUL, _DOT = J.primitive("mul"), J.primitive("dot_general")


def with_outer_sums(program: Program) -> Program:
    """The program with such reductions; without any it is ``program``. Meaning-preserving, and idempotent."""
    found = {e: instead for e in program.equations if e.op is reduce_p and (instead := _instead(e, program)) is not None}
    if not found:
        return program
    return with_equations(program, live(tuple(found.get(e, e) for e in program.equations), program))


def _instead(e: Equation, program: Program) -> Equation | None:
    if e.params["op"] not in ("sum", "mean") or len(e.inputs) != 1 or not jnp.issubdtype(e.outputs[0].dtype, jnp.floating):
        return None
    (v,) = e.inputs
    if not isinstance(v, Var) or not program.dims_of(v).issuperset(e.params["over"]):
        return None
    found = _outer(v, program)
    if found is None:
        return None
    factors, outer = found
    return replace(e, inputs=factors, params={**e.params, "outer": outer})


def _outer(v: Var, program: Program) -> tuple[tuple[Atom, ...], Outer] | None:
    """The factors of a product that is larger than each, or of such a product times what has axes of one of them alone."""
    d = program.definitions().get(v)
    if d is None or d.op not in (_MUL, _DOT) or d.is_ragged or J.symbolic_axes(v.shape):
        return None
    if any(u.dtype != v.dtype for u in d.inputs):
        return None
    it = nest_of(d.op, d.params, [u.shape for u in d.inputs], [v.shape])
    if it is None:
        return None
    loops = dict.fromkeys(loop for axes in (*it.results, *it.operands) for loop in axes if loop is not None)
    place = {loop: i for i, loop in enumerate(loops)}
    axes = tuple(tuple(None if loop is None else place[loop] for loop in operand) for operand in it.operands)
    if max(math.prod(u.shape) for u in d.inputs) < math.prod(v.shape):
        return d.inputs, Outer(axes, v.shape, d.op is _MUL)
    if d.op is _DOT:
        return None
    for i, j in ((0, 1), (1, 0)):
        product, scale = d.inputs[i], {a for a in axes[j] if a is not None}
        found = _outer(product, program) if isinstance(product, Var) and axes[i] == tuple(range(len(v.shape))) else None
        if found is not None and (scale <= found[1].at(0) or scale <= found[1].at(1)):
            return (*found[0], d.inputs[j]), replace(found[1], axes=(*found[1].axes, axes[j]))
    return None
