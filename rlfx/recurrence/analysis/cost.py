"""What an equation costs: floating-point operations and bytes, at one point of the domain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlfx import _jaxpr as J
from rlfx._axes import REDUCTIONS, nest_of
from rlfx.recurrence.ir.program import Equation, Program, Var
from rlfx.recurrence.language.domain import Domain, widest

#: Products, which take most of the time of networks.
PRODUCTS = frozenset({J.primitive("dot_general"), J.primitive("conv_general_dilated")})

_PRODUCTS_AND_LOOPS = PRODUCTS | {J.SCAN, J.WHILE}

#: The domain of a jaxpr without a time of its own.
_ONE = Domain(1)

#: A hash of the counter-based generator, per 32-bit word.
_RANDOM_FLOPS = 100.0


def _size(shape: Any, domain: Domain) -> int:
    return math.prod(widest(domain, d) for d in shape)


def bytes_of(var: Any, domain: Domain) -> int:
    """Bytes of a value at one point; an axis that depends on t counts at its widest, as its array is allocated."""
    width = 8 if J.short_dtype(var.dtype) == "key" else np.dtype(var.dtype).itemsize
    return _size(var.shape, domain) * width


def points(dims: frozenset, domain: Domain, batch: int | None = None) -> int:
    """How many points a value has that varies with ``dims``; ``batch``: environments, if not those of the domain."""
    return (domain.length if "t" in dims else 1) * ((batch or domain.batch or 1) if "b" in dims else 1)


def bytes_in_all(var: Any, program: Program, batch: int | None = None) -> int:
    """Bytes of a value at all its points; ``batch``: environments, if not those of the program."""
    return bytes_of(var, program.domain) * points(program.dims_of(var), program.domain, batch)


def multiplies(body: Iterable[Equation]) -> bool:
    """Whether there is more than elementwise operations: products, or loops; or products whose values are known, and whose
    derivatives are not (``rewrite/caching.py``): a function of a matrix that has nothing in it."""
    return any(_knows_products(e) or J.contains(e.op, dict(e.params), _PRODUCTS_AND_LOOPS) for e in body)


def _knows_products(e: Equation) -> bool:
    matrix = any(isinstance(v, Var) and len(v.shape) > 1 for v in e.inputs)
    return e.op is J.CUSTOM_JVP and matrix and not J.body_of(e.params["call_jaxpr"])[0].eqns


def multiplies_weights(body: Iterable[Equation], program: Program) -> bool:
    """Whether there are products with what environments share, which have a row for each of them, or loops."""

    def own(e: Equation) -> bool:
        return e.op in PRODUCTS and all("b" in program.dims_of(v) for v in e.inputs if isinstance(v, Var))

    return multiplies(e for e in body if not own(e))


def flops_of(equation: Equation, domain: Domain) -> float:
    """Floating-point operations of an equation at one point."""
    return _flops(
        equation.op,
        equation.params,
        [v.shape for v in equation.inputs],
        [v.shape for v in equation.outputs],
        domain,
    )


def flops_of_jaxpr_equation(equation: Any) -> float:
    """Floating-point operations of an equation of a jaxpr."""
    shapes = [_shape(v) for v in equation.invars], [_shape(v) for v in equation.outvars]
    return _flops(equation.primitive, equation.params, *shapes, _ONE)


def _flops(op: Any, params: Mapping, ins: list, outs: list, domain: Domain) -> float:
    out = float(sum(_size(s, domain) for s in outs))
    if op in PRODUCTS:
        loops = nest_of(op, params, ins, outs)
        return 2.0 * _size(loops.sizes, domain) if loops else 2.0 * out
    if op in J.RANDOM:
        return _RANDOM_FLOPS * max(out, 1.0)
    bodies = J.sub_jaxprs(dict(params))
    if bodies:
        trips = params.get("length", 1)
        inner = sum(
            _flops(e.primitive, e.params, [_shape(v) for v in e.invars], [_shape(v) for v in e.outvars], domain)
            for body, _ in bodies
            for e in body.eqns
        )
        return inner * widest(domain, trips)
    return max(out, float(sum(_size(s, domain) for s in ins)) if op in REDUCTIONS else 0.0)


#: Elementwise operations that XLA makes one of.
FUSED = 8


def starts_of(op: Any, params: Mapping, domain: Domain) -> float:
    """About how many operations an equation, or those of its bodies, start at one timestep; a loop on data counts once."""
    if op in PRODUCTS:
        return 1.0
    bodies = J.sub_jaxprs(dict(params))
    if not bodies:
        return 1.0 / FUSED
    trips = params.get("length", 1)
    inner = sum(starts_of(e.primitive, e.params, domain) for body, _ in bodies for e in body.eqns)
    return inner * widest(domain, trips)


def is_counted_loop(equation: Equation) -> bool:
    """Whether it is a loop that takes as long for any data: a ``scan`` without branches, which many rows would take all of."""
    return equation.op is J.SCAN and not _branches(dict(equation.params))


def _branches(params: dict) -> bool:
    return any(
        e.primitive in (J.COND, J.WHILE) or _branches(dict(e.params))
        for body, _ in J.sub_jaxprs(params)
        for e in body.eqns
    )


def bytes_inside(equation: Equation, domain: Domain) -> int:
    """Bytes at one point of all that one iteration of a loop computes."""
    return sum(
        bytes_of(v.aval, domain)
        for body, _ in J.sub_jaxprs(dict(equation.params))
        for e in body.eqns
        for v in e.outvars
    )


def bytes_of_residuals(equation: Equation, domain: Domain) -> int:
    """About how many bytes at one point the derivative of a loop needs of all its iterations.

    Half of what they compute: the rest is fused, or linear. Of a loop that computes again, its states.
    """
    if equation.op is not J.SCAN:
        return 0
    params = equation.params
    body = params["jaxpr"].jaxpr
    again = any(e.primitive is J.REMAT for e in body.eqns)
    values = body.outvars[: J.scan_counts(params)[1]] if again else [v for e in body.eqns for v in e.outvars]
    floats = [v.aval for v in values if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    each = sum(bytes_of(aval, domain) for aval in floats)
    return (each if again else each // 2) * int(widest(domain, params["length"]))


def _shape(atom: Any) -> tuple:
    return getattr(atom.aval, "shape", ())


def show_bytes(n: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.4g} {unit}"
        n /= 1024
    return f"{n:.4g} GiB"
