"""What a program runs on: the mesh that it is split over, and the target."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, Mesh

from rlfx import _jaxpr as J
from rlfx import _target
from rlfx._checks import TEXT, expect, instance, optional
from rlfx._target import Target, target_of
from rlfx.errors import ScheduleError, located
from rlfx.recurrence.gradient.mesh import Sharding

_MESH = optional(instance((Mesh, AbstractMesh), "a mesh of devices", 'jax.make_mesh((n,), ("b",))'))
TARGET = optional(_target.TARGET)


def sharding_of(mesh: Mesh | AbstractMesh | None, axis: str | None) -> Sharding | None:
    """How the environments are split: over an axis of a mesh; None if they are not."""
    expect("mesh", mesh, _MESH, ScheduleError)
    expect("mesh_axis", axis, optional(TEXT), ScheduleError)
    if mesh is None or axis is None:
        return None
    if axis not in mesh.shape:
        raise ScheduleError(
            located(
                f"mesh_axis={axis!r} is not an axis of the mesh, which has {list(mesh.shape)}.",
                where=J.here(),
                fix='Name one of them, or make the mesh with jax.make_mesh((n,), ("b",)).',
            )
        )
    return Sharding(automatic(mesh), axis)


def automatic(mesh: Mesh | AbstractMesh) -> Mesh:
    """The mesh whose axes the compiler places itself: none of them shows up in the types of the user's arrays."""
    auto = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, AbstractMesh):  # of devices that are not here: rlfx.target("h200:8").mesh("b")
        abstract = AbstractMesh(mesh.axis_sizes, mesh.axis_names, auto, abstract_device=mesh.abstract_device)
        return abstract  # pyright: ignore[reportReturnType]
    return Mesh(mesh.devices, mesh.axis_names, axis_types=auto)


def here(sharding: Sharding | None) -> Target:
    """What the mesh is made of, or what jax runs on."""
    device = None if sharding is None else sharding.mesh.abstract_mesh.abstract_device
    return _target.target() if device is None else target_of(device)
