"""Small convolutions, and those that a gradient goes through time by, as products of patches.

XLA:CPU takes for the kernel's gradient of a small convolution many times as long as for its value, and a recurrence has one at
every timestep. As a product of patches with the kernel it has two more products as derivatives. What of its input is no part
of the recurrence (an image beside a memory, put together) has a product of its own, for all timesteps at once.
So it is with the first layer of small images, of few features, wherever it is: its value takes 0.6 to 0.95 of the time as a
product, its derivatives 0.6 to 1.0. Larger ones are level, or better as they are. (Where its steps are of one it is as in
``narrow.py``.)
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.analysis.active import differentiated
from rlfx.recurrence.cpu.convolution import CONVOLUTION, is_channels_last
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program
from rlfx.recurrence.rewrite.lift import ancestors, reaches

_CONCATENATE = J.primitive("concatenate")
#: Outside of recurrences: numbers of patches at a point, and of one patch, at most.
FEW, NARROW = 1 << 13, 64

_ONE_MORE_AXIS = (J.primitive("broadcast_in_dim"), J.primitive("reshape"))


@dataclass(frozen=True)
class _Part:
    """Features of the input, which are put together: the first, how many, and whether they are part of the recurrence."""

    value: Atom
    first: int
    count: int
    recurs: bool


def with_patches(program: Program, most: int, few: int = FEW) -> Program:
    """The program with products for convolutions whose patches are few numbers at a point.

    Args:
      most: of a recurrence.
      few: of others, of data; 0: never. (Of what acts, patches would be kept for the learner, which are more memory than images.)

    Meaning-preserving up to reassociation; without such convolutions it is ``program``.
    """
    definition = program.definitions()

    def instead(e: Equation) -> tuple[Callable, Sequence[Atom]] | None:
        if e.op is not CONVOLUTION or not _is_plain(e) or _patches(e) > most:
            return None
        if not ((_is_small(e, few) and not is_acted(e, program, definition)) or depends(e, e, definition)):
            return None
        parts = _parts(e, definition)
        return functools.partial(_sum, parts, dict(e.params)), [e.inputs[1], *(part.value for part in parts)]

    return exchanged(program, instead)


def _is_plain(e: Equation) -> bool:
    """Whether it is one in the layout of ``with_channels_last``, of all features, in single precision or better."""
    p, out = e.params, e.outputs[0]
    ones = p["feature_group_count"] == p["batch_group_count"] == 1
    spread = set(p["lhs_dilation"] or ()) | set(p["rhs_dilation"] or ())
    whole = jnp.issubdtype(out.dtype, jnp.floating) and jnp.finfo(out.dtype).bits >= 32
    fits = all(v.dtype == out.dtype for v in e.inputs) and all(n >= 0 for pair in p["padding"] for n in pair)
    return ones and spread <= {1} and whole and fits and not e.is_ragged and is_channels_last(e)


def _patches(e: Equation) -> int:
    """How many numbers its patches are."""
    return math.prod(e.outputs[0].shape[:-1]) * math.prod(e.inputs[1].shape[:-1])


def _is_small(e: Equation, few: int) -> bool:
    return _patches(e) <= few and math.prod(e.inputs[1].shape[:-1]) <= NARROW


def is_acted(e: Equation, program: Program, definition: Mapping) -> bool:
    """Whether what is convolved depends on the carry."""
    whole = definition.get(e.inputs[0])
    behind = () if whole is None else (whole, *ancestors(whole, definition))
    return not {*program.carry}.isdisjoint([e.inputs[0], *(v for one in behind for v in one.inputs)])


def depends(e: Equation | None, on: Equation, definition: Mapping) -> bool:
    """Whether what an equation computes has a derivative with respect to what another one does, at this or another timestep.

    Of an equation and itself: whether the gradient flows through time by it.
    """
    return e is not None and reaches(e, on, definition, differentiated)


def _parts(e: Equation, definition: Mapping) -> list[_Part]:
    """Neighbours that are alike are one part: if none or all of them recur, the input as it is."""
    whole = e.inputs[0]
    size, together = whole.shape[-1], definition.get(whole)
    if together is not None and together.op in _ONE_MORE_AXIS and whole.shape == (1, *together.inputs[0].shape):  # x[None]
        together = definition.get(together.inputs[0])
    if together is None or together.op is not _CONCATENATE or together.params["dimension"] != _last(together):
        return [_Part(whole, 0, size, True)]
    firsts = itertools.accumulate((v.shape[-1] for v in together.inputs), initial=0)
    parts = [
        _Part(v, first, v.shape[-1], definition.get(v) is e or depends(definition.get(v), e, definition))
        for v, first in zip(together.inputs, firsts, strict=False)
    ]
    return [_Part(whole, 0, size, True)] if all(part.recurs for part in parts) else parts


def _last(e: Equation) -> int:
    return len(e.outputs[0].shape) - 1


def _sum(parts: Sequence[_Part], params: dict, kernel: Any, *values: Any) -> Any:
    """The convolution at one point: of what recurs, and of the rest."""
    groups: dict[bool, list[tuple[Any, Any]]] = {}
    for part, x in zip(parts, values, strict=True):
        x = x if x.ndim == kernel.ndim else x[None]
        cut = jax.lax.slice_in_dim(kernel, part.first, part.first + part.count, axis=kernel.ndim - 2)
        groups.setdefault(part.recurs, []).append((x, cut))
    found = []
    for group in groups.values():
        x, w = (jnp.concatenate(both, axis) for both, axis in zip(zip(*group, strict=True), (-1, -2), strict=True))
        found.append(product_of_patches(x, w, params))
    return functools.reduce(jnp.add, found)


def product_of_patches(x: Any, w: Any, params: Mapping) -> Any:
    """``x[N, ..., I]`` and ``w[..., I, O]`` convolved, as a product of ``[N, ..., K * I]`` with ``[K * I, O]``.

    (Patches by ``jax.lax.conv_general_dilated_patches`` are a convolution themselves.)
    """
    strides, padding, window = params["window_strides"], params["padding"], w.shape[:-2]
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    sizes = [(n - k) // s + 1 for n, k, s in zip(x.shape[1:-1], window, strides, strict=True)]

    def shifted(offset: tuple[int, ...]) -> Any:
        ends = [o + (n - 1) * s + 1 for o, n, s in zip(offset, sizes, strides, strict=True)]
        return jax.lax.slice(x, (0, *offset, 0), (x.shape[0], *ends, x.shape[-1]), (1, *strides, 1))

    patches = jnp.concatenate([shifted(offset) for offset in itertools.product(*map(range, window))], -1)
    return jnp.matmul(patches, w.reshape(-1, w.shape[-1]), precision=params["precision"])
