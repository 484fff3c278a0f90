"""What placement needs of jaxprs: a flat one, the scopes and lines of its equations, their primitives."""

from __future__ import annotations

import functools
from typing import Any

import jax

from rlfx import _jaxpr as J
from rlfx._jaxpr import JaxprEqn, Var, source_info_util
from rlfx._jaxpr import primitives as p

dot_general_p = p.dot_general_p
broadcast_in_dim_p = p.broadcast_in_dim_p
transpose_p = p.transpose_p
reshape_p = p.reshape_p
squeeze_p = p.squeeze_p
slice_p = p.slice_p
concatenate_p = p.concatenate_p
iota_p = p.iota_p
CASTS = frozenset({p.convert_element_type_p, p.stop_gradient_p, p.copy_p, p.name_p})


def flatten(closed: Any, *, calls: bool = False) -> tuple[Any, list[Any]]:
    """The same computation with every call (jit, remat, custom derivatives) inlined, and its constants.

    Inlined equations keep their own source line, or take their caller's; their name stack gains the caller's, and if
    ``calls`` the name of the jitted function.
    """
    fresh: list[JaxprEqn] = []
    constants: dict[Var, Any] = {}

    def constant(value: Any) -> Var:
        var = Var(jax.typeof(value))
        constants[var] = value
        return var

    def visit(eqn: JaxprEqn, inputs: list[Any], within: tuple) -> list[Var]:
        outvars = [Var(v.aval) for v in eqn.outvars]
        info = functools.reduce(lambda caller, e: _within(_info(e, calls), caller), (*within, eqn), None)
        fresh.append(eqn.replace(invars=inputs, outvars=outvars, source_info=info))
        return outvars

    top = closed.jaxpr
    consts = [constant(c) for c in closed.consts]
    outs = J.walk(top, consts, list(top.invars), visit, literal=lambda atom: atom, constant=constant)
    flat = top.replace(constvars=list(constants), eqns=fresh, outvars=outs, debug_info=top.debug_info)
    flat = J.close_with(flat, constants.values())  # from jax 0.11 on, variables without their values are inputs
    return flat.jaxpr, list(flat.consts)


def _info(eqn: JaxprEqn, calls: bool) -> Any:
    """Source information of an equation; of a call, with the name of what it calls."""
    info = eqn.source_info
    named = calls and eqn.primitive in J.INLINED and "name" in eqn.params
    return info.replace(name_stack=info.name_stack.extend(eqn.params["name"])) if named else info


def _within(info: Any, caller: Any) -> Any:
    """Source information of an equation inlined at ``caller``."""
    if caller is None:
        return info
    traceback = info.traceback if source_info_util.summarize(info) else caller.traceback
    return info.replace(name_stack=caller.name_stack + info.name_stack, traceback=traceback)


def scopes(eqn: JaxprEqn) -> tuple[str, ...]:
    """The names of the ``jax.named_scope`` contexts around an equation, outermost first."""
    return tuple(part for part in str(eqn.source_info.name_stack).split("/") if part)


def source(eqn: JaxprEqn) -> str:
    """The user's line that an equation comes from, as ``file.py:12:8 (function)``; empty inside jax's own functions."""
    return source_info_util.summarize(eqn.source_info)


def evaluate(eqn: JaxprEqn, *operands: Any) -> list[Any]:
    """Run one equation on values."""
    return J.bind(eqn.primitive, eqn.params, *operands)
