"""The only module of the compiler that imports private jax: jaxprs, primitives, symbolic dimensions, source lines.

Everything the compiler needs from ``jax.extend`` and ``jax._src`` has a name here, so that a change in jax is met in one
place. Tested on the oldest and the newest supported jax.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core, dtypes, source_info_util, xla_bridge
from jax._src.export import shape_poly
from jax._src.interpreters import partial_eval as pe
from jax.extend.core import Primitive, primitives
from jax.interpreters import ad, batching, mlir

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


def is_zero_tangent(tangent: Any) -> bool:
    """Whether a tangent in a JVP rule is a symbolic zero."""
    return isinstance(tangent, ad.Zero)


def zero_tangent_like(primal: Any) -> Any:
    """The symbolic zero tangent of a value."""
    return ad.Zero(core.get_aval(primal).to_tangent_aval())


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
    return core.ClosedJaxpr(pe.convert_constvars_jaxpr(jaxpr), ())


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


# -- source lines ----------------------------------------------------------------------------------------------------


def source_of(equation: Any) -> str:
    """``file.py:12 (function)`` of the user's code that made a jaxpr equation."""
    return short_source(source_info_util.summarize(equation.source_info))


def scope_of(equation: Any) -> str:
    """The ``jax.named_scope`` path under which a jaxpr equation was made."""
    return str(equation.source_info.name_stack)


def here() -> str:
    """``file.py:12 (function)`` of the user's frame that is running now."""
    return short_source(source_info_util.summarize(source_info_util.current()))


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
    """The value of a dimension at ``tau``, ``nu``: integers or integer arrays."""
    return dim._evaluate({"tau": tau, "nu": nu}) if is_symbolic(dim) else dim


DIM_AS_VALUE = shape_poly.dim_as_value_p if hasattr(shape_poly, "dim_as_value_p") else core.dim_as_value_p


# -- classes of primitives -------------------------------------------------------------------------------------------


def _all(*names: str) -> frozenset:
    return frozenset(p for n in names if (p := getattr(primitives, n + "_p", None)) is not None)


#: One output element for each element of the operands (scalars broadcast).
ELEMENTWISE = _all(
    *[
        "abs",
        "acos",
        "acosh",
        "add",
        "add_any",
        "and",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "bessel_i0e",
        "bessel_i1e",
        "cbrt",
        "ceil",
        "clamp",
        "complex",
        "conj",
    ],
    *[
        "convert_element_type",
        "copy",
        "copy_p",
        "cos",
        "cosh",
        "digamma",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "igamma",
    ],
    *[
        "igamma_grad_a",
        "igammac",
        "imag",
        "integer_pow",
        "is_finite",
        "le",
        "lgamma",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "nextafter",
    ],
    *[
        "not",
        "or",
        "polygamma",
        "population_count",
        "pow",
        "real",
        "reduce_precision",
        "regularized_incomplete_beta",
        "rem",
        "round",
        "rsqrt",
    ],
    *[
        "select_n",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tan",
    ],
    *["tanh", "xor", "zeta", "random_gamma_grad", "clz"],
)
STOP_GRADIENT = _all("stop_gradient")
RANDOM = _all("random_bits", "random_fold_in", "random_seed", "random_split", "random_gamma", "threefry2x32")


def primitive(name: str) -> Primitive:
    """A primitive of jax by its public name, ``primitive("dot_general")``."""
    return getattr(primitives, name + "_p")


def short_dtype(dtype: Any) -> str:
    """``f32``, ``i32``, ``bool``, ``key``."""
    return "key" if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtypes.short_dtype_name(dtype)


#: Calls whose body may be inlined at the price of their special rule (custom derivative, rematerialisation).
_CALLS = INLINED | {CUSTOM_JVP, CUSTOM_VJP, REMAT}


def is_call(op: Any) -> bool:
    """Whether an equation calls a body on exactly its own inputs."""
    return op in _CALLS


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


# -- hoisting --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hoisted:
    """A cond or scan whose inner accesses became operands.

    Attributes:
      equations: ``(primitive, params, positions, aval)``: what to evaluate before; positions index the old operands, or
        are literals.
      params: the new parameters of the equation.
      place: ``(old operands, hoisted values) -> new operands``.
      body: ``(jaxpr, consts)`` to inline on the new operands, instead of an equation with new parameters.
    """

    equations: list
    params: dict
    place: Callable
    body: tuple[Any, list] | None = None


def hoist(eqn: Any, wanted: Callable[[Any], bool]) -> Hoisted | None:
    """Move the equations that ``wanted`` selects out of the bodies of a cond or scan; None if one of them can't be."""
    if eqn.primitive is COND:
        bodies, offset = list(eqn.params["branches"]), 1
    elif eqn.primitive is SCAN and "num_consts" not in eqn.params:  # jax 0.11 and later
        return _hoist_by_tracing(eqn, wanted)
    elif "num_consts" in eqn.params and "jaxpr" in eqn.params:  # a scan, and our own calls of its form
        bodies, offset = [eqn.params["jaxpr"]], 0
    else:
        return None
    outer = len(eqn.invars)
    fixed = outer if eqn.primitive is COND else eqn.params["num_consts"]
    found: list = []
    plans = []
    for body in bodies:
        plan: list = []
        positions = {v: i + offset for i, v in enumerate(body.jaxpr.invars) if i + offset < fixed}
        if not _collect(body.jaxpr, positions, wanted, plan):
            return None
        plans.append((body, len(found), plan))
        found += plan
    avals = [aval for *_, aval in found]
    if any(symbolic_axes(a.shape) for a in avals):
        return None

    def rebuilt(body, first, plan):
        def fn(*args):
            extra, rest = args[: len(found)], args[len(found) :]
            return _replay(body.jaxpr, body.consts, rest, wanted, iter(extra[first : first + len(plan)]))

        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*avals, *(v.aval for v in body.jaxpr.invars))]
        traced = jax.make_jaxpr(fn)(*structs)
        return core.ClosedJaxpr(pe.convert_constvars_jaxpr(traced.jaxpr), ()) if traced.consts else traced

    new_bodies = [rebuilt(*p) for p in plans]
    params = dict(eqn.params)
    if eqn.primitive is COND:
        params["branches"] = tuple(new_bodies)
        return Hoisted(found, params, lambda old, new: [old[0], *new, *old[1:]])
    params.update(jaxpr=new_bodies[0], num_consts=params["num_consts"] + len(found))
    if "linear" in params:
        params["linear"] = (False,) * len(found) + tuple(params["linear"])
    return Hoisted(found, params, lambda old, new: [*new, *old])


def scan_counts(params: dict) -> tuple[int, int]:
    """``(num_consts, num_carry)`` of a scan equation; jax 0.11 keeps them as trees."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def _hoist_by_tracing(eqn: Any, wanted: Callable) -> Hoisted | None:
    """As :func:`hoist`, for a scan: traced again with the hoisted values as constants of its body."""
    jaxpr, consts = body_of(eqn.params["jaxpr"])
    n_consts, n_carry = scan_counts(eqn.params)
    plan: list = []
    if not _collect(jaxpr, {v: i for i, v in enumerate(jaxpr.invars) if i < n_consts}, wanted, plan):
        return None
    avals = [aval for *_, aval in plan]
    if any(symbolic_axes(a.shape) for a in avals):
        return None

    def again(*args):
        early, rest = args[: len(plan)], args[len(plan) :]
        fixed, init, xs = rest[:n_consts], rest[n_consts : n_consts + n_carry], rest[n_consts + n_carry :]

        def body(carry, x):
            outs = _replay(jaxpr, consts, [*fixed, *carry, *x], wanted, iter(early))
            return outs[:n_carry], outs[n_carry:]

        options = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
        carry, ys = jax.lax.scan(body, list(init), list(xs), **options)
        return [*carry, *ys]

    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*avals, *(v.aval for v in eqn.invars))]
    traced = jax.make_jaxpr(again)(*structs)
    return Hoisted(plan, {}, lambda old, new: [*new, *old], (traced.jaxpr, list(traced.consts)))


def _collect(jaxpr: Any, positions: dict, wanted: Callable, plan: list) -> bool:
    """List the wanted equations of a body in order; False if one depends on what the body computes."""
    for eqn in jaxpr.eqns:
        if wanted(eqn.primitive):
            if len(eqn.outvars) != 1 or not all(is_literal(v) or v in positions for v in eqn.invars):
                return False
            where = [v if is_literal(v) else positions[v] for v in eqn.invars]
            plan.append((eqn.primitive, eqn.params, where, eqn.outvars[0].aval))
        elif eqn.primitive in INLINED:
            body, _ = call_body(eqn.primitive, eqn.params)
            inner = {
                i: positions[o]
                for i, o in zip(body.invars, eqn.invars, strict=True)
                if not is_literal(o) and o in positions
            }
            if not _collect(body, inner, wanted, plan):
                return False
        elif any(_contains(j, wanted) for j, _ in sub_jaxprs(eqn.params)):
            return False
    return True


def _contains(jaxpr: Any, wanted: Callable) -> bool:
    return any(wanted(e.primitive) or any(_contains(j, wanted) for j, _ in sub_jaxprs(e.params)) for e in jaxpr.eqns)


def _replay(jaxpr: Any, consts: Sequence, args: Sequence, wanted: Callable, values: Any) -> list:
    """Evaluate a body in which the wanted equations have their values from ``values``, in order."""
    env: dict = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

    def read(v):
        return v.val if is_literal(v) else env[v]

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if wanted(eqn.primitive):
            outs = [next(values)]
        elif eqn.primitive in INLINED:
            body, inner = call_body(eqn.primitive, eqn.params)
            outs = _replay(body, inner, operands, wanted, values)
        else:
            outs = bind(eqn.primitive, eqn.params, *operands)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


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
