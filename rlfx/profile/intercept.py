"""Calls of jax that block without leaving an event in the trace: wrapped in an annotation while a capture runs.

RL-Scope, section 3.2, wraps the bindings of native libraries; jax already traces its own, all but these.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import jax

from rlfx._jaxpr import waits
from rlfx.profile.rules import WAITING

# What the public functions end in, so that `from jax import block_until_ready` is seen too; else those themselves.
BLOCKING = waits or ((jax, "block_until_ready"), (jax, "effects_barrier"))


@contextlib.contextmanager
def intercepting() -> Iterator[None]:
    """Name the waits inside; the functions are the originals again afterwards."""
    originals = [(owner, name, getattr(owner, name)) for owner, name in BLOCKING]
    for owner, name, function in originals:
        setattr(owner, name, _annotated(function, WAITING + name))
    try:
        yield
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def _annotated(function, label: str):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        with jax.profiler.TraceAnnotation(label):
            return function(*args, **kwargs)

    return wrapped
