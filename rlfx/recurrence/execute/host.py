"""Stored values in host memory: written from the acting loop, fetched one block at a time by the learner."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from rlfx import _jaxpr as J
from rlfx.errors import DomainError, ScheduleError, located
from rlfx.recurrence.analysis.cost import bytes_in_all
from rlfx.recurrence.execute.values import Value
from rlfx.recurrence.ir.directives import Hosting
from rlfx.recurrence.ir.program import Program, Var
from rlfx.recurrence.schedule.learner import Learner
from rlfx.recurrence.schedule.plan import Plan
from rlfx.recurrence.schedule.schedule import Loop, needed_last

NAME = J.primitive("name")

#: The version of jaxlib that is installed.
JAXLIB = importlib.metadata.version("jaxlib")

#: Before, XLA:GPU read offloaded data of a loop in the wrong order when the index is not the loop's counter itself, and
#: so computed wrong gradients without an error (openxla/xla#46231).
FIRST_RIGHT_JAXLIB = (0, 11, 1)


def names_of(program: Program) -> dict[str, frozenset[Var]]:
    """The named values of a program, with the values that are the same under another variable."""
    found: dict[str, set[Var]] = {}
    for e in program.equations:
        if e.op is NAME:
            found.setdefault(e.params["name"], set()).update(v for v in (*e.inputs, *e.outputs) if isinstance(v, Var))
    return {name: frozenset(values) for name, values in found.items()}


def checked_names(program: Program, names: tuple[str, ...]) -> None:
    """Raise a DomainError for a name that no value has."""
    known = names_of(program)
    unknown = [n for n in names if n not in known]
    if unknown:
        raise DomainError(
            located(
                f"No value of {program.name} is named {unknown[0]!r}; named values: {sorted(known) or 'none'}.",
                where=program.where,
                fix=f'Name it in the program: x = jax.ad_checkpoint.checkpoint_name(x, "{unknown[0]}").',
            )
        )


def hosted(learner: Learner, hosting: Hosting | None) -> frozenset[Var]:
    """The stored values that go to the host: what only the learner uses, and was asked for."""
    if hosting is None:
        return frozenset()
    program = learner.program
    named = frozenset().union(*(names_of(program).get(n, frozenset()) for n in hosting.names))
    in_acting = {v for e in learner.acting.graph.equations if e.is_read or not e.is_pointwise for v in e.inputs}
    stacked = {v for loop in learner.acting.loops for v in loop.stacked}
    later = _used_elsewhere(learner)

    def large(v: Var) -> bool:
        size = bytes_in_all(v, program)
        return hosting.min_bytes is not None and size >= hosting.min_bytes

    return frozenset(v for v in learner.stored if v in stacked - later - in_acting and (v in named or large(v)))


def _used_elsewhere(learner: Learner) -> set[Var]:
    """What the acting pass itself uses after the loop that stacks it: other stages, and what is evaluated beyond the end."""
    found = {v for v in (*learner.program.aux, learner.program.alive) if isinstance(v, Var)}
    graph = learner.acting.graph
    found |= needed_last(graph, graph.equations)
    for stage in learner.acting.stages:
        own = stage.stacked if isinstance(stage, Loop) else ()
        found |= {v for e in stage.equations for v in e.inputs if isinstance(v, Var) and v not in own}
    return found


def hosting_of(program: Program, plan: Plan) -> Hosting | None:
    """What goes to the host: by the program's directive, and by the plan."""
    asked = program.directives.offload
    if plan.offload is None:
        return asked
    sizes = [n for n in (plan.offload, asked and asked.min_bytes) if n is not None]
    return Hosting(asked.names if asked else (), min(sizes))


def note(backend: str) -> str:
    """What offloading means on a backend."""
    if backend == "cpu":
        return "Nothing is saved on cpu: host and device memory are the same. The placement is that of a GPU."
    return ""


def is_right(backend: str, jaxlib_version: str) -> bool:
    """Whether host memory that is read in a loop has the right values."""
    version = tuple(int(part) for part in jaxlib_version.split(".")[:3] if part.isdigit())
    return backend not in ("gpu", "cuda", "rocm") or version >= FIRST_RIGHT_JAXLIB


def refuse(backend: str, jaxlib_version: str) -> None:
    """Raise where a host buffer that is read in a loop gives wrong results without an error.

    Raises:
      ScheduleError: on a GPU with a jaxlib before 0.11.1.
    """
    if not is_right(backend, jaxlib_version):
        raise ScheduleError(
            located(
                f"jaxlib {jaxlib_version} may read host memory in a loop in the wrong order on a GPU, without an error "
                "(openxla/xla#46231).",
                fix='Install jaxlib>=0.11.1, or use rlfx.offload(..., form="driver").',
            )
        )


def to_host(x: Any) -> Any:
    """The array in pinned host memory."""
    if jax.typeof(x).memory_space == jax.memory.Space.Host:
        return x
    return jax.device_put(x, jax.memory.Space.Host)


def fetched(values: Mapping[Var, Value], on_host: frozenset[Var]) -> dict[Var, Value]:
    """The values, those of them that are on the host brought to the device."""
    return {v: replace(x, data=_to_device(x.data)) if v in on_host else x for v, x in values.items()}


def fetched_times(value: Value, first: Any, count: int) -> Any:
    """Consecutive timesteps of a value on the host, on the device."""
    return _to_device(_slice(value.data, first, count, 0))


def _to_device(x: Any) -> Any:
    return jax.device_put(x, jax.memory.Space.Device)


def _slice(x: Any, first: Any, count: int, axis: int) -> Any:
    """``lax.dynamic_slice_in_dim``, which ``jax.vmap`` makes a gather of: that takes no indices from the device."""

    @jax.custom_batching.custom_vmap
    def cut(x, first):
        return jax.lax.dynamic_slice_in_dim(x, first, count, axis)

    @cut.def_vmap
    def _(size, batched, x, first):
        assert not batched[1], "the loop over blocks is not mapped"
        return _slice(x, first, count, axis + batched[0]), batched[0]

    return cut(x, first)
