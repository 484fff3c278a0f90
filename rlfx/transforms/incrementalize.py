"""``incrementalize``: run a program's learner in blocks of timesteps, accumulating gradients."""

from __future__ import annotations

from dataclasses import replace

from rlfx.errors import DomainError, located
from rlfx.recurrence.program import Program


def incrementalize(program: Program, *, over: str = "t", block_size: int) -> Program:
    """``grad(sum over all t)  ->  sum over blocks of grad(sum over the block)``.

    Args:
      program: a traced program with a loss.
      over: the dimension that is cut, ``"t"``.
      block_size: timesteps in a block; the last block may be shorter.

    Returns:
      The program with the directive. Lowered, it has the same results up to reassociation, and holds the activations of
      one block at a time; what the acting pass stores for the learner is not changed.

    Raises:
      DomainError: for a block size that is no integer in [1, T], a dimension other than t, or a program without a loss.
      ScheduleError: (when differentiated) if the learner is a recurrence over t, which has no blocks.

    TimeRL section 5.3, Alg. 3, which tiles every operation that is too large; here one loop runs around the whole
    differentiated region, and without a directive the compiler chooses the block itself.

    Example:
      >>> import jax, jax.numpy as jnp, rlfx
      >>> program = rlfx.trace(lambda w, x, t: ((w * x) ** 2, x + 1.0), 2.0, jnp.float32(1.0), length=4)
      >>> jax.grad(lambda w: rlfx.lower(incrementalize(program, block_size=2))(w, jnp.float32(1.0))[0])(2.0)
      Array(30., dtype=float32)
    """
    length = program.domain.length
    if over != "t":
        raise DomainError(located(f'over is "t", got {over!r}.', fix="Blocks of environments: shard them with mesh=."))
    if isinstance(block_size, bool) or not isinstance(block_size, int) or not 1 <= block_size <= length:
        raise DomainError(
            located(
                f"block_size={block_size!r} is not an integer between 1 and the length of the axis, T={length}.",
                fix=f"Give a divisor of {length}: the last block is shorter otherwise.",
            )
        )
    if program.loss is None:
        raise DomainError(
            located("An unrolled program has no learner to cut into blocks.", fix="Use rlfx.compile, with a loss.")
        )
    return replace(program, directives={**program.directives, "block_size": {"t": block_size}})
