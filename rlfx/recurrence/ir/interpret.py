"""A jaxpr evaluated equation by equation, some of them by a rule of the caller's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from rlfx import _jaxpr as J


def evaluate(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    rule: Callable[[Any, list], Any] = lambda eqn, operands: None,
    inlines: Callable[[Any], bool] = lambda eqn: False,
) -> list[Any]:
    """The outputs of a jaxpr; scopes and source lines stay those of its equations.

    Args:
      jaxpr, consts, args: the jaxpr (or what has its names and equations), the values of its constants, and of its inputs.
      rule: ``rule(equation, operands)`` returns the outputs of an equation, or None: evaluate it as it is.
      inlines: the calls of which the rule gets the equations, in their place.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> closed = jax.make_jaxpr(lambda x: jnp.sin(x) + 1.0)(2.0)
      >>> halved = lambda eqn, operands: [operands[0] / 2] if eqn.primitive.name == "sin" else None
      >>> evaluate(closed.jaxpr, closed.consts, [2.0], halved)
      [Array(2., dtype=float32, weak_type=True)]
    """

    def visit(eqn: Any, operands: list, within: tuple) -> Any:
        names = J.source_info_util.current_name_stack()
        for e in (*within, eqn):
            names = names + e.source_info.name_stack
        with J.source_info_util.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
            outs = rule(eqn, operands)
            return J.bind_again(eqn, *operands) if outs is None else outs

    return J.walk(jaxpr, consts, args, visit, inlines=inlines)


def scanned(params: Mapping[str, Any], body: Any, operands: Sequence[Any], rule: Callable[[Any, list], Any]) -> list[Any]:
    """The outputs of a ``lax.scan`` with its parameters and operands, whose body's equations are evaluated by a rule.

    Args:
      body: its closed jaxpr, or one that means the same.
      rule: as for :func:`evaluate`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> loop = lambda x: jax.lax.scan(lambda c, y: (jnp.sin(c) + y, c), x, jnp.ones(3))
      >>> (eqn,) = [e for e in jax.make_jaxpr(loop)(0.0).eqns if e.primitive.name == "scan"]
      >>> halved = lambda eqn, operands: [operands[0] / 2] if eqn.primitive.name == "sin" else None
      >>> last, all = scanned(eqn.params, eqn.params["jaxpr"], [jnp.float32(0.0), jnp.ones(3)], halved)
      >>> float(last)
      1.75
    """
    consts, carried = J.scan_counts(dict(params))
    same, init, xs = operands[:consts], operands[consts : consts + carried], operands[consts + carried :]

    def step(carry: tuple, x: tuple) -> tuple:
        out = evaluate(body.jaxpr, body.consts, (*same, *carry, *x), rule)
        return tuple(out[:carried]), tuple(out[carried:])

    how = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(step, tuple(init), tuple(xs), **how)
    return [*carry, *ys]


def has_only_a_name(eqn: Any) -> bool:
    """Whether an equation is a call that means nothing but its body, and is not kept as one (``J.computed_once``)."""
    return eqn.primitive in J.INLINED and not J.stays_a_call(eqn)


def rewritten(fn: Callable, rules: Mapping[Any, Callable[[Any, list], Any]]) -> Callable:
    """``fn`` with the equations of some primitives by other rules, those inside inlined calls too; without rules ``fn``.

    Args:
      rules: primitive -> ``rule(equation, operands)``, as for :func:`evaluate`.

    Example:
      >>> import jax.numpy as jnp
      >>> from rlfx import _jaxpr as J
      >>> float(rewritten(lambda x: jnp.sin(x) + 1.0, {J.primitive("sin"): lambda eqn, operands: operands})(2.0))
      3.0
    """
    return _by(rules, fn) if rules else fn


def rewritten_body(body: Any, rules: Mapping[Any, Callable[[Any, list], Any]]) -> Any:
    """As :func:`rewritten`, of a closed jaxpr."""
    return jax.make_jaxpr(rewritten(J.jaxpr_as_fun(body.jaxpr, body.consts), rules))(*body.in_avals)


def inlined(fn: Callable) -> Callable:
    """``fn`` without calls that only have a name: their bodies are in their place."""
    return _by({}, fn)


def inlined_body(body: Any) -> Any:
    """As :func:`inlined`, of a closed jaxpr; without such calls it is ``body``."""
    if not any(map(has_only_a_name, body.jaxpr.eqns)):
        return body
    return jax.make_jaxpr(inlined(J.jaxpr_as_fun(body.jaxpr, body.consts)))(*body.in_avals)


def _by(rules: Mapping[Any, Callable[[Any, list], Any]], fn: Callable) -> Callable:
    def rule(eqn: Any, operands: list) -> Any:
        return rules[eqn.primitive](eqn, operands) if eqn.primitive in rules else None

    def run(*args: Any) -> Any:
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        results = evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), rule, has_only_a_name)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return run
