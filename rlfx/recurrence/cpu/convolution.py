"""Convolutions in the one layout that XLA:CPU computes fast inside loops."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from rlfx import _jaxpr as J

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
