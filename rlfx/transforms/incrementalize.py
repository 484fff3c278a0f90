"""``incrementalize``: blocks of timesteps of a program, or of the batch of any JAX function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, overload

from rlfx.errors import DomainError, located
from rlfx.recurrence.directed import directed
from rlfx.recurrence.program import Program
from rlfx.transforms._blocks_loss import Blocks, InBlocks, in_blocks


@overload
def incrementalize(target: Program, *, over: str = "t", block_size: int | tuple[int, int]) -> Program: ...


@overload
def incrementalize(target: Callable, *, over: str, block_size: int | tuple[int, int]) -> Callable: ...


@overload
def incrementalize(
    target: Callable,
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
      >>> batch = jnp.arange(12.0).reshape(6, 2), jnp.ones(6)
      >>> step = jax.jit(jax.value_and_grad(incrementalize(loss, block_size=2)))
      >>> step(jnp.ones(2), batch)
      (Array(146.66667, dtype=float32), Array([146.66667, 166.66667], dtype=float32))
      >>> program = rlfx.trace(lambda w, x, t: ((w * x) ** 2, x + 1.0), 2.0, jnp.float32(1.0), length=4)
      >>> jax.grad(lambda w: rlfx.lower(incrementalize(program, block_size=2))(w, jnp.float32(1.0))[0])(2.0)
      Array(30., dtype=float32)
    """
    if isinstance(target, Program):
        return _program(target, "t" if over is None else over, block_size)
    if not callable(target):
        raise DomainError(
            located(
                f"incrementalize takes a function or a program, got {type(target).__name__}.",
                fix="Give loss(params, batch), or rlfx.trace(...).",
            )
        )
    if over is not None:
        return directed(target, lambda program: _program(program, over, block_size))
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
    return in_blocks(jaxpr, batched, checked_blocks((), block_size, blocks))


def checked_blocks(batch_argnums: int | Sequence[int], block_size: Any, blocks: int | None) -> Blocks:
    """How to cut a batch, from the arguments of the public functions."""
    if (block_size is None) == (blocks is None):
        fix = "block_size=64 is 64 examples at a time, blocks=8 an eighth."
        raise DomainError(located("Give either block_size= or blocks=.", fix=fix))
    given, name = (block_size, "block_size") if blocks is None else (blocks, "blocks")
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise DomainError(
            located(f"{name}={given!r} is not a positive integer.", fix="Give a divisor of the batch size.")
        )
    return Blocks((batch_argnums,) if isinstance(batch_argnums, int) else tuple(batch_argnums), block_size, blocks)


def _program(program: Program, over: str, block_size: int | tuple[int, int] | None) -> Program:
    if over not in ("t", "b", "tb"):
        raise DomainError(located(f'over is "t", "b" or "tb", got {over!r}.', fix="Name the dimensions to cut."))
    sizes = block_size if isinstance(block_size, tuple) else (block_size,)
    if len(sizes) != len(over):
        raise DomainError(
            located(f"over={over!r} takes {len(over)} block sizes, got {block_size!r}.", fix="Give a pair for both.")
        )
    axes = {"t": ("T", program.domain.length), "b": ("B", program.domain.batch)}
    for axis, size in zip(over, sizes, strict=True):
        name, length = axes[axis]
        if length is None:
            raise DomainError(located("The program has no batch to cut.", fix="Give compile(batch=...)."))
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= length:
            raise DomainError(
                located(
                    f"block_size={size!r} is not an integer between 1 and the length of the axis, {name}={length}.",
                    fix=f"Give a divisor of {length}.",
                )
            )
    if program.loss is None:
        raise DomainError(
            located("An unrolled program has no learner to cut into blocks.", fix="Use rlfx.compile, with a loss.")
        )
    asked = {**program.directives.get("block_size", {}), **dict(zip(over, sizes, strict=True))}
    return replace(program, directives={**program.directives, "block_size": asked})
