"""The only module that imports private jax: jaxprs, primitives, symbolic dimensions, source lines.

Everything the library needs from ``jax.extend`` and ``jax._src`` has a name here, so that a change in jax is met in one
place. Tested on the oldest and the newest supported jax.
"""

from __future__ import annotations

import dataclasses
import functools
import linecache
import os
import pathlib
import re
import socket
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import (
    callback,
    checkify,
    config,
    core,
    custom_batching,
    custom_derivatives,
    debugging,
    dispatch,
    dtypes,
    linear_util,
    profiler,
    shard_map,
    source_info_util,
    xla_bridge,
)
from jax._src.export import shape_poly
from jax._src.interpreters import ad as private_ad
from jax._src.interpreters import partial_eval, pxla
from jax._src.lax import lax
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax._src.random import prng
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, primitives
from jax.extend.random import define_prng_impl
from jax.interpreters import ad, batching, mlir

#: Private names that other modules build on; they import them from here.
__all__ = [
    "ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "Primitive", "Var",
    "define_prng_impl", "partial_eval", "primitives", "prng", "pxla", "source_info_util",
]  # fmt: skip

# The user's source line is the first frame outside the library.
source_info_util.register_exclusion(os.path.dirname(os.path.abspath(__file__)))

ShapedArray = core.ShapedArray
Tracer = core.Tracer
InconclusiveDimension = (shape_poly.InconclusiveDimensionOperation, core.InconclusiveDimensionOperation)
UnexpectedTracerError = jax.errors.UnexpectedTracerError


# -- primitives ------------------------------------------------------------------------------------------------------


def new_primitive(
    name: str,
    abstract_eval: Callable,
    *,
    multiple_results: bool = False,
    outside: Callable[[], Exception] | None = None,
) -> Primitive:
    """A primitive that has meaning while a program is traced, and raises ``outside()`` when it is executed elsewhere."""
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_abstract_eval(abstract_eval)
    if outside is not None:

        def refuse(*_args, **_params):
            raise outside()

        primitive.def_impl(refuse)
        mlir.register_lowering(primitive, refuse)
    return primitive


def define_batching(primitive: Primitive, rule: Callable) -> None:
    """``rule(args, dims, **params) -> (outs, out_dims)``."""
    batching.primitive_batchers[primitive] = rule


def define_jvp(primitive: Primitive, rule: Callable) -> None:
    """``rule(primals, tangents, **params) -> (primals_out, tangents_out)``."""
    ad.primitive_jvps[primitive] = rule


#: What a rule for linearization returns after its residuals, from jax 0.11 on.
NO_STRUCTURED_RESIDUALS = (None,) if "structured_residuals" in private_ad.LinearizeTrace.__annotations__ else ()


class Staged(Primitive):
    """A call of ``params["jaxpr"]``, which ``jax.vmap`` replaces.

    ``again(args, (size, varies, name), **params)`` gives the parameters under one more axis, which is the leading one of
    those ``args`` that vary, and of all results. Its derivative is that of the body, or of what ``differentiable(**params)``
    gives: a function of the same arguments. Results that nobody uses are dead code: ``params["used"]`` has the others.
    """

    def __init__(self, name: str, again: Callable, differentiable: Callable | None = None):
        super().__init__(name)
        self.multiple_results = True

        def run(*args, jaxpr, **_):
            return core.jaxpr_as_fun(jaxpr)(*args)

        def moved(primals, moving, *, used, **params):
            """The call as a function of the arguments that move alone."""
            fn = functools.partial(run, used=used, **params) if differentiable is None else differentiable(**params)

            def of(*new):
                outs = fn(*(dict(enumerate(primals)) | dict(zip(moving, new, strict=True))).values())
                return outs if differentiable is None else [out for out, u in zip(outs, used, strict=True) if u]

            return of, [primals[i] for i in moving]

        def jvp(primals, tangents, **params):
            moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]
            of, new = moved(primals, moving, **params)
            outs, dots = jax.jvp(of, new, [tangents[i] for i in moving])
            return outs, without_float0(outs, dots)

        def linearize(_, moves, *primals, **params):
            # jax's own way from a jvp forgets the names of scopes.
            moving = [i for i, m in enumerate(moves) if m]
            of, new = moved(primals, moving, **params)
            outs, pushed = jax.linearize(of, *new)

            def linear(*given):
                tangents = given[-len(moves) :]  # after residuals, structured or not
                return without_float0(outs, pushed(*(ad.instantiate_zeros(tangents[i]) for i in moving)))

            moved_out = [zero_tangent_like(o).aval.dtype != dtypes.float0 for o in outs]
            return outs, moved_out, (), *NO_STRUCTURED_RESIDUALS, linear

        def without_float0(outs, dots):
            return [zero_tangent_like(o) if d.dtype == dtypes.float0 else d for o, d in zip(outs, dots, strict=True)]

        def batch(axis, args, dims, *, used, **params):
            varies = tuple(d is not None for d in dims)
            if not any(varies):
                outs = self.bind(*args, used=used, **params)
                return outs, [None] * len(outs)
            args = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
            name = None if axis.name is core.no_axis_name else axis.name
            params = again(args, (axis.size, varies, name), **params)
            outs = self.bind(*args, used=used, **params | {"jaxpr": without_dead_code(params["jaxpr"], used)})
            return outs, [0] * len(outs)

        def dce(wanted, eqn):
            if not any(wanted) and not eqn.effects:
                return [False] * len(eqn.invars), None
            jaxpr, left = without_dead_code(eqn.params["jaxpr"], wanted), iter(wanted)
            params = eqn.params | {"jaxpr": jaxpr, "used": tuple(u and next(left) for u in eqn.params["used"])}
            outvars = [v for v, u in zip(eqn.outvars, wanted, strict=True) if u]
            return [True] * len(eqn.invars), eqn.replace(outvars=outvars, params=params, effects=jaxpr.effects)

        def checked(*given, jaxpr, **_):
            n = len(given) - len(jaxpr.in_avals)
            *context, error, enabled = given[:n]  # from jax 0.11 on, with a context
            return checkify.checkify_jaxpr(*context, jaxpr, enabled, error, *given[n:])

        self.def_impl(run)
        self.def_effectful_abstract_eval(lambda *_, jaxpr, **__: (jaxpr.out_avals, jaxpr.effects))
        mlir.register_lowering(self, mlir.lower_fun(run, multiple_results=True))
        ad.primitive_jvps[self] = jvp
        private_ad.primitive_linearizations[self] = linearize
        batching.fancy_primitive_batchers[self] = batch
        partial_eval.dce_rules[self] = dce
        checkify.error_checks[self] = checked

    def call(self, *args: Any, jaxpr: Any, **params: Any) -> list:
        """Bind it, with all results."""
        jaxpr = without_dead_code(jaxpr)
        return self.bind(*args, jaxpr=jaxpr, used=(True,) * len(jaxpr.out_avals), **params)


def is_zero_tangent(tangent: Any) -> bool:
    """Whether a tangent in a JVP rule is a symbolic zero."""
    return isinstance(tangent, ad.Zero)


def zero_tangent_like(primal: Any) -> Any:
    """The symbolic zero tangent of a value."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def bind_params(primitive: Primitive, params: dict) -> tuple[list, dict]:
    """The ``(subfuns, params)`` with which an equation is bound again.

    ``get_bind_params`` may return the equation's own dict: it is copied, since changing it corrupts jax's cached jaxpr.
    """
    got = primitive.get_bind_params(dict(params))
    if isinstance(got, tuple):
        subfuns, bound = got
        return list(subfuns), dict(bound)
    return [], dict(got)


def bind(primitive: Primitive, params: dict, *args: Any) -> list:
    """Evaluate one equation on ``args``; always a list of outputs."""
    subfuns, bound = bind_params(primitive, params)
    outs = primitive.bind(*subfuns, *args, **bound)
    return list(outs) if primitive.multiple_results else [outs]


def types_of(primitive: Primitive, params: dict, avals: Sequence) -> list | str | None:
    """The types of an equation's outputs; as text what is wrong with its inputs; None where the primitive does not say."""
    try:
        outs, _ = primitive.abstract_eval(*avals, **params)
    except (TypeError, ValueError) as error:
        return str(error).splitlines()[0]
    except NotImplementedError:
        return None
    return list(outs) if primitive.multiple_results else [outs]


# -- jaxprs ----------------------------------------------------------------------------------------------------------


def make_jaxpr(fn: Callable, *, axes: Sequence[tuple[str, int]] = ()) -> Callable:
    """``jax.make_jaxpr`` of a flat function, under named axes. Returns ``(jaxpr, consts)`` when called."""

    def traced(*args):
        with jax.disable_jit(
            False
        ):  # symbolic lengths need staged calls; a user who debugs eagerly still gets a program
            closed = jax.make_jaxpr(fn, axis_env=list(axes))(*args)
        return closed.jaxpr, list(closed.consts)

    return traced


def axis_size(name: str) -> int | None:
    """The size of a named axis of the trace in progress, or None when there is no such axis."""
    try:
        return jax.lax.axis_size(name)
    except NameError:
        return None


def weakly(value: Any) -> Callable[[], Any]:
    """A weak reference, or for what can't have one a function that gives the value."""
    return weakref.ref(value) if isinstance(value, Tracer) else lambda: value


def is_literal(atom: Any) -> bool:
    """Whether a jaxpr's atom is a literal."""
    return isinstance(atom, core.Literal)


def closed(value: Any) -> tuple[Any, list] | None:
    """``(jaxpr, consts)`` of a jaxpr-valued parameter, or None if it is none."""
    if isinstance(value, core.ClosedJaxpr):
        return value.jaxpr, list(value.consts)
    if isinstance(value, core.Jaxpr):
        return value, []
    return None


def body_of(value: Any) -> tuple[Any, list]:
    """``(jaxpr, consts)`` of a parameter that is a jaxpr."""
    pair = closed(value)
    assert pair is not None, f"not a jaxpr: {value!r}"
    return pair


def sub_jaxprs(params: dict) -> list[tuple[Any, list]]:
    """Every jaxpr among an equation's parameters, tuples of jaxprs included."""
    found = []
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            pair = closed(item)
            if pair is not None:
                found.append(pair)
    return found


def close_with(jaxpr: Any, consts: Sequence) -> Any:
    """The closed jaxpr of ``jaxpr``."""
    return core.ClosedJaxpr(jaxpr, list(consts))


def lift_consts(jaxpr: Any) -> Any:
    """The closed jaxpr in which the constants of ``jaxpr`` are its first inputs."""
    return core.ClosedJaxpr(partial_eval.convert_constvars_jaxpr(jaxpr), ())


def without_dead_code(jaxpr: Any, used: Sequence[bool] | None = None) -> Any:
    """The closed jaxpr without the equations that no output needs, as XLA will see it; with those outputs that are used."""
    outs = [True] * len(jaxpr.jaxpr.outvars) if used is None else list(used)
    left, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, outs, instantiate=True)
    return core.ClosedJaxpr(left, jaxpr.consts)


def jaxpr_as_fun(jaxpr: Any, consts: Sequence) -> Callable:
    """A jaxpr as a function of its inputs, returning a list."""
    return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, list(consts)))


#: Calls that mean nothing but their body: the tracer inlines them.
INLINED = frozenset(p for n in ("jit_p", "closed_call_p", "core_closed_call_p") if (p := getattr(primitives, n, None)))
CUSTOM_JVP = primitives.custom_jvp_call_p
CUSTOM_VJP = primitives.custom_vjp_call_p
REMAT = next(p for n in ("remat_p", "checkpoint_p") if (p := getattr(primitives, n, None)))
COND, SCAN, WHILE = primitives.cond_p, primitives.scan_p, primitives.while_p


def call_body(primitive: Primitive, params: dict) -> tuple[Any, list]:
    """The body of a call-like equation (jit, custom_jvp, custom_vjp, remat) as ``(jaxpr, consts)``."""
    return sub_jaxprs(params)[0]


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


def is_inexact(aval: Any) -> bool:
    """Whether a value may have a derivative."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


# -- jax.shard_map ---------------------------------------------------------------------------------------------------


def varying_axes(values: Sequence) -> tuple:
    """The axes of a mesh over which any of the values varies by its type: inside ``jax.shard_map`` with ``check_vma``."""
    types = [core.typeof(x) for x in values]  # under another name before jax 0.10.2
    found = (t.mat.varying if hasattr(t, "mat") else getattr(t, "vma", frozenset()) for t in types)
    return tuple(sorted(frozenset().union(*found)))


def varying(values: Any, axes: tuple) -> Any:
    """The values with types that vary over ``axes``: then the gradient of what all devices share is summed over them."""
    missing = lambda x: tuple(a for a in axes if a not in varying_axes([x]))  # noqa: E731
    return jax.tree.map(lambda x: core.pvary(x, missing(x)), values)


def unchecked(fn: Callable, axes: tuple) -> Callable:
    """``fn`` without jax's check of what varies over a mesh; with any ``axes``, all of its results vary over these.

    What is traced once, for one timestep, has no such types.
    """
    if not axes:
        return fn

    def untyped(x: Any) -> Any:
        if isinstance(x, custom_derivatives.CustomVJPPrimal):
            return dataclasses.replace(x, value=untyped(x.value))
        return x if isinstance(x, jax.custom_derivatives.SymbolicZero) else _retyped(x, ())

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        args = jax.tree.map(untyped, args)
        with config._check_vma(False):
            outs = fn(*args)
        return jax.tree.map(lambda x: _retyped(x, axes), outs)

    return call


def _retyped(x: Any, axes: tuple) -> Any:
    """The value with a type that varies over exactly ``axes``. Unlike ``jax.lax.pvary``, it means nothing."""
    before = varying_axes([x])
    return x if before == axes else _retype_p.bind(x, before=before, axes=axes)


def _retype_aval(aval: Any, *, before: tuple, axes: tuple) -> Any:
    if hasattr(aval, "mat"):
        return aval.update(manual_axis_type=core.ManualAxisType(varying=frozenset(axes)))
    return aval.update(vma=frozenset(axes))


_retype_p = Primitive("retype")
_retype_p.def_impl(lambda x, **_: x)
_retype_p.def_abstract_eval(_retype_aval)
mlir.register_lowering(_retype_p, lambda ctx, x, **_: [x])
ad.deflinear(_retype_p, lambda t, *, before, axes: [_retyped(t, before)])
batching.primitive_batchers[_retype_p] = lambda args, dims, **params: (_retype_p.bind(*args, **params), dims[0])


# -- source lines ----------------------------------------------------------------------------------------------------


def source_of(equation: Any) -> str:
    """``file.py:12 (function)`` of the user's code that made a jaxpr equation."""
    return short_source(source_info_util.summarize(equation.source_info))


def scope_of(equation: Any) -> str:
    """The ``jax.named_scope`` path under which a jaxpr equation was made."""
    return str(equation.source_info.name_stack)


def here() -> str:
    """``file.py:12 (function)`` of the user's frame that is running now."""
    found = short_source(source_info_util.summarize(source_info_util.current()))
    return _caller_of_init(found) if "__create_fn__" in found else found


def _caller_of_init(found: str) -> str:
    """Where a dataclass is made, for the line of the ``__init__`` that Python has written for it."""
    frame: Any = sys._getframe()
    while frame is not None and (frame.f_code.co_name, frame.f_code.co_filename) != ("__init__", "<string>"):
        frame = frame.f_back
    if frame is None or frame.f_back is None:
        return found
    code = frame.f_back.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_back.f_lineno} ({code.co_qualname})"


def short_source(summary: str) -> str:
    """``dir/file.py:12:8 (f)`` without the directory and the column.

    Example:
      >>> short_source("some/where/agent.py:12:8 (loss)")
      'agent.py:12 (loss)'
    """
    location, _, function = summary.partition(" (")
    parts = os.path.basename(location).split(":")
    return ":".join(parts[:2]) + (f" ({function}" if function else "")


# -- symbolic dimensions ---------------------------------------------------------------------------------------------


@functools.cache
def time_dims(length: int, ragged_end: bool) -> tuple[Any, Any]:
    """``(tau, nu)``: ``tau = t + 1`` (jax assumes dimensions >= 1), and the length of the time axis.

    ``nu`` is the integer ``length``, or a symbol bounded by it when every environment ends at its own time.
    """
    if ragged_end:
        scope = shape_poly.SymbolicScope(["tau <= nu", f"nu <= {length}"])
        tau, nu = shape_poly.symbolic_shape("tau, nu", scope=scope)
        return tau, nu
    scope = shape_poly.SymbolicScope([f"tau <= {length}"])
    return shape_poly.symbolic_shape("tau", scope=scope)[0], length


def is_symbolic(dim: Any) -> bool:
    """Whether a dimension depends on the timestep."""
    return isinstance(dim, shape_poly._DimExpr)


def mentions_end(dim: Any) -> bool:
    """Whether a dimension depends on the length of the time axis."""
    return is_symbolic(dim) and "nu" in dim._get_vars()


def symbolic_axes(shape: Sequence) -> tuple[int, ...]:
    """The axes of a shape whose length depends on the timestep."""
    return tuple(i for i, d in enumerate(shape) if is_symbolic(d))


def minimum_dim(a: Any, b: Any) -> Any:
    """``min`` of dimensions."""
    return core.min_dim(a, b)


def maximum_dim(a: Any, b: Any) -> Any:
    """``max`` of dimensions."""
    return core.max_dim(a, b)


def evaluate_dim(dim: Any, tau: Any, nu: Any) -> Any:
    """The value of a dimension at ``tau``, ``nu``: integers, or arrays of their dtype."""
    if not is_symbolic(dim):
        return int(dim) if isinstance(dim, np.integer) else dim  # jnp.pad's are int64
    own = [x.dtype for x in (tau, nu) if hasattr(x, "dtype")]
    if own:  # jax's constants are int64 where that is enabled, and its minima want one dtype
        tau, nu = (x.astype(core.dim_value_dtype()) if hasattr(x, "astype") else x for x in (tau, nu))
    with jax.numpy_dtype_promotion("standard"):
        value = dim._evaluate({"tau": tau, "nu": nu})
    return value.astype(own[0]) if own and hasattr(value, "astype") else value


DIM_AS_VALUE = shape_poly.dim_as_value_p if hasattr(shape_poly, "dim_as_value_p") else core.dim_as_value_p


# -- classes of primitives -------------------------------------------------------------------------------------------


def _all(*names: str) -> frozenset:
    return frozenset(p for n in names if (p := getattr(primitives, n + "_p", None)) is not None)


ADD_ANY = ad.add_jaxvals_p
#: One output element for each element of the operands (scalars broadcast).
ELEMENTWISE = {ADD_ANY} | _all(
    "abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "cbrt", "ceil", "clamp", "complex", "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh",
    "digamma", "div", "eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma",
    "igamma_grad_a", "igammac", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2",
    "logistic", "lt", "lt_to", "max", "min", "mul", "ne", "neg", "nextafter", "not", "one_minus_square", "or",
    "polygamma", "population_count", "pow", "real", "reduce_precision", "regularized_incomplete_beta", "rem", "round",
    "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt",
    "square", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta", "random_gamma_grad", "clz",
)  # fmt: skip
STOP_GRADIENT = _all("stop_gradient")
#: Primitives that ``jax.extend`` does not list.
SPLIT, OPTIMIZATION_BARRIER = lax.split_p, lax.optimization_barrier_p
#: jnp.stack, unstack and tile, where jax has primitives for them.
STACKING = frozenset(p for n in ("stack_p", "unstack_p", "tile_p") if (p := getattr(lax, n, None)))
RANDOM_WRAP, RANDOM_UNWRAP = prng.random_wrap_p, prng.random_unwrap_p
DRAWS = _all("random_bits", "random_fold_in", "random_split")
RANDOM = _all("random_bits", "random_fold_in", "random_seed", "random_split", "random_gamma", "threefry2x32")


def primitive(name: str) -> Primitive:
    """A primitive of jax by its public name, ``primitive("dot_general")``."""
    return getattr(primitives, name + "_p")


def zero_keys(shape: tuple, dtype: Any) -> Any:
    """Typed keys of this dtype, all words zero."""
    impl = dtype._impl
    return prng.random_wrap(jnp.zeros((*shape, *impl.key_shape), jnp.uint32), impl=impl)


def keys_of(words: Any, dtype: Any) -> Any:
    """Typed keys of this dtype from their words."""
    return prng.random_wrap(words, impl=dtype._impl)


def platform() -> str:
    """The platform that programs are traced for, "cpu", "gpu" or "tpu": that of the mesh around, or jax's own."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def computed_once(fn: Callable, static_argnums: tuple[int, ...] = ()) -> Callable:
    """``fn``, whose results XLA computes once, however many use them.

    Operations that XLA counts as cheap are computed again in every fusion that uses their results, be they hundreds one after
    another. On CPUs ``optimization_barrier`` is gone by then, but a call that must not be inlined stays; elsewhere it is a
    barrier.
    """

    def body(*args: Any) -> Any:
        with set_xla_metadata(inlineable=None):  # of the call alone, not of what is inside
            return fn(*args)

    functools.update_wrapper(body, fn)
    apart, within = (
        jax.jit(body, static_argnums=static_argnums),
        jax.jit(fn, static_argnums=static_argnums, inline=True),
    )

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        if platform() != "cpu":
            return within(*args)
        with set_xla_metadata(inlineable="false"):
            return apart(*args)

    return call


def random_by_loop(equation: Any) -> bool:
    """Whether an operation on random keys is jax's own threefry, a loop of its own, and not straight arithmetic."""
    dtypes_of = [v.aval.dtype for v in (*equation.invars, *equation.outvars)]
    impls = [d._impl.name for d in dtypes_of if jnp.issubdtype(d, jax.dtypes.prng_key)]
    return not impls or impls[0] == "threefry2x32"


def short_dtype(dtype: Any) -> str:
    """``f32``, ``i32``, ``bool``, ``key``."""
    return "key" if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtypes.short_dtype_name(dtype)


#: Primitives that run Python functions of the user's.
CALLBACKS = frozenset(
    p
    for module, names in (
        (callback, ("pure_callback_p", "io_callback_p")),
        (debugging, ("debug_callback_p", "debug_print_p")),
    )
    for n in names
    if (p := getattr(module, n, None)) is not None
)
SHARD_MAP = frozenset({shard_map.shard_map_p})


def contains(op: Any, params: dict, primitives: frozenset) -> bool:
    """Whether an equation is one of some primitives, or has a body in which one is."""
    inside = (eqn for body, _ in sub_jaxprs(params) for eqn in body.eqns)
    return op in primitives or any(contains(eqn.primitive, eqn.params, primitives) for eqn in inside)


def surroundings() -> tuple:
    """What a trace depends on beside its arguments: named axes, the mesh, jax's options. Hashable."""
    env = core.get_axis_env()
    return config.trace_context(), tuple(env.axis_sizes.items())


#: Calls whose body may be inlined at the price of their special rule (custom derivative or batching, rematerialisation).
_CALLS = INLINED | {CUSTOM_JVP, CUSTOM_VJP, REMAT, custom_batching.custom_vmap_p}


def is_call(op: Any) -> bool:
    """Whether an equation calls a body on exactly its own inputs."""
    return op in _CALLS or isinstance(op, Staged)


def function_source(fn: Any) -> str:
    """``file.py:12 (name)`` of a Python function."""
    code = getattr(getattr(fn, "__wrapped__", fn), "__code__", None)
    name = getattr(fn, "__name__", type(fn).__name__)
    return f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} ({name})" if code else name


def source_in_traceback(error: BaseException) -> str | None:
    """The user's innermost source line in an exception's traceback."""
    frame, found = error.__traceback__, None
    while frame is not None:
        code = frame.tb_frame.f_code
        if source_info_util.is_user_filename(code.co_filename):
            found = f"{os.path.basename(code.co_filename)}:{frame.tb_lineno} ({code.co_name})"
        frame = frame.tb_next
    return found


def expression_in_traceback(error: BaseException) -> tuple[str, dict]:
    """The user's innermost expression in an exception's traceback, and the names that it sees; "" where it is unknown."""
    frame, found = error.__traceback__, None
    while frame is not None:
        if source_info_util.is_user_filename(frame.tb_frame.f_code.co_filename):
            found = frame
        frame = frame.tb_next
    if found is None:
        return "", {}
    code = found.tb_frame.f_code
    first, last, start, stop = list(code.co_positions())[found.tb_lasti // 2]
    if first is None or last is None or start is None or stop is None:
        return "", {}
    lines = [linecache.getline(code.co_filename, n).encode() for n in range(first, last + 1)]
    lines[-1] = lines[-1][:stop]  # columns are those of the bytes
    lines[0] = lines[0][start:]
    return b"".join(lines).decode(), {**found.tb_frame.f_globals, **found.tb_frame.f_locals}


def scan_counts(params: dict) -> tuple[int, int]:
    """``(num_consts, num_carry)`` of a scan equation; jax 0.11 keeps them as trees."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def equal_dims(a: Any, b: Any) -> bool:
    """Whether two dimensions are surely equal."""
    return core.definitely_equal(a, b)


def evaluate_dims(value: Any, tau: int, nu: int) -> Any:
    """An equation's parameter with integers in place of symbolic dimensions."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(evaluate_dims(v, tau, nu) for v in value)
    return int(evaluate_dim(value, tau, nu)) if _is_dim(value) else value


def _is_dim(value: Any) -> bool:
    return isinstance(value, shape_poly._DimExpr)


def backend_has_started() -> bool:
    """Whether jax has initialised its devices: their number is fixed from then on."""
    return xla_bridge.backends_are_initialized()


def leaked_from(error: BaseException) -> str | None:
    """The user's line that made the value of which jax says that it leaked."""
    found = re.search(r"created on line (\S+:\d+)\S*( \(\w+\))?", str(error))
    return short_source(found[1] + (found[2] or "")) if found else None


# -- profiling -------------------------------------------------------------------------------------------------------


def stop_trace(folder: pathlib.Path) -> None:
    """Stop the running trace and write its `.xplane.pb` into `folder`.

    `jax.profiler.stop_trace` converts every event to JSON as well, which takes several times as long as the rest. Where
    a jax has other internals, this is the public function, which writes to the same folder.
    """
    state = getattr(profiler, "_profile_state", None)
    session = getattr(state, "profile_session", None)
    if session is None or not all(hasattr(o, n) for o, n in ((session, "stop"), (state, "reset"), (state, "lock"))):
        jax.profiler.stop_trace()
        return
    with state.lock:
        raw = session.stop()
        state.reset()
    clear = getattr(profiler, "clear_metadata", None)
    if clear is not None:
        clear()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{socket.gethostname() or os.uname().nodename}.xplane.pb").write_bytes(raw)


#: Where jax waits without leaving an event in a trace: `(owner, attribute)`.
waits = tuple(
    (owner, name)
    for owner, name in (
        (xla_client, "batched_block_until_ready"),  # of `jax.block_until_ready`, if there are several arrays
        (getattr(dispatch, "RuntimeTokenSet", None), "block_until_ready"),  # of `jax.effects_barrier`
    )
    if hasattr(owner, name)
)


_trace_state_clean = getattr(core, "trace_state_clean", None)


def tracing() -> bool:
    """Is jax tracing a function in this thread? If not, a named scope would reach nothing. True where unknown."""
    return _trace_state_clean is None or not _trace_state_clean()
