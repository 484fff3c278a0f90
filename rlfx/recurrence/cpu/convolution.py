"""Convolutions in the one layout that XLA:CPU computes fast inside loops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program

CONVOLUTION = J.primitive("conv_general_dilated")


def convolved(x: Any, w: Any, params: Mapping) -> Any:
    """A convolution as it is."""
    return J.bind(CONVOLUTION, dict(params), x, w)[0]


def channels_last(x: Any, w: Any, params: Mapping, convolve: Callable[[Any, Any, Mapping], Any] = convolved) -> Any:
    """A convolution as NHWC, HWIO -> NHWC: other layouts are an order of magnitude slower in loops on a CPU (jax#12868).

    Args:
      convolve: ``convolve(x, w, params)`` computes it in that layout.
    """
    numbers = params["dimension_numbers"]
    lhs, rhs, out = (tuple(map(int, spec)) for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
    d = len(lhs)
    spatial = tuple(range(1, d - 1))
    last = type(numbers)((0, d - 1, *spatial), (d - 1, d - 2, *range(d - 2)), (0, d - 1, *spatial))
    x = jax.lax.transpose(x, (lhs[0], *lhs[2:], lhs[1]))
    w = jax.lax.transpose(w, (*rhs[2:], rhs[1], rhs[0]))
    y = convolve(x, w, {**params, "dimension_numbers": last})
    return jax.lax.transpose(y, tuple(np.argsort((out[0], *out[2:], out[1]))))


def of_derivative(eqn: Any, operands: Sequence[Any]) -> list:
    """A convolution in that layout, in what has derivatives already.

    A kernel's derivative turns both of its operands, so that images are innermost. XLA:CPU turns an array that is in memory
    three to four times as fast as one that it computes meanwhile: they are computed before.
    """
    numbers, (x, w) = eqn.params["dimension_numbers"], operands
    if numbers.lhs_spec[1] == 0 and J.platform() == "cpu" and not any(map(J.is_symbolic, x.shape)):
        x, w = (_computed(y) if _LARGE <= y.size <= _IN_CACHE else y for y in (x, w))
    return [channels_last(x, w, eqn.params)]


#: Smaller arrays take no time; larger ones are not in the cache when they are turned.
_LARGE, _IN_CACHE = 1 << 14, 1 << 21

_computed = J.computed_once(lambda x: x)


def with_channels_last(program: Program) -> Program:
    """The program with its convolutions in that layout. Meaning-preserving; without convolutions it is ``program``.

    XLA makes no copies of the transposes between one convolution and the next: it chooses how the arrays lie in memory.
    """

    def instead(equation: Equation) -> tuple[Callable, Sequence[Atom]] | None:
        if equation.op is not CONVOLUTION or equation.is_ragged or is_channels_last(equation):
            return None
        return functools.partial(channels_last, params=dict(equation.params)), equation.inputs

    return exchanged(program, instead)


def is_plain(params: Mapping, x: Any, w: Any) -> bool:
    """Whether a convolution of such operands is of all features, without holes, in single precision or better throughout."""
    ones = params["feature_group_count"] == params["batch_group_count"] == 1
    spread = {*(params["lhs_dilation"] or ()), *(params["rhs_dilation"] or ())}
    same = x.dtype == w.dtype and params["preferred_element_type"] in (None, x.dtype)
    return ones and spread <= {1} and same and jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits >= 32


def is_channels_last(equation: Equation) -> bool:
    """Whether a convolution is NHWC, HWIO -> NHWC."""
    numbers = equation.params["dimension_numbers"]
    d = len(numbers.lhs_spec)
    last = (0, d - 1, *range(1, d - 1))
    kernel = (d - 1, d - 2, *range(d - 2))
    return tuple(numbers.lhs_spec) == last == tuple(numbers.out_spec) and tuple(numbers.rhs_spec) == kernel
