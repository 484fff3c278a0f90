"""``remat``: backpropagation through time in blocks of timesteps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

from rlfx._checks import POSITIVE, expect
from rlfx.recurrence.ir.arguments import validate_target
from rlfx.recurrence.ir.program import Program
from rlfx.transforms.incrementalize import incrementalize


@overload
def remat(target: Program, *, every: int) -> Program: ...


@overload
def remat(target: Callable[..., Any], *, every: int) -> Callable[..., Any]: ...


def remat(target: Any, *, every: int) -> Any:
    """``backpropagation through T timesteps  ->  through blocks of them, from the last to the first``.

    The state before each block of ``every`` timesteps is kept, and the activations of one block exist at a time: memory
    falls from T of them to ``every``, plus ``T / every`` states. Acting computes the states anyway, so that nothing is
    computed more often than without. Where no gradient flows through time the learner runs in such blocks, too:
    :func:`rlfx.incrementalize` over ``"t"``, of which this is the name for recurrent learners.

    Args:
      target: a program with a loss, or a per-timestep function of one.
      every: timesteps in a block. Near ``sqrt(T)`` states and activations are in balance; they are fast as long as a block's
        activations fit the cache, which the compiler sees to by itself on a CPU.

    Returns:
      The program, or function, with the directive. Its results are the same.

    Raises:
      ProgramError, DomainError: for another target, or a block longer than T.
      ScheduleError: when it is compiled, if the gradient flows through other reads than those of the previous timestep.

    Rematerialisation as of Griewank and Walther (2000) or Chen et al. (2016) runs the recurrence forward once more.

    Example:
      >>> import jax, jax.numpy as jnp, rlfx
      >>> def step(w, h, t):
      ...     h = jnp.tanh(w * h + 1.0)
      ...     return h**2, h
      >>> loss = rlfx.compile(rlfx.remat(step, every=2), length=6)
      >>> jax.grad(lambda w: loss(w, jnp.float32(0.0))[0])(0.5)
      Array(0.284..., dtype=float32)
    """
    every = expect("every", every, POSITIVE, of="remat")
    validate_target(target, "remat")
    return incrementalize(target, over="t", block_size=every)
