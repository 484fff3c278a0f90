"""``vectorize``: everything that is no recurrence runs for all timesteps at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, overload

from rlfx._checks import expect, one_of
from rlfx.recurrence.api.pending import directed
from rlfx.recurrence.ir.arguments import validate_target
from rlfx.recurrence.ir.program import Program


@overload
def vectorize(target: Program, *, over: str = "t") -> Program: ...


@overload
def vectorize(target: Callable[..., Any], *, over: str = "t") -> Callable[..., Any]: ...


def vectorize(target: Any, *, over: str = "t") -> Any:
    """``scan(recurrence; rest)  ->  scan(recurrence); vmap over t of the rest``.

    By default the compiler decides for each equation that could leave a loop over time, by what its operands cost to
    store (``explain`` shows where it runs). This moves out all of them, which makes large products of small ones, for the
    memory of their operands at every timestep. Over ``"b"`` every program is vectorized already.

    Args:
      target: a program, or a per-timestep function: it is applied when the function is compiled.
      over: ``"t"`` or ``"b"``.

    Returns:
      The program, or function, with the directive. Its results are the same.

    Raises:
      DomainError: for another axis.
      ProgramError: the target is no function.

    TimeRL section 5.3 (vectorization), there one operation at a time.

    Example:
      >>> import jax.numpy as jnp, rlfx
      >>> def f(w, x, t):
      ...     return jnp.tanh(w * x), x + 1.0
      >>> rlfx.compile(rlfx.vectorize(f), length=3)(2.0, jnp.float32(0.0))[0]
      Array(0.6544..., dtype=float32)
    """
    expect("over", over, one_of("t", "b"), of="vectorize")
    validate_target(target, "vectorize")
    if not isinstance(target, Program):
        return directed(target, lambda program: vectorize(program, over=over))
    asked = tuple(dict.fromkeys((*target.directives.vectorize, over)))
    return replace(target, directives=replace(target.directives, vectorize=asked))
