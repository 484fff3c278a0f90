"""What the input of a convolution is put together of."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.program import Atom, Equation

_CONCATENATE, _TRANSPOSE = J.primitive("concatenate"), J.primitive("transpose")
_ONE_MORE_AXIS = (J.primitive("broadcast_in_dim"), J.primitive("reshape"))


@dataclass(frozen=True)
class PutTogether:
    """Values whose features, one after the other, are those of a convolution's input.

    Attributes:
      values: before they are put together.
      axis: of features, in the values.
      moves: what was done to what they are put together to, the last first.
    """

    values: tuple[Atom, ...]
    axis: int
    moves: tuple[Equation, ...] = ()

    @property
    def places(self) -> list[tuple[Atom, int, int]]:
        """Each value, where its features are, and how many."""
        counts = [v.shape[self.axis] for v in self.values]
        return list(zip(self.values, itertools.accumulate(counts, initial=0), counts, strict=False))

    @property
    def turned(self) -> bool:
        """Whether its axes come in another order."""
        return any(e.op is _TRANSPOSE for e in self.moves)

    def image(self, values: Sequence[Any]) -> Any:
        """Some of them put together, as the input of a convolution."""
        x = jnp.concatenate(values, self.axis) if len(values) > 1 else values[0]
        for e in reversed(self.moves):
            x = jnp.transpose(x, e.params["permutation"]) if e.op is _TRANSPOSE else x[None]
        return x

    def by_kind(self, kinds: Sequence[Any], params: Mapping, kernel: Any, values: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Of each kind of values the input that they are put together to, and the kernel's rows for it: a sum is the convolution.

        Args:
          kinds: one for each value.
          params: the convolution's.
        """
        axis, groups = params["dimension_numbers"].rhs_spec[1], {}
        for kind, x, (_, first, count) in zip(kinds, values, self.places, strict=True):
            cut = jax.lax.slice_in_dim(kernel, first, first + count, axis=axis)
            groups.setdefault(kind, []).append((x, cut))
        pairs = (zip(*group, strict=True) for group in groups.values())
        return [(self.image(images), jnp.concatenate(cuts, axis)) for images, cuts in pairs]


def parts_of(e: Equation, definition: Mapping) -> PutTogether:
    """Those of a convolution's input; it alone where nothing is put together along its features."""
    value, moves, axis = e.inputs[0], [], e.params["dimension_numbers"].lhs_spec[1]
    while (made := definition.get(value)) is not None:
        if made.op is _CONCATENATE and made.params["dimension"] == axis:
            return PutTogether(made.inputs, axis, tuple(moves))
        if made.op is _TRANSPOSE:
            axis = made.params["permutation"][axis]
        elif made.op in _ONE_MORE_AXIS and axis and made.outputs[0].shape == (1, *made.inputs[0].shape):  # x[None]
            axis -= 1
        else:
            break
        moves.append(made)
        value = made.inputs[0]
    return PutTogether((e.inputs[0],), e.params["dimension_numbers"].lhs_spec[1])
