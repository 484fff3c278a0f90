"""One MLIR context for many programs: jax makes one a program, which takes a quarter of the tests' time."""

import threading

from jax._src.interpreters import mlir

#: Programs a context. What they intern stays in it, so that memory would grow without an end.
PROGRAMS = 200


def share() -> None:
    """Let jax lower programs in a context that others of the same thread were lowered in. Affects no user's process."""
    make, mine = mlir.make_ir_context, threading.local()

    def shared():
        if mlir.ir.Context.current is not None:  # a program lowered inside of another must not be written into it
            return make()
        left, context = getattr(mine, "held", (0, None))
        if not left:
            left, context = PROGRAMS, make()
        mine.held = left - 1, context
        return context

    mlir.make_ir_context = shared
