"""Making primitives and giving them rules; binding those of equations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import core, dispatch, dtypes, source_info_util
from jax._src.interpreters import partial_eval
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def new_primitive(
    name: str,
    abstract_eval: Callable,
    *,
    multiple_results: bool = False,
    effectful: bool = False,
    outside: Callable[[], Exception] | None = None,
) -> Primitive:
    """A primitive that has meaning while a program is traced, and raises ``outside()`` when it is executed elsewhere.

    ``effectful``: whether ``abstract_eval`` gives ``(avals, effects)``.
    """
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results
    define = primitive.def_effectful_abstract_eval if effectful else primitive.def_abstract_eval
    define(abstract_eval)
    if outside is not None:

        def refuse(*_args, **_params):
            raise outside()

        primitive.def_impl(refuse)
        mlir.register_lowering(primitive, refuse)
    return primitive


def computed_by(name: str, fn: Callable[..., Any]) -> Primitive:
    """A primitive of one result, ``fn(*operands, **params)``, without rules of batching and of derivatives yet."""

    def typed(*operands: Any, **params: Any) -> Any:
        given = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
        found = jax.eval_shape(functools.partial(fn, **params), *given)
        return core.ShapedArray(found.shape, found.dtype)

    primitive = new_primitive(name, typed)
    primitive.def_impl(functools.partial(dispatch.apply_primitive, primitive))
    mlir.register_lowering(primitive, mlir.lower_fun(fn, multiple_results=False))
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


def bind_again(eqn: Any, *operands: Any) -> list:
    """Evaluate an equation as it is on other operands; always a list of outputs.

    In a trace that keeps a jaxpr, where the operands have the types of the equation's own, so have the outputs: the equation
    is copied, and what it calls is neither typed nor traced again.
    """
    trace = core.trace_ctx.trace
    if isinstance(trace, partial_eval.DynamicJaxprTrace) and _copies(eqn, trace.requires_low):
        given = list(map(dtypes.canonicalize_value, operands))
        mine = any(isinstance(x, partial_eval.DynamicJaxprTracer) and x._trace is trace for x in given)
        if mine and all(core.typeof(x) == v.aval for x, v in zip(given, eqn.invars, strict=True)):
            source = source_info_util.current()
            operands_here = [trace.to_jaxpr_tracer(x, source) for x in given]
            types = [v.aval for v in eqn.outvars]
            return trace.emit_eqn(operands_here, types, eqn.primitive, eqn.params, eqn.effects, source, eqn.ctx)
    return bind(eqn.primitive, eqn.params, *operands)


def _copies(eqn: Any, lowering: bool) -> bool:
    """Whether nothing happens when an equation is bound but that it is there.

    jax folds constants of a few, and calls with derivatives of their own are their bodies when they are lowered.
    """
    special = eqn.primitive.ref_allocating or eqn.primitive in partial_eval.const_fold_rules
    return not (eqn.effects or special or (lowering and "call_jaxpr" in eqn.params))


def evaluate_again(jaxpr: Any, *args: Any) -> list:
    """The outputs of a closed jaxpr: ``jaxpr_as_fun``, but that equations are copied where they can be.

    Example:
      >>> import jax
      >>> evaluate_again(jax.make_jaxpr(lambda x: 2.0 * x)(1.0), 3.0)
      [Array(6., dtype=float32, weak_type=True)]
    """
    env = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)) | dict(zip(jaxpr.jaxpr.invars, args, strict=True))
    around = source_info_util.current_name_stack()
    read = lambda atom: atom.val if isinstance(atom, core.Literal) else env[atom]  # noqa: E731
    for eqn in jaxpr.eqns:
        source = eqn.source_info
        with source_info_util.user_context(source.traceback, name_stack=around + source.name_stack), eqn.ctx.manager:
            env.update(zip(eqn.outvars, bind_again(eqn, *map(read, eqn.invars)), strict=True))
    return list(map(read, jaxpr.jaxpr.outvars))


def types_of(primitive: Primitive, params: dict, avals: Sequence) -> list | str | None:
    """The types of an equation's outputs; as text what is wrong with its inputs; None where the primitive does not say."""
    try:
        outs, _ = primitive.abstract_eval(*avals, **params)
    except (TypeError, ValueError) as error:
        return str(error).splitlines()[0]
    except NotImplementedError:
        return None
    return list(outs) if primitive.multiple_results else [outs]
