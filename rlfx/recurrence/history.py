"""History: a ring buffer that lives in the carry, so that a series can be read further back than this call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

tree = jax.tree_util


@tree.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class History:
    """The last ``capacity`` values of a series, by absolute time: time ``i`` is in slot ``i % capacity``.

    Args:
      capacity: how many timesteps are kept.
      like: one value (a pytree of arrays or shapes), of one environment.
      batch: the number of environments, for a program compiled with ``batch=``: every leaf then has a leading axis.

    The buffer starts as zeros. Put it in the carry; ``rlfx.series(value, history=carry.buffer)`` writes the value of
    this timestep, and ``.history`` of the result is the buffer's next value.

    Example:
      >>> import jax.numpy as jnp
      >>> History(capacity=3, like=jnp.zeros(2)).data.shape
      (3, 2)
    """

    data: Any
    capacity: int

    def __init__(self, capacity: int, like: Any = None, *, batch: int | None = None, data: Any = None):
        if data is None:
            lead = (capacity,) if batch is None else (batch, capacity)
            data = tree.tree_map(lambda x: jnp.zeros(lead + jnp.shape(x), jnp.result_type(x)), like)
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "capacity", capacity)

    def tree_flatten(self):
        return (self.data,), self.capacity

    @classmethod
    def tree_unflatten(cls, capacity, children):
        return cls(capacity, data=children[0])

    def write(self, now: Any, value: Any) -> History:
        """The history after time ``now`` (int32) had ``value``."""
        slot = now % self.capacity

        def put(buffer, x):
            return jax.lax.dynamic_update_index_in_dim(buffer, x.astype(buffer.dtype), slot, 0)

        return History(self.capacity, data=tree.tree_map(put, self.data, value))

    def lookup(self, now: Any, i: Any, b: Any, across: Callable) -> Any:
        """The values at absolute times ``i`` (of environments ``b``), clamped to what is kept."""
        slot = jnp.clip(i, jnp.maximum(now - self.capacity + 1, 0), now) % self.capacity
        if b is None:
            return tree.tree_map(lambda buffer: buffer[slot], self.data)
        return tree.tree_map(lambda buffer: across(buffer, slot, b), self.data)
