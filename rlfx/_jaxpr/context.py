"""Tracing, and what a trace depends on: named axes, the mesh, jax's options."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import config, core

ShapedArray = core.ShapedArray
Tracer = core.Tracer

UnexpectedTracerError = jax.errors.UnexpectedTracerError


def make_jaxpr(fn: Callable, *, axes: Sequence[tuple[Any, int]] = ()) -> Callable:
    """``jax.make_jaxpr`` of a flat function, under named axes. Returns ``(jaxpr, consts)`` when called."""

    def traced(*args):
        with jax.disable_jit(
            False
        ):  # symbolic lengths need staged calls; a user who debugs eagerly still gets a program
            closed = jax.make_jaxpr(fn, axis_env=list(axes))(*args)
        return closed.jaxpr, list(closed.consts)

    return traced


def axis_size(name: str) -> int | None:
    """The size of a named axis of the trace in progress, or None when there is no such axis."""
    try:
        return jax.lax.axis_size(name)
    except NameError:
        return None


def named_axes() -> dict[Any, int]:
    """The named axes of the trace in progress, the outermost first, with their sizes."""
    return dict(core.get_axis_env().axis_sizes)


def current_trace() -> Any:
    """The trace in progress."""
    return core.trace_ctx.trace


def trace_of(value: Any) -> Any:
    """The trace that a value belongs to; None of one that is known."""
    return value._trace if isinstance(value, Tracer) else None


def weakly(value: Any) -> Callable[[], Any]:
    """A weak reference, or for what can't have one a function that gives the value."""
    return weakref.ref(value) if isinstance(value, Tracer) else lambda: value


def surroundings() -> tuple:
    """What a trace depends on beside its arguments: named axes, the mesh, jax's options. Hashable."""
    env = core.get_axis_env()
    return config.trace_context(), tuple(env.axis_sizes.items())


_trace_state_clean = getattr(core, "trace_state_clean", None)


def tracing() -> bool:
    """Is jax tracing a function in this thread? If not, a named scope would reach nothing. True where unknown."""
    return _trace_state_clean is None or not _trace_state_clean()
