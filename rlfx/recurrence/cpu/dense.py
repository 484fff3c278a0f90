"""Transposed convolutions multiply no zeros: of an input with zeros between its elements, what each output reads is dense.

A decoder that makes frames is ``jax.lax.conv_transpose``, a convolution of its input with s - 1 zeros after every element. Along
an axis, outputs whose places have one remainder by s read every s-th tap of the kernel: so many kernels, side by side as
features, are convolved with the input as it is, and their results are taken in turns. For three taps in two dimensions and
steps of two this is 16 products in place of 36, of which 9 are not with zeros.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.cpu import convolution
from rlfx.recurrence.cpu.convolution import CONVOLUTION, channels_last, convolved
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program


class _Axis(NamedTuple):
    """One axis of places.

    Attributes:
      taps: of every remainder, the first tap that it reads, and how many there are.
      starts: of every remainder, which element the first of its windows begins at, from the first such element on.
      window: how many elements all windows of one place have together.
      padding: of the input as it is; negative: so many elements are left out.
      outputs: how many places there are then.
    """

    taps: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]
    window: int
    padding: tuple[int, int]
    outputs: int


def with_dense_convolutions(program: Program) -> Program:
    """The program with such convolutions; without transposed ones it is ``program``. Meaning-preserving up to reassociation."""

    def instead(e: Equation) -> tuple[Callable, Sequence[Atom]] | None:
        if e.op is not CONVOLUTION or e.is_ragged or not _is_transposed(e.params, e.inputs[1].shape):
            return None
        return functools.partial(dense_convolution, dict(e.params)), e.inputs

    return exchanged(program, instead)


def of_derivative(eqn: Any, operands: Sequence[Any]) -> list:
    """As ``convolution.of_derivative``, and dense: by what windows with steps move over, it is a transposed convolution."""
    if _is_transposed(eqn.params, operands[1].shape) and not any(map(J.is_symbolic, operands[0].shape)):
        return [dense_convolution(eqn.params, *operands)]
    return convolution.of_derivative(eqn, operands)


def _is_transposed(params: Mapping, kernel: Sequence[int]) -> bool:
    """Whether zeros are between elements, and windows move by one and have a tap for every remainder."""
    spread, groups = params["lhs_dilation"] or (), (params["feature_group_count"], params["batch_group_count"])
    plain = set(params["window_strides"]) <= {1} and set(params["rhs_dilation"] or ()) <= {1} and groups == (1, 1)
    taps = [kernel[a] for a in params["dimension_numbers"].rhs_spec[2:]]
    return plain and max(spread, default=1) > 1 and all(n >= s for n, s in zip(taps, spread, strict=True))


def dense_convolution(params: Mapping, x: Any, w: Any) -> Any:
    """A transposed convolution, of its input without zeros.

    Example:
      >>> import jax.numpy as jnp
      >>> from jax import lax
      >>> x, w = jnp.ones((1, 3, 3, 2)), jnp.ones((4, 3, 2, 5))
      >>> whole = lambda x: lax.conv_transpose(x, w, (2, 2), "SAME")
      >>> (eqn,) = (e for e in jax.make_jaxpr(whole)(x).eqns if e.primitive.name == "conv_general_dilated")
      >>> bool(jnp.allclose(dense_convolution(eqn.params, x, w), whole(x)))
      True
    """
    return channels_last(x, w, params, _dense)


def _dense(x: Any, w: Any, params: Mapping) -> Any:
    """That of ``x[N, *places, I]`` and ``w[*taps, I, O]``."""
    steps, (batch, *places, _), (*taps, _, out) = params["lhs_dilation"], x.shape, w.shape
    axes = list(map(_axis, places, taps, steps, params["padding"]))
    kernels = [_kernel(w, axes, rest) for rest in itertools.product(*map(range, steps))]
    same = {"lhs_dilation": (1,) * len(places), "padding": tuple(axis.padding for axis in axes)}
    y = convolved(x, jnp.concatenate(kernels, -1), {**params, **same})
    blocks, outputs = y.shape[1:-1], [axis.outputs for axis in axes]
    turns = (a for i in range(len(places)) for a in (1 + i, 1 + len(places) + i))
    y = jnp.transpose(y.reshape(batch, *blocks, *steps, out), (0, *turns, 1 + 2 * len(places)))
    y = y.reshape(batch, *(n * s for n, s in zip(blocks, steps, strict=True)), out)
    return jax.lax.slice(y, (0,) * y.ndim, (batch, *outputs, out))


def _axis(places: int, taps: int, step: int, padding: tuple[int, int]) -> _Axis:
    """Place ``step * q + r`` of the output reads tap ``k`` of the element at ``(step * q + r + k - padding[0]) / step``."""
    firsts = [(padding[0] - r) % step for r in range(step)]
    counts = [len(range(k, taps, step)) for k in firsts]
    starts = [(r + k - padding[0]) // step for r, k in enumerate(firsts)]
    first, last = min(starts), max(a + n for a, n in zip(starts, counts, strict=True))
    outputs = (places - 1) * step + 1 + sum(padding) - taps + 1
    read = -(-outputs // step) - 1 + last  # elements, behind which nothing is read
    found = tuple(zip(firsts, counts, strict=True)), tuple(a - first for a in starts)
    return _Axis(*found, last - first, (-first, read - places), outputs)


def _kernel(w: Any, axes: Sequence[_Axis], rest: Sequence[int]) -> Any:
    """What the places with such remainders read, in the window of all."""
    begins, ends, steps, around = [], [], [], []
    for axis, r in zip(axes, rest, strict=True):
        (first, count), start, step = axis.taps[r], axis.starts[r], len(axis.starts)
        begins, ends, steps = [*begins, first], [*ends, first + (count - 1) * step + 1], [*steps, step]
        around.append((start, axis.window - start - count))
    part = jax.lax.slice(w, (*begins, 0, 0), (*ends, *w.shape[-2:]), (*steps, 1, 1))
    return jnp.pad(part, (*around, (0, 0), (0, 0)))
