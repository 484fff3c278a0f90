"""What a program runs on: the mesh that it is split over, and the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from rlfx import _jaxpr as J
from rlfx import _target
from rlfx._checks import TEXT, expect, instance, optional
from rlfx._target import Target, target_of
from rlfx.errors import ScheduleError, located
from rlfx.recurrence.gradient.mesh import Sharding

_MAKE = 'jax.make_mesh((n,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))'
_MESH = optional(instance((Mesh, AbstractMesh), "a mesh of devices", _MAKE))
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
                fix=f"Name one of them, or make the mesh with {_MAKE}.",
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


def check_axes(sharding: Sharding | None, arrays: Sequence) -> None:
    """Arrays, and what is around a call, have no axes in their types.

    Raises:
      ScheduleError: if they are on a mesh of ``Explicit`` axes: each operation would have to say how its result is split. Of a
        program that is not split itself, replicated arrays may be.
    """
    if sharding is not None and (axes := _explicit(jax.sharding.get_abstract_mesh())):
        what = f"Around the call is jax.set_mesh, of a mesh whose axes {axes} are Explicit"
    else:
        types = (jax.typeof(x).sharding for x in arrays)
        axes = next((a for s in types if (a := _explicit(s.mesh)) and (sharding is not None or any(s.spec))), ())
        what = f"An argument is on a mesh whose axes {axes} are Explicit"
    if axes:
        fact = f"{what}: jax has them in the types of arrays, and wants every operation to say how its result is split."
        raise ScheduleError(located(fact, where=J.here(), fix=f"Make the mesh of Auto axes, {_MAKE}."))


def _explicit(mesh: Any) -> tuple[str, ...]:
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in kinds if kind == jax.sharding.AxisType.Explicit)


def here(sharding: Sharding | None) -> Target:
    """What the mesh is made of, or what jax runs on."""
    device = None if sharding is None else sharding.mesh.abstract_mesh.abstract_device
    return _target.target() if device is None else target_of(device)
