"""The part of the domain that one execution covers: timesteps, and the environments of this device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rlfx.recurrence.execute.values import Value, axis_of, cut_environments
from rlfx.recurrence.ir.program import Program


@dataclass(frozen=True, eq=False)
class Extent:
    """The part of the domain that one execution covers.

    Attributes:
      times: the timesteps, int32 [T or block].
      batch: the number of environments here.
      first: the index of the first of them.
      mesh_axis: the name of the mesh axis over which the environments are split, or None.
      goes_on: whether the timestep behind the last one is of the domain, or T: ``beyond`` has its values.
    """

    times: Any
    batch: int
    first: Any = 0
    mesh_axis: str | None = None
    goes_on: bool = False

    def environments(self) -> Any:
        """The global indices of the environments."""
        return self.first + jnp.arange(self.batch, dtype=jnp.int32)

    def at(self, times: Any) -> Extent:
        """The same environments at other timesteps."""
        return Extent(times, self.batch, self.first, self.mesh_axis)

    def over_devices(self, op: str, x: Any) -> Any:
        """See :func:`over_devices`."""
        return over_devices(self.mesh_axis, op, x)

    def own(self, value: Value) -> Value:
        """The environments of this device, of a value that may have those of all."""
        axis = axis_of(value.dims, "b")
        if axis is None or value.data.shape[axis] == self.batch:
            return value
        return cut_environments(value, self.first, self.batch)

    def gathered(self, value: Value) -> Value:
        """The value of all environments, on every device."""
        if self.mesh_axis is None or "b" not in value.dims:
            return value
        data = jax.lax.all_gather(value.data, self.mesh_axis, axis=axis_of(value.dims, "b"), tiled=True)
        return Value(data, value.dims)

    def on_the_first(self, fn: Callable) -> Callable:
        """An effect that is the same on every device, on the first of them; the others have zeros."""
        if self.mesh_axis is None:
            return fn

        def once(*args: Any) -> Any:
            nothing = [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(fn, *args)]
            return jax.lax.cond(jax.lax.axis_index(self.mesh_axis) == 0, fn, lambda *_: nothing, *args)

        return once


def over_devices(mesh_axis: str | None, op: str, x: Any) -> Any:
    """Complete a reduction over the environments of this device with those of the others.

    ``any`` stays one of this device, see :data:`rlfx.recurrence.language.primitives.reduce_p`.
    """
    if mesh_axis is None or op == "any":
        return x
    collective = {"sum": jax.lax.psum, "mean": jax.lax.pmean, "max": jax.lax.pmax, "min": jax.lax.pmin}[op]
    if x.dtype == jnp.bool_:
        return collective(x.astype(jnp.int32), mesh_axis).astype(jnp.bool_)
    return collective(x, mesh_axis)


def whole_extent(program: Program) -> Extent:
    """All timesteps of all environments."""
    return Extent(jnp.asarray(program.domain.times()), program.domain.batch or 1)
