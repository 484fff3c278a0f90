"""What placement needs of jax's own primitives: a flat jaxpr, and tables of primitives by class (never by name)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlfx import _jaxpr as J
from rlfx._jaxpr import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, source_info_util
from rlfx._jaxpr import primitives as p

# out[i] depends on operand[i] alone; operands have the output's shape or are scalars.
ELEMENTWISE = frozenset(
    {
        p.abs_p, p.acos_p, p.acosh_p, p.add_p, p.and_p, p.asin_p, p.asinh_p, p.atan2_p, p.atan_p, p.atanh_p,
        p.cbrt_p, p.ceil_p, p.clamp_p, p.cos_p, p.cosh_p, p.digamma_p, p.div_p, p.eq_p, p.erf_inv_p, p.erf_p, p.erfc_p,
        p.exp2_p, p.exp_p, p.expm1_p, p.floor_p, p.ge_p, p.gt_p, p.integer_pow_p, p.is_finite_p, p.le_p, p.lgamma_p,
        p.log1p_p, p.log_p, p.logistic_p, p.lt_p, p.max_p, p.min_p, p.mul_p, p.ne_p, p.neg_p, p.nextafter_p, p.not_p,
        p.or_p, p.pow_p, p.rem_p, p.round_p, p.rsqrt_p, p.select_n_p, p.shift_left_p, p.shift_right_arithmetic_p,
        p.shift_right_logical_p, p.sign_p, p.sin_p, p.sinh_p, p.sqrt_p, p.square_p, p.sub_p, p.tan_p, p.tanh_p, p.xor_p,
    }
)  # fmt: skip

# Reductions over ``params["axes"]``, with the monoid that combines the partial results of a split reduced axis.
REDUCTIONS: Mapping[Any, Callable[[jax.Array, jax.Array], jax.Array]] = {
    p.reduce_sum_p: jnp.add,
    p.reduce_max_p: jnp.maximum,
    p.reduce_min_p: jnp.minimum,
    p.reduce_prod_p: jnp.multiply,
    p.reduce_and_p: jnp.bitwise_and,
    p.reduce_or_p: jnp.bitwise_or,
}

# Independent along every axis but those that the parameter names.
ALONG: Mapping[Any, str] = {
    p.cumsum_p: "axis",
    p.cumprod_p: "axis",
    p.cummax_p: "axis",
    p.cummin_p: "axis",
    p.cumlogsumexp_p: "axis",
    p.argmax_p: "axes",
    p.argmin_p: "axes",
}

_CALLS = {
    p.jit_p: "jaxpr",
    p.closed_call_p: "call_jaxpr",
    p.remat_p: "jaxpr",
    p.custom_jvp_call_p: "call_jaxpr",
    p.custom_vjp_call_p: "call_jaxpr",
}

dot_general_p = p.dot_general_p
broadcast_in_dim_p = p.broadcast_in_dim_p
transpose_p = p.transpose_p
reshape_p = p.reshape_p
squeeze_p = p.squeeze_p
slice_p = p.slice_p
concatenate_p = p.concatenate_p
iota_p = p.iota_p
CASTS = frozenset({p.convert_element_type_p, p.stop_gradient_p, p.copy_p, p.name_p})


def flatten(closed: Any) -> tuple[Any, list[Any]]:
    """The same computation with every call (jit, remat, custom derivatives) inlined, and its constants.

    Inlined equations keep their own source line, or take their caller's; their name stack gains the caller's.
    """
    fresh: list[JaxprEqn] = []
    constants: dict[Var, Any] = {}

    def inline(jaxpr: Jaxpr, consts: list[Any], args: list[Any], caller: Any) -> list[Any]:
        env: dict[Var, Any] = dict(zip(jaxpr.invars, args, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            env[var] = var
            constants[var] = const

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            info = _within(eqn.source_info, caller)
            if eqn.primitive in _CALLS:
                inner = eqn.params[_CALLS[eqn.primitive]]
                body, body_consts = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, [])
                outs = inline(body, list(body_consts), inputs, info)
                env.update(zip(eqn.outvars, outs, strict=True))
                continue
            outvars = [Var(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outvars, strict=True))
            fresh.append(eqn.replace(invars=inputs, outvars=outvars, source_info=info))
        return [read(v) for v in jaxpr.outvars]

    top = closed.jaxpr
    outs = inline(top, list(closed.consts), list(top.invars), None)
    flat = top.replace(constvars=list(constants), eqns=fresh, outvars=outs, debug_info=top.debug_info)
    return flat, list(constants.values())


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
