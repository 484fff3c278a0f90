"""What a program does beside its results, in the order of time: checkpoints, metrics, progress.

The effects of a timestep are one equation that reads itself one timestep before. So they are a loop over time in every plan, what
acts runs it once, and no learner has a part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx._checks import POSITIVE, expect, function
from rlfx.errors import ProgramError, UnsupportedSliceOp, located
from rlfx.recurrence.language.domain import current_domain
from rlfx.recurrence.language.operands import as_array, mask_like
from rlfx.recurrence.language.time import without_time

tree = jax.tree_util

#: The scope of the equation, by which the reference finds what runs though no result needs it.
SCOPE = "rlfx.effect"


def _abstract(*_: Any, calls: Any, structure: Any, every: int) -> tuple:
    return [], {J.HOST_EFFECT}


#: ``effect_p(*leaves; calls, structure, every)``: an effect where the program has it. Tracing gathers those of a program.
effect_p = J.new_primitive("effect", _abstract, multiple_results=True, effectful=True)


def together(effects: Sequence[Mapping], order: Any, now: Any, going: Any, *leaves: Any) -> Any:
    """The effects of one timestep, one after the other.

    Args:
      effects: the parameters of each.
      order: what stands for the effects before these; it is given back by those that come after them.
      now: the absolute time.
      going: which environments have not ended, ``[B]``.
      leaves: the operands of all of them, ``[B, ...]``.
    """
    left = list(leaves)
    with jax.named_scope(SCOPE):
        for params in effects:
            n = params["structure"].num_leaves
            own, left = [jnp.where(mask_like(going, x), x, jnp.zeros_like(x)) for x in left[:n]], left[n:]
            here = now % np.int32(params["every"]) == 0
            call, skip = partial(J.host_call, _on_host(params)), lambda order, *_: order
            order = jax.lax.cond(here, call, skip, order, here & jnp.any(going), *own)
    return order


def _on_host(params: Mapping) -> Callable[..., Any]:
    return lambda *leaves: params["calls"](*tree.tree_unflatten(params["structure"], leaves))


def effect(fn: Callable[..., Any], *args: Any, every: int = 1) -> None:
    """Call ``fn(*args)`` on the host at the timesteps where ``(t0 + t) % every == 0``: checkpoints, metrics, progress.

    Once for each timestep of a call, whatever the plan, and in the order of time; the effects of one timestep in the order of the
    program. Acting calls it; a learner, which may evaluate a timestep again, does not. Derivatives know nothing of it.

    Args:
      fn: a Python function; its result is not used. What it raises ends the call.
      *args: pytrees of arrays. With a batch each leaf has the axis [B] of all environments; under ``until=`` those that have
        ended have zeros, as in outputs, and nothing is called when all have. They arrive as NumPy arrays, from all devices of a
        mesh.
      every: a positive integer.

    Under ``jax.vmap`` ``fn`` is called for one member after the other, at every timestep, if its arguments differ between them.
    ``jax.effects_barrier()`` waits for the calls.

    Raises:
      DomainError: ``every`` is no positive integer.
      ProgramError: outside of a per-timestep program; inside of a condition or loop of jax there, or of what ``jax.vmap``
        maps; an argument is a key.
      UnsupportedSliceOp: an argument has a length that depends on t.

    TimeRL's ``dnn[(i + 1) % 10 == 0].checkpoint(path)`` (section 4).

    Example:
      >>> import jax, jax.numpy as jnp, rlfx
      >>> saved = []
      >>> def f(_, total, t):
      ...     rlfx.effect(lambda now, x: saved.append((int(now), float(x))), t, total, every=2)
      ...     return total + 1.5, None
      >>> _ = rlfx.unroll(f, length=5)(None, jnp.float32(0.0))
      >>> jax.effects_barrier()
      >>> saved
      [(0, 0.0), (2, 3.0), (4, 6.0)]
    """
    current_domain("rlfx.effect")
    expect("fn", fn, function(*(f"x{i}" for i in range(len(args)))), ProgramError, of="rlfx.effect", fix=_FIX)
    every = expect("every", every, POSITIVE, of="rlfx.effect")
    leaves, structure = tree.tree_flatten(without_time(args))
    leaves = [jax.lax.stop_gradient(as_array(leaf, "rlfx.effect")) for leaf in leaves]
    if any(J.is_key(leaf) for leaf in leaves):
        fact = "rlfx.effect has a random key among its arguments, and the host takes numbers."
        raise ProgramError(located(fact, where=J.here(), fix="Give its words: jax.random.key_data(key)."))
    if any(J.symbolic_axes(leaf.shape) for leaf in leaves):
        fact = "rlfx.effect is given a slice whose length depends on t."
        fix = "Reduce it, or give a window of fixed length: x.window(lo, hi, fill=v)."
        raise UnsupportedSliceOp(located(fact, where=J.here(), fix=fix))
    effect_p.bind(*leaves, calls=fn, structure=structure, every=every)


def is_effect(equation: Any) -> bool:
    """Whether an equation of a program is what :func:`effect` asked for, and no other that has an effect."""
    return equation.has_effects and SCOPE in equation.scope


_FIX = "Give one argument of fn for each of its own: rlfx.effect(fn, x, y)."


def inside(what: str, where: str) -> ProgramError:
    """What is raised for an effect inside of something else than the program's body."""
    return ProgramError(
        located(
            f"rlfx.effect stands inside of {what}: how often that runs is not for the program to say.",
            where=where,
            fix="Call it in the body of the program, with every= for some timesteps, and let fn decide by its arguments.",
        )
    )


def _refuse(what: str) -> Callable[..., Any]:
    def rule(*_: Any, **__: Any) -> Any:
        raise inside(what, J.here())

    return rule


J.define_jvp(effect_p, _refuse("what jax.grad differentiates"))
J.define_batching(effect_p, _refuse("what jax.vmap maps"))
