"""The loops of an equation, and how partial results become one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

#: For each axis of an array the loop that it follows; None: the axis is a whole.
Axes = tuple[int | None, ...]


@dataclass(frozen=True)
class Monoid:
    """How two partial results become one, ``combine(x, y)``, and what changes nothing, ``identity(dtype)``."""

    combine: Callable[[Any, Any], Any]
    identity: Callable[[Any], Any]


@dataclass(frozen=True)
class Nest:
    """The loops of an equation.

    Attributes:
      sizes: how long each of them is.
      operands, results: which loop each axis follows.
      reduced: they are in no result; partial results are combined by the monoid.
      pinned: they run as a whole. With a monoid, positions that hold its identity change no other (a cumulative sum).
      monoid: of a reduction or accumulation.
    """

    sizes: tuple
    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    reduced: frozenset[int] = frozenset()
    pinned: frozenset[int] = frozenset()
    monoid: Monoid | None = None

    @property
    def free(self) -> frozenset[int]:
        """The loops along which every result can be cut."""
        return frozenset(range(len(self.sizes))) - self.reduced - self.pinned


def extreme_of(dtype: Any, largest: bool) -> Any:
    """The largest, or smallest, value of a dtype: the identity of min and max.

    Example:
      >>> extreme_of(jnp.int8, True), extreme_of(jnp.float32, False)
      (127, -inf)
    """
    if jnp.issubdtype(dtype, jnp.floating):
        return np.inf if largest else -np.inf
    if dtype == jnp.bool_:
        return largest
    return int(jnp.iinfo(dtype).max if largest else jnp.iinfo(dtype).min)


SUM = Monoid(lax.add, lambda dtype: 0)
PRODUCT = Monoid(lax.mul, lambda dtype: 1)
MAXIMUM = Monoid(lax.max, lambda dtype: extreme_of(dtype, False))
MINIMUM = Monoid(lax.min, lambda dtype: extreme_of(dtype, True))
AND = Monoid(lax.bitwise_and, lambda dtype: np.invert(np.zeros((), dtype)))
OR = Monoid(lax.bitwise_or, lambda dtype: 0)
XOR = Monoid(lax.bitwise_xor, lambda dtype: 0)
LOGSUMEXP = Monoid(jnp.logaddexp, lambda dtype: -np.inf)


def nest(
    ins: Sequence[Sequence],
    outs: Sequence[Sequence],
    operands: Iterable[Iterable[int | None]],
    results: Iterable[Iterable[int | None]],
    reduced: Iterable[int] = (),
    pinned: Iterable[int] = (),
    monoid: Monoid | None = None,
) -> Nest:
    """A nest whose loops have the sizes of the axes that follow them."""
    operands, results = (tuple(map(tuple, sides)) for sides in (operands, results))
    sizes: dict[int, Any] = {}
    for axes, shape in zip((*results, *operands), (*outs, *ins), strict=True):
        sizes.update({loop: n for loop, n in zip(axes, shape, strict=True) if loop is not None})
    assert sorted(sizes) == list(range(len(sizes)))
    return Nest(
        tuple(sizes[loop] for loop in range(len(sizes))),
        operands,
        results,
        frozenset(reduced),
        frozenset(pinned),
        monoid,
    )
