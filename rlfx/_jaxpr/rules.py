"""Making primitives and giving them rules; binding those of equations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
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


def types_of(primitive: Primitive, params: dict, avals: Sequence) -> list | str | None:
    """The types of an equation's outputs; as text what is wrong with its inputs; None where the primitive does not say."""
    try:
        outs, _ = primitive.abstract_eval(*avals, **params)
    except (TypeError, ValueError) as error:
        return str(error).splitlines()[0]
    except NotImplementedError:
        return None
    return list(outs) if primitive.multiple_results else [outs]
