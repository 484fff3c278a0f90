"""Outputs that are not kept for every timestep: ``rlfx.Last(x)``, ``rlfx.Every(100, x)``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from rlfx._checks import POSITIVE, expect

tree = jax.tree_util


@tree.register_pytree_node_class
@dataclass(frozen=True)
class Last:
    """An output of which only the value at the last timestep is kept: its memory does not grow with T.

    Stands in what a per-timestep function returns as aux. The result is ``x[T - 1]``, with the axis [B] of a batch; under
    ``until=`` each environment's own last one.

    Example:
      >>> import jax.numpy as jnp, rlfx
      >>> f = rlfx.unroll(lambda p, c, t: (c + 1.0, (c, rlfx.Last(c))), length=3)
      >>> f(None, jnp.float32(0.0))[1]
      (Array([0., 1., 2.], dtype=float32), Array(2., dtype=float32))
    """

    value: Any

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children[0])

    def kept_of(self, stacked: Any, lengths: Any = None) -> Any:
        """Of a value with all axes [T, B]: what is kept."""
        if lengths is None:
            return stacked[-1]
        return stacked[lengths - 1] if lengths.ndim == 0 else jax.vmap(lambda x, n: x[n - 1], (1, 0))(stacked, lengths)


@tree.register_pytree_node_class
@dataclass(frozen=True)
class Every:
    """An output that is kept at every n-th timestep of a call: ``x[0], x[n], x[2 n], ...``.

    Stands in what a per-timestep function returns as aux. The result has ``ceil(T / n)`` rows.

    Args:
      n: a positive integer.
      value: a pytree of arrays.

    Raises:
      DomainError: ``n`` is no positive integer.

    Example:
      >>> import jax.numpy as jnp, rlfx
      >>> f = rlfx.unroll(lambda p, c, t: (c + 1.0, rlfx.Every(2, c)), length=5)
      >>> f(None, jnp.float32(0.0))[1]
      Array([0., 2., 4.], dtype=float32)
    """

    n: int
    value: Any

    def __post_init__(self):
        object.__setattr__(self, "n", expect("n", self.n, POSITIVE, of="rlfx.Every"))

    def tree_flatten(self):
        return (self.value,), self.n

    @classmethod
    def tree_unflatten(cls, n, children):
        made = object.__new__(cls)
        object.__setattr__(made, "n", n)
        object.__setattr__(made, "value", children[0])
        return made

    def kept_of(self, stacked: Any, lengths: Any = None) -> Any:
        """Of a value with all axes [T, B]: what is kept."""
        return stacked[:: self.n]

    def rows(self, length: int) -> int:
        """How many timesteps are kept."""
        return -(-length // self.n)


def is_kept(x: Any) -> bool:
    """Whether a node of a pytree says how long an output is kept."""
    return isinstance(x, (Last, Every))


def marks(structure: Any) -> list[Last | Every | None]:
    """For each leaf of a structure of outputs, how it is kept; None: at every timestep."""
    nodes = tree.tree_leaves(tree.tree_unflatten(structure, range(structure.num_leaves)), is_leaf=is_kept)
    return [node if is_kept(node) else None for node in nodes for _ in tree.tree_leaves(node)]


def unmarked(aux: Any) -> Any:
    """Outputs without their marks."""
    return tree.tree_map(lambda x: x.value if is_kept(x) else x, aux, is_leaf=is_kept)
