"""Derivatives that a function has been given, and those of equations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core, linear_util
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from rlfx._jaxpr.jaxprs import without_dead_code
from rlfx._jaxpr.kinds import CUSTOM_JVP, CUSTOM_VJP, is_inexact
from rlfx._jaxpr.rules import bind


def has_own_derivative(equation: Any) -> bool:
    """Whether an equation is a call with a derivative of its own, of anything that may have one."""
    moves = all(any(is_inexact(v.aval) for v in side) for side in (equation.invars, equation.outvars))
    return equation.primitive in (CUSTOM_JVP, CUSTOM_VJP) and moves


def closure_count(params: dict) -> int:
    """How many of a custom derivative's first operands are values that its function closes over."""
    return params.get("num_consts", 0)


def backward_of(equation: Any) -> tuple[Any, list]:
    """The derivative of an equation, as ``(jaxpr, consts)`` of ``(*operands, *cotangents) -> cotangents``.

    Of what is inexact alone: nothing else has one.
    """
    n = len(equation.invars)
    moves = [i for i, v in enumerate(equation.invars) if is_inexact(v.aval)]
    kept = [i for i, v in enumerate(equation.outvars) if is_inexact(v.aval)]

    def backward(*args):
        operands, cotangents = args[:n], args[n:]

        def call(*moving):
            given = dict(zip(moves, moving, strict=True))
            outs = bind(equation.primitive, equation.params, *(given.get(i, x) for i, x in enumerate(operands)))
            return [outs[i] for i in kept]

        return jax.vjp(call, *(operands[i] for i in moves))[1](list(cotangents))

    avals = [v.aval for v in (*equation.invars, *(equation.outvars[i] for i in kept))]
    traced = jax.make_jaxpr(backward)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    traced = without_dead_code(traced)
    return traced.jaxpr, list(traced.consts)


def _varies_with_batch(args, dims):
    x, dim = args[0], dims[0]
    if dim is None:
        size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
        x, dim = jnp.broadcast_to(x, (size, *x.shape)), 0
    return varies_with.bind(x, *args[1:]), dim  # further axes: those of maps around a loop or checkpoint come later


#: ``varies_with(x, *others)`` is x; under ``jax.vmap`` it varies as soon as one of the others does.
varies_with = Primitive("varies_with")
varies_with.def_impl(lambda x, *_: x)
varies_with.def_abstract_eval(lambda x, *_: x)
mlir.register_lowering(varies_with, lambda _, x, *__: [x])
batching.primitive_batchers[varies_with] = _varies_with_batch
ad.primitive_jvps[varies_with] = lambda primals, tangents: (varies_with.bind(*primals), tangents[0])


def with_own_cotangents(op: Any, params: dict) -> dict:
    """An equation's parameters, so that outputs of a ``custom_vjp`` vary with all its operands under ``jax.vmap``.

    Otherwise the cotangents of an output that is the same at all points would be added up before the rule is called, and it
    would be called with their sum at each of the points that another operand has. What needs no change is returned as it is.
    """
    changed = {k: _own_cotangents(v) for k, v in params.items()}
    if op is CUSTOM_VJP:
        body, thunk = changed["call_jaxpr"], changed["fwd_jaxpr_thunk"]
        count = len(body.jaxpr.outvars)

        def forward(*zeros):
            jaxpr, consts = thunk.call_wrapped(*zeros)
            return _outputs_vary(_own_cotangents(jaxpr), count), consts

        changed["call_jaxpr"] = body.replace(jaxpr=_outputs_vary(body.jaxpr, count))
        changed["fwd_jaxpr_thunk"] = linear_util.wrap_init(forward, debug_info=thunk.debug_info)
    return params if all(changed[k] is v for k, v in params.items()) else changed


def _own_cotangents(value: Any) -> Any:
    """A parameter of an equation: the same object if no ``custom_vjp`` is in it."""
    if isinstance(value, (tuple, list)):
        items = [_own_cotangents(v) for v in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    if isinstance(value, core.ClosedJaxpr) and value.jaxpr is not value:  # from jax 0.11 on they are one
        jaxpr = _own_cotangents(value.jaxpr)
        return value if jaxpr is value.jaxpr else value.replace(jaxpr=jaxpr)
    if not isinstance(value, core.Jaxpr):
        return value
    params = [with_own_cotangents(e.primitive, e.params) for e in value.eqns]
    if all(p is e.params for p, e in zip(params, value.eqns, strict=True)):
        return value
    return value.replace(eqns=[e.replace(params=p) for p, e in zip(params, value.eqns, strict=True)])


def _outputs_vary(jaxpr: Any, count: int) -> Any:
    """The jaxpr whose last ``count`` outputs vary with all of its inputs under ``jax.vmap``."""
    kept, outs = jaxpr.outvars[: len(jaxpr.outvars) - count], jaxpr.outvars[len(jaxpr.outvars) - count :]
    tied = [core.Var(o.aval) for o in outs]
    eqns = [
        core.new_jaxpr_eqn([o, *jaxpr.invars], [v], varies_with, {}, core.no_effects)
        for o, v in zip(outs, tied, strict=True)
    ]
    return jaxpr.replace(eqns=[*jaxpr.eqns, *eqns], outvars=[*kept, *tied])
