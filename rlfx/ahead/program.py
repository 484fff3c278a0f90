"""A function and the shapes of its arguments as an exported program: bytes that another process compiles."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._checks import is_array, shown
from rlfx.ahead.machines import Machine
from rlfx.errors import TargetError, located

tree = jax.tree_util

#: jax's names of the platforms that plugins compile for.
PLATFORMS = {"cuda": "cuda", "tpu": "tpu", "cpu": "cpu"}

#: Calls that a later XLA may not know: what compiles the program is of the version that exports it, or near.
_ALLOWED = tuple(map(jax.export.DisabledSafetyCheck.custom_call, ("ALL", "__gpu$xla.gpu.triton", "triton_kernel_call")))


#: Meshes in a module's text.
_MESHES = re.compile(r"sdy\.mesh @\S+ = <\[([^\]]*)\]")

#: Parts of what jax says of a program that calls back into Python.
_CALLS_BACK = ("host_callbacks", "keepalive", "different from the lowering platform")


@dataclass(frozen=True)
class Exported:
    """A program that leaves the process.

    Attributes:
      name: of the function.
      data: StableHLO as ``jax.export`` writes it, of flat arguments and results (keys as their words).
      donated: positions of the arguments whose memory the program may use.
      mesh: names and sizes of the axes over which arguments are split; None if none is.
      devices: that it runs on.
      text: the program without its source lines, to tell it from others.
    """

    name: str
    data: bytes
    donated: tuple[int, ...]
    mesh: tuple[tuple[str, ...], tuple[int, ...]] | None
    devices: int
    text: str


def export(fn: Callable, arguments: Sequence[Any], machine: Machine) -> Exported:
    """A function of arrays, exported for a machine: traced as if jax ran on it.

    Args:
      fn: a function of pytrees of arrays, jitted or not (what is donated is, then).
      arguments: arrays, or their shapes (``jax.ShapeDtypeStruct``, with a sharding where they are split over a mesh).

    Raises:
      TargetError: it can't be exported: a callback into Python, an argument that is no array, devices that do not fit.
    """
    name = getattr(fn, "__name__", None) or getattr(getattr(fn, "func", None), "__name__", type(fn).__name__)
    leaves, treedef = tree.tree_flatten(tuple(arguments))
    shapes = [_struct(leaf, name) for leaf in leaves]
    mesh = _mesh(shapes)
    keys = [J.is_key(s) for s in shapes]
    given = [_words(s) if key else s for s, key in zip(shapes, keys, strict=True)]

    def flat(*values: Any) -> list:
        typed = [J.keys_of(x, s.dtype) if key else x for x, s, key in zip(values, shapes, keys, strict=True)]
        return [_plain(x) for x in tree.tree_leaves(fn(*tree.tree_unflatten(treedef, typed)))]

    with jax.sharding.use_abstract_mesh(surroundings(machine)):
        donated = _donated(fn, tree.tree_unflatten(treedef, shapes))
        exporter = jax.export.export(jax.jit(flat), platforms=[PLATFORMS[machine.plugin]], disabled_checks=_ALLOWED)
        try:
            made = exporter(*given)
        except (NotImplementedError, ValueError) as error:
            if not any(part in str(error) for part in _CALLS_BACK):
                raise
            fact = f"{name} calls back into Python (jax.debug.print, jax.pure_callback): it can't leave this process."
            fix = "Leave the callback out for this: a flag of the function, or jax.debug.print behind `if`."
            raise TargetError(located(fact, where=J.here(), fix=fix)) from error
    text = _without_lines(made.mlir_module())
    split = max((math.prod(map(int, re.findall(r"=(\d+)", axes))) for axes in _MESHES.findall(text)), default=1)
    if split > made.nr_devices:
        fact = f"{name} runs on a mesh of {split} devices, but none of its arguments is on it."
        fix = "Give the shapes of those that are split a sharding: jax.ShapeDtypeStruct(..., sharding=NamedSharding(mesh, ...))."
        raise TargetError(located(fact, where=J.here(), fix=fix))
    if made.nr_devices > machine.devices:
        many = f"{machine.name}:{'x'.join(map(str, machine.grid))}" if machine.grid else machine.name
        fact = f"{name} runs on {made.nr_devices} devices, but {many} is {machine.devices}."
        fix = f'Name a machine of so many: rlfx.target("{machine.name}:{made.nr_devices}").'
        raise TargetError(located(fact, where=J.here(), fix=fix))
    named = None if mesh is None else (tuple(mesh.axis_names), tuple(mesh.axis_sizes))
    return Exported(name, _bytes(made), donated, named, made.nr_devices, text)


def _bytes(made: jax.export.Exported) -> bytes:
    try:
        return bytes(made.serialize())
    except ImportError as error:
        fact = "Programs leave this process by flatbuffers, which is not installed."
        raise TargetError(located(fact, fix="pip install 'rlfx[targets]'")) from error


def _without_lines(text: str) -> str:
    """A module's text without the places in files that its operations come from."""
    kept = (line for line in text.splitlines() if not line.startswith("#loc"))
    return re.sub(r" ?loc\((?:[^()]|\([^()]*\))*\)", "", "\n".join(kept))


def surroundings(
    machine: Machine, grid: tuple[int, ...] = (), names: tuple[str, ...] = ()
) -> jax.sharding.AbstractMesh:
    """A mesh of the machine's devices to trace in: what asks jax for its device is told of this one.

    By default it has no axes: the program may have a mesh of its own.
    """
    platform = "gpu" if machine.plugin == "cuda" else machine.plugin
    device = jax.sharding.AbstractDevice(device_kind=machine.kind, num_cores=machine.cores, platform=platform)
    auto = (jax.sharding.AxisType.Auto,) * len(grid)
    return jax.sharding.AbstractMesh(grid, names, auto, abstract_device=device)


def _struct(given: Any, name: str) -> jax.ShapeDtypeStruct:
    """The shape of an argument, and how it lies on a mesh, if it does."""
    if not is_array(given):
        fact = f"An argument of {name} is no array: {shown(given)}."
        fix = "Give arrays or shapes (jax.ShapeDtypeStruct), and bind the rest: functools.partial, or a lambda."
        raise TargetError(located(fact, where=J.here(), fix=fix))
    if isinstance(given, (bool, int, float, complex)):
        return jax.ShapeDtypeStruct((), jax.typeof(given).dtype, weak_type=True)
    sharding = getattr(given, "sharding", None)
    split = isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.size > 1
    return jax.ShapeDtypeStruct(given.shape, given.dtype, sharding=sharding if split else None)


def _words(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Of keys: their words."""
    return jax.eval_shape(jax.random.key_data, struct)


def _plain(value: Any) -> Any:
    value = jnp.asarray(value)
    return jax.random.key_data(value) if J.is_key(value) else value


def _donated(fn: Callable, arguments: tuple) -> tuple[int, ...]:
    """Positions of the leaves that a jitted function takes over."""
    if not hasattr(fn, "lower") or not hasattr(fn, "trace") or not isinstance(fn, _JITTED):
        return ()
    info = tree.tree_leaves(fn.trace(*arguments).args_info)
    return tuple(i for i, argument in enumerate(info) if argument.donated)


_JITTED = type(jax.jit(lambda: None))


def _mesh(shapes: Sequence[jax.ShapeDtypeStruct]) -> Any:
    """The one mesh that arguments are split over."""
    meshes = {s.sharding.mesh.abstract_mesh for s in shapes if s.sharding is not None}
    if len(meshes) > 1:
        fact = "The arguments are split over different meshes."
        raise TargetError(located(fact, where=J.here(), fix="Split them over one: rlfx.target(...).mesh(...)."))
    return next(iter(meshes), None)
