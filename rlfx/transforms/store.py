"""``store``: values in fewer bits, so that what is kept of them takes fewer bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, overload

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._checks import TEXT, each, expect, one_of
from rlfx.errors import ProgramError, located
from rlfx.recurrence.execute.host import NAME, checked_names
from rlfx.recurrence.ir.build import Builder
from rlfx.recurrence.ir.program import Equation, Program, with_equations

#: (bits of the exponent, bits of the mantissa) of what floats are stored as.
FORMATS = {"bfloat16": (8, 7), "float16": (5, 10)}

_AS = one_of(*FORMATS)
_NAMES = each(TEXT, "names of values", '("obs",)')


def rounded(x: jax.Array, as_: str) -> jax.Array:
    """A float as the nearest one of a format, in its own dtype, by way of an array of that format."""
    exact = jax.lax.reduce_precision(x, *FORMATS[as_])  # XLA would drop the two conversions alone
    return exact.astype(jnp.dtype(as_)).astype(x.dtype)


@overload
def store(x: Program, as_: str = "bfloat16", *, names: tuple[str, ...]) -> Program: ...


@overload
def store(x: Any, as_: str = "bfloat16") -> Any: ...


def store(x: Any, as_: str = "bfloat16", *, names: tuple[str, ...] = ()) -> Any:
    """``x  ->  x rounded``, so that whoever keeps ``x`` keeps half of its bytes.

    The result is the value that ``as_`` has, in the dtype of ``x``, everywhere: in the timestep, in what is returned, in the
    learner. What is kept of it between timesteps, for the learner, on the host or for a loop is the narrow array: the
    minimum cut of the compiler finds that it has fewer bytes, and widening it again costs nothing. A value that is widened
    from uint8 (``pixels.astype(jnp.float32) / 255``) is kept as uint8 without being asked, since nothing is lost by that.

    Args:
      x: float32 or wider arrays of one timestep, a pytree; other leaves stay as they are. Or a program: then the values that
        ``jax.ad_checkpoint.checkpoint_name`` has given one of ``names`` are rounded in it
        (``rlfx.compile(f, transform=lambda p: rlfx.store(p, "bfloat16", names=("obs",)))``).
      as_: "bfloat16" (8 bits of precision, relative error at most 2**-9) or "float16" (11 bits, 2**-12, up to 65504).
      names: of a program alone.

    Returns:
      The values, of the same shapes and dtypes; derivatives are rounded alike. Or the program.

    Raises:
      ProgramError, DomainError: for another format, names without a program, or names that no value has.

    TimeRL (section 5.4) swaps what it stores; it keeps every bit of it.

    Example:
      >>> import jax.numpy as jnp, rlfx
      >>> rlfx.store(jnp.array([1.0, 1.001, 3.14159]))
      Array([1.      , 1.      , 3.140625], dtype=float32)
    """
    as_ = expect("as_", as_, _AS, ProgramError, of="store")
    names = expect("names", tuple(names) if isinstance(names, list) else names, _NAMES, ProgramError, of="store")
    if isinstance(x, Program):
        return _in_program(x, as_, names)
    if names:
        fact = f"store(names={names!r}) is for a program, and x is {type(x).__name__}."
        fix = f'Write it in compile: transform=lambda p: rlfx.store(p, "{as_}", names={names!r}).'
        raise ProgramError(located(fact, where=J.here(), fix=fix))
    return jax.tree.map(lambda leaf: rounded(leaf, as_) if _is_wide(leaf, as_) else leaf, x)


def _is_wide(x: Any, as_: str) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > jnp.dtype(as_).itemsize


def _in_program(program: Program, as_: str, names: tuple[str, ...]) -> Program:
    checked_names(program, names)
    build = Builder(program)
    equations: list[Equation] = []
    for e in program.equations:
        (out,) = e.outputs if len(e.outputs) == 1 else (None,)
        if e.op is not NAME or e.params["name"] not in names or out is None or not _is_wide(out, as_):
            equations.append(e)
            continue
        build.equations = []
        one: Callable[..., Any] = lambda x: rounded(x, as_)  # noqa: E731
        result = build.call(one, e.inputs, e)
        equations += [*build.equations, dataclasses.replace(e, inputs=(result,))]
    return with_equations(program, equations)
