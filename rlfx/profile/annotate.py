"""Phases and operations: the names that a profile gives to time, in Python and inside traced code.

An annotation is two of jax's own: `jax.profiler.TraceAnnotation` marks the Python time, `jax.named_scope` the
instructions traced meanwhile. Both carry the same marked name, so a compiled program keeps its operations through
`scan`, `vmap`, `grad`, `remat`, `cond` and `while`, and nothing is left behind when no capture is running.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time

import jax

from rlfx._jaxpr import tracing
from rlfx.errors import ProfileError, located

OPERATION = "rlfx.op:"
PHASE = "rlfx.phase:"
CAPTURE = "rlfx.capture"
STAGE = "rlfx.stage"

# jax records an annotation when it closes, if it was opened during the trace. The ones open when a capture begins or
# ends would be lost: each thread notes here what it has open, and `capture` adds it to the trace's metadata.
_open: dict[int, list[Open]] = {}


class Open:
    """An annotation somebody has open: its marked name, and the epoch times it opened and (later) closed."""

    __slots__ = ("name", "start_ns", "stop_ns")

    def __init__(self, name: str):
        self.name = name
        self.start_ns = time.time_ns()
        self.stop_ns: int | None = None


def open_annotations() -> dict[int, list[Open]]:
    """`{thread ident: annotations open now, outermost first}`."""
    return {thread: list(stack) for thread, stack in list(_open.items()) if stack}


@functools.cache
def _refused(name: str) -> bool:
    return not name or any(c in name for c in "#/()\n")


class _Annotation(contextlib.ContextDecorator):
    """A marked name around a block: one use of one `with`, or a decorator that opens a fresh one at each call."""

    prefix = ""

    def __init__(self, name: str):
        if not isinstance(name, str) or _refused(name):
            raise ProfileError(
                located(
                    f"{type(self).__name__}({name!r}): a name is a non-empty string without '#', '/', '(', ')' or "
                    "newline; these separate fields in traces and scopes in XLA's metadata.",
                    fix='Write for example operation("advantages"), and nest operations for a hierarchy.',
                )
            )
        self.name = name

    def __enter__(self):
        marked = self.prefix + self.name
        self._stack = _open.setdefault(threading.get_ident(), [])
        self._stack.append(Open(marked))
        self._trace = jax.profiler.TraceAnnotation(marked)
        self._trace.__enter__()
        # Python time needs no scope, and a scope costs more than all the rest.
        self._scope = jax.named_scope(marked) if tracing() else None
        if self._scope is not None:
            self._scope.__enter__()
        return self

    def __exit__(self, *exc):
        if self._scope is not None:
            self._scope.__exit__(*exc)
        self._trace.__exit__(*exc)
        self._stack.pop().stop_ns = time.time_ns()
        return False

    def _recreate_cm(self):
        return type(self)(self.name)


class operation(_Annotation):
    """Name what the program does in a block: `simulation`, `inference`, `backpropagation`, ...

    Use it as a context manager or a decorator, around Python code or inside a function that jax traces; operations
    nest. Time is attributed to the innermost one (RL-Scope, section 3.1). Outside a capture it costs about 1.5 µs.

    Raises:
      ProfileError: the name contains `#`, `/`, a parenthesis or a newline, or is empty.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> @operation("backpropagation")
      ... def loss(w):
      ...     with operation("inference"):
      ...         return jnp.sum(jnp.tanh(w))
      >>> float(jax.jit(loss)(jnp.zeros(3)))
      0.0
    """

    prefix = OPERATION


class phase(_Annotation):
    """Name a training phase: `data_collection`, `update`, `evaluation`.

    Phases hold operations. They do not nest into paths: the innermost counts. Otherwise as `operation`.

    Example:
      >>> with phase("data_collection"), operation("simulation"):
      ...     state = sum(range(10))
    """

    prefix = PHASE
