"""Calls that leave no event in the trace, wrapped in an annotation while a capture runs: where jax waits for the device,
where Python blocks on others, and the steps of asyncio's tasks.

RL-Scope, section 3.2, wraps the bindings of native libraries; jax already traces its own, all but these. Where else a
thread blocks, its processor clock says (`threads.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import multiprocessing.connection
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from rlfx._jaxpr import waits
from rlfx.profile import annotate
from rlfx.profile.rules import BLOCKING, IMPORTING, TOGETHER, WAITING
from rlfx.profile.threads import foreign

# What the public functions end in, so that `from jax import block_until_ready` is seen too; else those themselves.
OF_JAX = waits or ((jax, "block_until_ready"), (jax, "effects_barrier"))
# What queues, events, barriers, futures, pools, pipes and sleeps end in, as far as it is Python.
OF_PYTHON: tuple[tuple[Any, str], ...] = (
    (time, "sleep"),
    (threading.Condition, "wait"),
    (threading.Thread, "join"),
    (multiprocessing.connection, "wait"),
    (multiprocessing.connection.Connection, "_recv"),
)
SELECTS = tuple((c, "select") for c in {selectors.DefaultSelector, selectors.SelectSelector, selectors.PollSelector})


@contextlib.contextmanager
def intercepting() -> Iterator[None]:
    """Name the waits inside; the functions are the originals again afterwards."""
    suspended: dict[int, dict[int, tuple[annotate.Open, ...]]] = {}  # thread: what each context that left has open
    wrappers = {
        **dict.fromkeys(OF_JAX, functools.partial(_annotated, prefix=WAITING)),
        **dict.fromkeys(OF_PYTHON, functools.partial(_annotated, prefix=BLOCKING)),
        **dict.fromkeys(SELECTS, functools.partial(_together, suspended)),
        (asyncio.Handle, "_run"): functools.partial(_in_turn, suspended),
        (importlib._bootstrap, "_find_and_load"): functools.partial(_imported, threading.local()),
    }
    originals = [(owner, name, getattr(owner, name)) for owner, name in wrappers if hasattr(owner, name)]
    _leave_suspended()
    for owner, name, function in originals:
        setattr(owner, name, wrappers[owner, name](function))
    try:
        yield
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def _annotated(function: Callable, prefix: str) -> Callable:
    label = prefix + function.__name__

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        with jax.profiler.TraceAnnotation(label):
            return function(*args, **kwargs)

    return wrapped


def _imported(inside: threading.local, load: Callable) -> Callable:
    """The import of a package, with all that it imports; a module of the user's may be the program itself."""

    @functools.wraps(load)
    def wrapped(name: str, import_: Callable):
        if getattr(inside, "a_package", False) or not _foreign(name.partition(".")[0]):
            return load(name, import_)
        inside.a_package = True
        try:
            with jax.profiler.TraceAnnotation(IMPORTING + name):
                return load(name, import_)
        finally:
            inside.a_package = False

    return wrapped


@functools.lru_cache(maxsize=4096)
def _foreign(name: str) -> bool:
    """Is a module without a dot one of an installed package, or of Python?"""
    if name in sys.builtin_module_names or name in sys.stdlib_module_names:
        return True
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return False
    found = spec and (spec.origin or next(iter(spec.submodule_search_locations or ()), None))
    return found is not None and foreign(found)


# asyncio: an annotation that is open at an `await` ends when its task leaves the thread, and begins again with it.


def _leave_suspended() -> None:
    """What other tasks of this thread opened before the capture is not open now."""
    stack, mine = annotate.here(), annotate.of()
    stack[:] = [o for o in stack if o in mine]


def _in_turn(suspended: dict, run: Callable) -> Callable:
    """A step of a task, or a callback, in the operations of its own context."""

    @functools.wraps(run)
    def wrapped(self: asyncio.Handle):
        stack = annotate.here()
        before = list(stack)
        for opened in annotate.of(self._context):
            if opened not in stack and opened.stop_ns is None:
                opened.enter(stack, annotate.AGAIN)
        waiting = suspended.setdefault(threading.get_ident(), {})
        waiting.pop(id(self._context), None)
        try:
            return run(self)
        finally:
            left = [opened for opened in stack if opened not in before]
            for opened in reversed(left):
                opened.leave(stack)
            if left:
                waiting[id(self._context)] = tuple(left)

    return wrapped


def _together(suspended: dict, select: Callable) -> Callable:
    """A loop that waits does so for the operations of all the tasks that wait."""

    @functools.wraps(select)
    def wrapped(*args, **kwargs):
        waiting = suspended.get(threading.get_ident(), {}).values()
        names = sorted({"/".join(o.name for o in left if o.stop_ns is None) for left in waiting} - {""})
        with jax.profiler.TraceAnnotation(TOGETHER + "//".join(names) if names else BLOCKING + select.__name__):
            return select(*args, **kwargs)

    return wrapped
