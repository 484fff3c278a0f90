"""Loops and branches that call programs, run on values: an interpreted program asks how many timesteps there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx.recurrence.ir.interpret import evaluate

_CALLS = frozenset({J.DEFERRED})


def run(op: Any, params: Mapping, operands: Sequence) -> list:
    """The outputs of an equation. A loop or branch that calls an interpreted program goes through Python; others are jax's.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> twice = J.deferred(lambda x: [2.0 * x] if float(x) else [x], [jnp.float32(0.0)])
      >>> loop = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: twice(x)[0], x))(jnp.float32(1.0)).eqns[-1]
      >>> run(loop.primitive, loop.params, [0, jnp.float32(1.0)])[-1]
      Array(8., dtype=float32)
    """
    rule = _RULES.get(op)
    if rule is None or not J.contains(op, dict(params), _CALLS):
        return J.bind(op, dict(params), *(x if hasattr(x, "shape") else jnp.asarray(x) for x in operands))
    return rule(params, [x if hasattr(x, "shape") else jnp.asarray(x) for x in operands])


def body(jaxpr: Any, consts: Sequence) -> Callable:
    """A jaxpr as a function of its inputs, whose equations are run so."""
    return lambda *args: evaluate(jaxpr, consts, args, lambda e, operands: run(e.primitive, e.params, operands))


def _call(params: Mapping, operands: Sequence) -> list:
    return body(*J.sub_jaxprs(dict(params))[0])(*operands)


def _cond(params: Mapping, operands: Sequence) -> list:
    return body(*J.body_of(params["branches"][int(operands[0])]))(*operands[1:])


def _while(params: Mapping, operands: Sequence) -> list:
    n, m = params["cond_nconsts"], params["body_nconsts"]
    test, step = (body(*J.body_of(params[name])) for name in ("cond_jaxpr", "body_jaxpr"))
    for_test, for_step, carry = operands[:n], operands[n : n + m], list(operands[n + m :])
    while bool(test(*for_test, *carry)[0]):
        carry = step(*for_step, *carry)
    return carry


def _scan(params: Mapping, operands: Sequence) -> list:
    n, m = J.scan_counts(dict(params))
    step = body(*J.body_of(params["jaxpr"]))
    consts, carry, xs = operands[:n], list(operands[n : n + m]), operands[n + m :]
    length, rows = params["length"], []
    for k in reversed(range(length)) if params["reverse"] else range(length):
        outs = step(*consts, *carry, *(x[k] for x in xs))
        carry = outs[:m]
        rows.append(outs[m:])
    rows = rows[::-1] if params["reverse"] else rows
    if not rows:
        return [
            *carry,
            *(jnp.zeros((0, *v.aval.shape), v.aval.dtype) for v in J.body_of(params["jaxpr"])[0].outvars[m:]),
        ]
    return [*carry, *(jnp.stack(each) for each in zip(*rows, strict=True))]


_RULES = {
    J.SCAN: _scan,
    J.WHILE: _while,
    J.COND: _cond,
    J.REMAT: _call,
    **dict.fromkeys(J.INLINED, _call),
}
