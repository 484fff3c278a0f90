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
from typing import Any

import jax
import jax.numpy as jnp

from rlfx.recurrence.analysis.active import differentiated
from rlfx.recurrence.cpu.convolution import CONVOLUTION, is_channels_last, is_plain
from rlfx.recurrence.ir.build import exchanged
from rlfx.recurrence.ir.program import Atom, Equation, Program
from rlfx.recurrence.rewrite.lift import ancestors, reaches
from rlfx.recurrence.rewrite.put_together import PutTogether, parts_of

#: Outside of recurrences: numbers of patches at a point, and of one patch, at most.
FEW, NARROW = 1 << 13, 64


def with_patches(program: Program, most: int, few: int = FEW) -> Program:
    """The program with products for convolutions whose patches are few numbers at a point.

    Args:
      most: of a recurrence.
      few: of others, of data; 0: never. (Of what acts, patches would be kept for the learner, which are more memory than images.)

    Meaning-preserving up to reassociation; without such convolutions it is ``program``.
    """
    definition = program.definitions()

    def instead(e: Equation) -> tuple[Callable, Sequence[Atom]] | None:
        if e.op is not CONVOLUTION or not _fits(e) or _patches(e) > most:
            return None
        if not ((_is_small(e, few) and not is_acted(e, program, definition)) or depends(e, e, definition)):
            return None
        parts = parts_of(e, definition)
        made = map(definition.get, parts.values)
        recur = tuple(one is e or depends(one, e, definition) for one in made)
        if parts.turned or all(recur):  # the input as it is
            return (lambda x, kernel: product_of_patches(x, kernel, e.params)), e.inputs
        return functools.partial(_sum, e.params, parts, recur), [e.inputs[1], *parts.values]

    return exchanged(program, instead)


def _fits(e: Equation) -> bool:
    """Whether it is one in the layout of ``with_channels_last``, of all features, in single precision or better."""
    inside = all(n >= 0 for pair in e.params["padding"] for n in pair)
    return not e.is_ragged and is_plain(e.params, *e.inputs) and inside and is_channels_last(e)


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


def _sum(params: Mapping, parts: PutTogether, recur: Sequence[bool], kernel: Any, *values: Any) -> Any:
    """The convolution at one point: of what recurs, and of the rest."""
    terms = (product_of_patches(x, w, params) for x, w in parts.by_kind(recur, params, kernel, values))
    return functools.reduce(jnp.add, terms)


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
