"""The environments of a program split over one axis of a mesh: its inputs' and outputs' specs, and sums over the devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from rlfx import _jaxpr as J
from rlfx.errors import ScheduleError, located
from rlfx.recurrence.execute.collectives import environment_axes
from rlfx.recurrence.execute.extent import Extent
from rlfx.recurrence.execute.outputs import aux_dims, carry_dims, output_dims
from rlfx.recurrence.execute.values import axis_of
from rlfx.recurrence.ir.program import Equation, Program, Var
from rlfx.recurrence.language.precision import widened


@dataclass(frozen=True)
class Sharding:
    """Over which axis of a mesh the environments are split.

    Attributes:
      inside: whether the program is called in another, which may be split over another axis of the mesh.
      among: the axes of a ``jax.shard_map`` of the user's, inside of which it is traced.
    """

    mesh: Mesh
    axis: str
    inside: bool = False
    among: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        return self.mesh.shape[self.axis]


@dataclass(frozen=True, eq=False)
class Split:
    """A program whose environments are split over a mesh axis, or on one device.

    Raises:
      ScheduleError: if the devices do not divide the batch, or the program calls what is itself split.
    """

    program: Program
    sharding: Sharding | None

    def __post_init__(self):
        if self.sharding is None:
            return
        batch = self.program.domain.batch
        if batch is None or batch % self.sharding.devices:
            raise ScheduleError(
                located(
                    f"batch={batch} cannot be split over the {self.sharding.devices} devices of mesh axis "
                    f"{self.sharding.axis!r}.",
                    fix="Give a batch that the number of devices divides, or mesh_axis=None to shard outside.",
                )
            )
        nested = [e for e in self._split_inside if not e.calls or not all(self._beside(call) for call in e.calls)]
        if nested:
            raise ScheduleError(
                located(
                    f"{self.program.name} is split over the mesh axis {self.sharding.axis!r}, and calls what is itself split "
                    "over a mesh: jax.shard_map, or a program with mesh=.",
                    where=nested[0].where,
                    fix="Give mesh= to one of them alone, or to both programs one mesh, and to each an axis of its own.",
                )
            )

    @functools.cached_property
    def _split_inside(self) -> list[Equation]:
        """What is itself split over a mesh."""
        return [e for e in self.program.equations if J.contains(e.op, dict(e.params), J.SHARD_MAP)]

    def _beside(self, call: Any) -> bool:
        """Whether a program that is called is split over another axis of this mesh."""
        theirs = call.rule.sharding
        return theirs is not None and theirs.mesh == self.sharding.mesh and theirs.axis != self.sharding.axis

    @property
    def devices(self) -> int:
        """Over how many devices the environments are split."""
        return 1 if self.sharding is None else self.sharding.devices

    @property
    def own_devices(self) -> list:
        """The devices of this process that the program runs on; none of a mesh that only describes some."""
        if self.sharding is None:
            return jax.local_devices()[:1]
        return list(self.sharding.mesh.local_devices) if isinstance(self.sharding.mesh, Mesh) else []

    @property
    def batch(self) -> int:
        """The environments of one device."""
        return (self.program.domain.batch or 1) // self.devices

    def extent(self) -> Extent:
        """What this device computes of the domain."""
        times = jnp.asarray(self.program.domain.times())
        if self.sharding is None:
            return Extent(times, self.batch)
        first = jax.lax.axis_index(self.sharding.axis) * self.batch
        return Extent(times, self.batch, first, self.sharding.axis)

    def over_devices(self, fn: Callable, in_specs: list, out_specs: Any, more: Any = None) -> Callable:
        """``fn(flat, t0)``, perhaps with one argument more, as every device runs it on its environments."""
        if self.sharding is None:
            return fn
        specs = (in_specs, PartitionSpec(), *(() if more is None else (more,)))
        around, mesh = jax.sharding.get_abstract_mesh(), self.sharding.mesh
        own = self.sharding.axis
        beside = self.sharding.inside and own in around.axis_names and own not in around.manual_axes
        # What is traced in a shard_map has the types of its mesh: jax binds it on no other, where this axis is manual, too.
        if around.manual_axes and (self.sharding.among or not beside):
            raise ScheduleError(
                located(
                    f"{self.program.name} is split over the mesh axis {self.sharding.axis!r}, but is called inside a "
                    f"jax.shard_map over {list(around.manual_axes)}.",
                    where=self.program.where,
                    fix="Compile it without mesh=, for the environments of one device; or call it outside of the shard_map, in a "
                    "program with mesh= and an axis of its own, if there is one around it.",
                )
            )
        # Of programs in each other each has its own axis: the others are left to those around it and inside.
        axes = {own} if self.sharding.inside or self._split_inside else set(mesh.axis_names)
        mesh = around if around.manual_axes else mesh
        return jax.shard_map(fn, mesh=mesh, axis_names=axes, in_specs=specs, out_specs=out_specs, check_vma=False)

    # -- specs

    def _spec(self, dims: frozenset) -> PartitionSpec:
        if self.sharding is None or "b" not in dims:
            return PartitionSpec()
        return PartitionSpec(*(None,) * (axis_of(dims, "b") or 0), self.sharding.axis)

    @functools.cached_property
    def environment_axes(self) -> dict[Var, int]:
        """Which axis of the data among the inputs is split with the environments."""
        return environment_axes(self.program)

    def input_spec(self, var: Var) -> PartitionSpec:
        """How an input, or its gradient, lies on the mesh."""
        axis = self.environment_axes.get(var)
        if self.sharding is None or axis is None:
            return self._spec(self.program.dims_of(var))
        return PartitionSpec(*(None,) * axis, self.sharding.axis)

    def input_specs(self, inputs: Iterable[Var]) -> list:
        """Of several inputs, or their gradients."""
        return [self.input_spec(v) for v in inputs]

    def output_specs(self) -> tuple:
        """Of the loss, the carry, aux, and lengths."""
        program = self.program
        carry = [self._spec(carry_dims(program, v)) for v in program.next_carry]
        aux = [self._spec(dims) for dims in aux_dims(program)]
        lengths = self._spec(frozenset("b")) if program.domain.until else None
        return (None if program.loss is None else PartitionSpec()), carry, aux, lengths

    def target_spec(self, var: Var) -> PartitionSpec:
        """Of a differentiated output."""
        return self._spec(output_dims(self.program, var))

    # -- shares

    def share(self, var: Var, cotangent: Any) -> Any:
        """This device's part of the cotangent of a target: of a value that all devices have, one of their shares."""
        if self.sharding is None or self.target_spec(var) != PartitionSpec() or var is self.program.loss:
            return cotangent
        return cotangent / self.sharding.devices

    def complete(self, order: Iterable[Var], grads: list, loss: Any = None) -> tuple[Any, list]:
        """``(loss, gradients)``: of what all environments share, summed over the devices, which meet for it once."""
        if self.sharding is None:
            return loss, grads
        own = [self.input_spec(v) != PartitionSpec() for v in order]
        shared = [widened(g) for g, mine in zip(grads, own, strict=True) if not mine]
        loss, shared = jax.lax.psum((loss, shared), self.sharding.axis)
        summed = iter(shared)
        return loss, [g if mine else next(summed) for g, mine in zip(grads, own, strict=True)]
