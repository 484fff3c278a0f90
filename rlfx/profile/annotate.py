"""Phases and operations: the names that a profile gives to time, in Python and inside traced code.

An annotation is two of jax's own: `jax.profiler.TraceAnnotation` marks the Python time, `jax.named_scope` the
instructions traced meanwhile. Both carry the same marked name, so a compiled program keeps its operations through
`scan`, `vmap`, `grad`, `remat`, `cond` and `while`, and nothing is left behind when no capture is running.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from threading import get_ident
from time import time_ns
from typing import Any, ClassVar, Literal, Self

import jax
from jax.profiler import TraceAnnotation

from rlfx._jaxpr import tracing
from rlfx.errors import ProfileError, located

OPERATION = "rlfx.op:"
PHASE = "rlfx.phase:"
AGAIN = "rlfx.again:"  # one of these continues, when its task of asyncio does
CAPTURE = "rlfx.capture"
STAGE = "rlfx.stage"

# jax records an annotation when it closes, if it was opened during the trace. The ones open when a capture begins or
# ends would be lost: each thread notes here what it has open, and `capture` adds it to the trace's metadata.
_open: dict[int, list[Open]] = {}
# What the running code has open: of a thread, or of a task of asyncio, which leaves its thread at every `await`.
_context: contextvars.ContextVar[tuple[Open, ...]] = contextvars.ContextVar("rlfx.profile.annotate", default=())

_edge: list[Callable[[], None]] = []  # what a running capture wants to do where an operation begins or ends


def at_edges(call: Callable[[], None] | None) -> None:
    """From now on, call this where an annotation begins or ends; None: nothing."""
    _edge[:] = [call] if call else []


class Open:
    """An annotation somebody has open: its marked name, and the epoch times it opened and (later) closed."""

    __slots__ = ("_trace", "name", "start_ns", "stop_ns")

    def __init__(self, name: str):
        self.name = name
        self.start_ns = time_ns()
        self.stop_ns: int | None = None
        self._trace: TraceAnnotation | None = None

    def enter(self, stack: list[Open], prefix: str = "") -> None:
        """Begin (again) on this thread."""
        stack.append(self)
        self._trace = trace = TraceAnnotation(prefix + self.name)
        trace.__enter__()

    def leave(self, stack: list[Open]) -> None:
        """End on this thread, for now or for good."""
        if stack and stack[-1] is self:
            stack.pop()
        elif self in stack:
            stack.remove(self)
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.__exit__(None, None, None)


def here() -> list[Open]:
    """What this thread has open now, outermost first; the thread adds to it."""
    thread = get_ident()
    return _open[thread] if thread in _open else _open.setdefault(thread, [])


def of(context: contextvars.Context | None = None) -> tuple[Open, ...]:
    """What a task has open, outermost first; by default the one that runs."""
    return _context.get() if context is None else context.get(_context, ())


def open_annotations() -> dict[int, list[Open]]:
    """`{thread ident: annotations open now, outermost first}`."""
    return {thread: list(stack) for thread, stack in list(_open.items()) if stack}


class _Annotation(contextlib.ContextDecorator):
    """A marked name around a block: one use of one `with`, or a decorator that opens a fresh one at each call."""

    prefix = ""
    _known: ClassVar[dict[str, str]] = {}  # names that were used before, marked

    def __init__(self, name: str):
        self.name = name
        if type(name) is not str or name not in self._known:
            self._learn(name)

    def _learn(self, name: object) -> None:
        if not isinstance(name, str) or not name or any(c in name for c in "#/()\n"):
            raise ProfileError(
                located(
                    f"{type(self).__name__}({name!r}): a name is a non-empty string without '#', '/', '(', ')' or "
                    "newline; these separate fields in traces and scopes in XLA's metadata.",
                    fix='Write for example operation("advantages"), and nest operations for a hierarchy.',
                )
            )
        self._known[name] = self.prefix + name

    # This is on the path of every step of a loop in Python: it looks up little, and calls little.

    def __enter__(self) -> Self:
        for call in _edge:
            call()
        self._opened = opened = Open(self._known[self.name])
        self._stack = stack = here()
        opened.enter(stack)
        self._around = around = _context.get()
        _context.set((*around, opened))
        # Python time needs no scope, and a scope costs more than all the rest.
        self._scope = None
        if tracing():
            self._scope = jax.named_scope(opened.name)
            self._scope.__enter__()
        return self

    def __exit__(self, *exc: Any) -> Literal[False]:
        if self._scope is not None:
            self._scope.__exit__(*exc)
        opened = self._opened
        opened.leave(self._stack)
        opened.stop_ns = time_ns()
        for call in _edge:  # after it, as before the begin: what reading the clocks costs is not the operation's
            call()
        mine = _context.get()
        if mine and mine[-1] is opened:
            _context.set(self._around)
        else:
            _context.set(tuple(o for o in mine if o is not opened))
        return False

    def _recreate_cm(self):
        return type(self)(self.name)


class operation(_Annotation):
    """Name what the program does in a block: `simulation`, `inference`, `backpropagation`, ...

    Use it as a context manager or a decorator, around Python code or inside a function that jax traces; operations
    nest. Time is attributed to the innermost one (RL-Scope, section 3.1). One that is open at an `await` belongs to its
    task of asyncio: others that run meanwhile are not in it. Outside a capture it costs 3 to 5 µs.

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
    _known: ClassVar[dict[str, str]] = {}


class phase(_Annotation):
    """Name a training phase: `data_collection`, `update`, `evaluation`.

    Phases hold operations. They do not nest into paths: the innermost counts. Otherwise as `operation`.

    Example:
      >>> with phase("data_collection"), operation("simulation"):
      ...     state = sum(range(10))
    """

    prefix = PHASE
    _known: ClassVar[dict[str, str]] = {}
