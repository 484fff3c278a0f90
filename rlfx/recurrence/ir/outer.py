"""An outer product at each point, that only its sum over points is asked of: by its factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

#: Of a factor's axes, which one of the product each is (those that are added up come after its own); None: of length one.
Axes = tuple[int | None, ...]

#: What the axes of a point are called; t and b are those of the points.
LETTERS = "acdefghijklmnopqrsuvwxyz"


@dataclass(frozen=True)
class Outer:
    """How factors are multiplied at a point. Prints as text.

    Attributes:
      axes: of the factors. The first two make the product large; another one has axes of one of these alone.
      shape: of the product.
      exact: whether numbers are multiplied one by one, exactly wherever it runs.
    """

    axes: tuple[Axes, ...]
    shape: tuple[int, ...]
    exact: bool

    @property
    def result(self) -> str:
        """What the axes of the product are called."""
        return LETTERS[: len(self.shape)]

    def at(self, i: int) -> frozenset[int]:
        """The axes of a factor that are longer than one."""
        return frozenset(a for a in self.axes[i] if a is not None)

    def of_point(self, factors: Sequence[Any]) -> Any:
        """The product.

        Example:
          >>> import jax.numpy as jnp
          >>> Outer(((0,), (1,), ()), (2, 3), True).of_point([jnp.ones(2), jnp.arange(3.0), jnp.float32(2.0)])
          Array([[0., 2., 4.],
                 [0., 2., 4.]], dtype=float32)
        """
        names = ",".join(map(lettered, self.axes))
        return jnp.einsum(f"{names}->{self.result}", *map(_squeezed, factors, self.axes))

    def slope(self, i: int, weight: Any, factors: Sequence[Any]) -> Any:
        """The derivative of ``(weight * product).sum()`` with respect to one factor; the product is not made.

        Example:
          >>> import jax.numpy as jnp
          >>> outer = Outer(((0,), (1,)), (2, 3), True)
          >>> outer.slope(0, jnp.ones((2, 3)), [jnp.ones(2), jnp.arange(3.0)])
          Array([3., 3.], dtype=float32)
        """
        others = [j for j in range(len(factors)) if j != i]
        names = ",".join([*(lettered(self.axes[j]) for j in others), self.result])
        given = (_squeezed(factors[j], self.axes[j]) for j in others)
        precision = jax.lax.Precision.HIGHEST if self.exact else None
        found = jnp.einsum(f"{names}->{lettered(self.axes[i])}", *given, weight, precision=precision)
        return found.reshape(factors[i].shape)

    def __str__(self) -> str:
        return "*".join(lettered(axes) or "1" for axes in self.axes)


def lettered(axes: Axes) -> str:
    """What axes longer than one are called."""
    return "".join(LETTERS[a] for a in axes if a is not None)


def _squeezed(x: Any, axes: Axes) -> Any:
    """A factor without its axes of length one."""
    return jnp.squeeze(x, tuple(i for i, a in enumerate(axes) if a is None))
