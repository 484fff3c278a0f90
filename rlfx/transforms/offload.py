"""``offload``: keep the batch of a function in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

from rlfx import _jaxpr as J
from rlfx._checks import NATURAL, TEXT, each, expect, one_of, optional, shown
from rlfx.errors import DomainError, located
from rlfx.recurrence.api.pending import directed
from rlfx.recurrence.execute.host import JAXLIB, Hosting, checked_names, refuse
from rlfx.recurrence.ir.arguments import validate_target
from rlfx.recurrence.ir.program import Program
from rlfx.transforms.blocks.driver import Driven
from rlfx.transforms.blocks.loss import Blocks
from rlfx.transforms.blocks.offloaded import Offloaded
from rlfx.transforms.incrementalize import BATCH, checked_blocks, refuse_others

FORMS = {"program": Offloaded, "driver": Driven}
_NAMES = each(TEXT, "a list of names", '["obs"]')


@overload
def offload(target: Program, *, names: Sequence[str] = (), min_bytes: int | None = None) -> Program: ...


@overload
def offload(
    target: Callable[..., Any],
    *,
    batch_argnums: int | Sequence[int] = 1,
    block_size: int | None = None,
    blocks: int | None = None,
    form: Literal["program"] = "program",
) -> Offloaded: ...


@overload
def offload(
    target: Callable[..., Any],
    *,
    batch_argnums: int | Sequence[int] = 1,
    block_size: int | None = None,
    blocks: int | None = None,
    form: Literal["driver"],
) -> Driven: ...


def offload(
    target: Any,
    *,
    batch_argnums: int | Sequence[int] = 1,
    block_size: int | None = None,
    blocks: int | None = None,
    form: str = "program",
    names: Sequence[str] = (),
    min_bytes: int | None = None,
) -> Any:
    """``f(params, batch)  ->  f with the batch in host memory, one block of it on the device and one on its way``.

    The function runs in blocks as by :func:`rlfx.incrementalize`, with the same results and gradients; the device holds
    two blocks of the batch instead of all of it.

    * ``form="program"``: one program. The batch is moved to pinned host memory (or is there: an argument made by
      ``jax.device_put(x, jax.memory.Space.Host)``); a ``lax.scan`` fetches block c + 1 while it computes with block c.
      Composes with ``jit``, ``grad`` and ``vmap``.
    * ``form="driver"``: a jitted call for each block, driven from Python; ``device_put`` of block c + 1 is under way
      meanwhile, and the accumulators are donated. The batch may be NumPy arrays (memory-mapped ones, too) and is never
      on the device as a whole. ``jax.grad`` and ``jax.value_and_grad`` work, ``jit`` around it does not.

    On a **program**, or with ``names`` or ``min_bytes`` on a **per-timestep function**: what the actor stores for the
    learner goes to the host as it is computed, and comes back one block of timesteps at a time.

    Args:
      target: a function of arrays, a program, or a per-timestep function; to be differentiated,
        a function's first result must be a scalar.
      batch_argnums: which positional arguments are the batch. All their leaves have the batch as leading axis.
      block_size: examples in a block; the last one may be shorter.
      blocks: how many blocks, instead of ``block_size``.
      form: ``"program"`` or ``"driver"``.
      names: for programs: the values that ``jax.ad_checkpoint.checkpoint_name`` has named so.
      min_bytes: for programs: all stored values of at least this size, over all timesteps.

    Returns:
      A function with the same arguments and results. ``.explain(*args)`` of the program form says what is where.

    Raises:
      DomainError: for bad block sizes, or leaves of the batch with different leading axes (when called).
      PlacementError: on a device without pinned host memory (when called).
      ScheduleError: for the program form on a GPU with a jaxlib that computes wrong results there (before 0.11.1).

    On a CPU host and device memory are the same: it runs, and nothing is saved. TimeRL section 5.2 evicts and fetches
    every stored tensor by itself; here the unit is the block of the batch that a loop reads next.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> def loss(w, batch):
      ...     x, y = batch
      ...     return jnp.mean((x @ w - y) ** 2)
      >>> batch = np.arange(16.0, dtype=np.float32).reshape(8, 2), np.ones(8, np.float32)
      >>> jax.jit(jax.grad(offload(loss, block_size=2)))(jnp.ones(2), batch)
      Array([280., 308.], dtype=float32)
      >>> jax.grad(offload(loss, block_size=2, form="driver"))(jnp.ones(2), batch)
      Array([280., 308.], dtype=float32)
    """
    expect("form", form, one_of(*FORMS))
    hosting = Hosting(expect("names", names, _NAMES), expect("min_bytes", min_bytes, optional(NATURAL)))
    if isinstance(target, Program) or hosting != Hosting():
        validate_target(target, "offload")
        of_a_batch = {"batch_argnums": batch_argnums is not BATCH, "block_size": block_size is not None}
        of_a_batch |= {"blocks": blocks is not None, "form": form != "program"}
        refuse_others("offload", of_a_batch, "names= or min_bytes=")
        if isinstance(target, Program):
            return _program(target, hosting)
        return directed(target, lambda program: _program(program, hosting))
    if not callable(target):
        fact = f"offload takes a function, got {shown(target)}."
        raise DomainError(located(fact, where=J.here(), fix="Give loss(params, batch)."))
    cut: Blocks = checked_blocks(batch_argnums, block_size, blocks)
    return FORMS[form](target, cut)


def _program(program: Program, hosting: Hosting) -> Program:
    if hosting == Hosting():
        raise DomainError(
            located(
                "offload of a program takes names= or min_bytes=: which stored values go to the host.",
                where=J.here(),
                fix="min_bytes=1 << 20 moves everything from 1 MiB on.",
            )
        )
    if program.loss is None:
        fact = "An unrolled program stores nothing for a learner."
        raise DomainError(located(fact, where=program.where, fix="Use rlfx.compile."))
    refuse(J.platform(), JAXLIB)
    checked_names(program, hosting.names)
    return replace(program, directives=replace(program.directives, offload=hosting))
