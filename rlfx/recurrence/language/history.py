"""History: a ring buffer that lives in the carry, so that a series can be read further back than this call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._checks import ARRAYS, POSITIVE, expect, optional
from rlfx.errors import BoundaryError, located
from rlfx.recurrence.language.boundary import fitted
from rlfx.recurrence.language.lookups import filled

tree = jax.tree_util

#: The scope in which values are written to a history.
SCOPE = "rlfx.history"


@tree.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class History:
    """The last ``capacity`` values of a series, by absolute time: time ``i`` is in slot ``i % capacity``.

    Args:
      capacity: how many timesteps are kept, a positive integer.
      like: one value (a pytree of arrays or shapes), of one environment.
      batch: the number of environments, for a program compiled with ``batch=``: every leaf then has a leading axis.

    The buffer starts as zeros. Put it in the carry; ``rlfx.series(value, history=carry.buffer)`` writes the value of
    this timestep, and ``.history`` of the result is the buffer's next value. It counts times from 0: begin with a call at
    ``t0 = 0``, and go on with the ``t0`` that follows. Times that were passed over are taken for kept.

    Raises:
      DomainError: if ``capacity`` or ``batch`` is no positive integer, or ``like`` has no arrays.
      ProgramError: (when a program is traced) if a history is written, and comes back in the carry as it was.

    Example:
      >>> import jax.numpy as jnp
      >>> History(capacity=3, like=jnp.zeros(2)).data.shape
      (3, 2)
    """

    data: Any
    capacity: int

    def __init__(self, capacity: int, like: Any = None, *, batch: int | None = None, data: Any = None):
        capacity = expect("capacity", capacity, POSITIVE, of="History")
        if data is None:
            like = expect("like", like, ARRAYS, of="History")
            batch = expect("batch", batch, optional(POSITIVE), of="History")
            lead = (capacity,) if batch is None else (batch, capacity)
            data = tree.tree_map(lambda x: jnp.zeros(lead + jnp.shape(x), jnp.result_type(x)), like)
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "capacity", capacity)

    def tree_flatten(self):
        return (self.data,), self.capacity

    @classmethod
    def tree_unflatten(cls, capacity, children):
        made = object.__new__(cls)
        object.__setattr__(made, "data", children[0])
        object.__setattr__(made, "capacity", capacity)
        return made

    def write(self, now: Any, value: Any) -> History:
        """The history after time ``now`` (int32) had ``value``.

        Raises:
          BoundaryError: if the structure, a shape or a dtype of ``value`` is not that of what is kept.
        """
        slot = now % self.capacity

        def put(buffer, x):
            return jax.lax.dynamic_update_index_in_dim(buffer, fitted(x, buffer.dtype), slot, 0)

        try:
            self._check(value)
            with jax.named_scope(SCOPE):
                return History(self.capacity, data=tree.tree_map(put, self.data, value))
        except TypeError as error:
            raise BoundaryError(
                located(
                    f"The value does not fit its history: {error}",
                    where=J.here(),
                    fix="Give a History made like one value, rlfx.History(capacity, like=value), or cast the value to it.",
                )
            ) from None

    def _check(self, value: Any) -> None:
        kept, given = tree.tree_structure(self.data), tree.tree_structure(value)
        if kept != given:
            raise TypeError(f"its structure is {given}, and {kept} is kept")
        for buffer, (path, x) in zip(tree.tree_leaves(self.data), tree.tree_flatten_with_path(value)[0], strict=True):
            if jnp.shape(buffer) != (self.capacity, *x.shape):
                kept = f"{self.capacity} timesteps of that are kept in an array of shape {list(jnp.shape(buffer))}"
                raise TypeError(f"value{tree.keystr(path)} has shape {list(x.shape)}, and {kept}")

    def lookup(self, now: Any, i: Any, b: Any, across: Callable[..., Any], batch: int | None, outside: str) -> Any:
        """The values at absolute times ``i`` (of environments ``b``); ``outside`` of what is kept as a lookup says."""
        oldest = jnp.maximum(now - self.capacity + 1, 0)
        slot = jnp.clip(i, oldest, now) % self.capacity
        inside = (i >= oldest) & (i <= now)
        if b is None:
            read = lambda buffer: buffer[slot]  # noqa: E731
        else:
            assert batch is not None
            inside &= (b >= 0) & (b < batch)
            read = lambda buffer: across(buffer, slot, jnp.clip(b, 0, batch - 1))  # noqa: E731
        found = tree.tree_map(read, self.data)
        return found if outside == "clip" else tree.tree_map(lambda x: filled(inside, x), found)
