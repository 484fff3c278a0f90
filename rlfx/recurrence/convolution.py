"""Convolutions in the one layout that XLA:CPU computes fast inside loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.interpret import evaluate

CONVOLUTION = J.primitive("conv_general_dilated")


def channels_last(x: Any, w: Any, params: dict) -> Any:
    """A convolution as NHWC, HWIO -> NHWC: other layouts are an order of magnitude slower in loops on a CPU (jax#12868)."""
    numbers = params["dimension_numbers"]
    lhs, rhs, out = (tuple(map(int, spec)) for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
    d = len(lhs)
    spatial = tuple(range(1, d - 1))
    last = type(numbers)((0, d - 1, *spatial), (d - 1, d - 2, *range(d - 2)), (0, d - 1, *spatial))
    x = jax.lax.transpose(x, (lhs[0], *lhs[2:], lhs[1]))
    w = jax.lax.transpose(w, (*rhs[2:], rhs[1], rhs[0]))
    y = J.bind(CONVOLUTION, {**params, "dimension_numbers": last}, x, w)[0]
    return jax.lax.transpose(y, tuple(np.argsort((out[0], *out[2:], out[1]))))


def with_channels_last(fn: Callable) -> Callable:
    """``fn``, every convolution in it in that layout: also those that differentiation has made of others."""

    def run(*args: Any) -> Any:
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        results = evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), _rule)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return run


def _rule(eqn: Any, operands: list) -> list | None:
    if eqn.primitive is CONVOLUTION:
        return [channels_last(operands[0], operands[1], eqn.params)]
    return evaluate(*J.call_body(eqn.primitive, eqn.params), operands, _rule) if eqn.primitive in J.INLINED else None
