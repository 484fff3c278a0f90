"""``incrementalize``: blocks of timesteps of a program, or of the batch of any JAX function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np

from rlfx import _jaxpr as J
from rlfx._checks import BOOLEAN, NATURAL, POSITIVE, each, expect, instance, one_of, optional, shown
from rlfx.errors import DomainError, located
from rlfx.recurrence.api.pending import directed
from rlfx.recurrence.ir.arguments import validate_target
from rlfx.recurrence.ir.program import Program
from rlfx.transforms.blocks.loss import Blocks, InBlocks, in_blocks

#: The default of ``batch_argnums``.
BATCH = 1

_ARGNUMS = each(NATURAL, "the positions of arguments", "(1, 2)")
_JAXPR = instance(J.ClosedJaxpr, "a ClosedJaxpr", "jax.make_jaxpr(f)(*args)")


@overload
def incrementalize(target: Program, *, over: str = "t", block_size: int | tuple[int, int]) -> Program: ...


@overload
def incrementalize(target: Callable[..., Any], *, over: str, block_size: int | tuple[int, int]) -> Callable[..., Any]: ...


@overload
def incrementalize(
    target: Callable[..., Any],
    *,
    batch_argnums: int | Sequence[int] = 1,
    block_size: int | None = None,
    blocks: int | None = None,
    strict: bool = False,
) -> InBlocks: ...


def incrementalize(
    target: Any,
    *,
    over: str | None = None,
    batch_argnums: int | Sequence[int] = 1,
    block_size: int | tuple[int, int] | None = None,
    blocks: int | None = None,
    strict: bool = False,
) -> Any:
    """``f(whole batch)  ->  combine f over blocks of the batch``, with the memory of one block.

    On a **function** of a batch, ``loss(params, batch)``, its ``jax.value_and_grad``, or any other: the same function,
    computed in one ``lax.scan`` over blocks of the batch. Sums, means, maxima and arg-reductions are accumulated,
    per-example results put together, batch statistics computed in passes of their own, so that the results are those of
    the whole batch up to reassociation. ``jax.grad`` of it runs in blocks, too.

    On a **program** (``rlfx.trace``), or with ``over=`` on a **per-timestep function**: its learner runs in blocks of
    timesteps, of environments, or of both, accumulating gradients.

    Args:
      target: a function of arrays (any pytrees), or a program with a loss, or a per-timestep function of one.
      over: for programs and per-timestep functions, the dimensions that are cut: ``"t"``, ``"b"``, or ``"tb"``.
      batch_argnums: which positional arguments are the batch. All their leaves have the batch as leading axis.
      block_size: examples (or timesteps) in a block; the last one may be shorter. Environments in a block divide the
        batch. A pair, (timesteps, environments), with ``over="tb"``.
      blocks: how many blocks, instead of ``block_size``.
      strict: raise at the first operation that needs the whole batch at once, instead of running it so.

    Returns:
      For a function, a function with the same arguments and results; ``.explain(*args)`` reports the passes over the
      batch, what is kept for all of it, and the operations that cannot run in blocks, with their source lines. For a
      program, the program with the directive: lowered, it holds the activations of one block at a time. For a
      per-timestep function, one that is compiled so.

    Raises:
      DomainError: for a block size that is not in [1, N], leaves of the batch with different leading axes (when called).
      ScheduleError: with ``strict``, at an operation that needs the whole batch; for programs (when differentiated), if
        the learner is a recurrence over t, which has no blocks.

    TimeRL section 5.3, Alg. 3, which tiles every operation that is too large. Here the batch is followed through the
    differentiated, flat jaxpr, and one loop runs around everything that can be cut.

    Example:
      >>> import jax, jax.numpy as jnp, rlfx
      >>> def loss(w, batch):
      ...     x, y = batch
      ...     return jnp.mean((x @ w - y) ** 2)
      >>> batch = jnp.arange(16.0).reshape(8, 2), jnp.ones(8)
      >>> step = jax.jit(jax.value_and_grad(incrementalize(loss, block_size=2)))
      >>> step(jnp.ones(2), batch)
      (Array(280., dtype=float32), Array([280., 308.], dtype=float32))
      >>> program = rlfx.trace(lambda w, x, t: ((w * x) ** 2, x + 1.0), 2.0, jnp.float32(1.0), length=4)
      >>> jax.grad(lambda w: rlfx.lower(incrementalize(program, block_size=2))(w, jnp.float32(1.0))[0])(2.0)
      Array(30., dtype=float32)
    """
    strict = expect("strict", strict, BOOLEAN)
    if isinstance(target, Program) or over is not None:
        validate_target(target, "incrementalize")
        over = expect("over", "t" if over is None else over, one_of("t", "b", "tb"))
        of_a_batch = {"batch_argnums": batch_argnums is not BATCH, "blocks": blocks is not None, "strict": strict}
        refuse_others("incrementalize", of_a_batch, "over= and block_size=")
        sizes = _sizes(over, block_size)
        if isinstance(target, Program):
            return _program(target, sizes)
        return directed(target, lambda program: _program(program, sizes))
    if not callable(target):
        raise DomainError(
            located(
                f"incrementalize takes a function or a program, got {shown(target)}.",
                where=J.here(),
                fix="Give loss(params, batch), or rlfx.trace(...).",
            )
        )
    return InBlocks(target, checked_blocks(batch_argnums, block_size, blocks), strict)


def incrementalize_jaxpr(
    jaxpr: Any, batched: Sequence[bool], *, block_size: int | None = None, blocks: int | None = None
) -> Any:
    """``jaxpr -> jaxpr`` with the same results, computed in blocks of the batch; see :func:`incrementalize`.

    Args:
      jaxpr: a ``ClosedJaxpr``; to be fast, of the function *and* its gradient: it is not differentiated here.
      batched: for each input whether its leading axis is the batch.
      block_size: examples in a block.
      blocks: how many blocks, instead of ``block_size``.

    Raises:
      DomainError: for bad block sizes, or batched inputs with different leading axes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> jaxpr = jax.make_jaxpr(lambda w, x: jnp.mean(jnp.sin(x * w)))(1.0, jnp.ones(6))
      >>> jax.core.eval_jaxpr(incrementalize_jaxpr(jaxpr, [False, True], block_size=4).jaxpr, (), 2.0, jnp.zeros(6))
      [Array(0., dtype=float32)]
    """
    expect("jaxpr", jaxpr, _JAXPR)
    batched = expect("batched", batched, each(BOOLEAN, "a list of booleans", "[False, True]"))
    if len(batched) != len(jaxpr.in_avals):
        fact = f"batched has {len(batched)} elements, and the jaxpr {len(jaxpr.in_avals)} inputs."
        raise DomainError(
            located(fact, where=J.here(), fix="Say for each input whether its leading axis is the batch.")
        )
    return in_blocks(jaxpr, batched, checked_blocks((), block_size, blocks))


def checked_blocks(batch_argnums: Any, block_size: Any, blocks: Any) -> Blocks:
    """How to cut a batch, from the arguments of the public functions."""
    argnums = (batch_argnums,) if isinstance(batch_argnums, (int, np.integer)) else batch_argnums
    argnums = expect("batch_argnums", argnums, _ARGNUMS)
    if (block_size is None) == (blocks is None):
        fix = "block_size=64 is 64 examples at a time, blocks=8 an eighth."
        raise DomainError(located("Give either block_size= or blocks=.", where=J.here(), fix=fix))
    fix = "Give a divisor of the batch size."
    block_size = expect("block_size", block_size, optional(POSITIVE), fix=fix)
    return Blocks(argnums, block_size, expect("blocks", blocks, optional(POSITIVE), fix=fix))


def refuse_others(transform: str, given: dict[str, bool], instead: str) -> None:
    """Raise for arguments that are for functions of a batch, and would be dropped: ``{name: whether it was given}``."""
    for name in (name for name, wanted in given.items() if wanted):
        fact = f"{transform}: {name}= is for functions of a batch; of a program or a per-timestep function, give {instead}."
        raise DomainError(located(fact, where=J.here(), fix=f"Leave {name}= out."))


def _sizes(over: str, block_size: Any) -> dict[str, int]:
    """The size of a block along each dimension that is cut."""
    sizes = block_size if isinstance(block_size, (tuple, list)) else (block_size,)
    if len(sizes) != len(over):
        fact = f"over={over!r} takes {len(over)} block size{'s' * (len(over) > 1)}, got {len(sizes)}: {shown(block_size)}."
        fix = "Give a pair, (timesteps, environments)." if over == "tb" else "Give one integer."
        raise DomainError(located(fact, where=J.here(), fix=fix))
    return {d: expect("block_size", size, POSITIVE) for d, size in zip(over, sizes, strict=True)}


#: The directive of a block's size, by axis.
_BLOCKS = {"t": "timesteps", "b": "environments"}


def _program(program: Program, sizes: dict[str, int]) -> Program:
    axes = {"t": ("T", program.domain.length), "b": ("B", program.domain.batch)}
    for axis, size in sizes.items():
        name, length = axes[axis]
        if length is None:
            fix = "Give compile(batch=...)."
            raise DomainError(located("The program has no batch to cut.", where=program.where, fix=fix))
        if size > length:
            raise DomainError(
                located(
                    f"block_size={size!r} is not an integer between 1 and the length of the axis, {name}={length}.",
                    where=program.where,
                    fix=f"Give a divisor of {length}.",
                )
            )
    if program.loss is None:
        raise DomainError(
            located(
                "An unrolled program has no learner to cut into blocks.",
                where=program.where,
                fix="Use rlfx.compile, with a loss.",
            )
        )
    asked = {_BLOCKS[axis]: size for axis, size in sizes.items()}
    return replace(program, directives=replace(program.directives, **asked))
