"""A jaxpr evaluated equation by equation, some of them by a rule of the caller's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlfx import _jaxpr as J


def evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], rule: Callable[[Any, list], Any]) -> list[Any]:
    """The outputs of a jaxpr; scopes and source lines stay those of its equations.

    Args:
      jaxpr, consts, args: the jaxpr, the values of its constants, and of its inputs.
      rule: ``rule(equation, operands)`` returns the outputs of an equation, or None: evaluate it as it is.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> closed = jax.make_jaxpr(lambda x: jnp.sin(x) + 1.0)(2.0)
      >>> halved = lambda eqn, operands: [operands[0] / 2] if eqn.primitive.name == "sin" else None
      >>> evaluate(closed.jaxpr, closed.consts, [2.0], halved)
      [Array(2., dtype=float32, weak_type=True)]
    """
    env: dict = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if J.is_literal(atom) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        names = J.source_info_util.current_name_stack() + eqn.source_info.name_stack
        with J.source_info_util.user_context(eqn.source_info.traceback, name_stack=names):
            outs = rule(eqn, operands)
            if outs is None:
                outs = J.bind(eqn.primitive, eqn.params, *operands)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]
